"""Regimes and the Trainer: schedules against formulas, every optimizer against its update rule in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import ER, HAT, Batch, Diverged, Method, Network, Regime, Split, Task, Trainer
from hatrack.methods.evaluate import Score
from hatrack.regime import LRSchedule
from hatrack.tasks.targets import CLASSES
from tests.helpers.learning import learn, make
from tests.helpers.toys import toy_tasks


def rates(regime, losses):
    """The learning rates of a training whose epochs end with these losses."""
    pace, used = LRSchedule(regime), []
    for epoch, loss in enumerate(losses):
        used.append(pace.start(epoch))
        pace.end(loss)
        if pace.finished:
            break
    return used


# Schedules


def test_the_defaults_are_the_papers():
    regime = Regime()
    assert (regime.epochs, regime.batch, regime.optimizer, regime.lr, regime.weight_decay) == (200, 64, "sgd", 0.05, 0)
    assert (regime.schedule, regime.patience, regime.factor, regime.floor) == ("plateau", 5, 3, 1e-4)
    assert (regime.clip, regime.keep_state, regime.restore) == (1e4, False, True)


def test_plateau_levels():
    # the first epoch is better than none, so the first level lasts 1 + 5 epochs, each of the other five 5; ties don't count
    used = rates(Regime(), [0.7] * 1000)
    levels = [0.05, 0.01667, 0.005556, 0.001852, 0.000617, 0.000206]
    assert used == pytest.approx([level for k, level in enumerate(levels) for _ in range(6 if k == 0 else 5)], rel=2e-3)
    assert len(used) == 31


def test_plateau_patience_starts_again_when_the_loss_falls():
    four_worse = [0.9, 0.9, 0.9, 0.9]
    assert rates(Regime(), [0.8, *four_worse, 0.7, *four_worse, 0.6999, *four_worse, 0.8]) == pytest.approx([0.05] * 16)
    # after a fall of the rate patience is whole again, and only a new lowest loss counts: 0.75 is none
    used = rates(Regime(), [0.7, *[0.8] * 5, 0.75, 0.8, 0.8, 0.8, 0.8, 0.6, 0.8])
    assert used == pytest.approx([0.05] * 6 + [0.05 / 3] * 5 + [0.05 / 9] * 2)


def test_plateau_with_other_numbers():
    regime = Regime(lr=1.0, patience=2, factor=10, floor=0.01)
    # 1, 1, 1, then 0.1 twice, then 0.01 twice, which is not below the floor; 0.001 is
    assert rates(regime, [1.0] * 50) == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_losses_that_are_not_numbers_are_never_better():
    assert rates(Regime(patience=2), [math.nan, math.nan, 1.0, math.inf, math.nan]) == pytest.approx(
        [0.05] * 2 + [0.05 / 3] * 3
    )


@pytest.mark.parametrize(
    ("changes", "formula"),
    [
        ({"schedule": "constant"}, lambda e: 0.2),
        ({"schedule": "step", "gamma": 0.5, "every": 3}, lambda e: 0.2 * 0.5 ** (e // 3)),
        ({"schedule": "exponential", "gamma": 0.9}, lambda e: 0.2 * 0.9**e),
        ({"schedule": "cosine", "epochs": 12}, lambda e: 0.1 * (1 + math.cos(math.pi * e / 12))),
    ],
)
def test_schedules_of_the_epoch(changes, formula):
    used = rates(Regime(lr=0.2, **changes), [1.0] * 12)
    assert used == pytest.approx([formula(e) for e in range(12)])


def test_cosine_by_hand():
    used = rates(Regime(lr=0.8, schedule="cosine", epochs=4), [1.0] * 4)
    assert used == pytest.approx([0.8, 0.4 * (1 + math.sqrt(0.5)), 0.4, 0.4 * (1 - math.sqrt(0.5))])


def test_decay_from_task_to_task():
    regime = Regime(lr=0.1, batch=64, task_lr_decay=0.4, task_batch_decay=0.5)
    expected = [0.1, 0.04, 0.016, 0.0064, 0.00256]
    assert [regime.at(t).lr for t in range(5)] == pytest.approx(expected)
    assert [regime.at(t).batch for t in range(9)] == [64, 32, 16, 8, 4, 2, 1, 1, 1]
    assert [regime.at(t).lr for t in (8, 9, 40)] == pytest.approx([0.1 * 0.4**8, 5e-5, 5e-5])  # 0.1 * 0.4^9 = 2.6e-5
    assert regime.at(0) == regime
    assert Regime(batch=10, task_batch_decay=0.77).at(1).batch == 8  # 7.7, rounded


def test_the_floor_of_the_decay_never_raises_the_rate():
    assert Regime(lr=1e-5, task_lr_decay=0.5).at(3).lr == pytest.approx(1e-5)
    assert Regime(lr=1e-5).at(3).lr == 1e-5
    assert Regime(lr=0.1, task_lr_decay=0.1, task_lr_floor=0.02).at(1).lr == pytest.approx(0.02)
    assert Regime(lr=0.1, task_lr_decay=0.1, task_lr_floor=0.0).at(5).lr == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epochs", 0, "at least 1, not 0"),
        ("epochs", 1.5, "a whole number, not 1.5"),
        ("batch", 0, "at least 1, not 0"),
        ("optimizer", "sdg", "one of 'sgd', 'momentum', 'adam', 'adamw', not 'sdg'"),
        ("lr", 0.0, "greater than 0, not 0.0"),
        ("lr", math.nan, "a finite number, not nan"),
        ("momentum", 1.0, "at most 0.9999, not 1.0"),
        ("weight_decay", -0.1, "at least 0, not -0.1"),
        ("keep_state", 1, "true or false, not 1"),
        ("schedule", "linear", "one of 'plateau', 'constant', 'step', 'exponential', 'cosine', not 'linear'"),
        ("patience", 0, "at least 1, not 0"),
        ("factor", 1.0, "greater than 1, not 1.0"),
        ("floor", -1e-4, "at least 0, not -0.0001"),
        ("gamma", 1.1, "at most 1, not 1.1"),
        ("gamma", 0.0, "greater than 0, not 0.0"),
        ("every", 0, "at least 1, not 0"),
        ("clip", -1.0, "at least 0, not -1.0"),
        ("task_lr_decay", 0.0, "greater than 0, not 0.0"),
        ("task_lr_decay", 1.5, "at most 1, not 1.5"),
        ("task_lr_floor", -1.0, "at least 0, not -1.0"),
        ("task_batch_decay", 2.0, "at most 1, not 2.0"),
    ],
)
def test_values_out_of_range(name, value, message):
    with pytest.raises(ValueError, match=f"^{name} must be {message}$"):
        Regime(**{name: value})


# Optimizers: softmax regression on all examples at once, in float64


class Reference:
    """Weights and biases as numpy arrays, moved by the update rules as their papers write them."""

    def __init__(self, net, regime):
        self.values = [p.detach().double().numpy().copy() for p in (net.heads[0].weight, net.heads[0].bias)]
        self.regime = regime
        self.clipped = 0
        self.forget()

    def forget(self):
        self.step, self.m, self.v = 0, [0.0, 0.0], [0.0, 0.0]

    def gradients(self, x, y):
        w, b = self.values
        power = np.exp(x @ w.T + b)
        wrong = power / power.sum(1, keepdims=True) - np.eye(len(b))[y]
        grads = [wrong.T @ x / len(x), wrong.mean(0)]
        norm = math.sqrt(sum((g**2).sum() for g in grads))
        self.clipped += norm > self.regime.clip
        return [g * min(1, self.regime.clip / norm) for g in grads]

    def update(self, x, y, lr):
        r, decay = self.regime, self.regime.weight_decay
        self.step += 1
        for k, g in enumerate(self.gradients(x, y)):
            w = self.values[k]
            if r.optimizer == "adamw":
                w = w - lr * decay * w
            else:
                g = g + decay * w
            if r.optimizer == "sgd":
                w = w - lr * g
            elif r.optimizer == "momentum":
                self.m[k] = r.momentum * self.m[k] + g
                w = w - lr * self.m[k]
            else:
                self.m[k] = 0.9 * self.m[k] + 0.1 * g
                self.v[k] = 0.999 * self.v[k] + 0.001 * g**2
                m, v = self.m[k] / (1 - 0.9**self.step), self.v[k] / (1 - 0.999**self.step)
                w = w - lr * m / (np.sqrt(v) + 1e-8)
            self.values[k] = w


def regression(index=0, examples=8):
    """A task of vectors, all for training, whose gradients are large at first and small later."""
    draw = np.random.RandomState(index)
    x, y = draw.normal(size=(examples, 3)), np.arange(examples) % 3
    x[:, 0] += 2 * y
    return Task.from_arrays(index, f"task {index}", x, y, x, y, valid=0)


def linear(heads="shared", tasks=2):
    return Network(nn.Flatten(), [3] * tasks, torch.zeros(2, 3), heads=heads)


def data(task):
    return task.test.x.double().numpy(), task.test.y.numpy()


def assert_same(net, reference):
    for p, expected in zip((net.heads[0].weight, net.heads[0].bias), reference.values, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=2e-5, atol=2e-6)


OPTIMIZERS = [
    {"optimizer": "sgd", "lr": 0.3},
    {"optimizer": "sgd", "lr": 0.3, "weight_decay": 0.1},
    {"optimizer": "momentum", "lr": 0.2, "momentum": 0.8},
    {"optimizer": "momentum", "lr": 0.2, "momentum": 0.8, "weight_decay": 0.1},
    {"optimizer": "adam", "lr": 0.05},
    {"optimizer": "adam", "lr": 0.05, "weight_decay": 0.1},
    {"optimizer": "adamw", "lr": 0.05},
    {"optimizer": "adamw", "lr": 0.05, "weight_decay": 0.1},
]


def name_of(changes):
    return " ".join(map(str, changes.values()))


@pytest.mark.parametrize("changes", OPTIMIZERS, ids=name_of)
def test_five_steps_of_every_optimizer(changes):
    regime = Regime(epochs=5, batch=8, schedule="step", gamma=0.5, every=2, clip=0.7, **changes)
    net, task = linear(), regression()
    reference = Reference(net, regime)
    Trainer(regime)(Method(net), task)
    for epoch in range(5):
        reference.update(*data(task), regime.lr * 0.5 ** (epoch // 2))
    assert_same(net, reference)
    assert reference.clipped  # the clipping was tested as well


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("changes", [OPTIMIZERS[3], OPTIMIZERS[5], OPTIMIZERS[7]], ids=name_of)
def test_state_is_fresh_for_every_task_or_kept(changes, keep):
    regime = Regime(epochs=3, batch=8, schedule="constant", clip=0.7, keep_state=keep, **changes)
    net, fit = linear(), Trainer(regime)
    reference, method = Reference(net, regime), Method(net)
    for task in (regression(0), regression(1)):
        method.learn(task, fit)
        if not keep:
            reference.forget()
        for _ in range(3):
            reference.update(*data(task), regime.lr)
    assert_same(net, reference)


def test_a_kept_state_belongs_to_one_method():
    regime = Regime(epochs=2, batch=8, optimizer="momentum", schedule="constant", keep_state=True)
    fit, nets = Trainer(regime), [linear(), linear()]
    for net in nets:
        Method(net).learn(regression(), fit)
    torch.testing.assert_close(nets[0].heads[0].weight, nets[1].heads[0].weight)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_heads_of_other_tasks_do_not_move(optimizer):
    net = linear("multi")
    fit = Trainer(Regime(epochs=3, optimizer=optimizer, weight_decay=0.1, keep_state=True, schedule="constant"))
    method = Method(net)
    method.learn(regression(0), fit)
    before = net.heads[0].weight.clone()
    method.learn(regression(1), fit)
    assert torch.equal(net.heads[0].weight, before)


def test_clipping_bounds_the_step():
    def moved(clip):
        net = linear()
        before = torch.cat([p.detach().flatten() for p in net.parameters()])
        Trainer(Regime(epochs=1, batch=8, lr=1.0, clip=clip))(Method(net), regression())
        return (torch.cat([p.detach().flatten() for p in net.parameters()]) - before).norm().item()

    free = moved(0.0)
    assert free > 0.5
    assert moved(0.01) == pytest.approx(0.01, rel=1e-3)
    assert moved(0.1) == pytest.approx(0.1, rel=1e-3)
    assert moved(1e4) == free


def test_plain_parameters_take_sgd_steps_of_their_own():
    class WithGate(Method):
        def __init__(self, net):
            super().__init__(net)
            self.gate = nn.Parameter(torch.tensor([1.0, 2.0]))
            self.register_buffer("pull", torch.tensor([100.0, -300.0]))

        def learn_task(self, task, fit):
            fit(self, task, plain={self.gate: 0.01})

        def loss(self, batch):
            return super().loss(batch) + (self.gate * self.pull).sum()

    regime = Regime(
        epochs=3, batch=8, optimizer="adamw", lr=0.05, weight_decay=0.1, schedule="exponential", gamma=0.5, clip=0.7
    )
    net = linear()
    reference, method = Reference(net, regime), WithGate(net)
    method.learn(regression(), Trainer(regime))
    # rates 0.01, 0.005, 0.0025: 1 - 0.0175 * 100 and 2 + 0.0175 * 300, neither decayed nor clipped
    np.testing.assert_allclose(method.gate.detach(), [1 - 1.75, 2 + 5.25], rtol=1e-5)
    for epoch in range(3):
        reference.update(*data(regression()), 0.05 * 0.5**epoch)  # the weights don't notice
    assert_same(net, reference)


def test_changes_are_for_one_fit():
    regime = Regime(epochs=4, batch=8, lr=0.3, task_lr_decay=0.5, schedule="constant")
    fit, method = Trainer(regime), Method(linear())
    fitted = [fit(method, regression(1), lr=0.7, epochs=2), fit(method, regression(1))]
    assert [e.lr for e in fitted[0].epochs] == [0.7, 0.7]
    assert [e.lr for e in fitted[1].epochs] == [0.15] * 4
    assert fit.fits == fitted
    with pytest.raises(ValueError, match="epochs must be at least 1, not 0"):
        fit(method, regression(1), epochs=0)


# Batches


def batches(method, task, monkeypatch, regime, seed=0, fit=None):
    """The numbers of the examples of every step."""
    seen = []
    fetch, batch = Split.fetch, Split.batch

    def fetched(split, index):
        seen.append(index.tolist())
        return fetch(split, index)

    def made(split, parts, step, steps, size):
        seen[-1] = (seen[-1], int(step), int(steps))
        return batch(split, parts, step, steps, size)

    with monkeypatch.context() as patch:
        patch.setattr(Split, "fetch", fetched)
        patch.setattr(Split, "batch", made)
        method.learn(task, fit or Trainer(regime, seed=seed))
    return seen


def mlp():
    return Network(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5)), [3] * 3, torch.zeros(2, 1, 4, 4)
    )


def test_every_epoch_sees_every_example_once(monkeypatch):
    task = toy_tasks(1)[0]  # 48 examples for training
    seen = batches(Method(mlp()), task, monkeypatch, Regime(epochs=3, batch=20))
    assert [(len(index), step, steps) for index, step, steps in seen] == [(20, 0, 3), (20, 1, 3), (8, 2, 3)] * 3
    epochs = [[n for index, _, _ in seen[k : k + 3] for n in index] for k in (0, 3, 6)]
    for order in epochs:
        assert sorted(order) == list(range(48))
    assert len({tuple(order) for order in epochs}) == 3


def test_methods_at_one_seed_see_the_same_batches(monkeypatch):
    tasks, regime = toy_tasks(2), Regime(epochs=2, batch=16)
    for task in tasks:
        torch.rand(7)  # what others draw does not matter
        plain = batches(Method(mlp()), task, monkeypatch, regime)
        assert batches(HAT(mlp()), task, monkeypatch, regime) == plain
        assert batches(Method(mlp()), task, monkeypatch, regime, seed=1) != plain
    assert batches(Method(mlp()), tasks[0], monkeypatch, regime) != batches(Method(mlp()), tasks[1], monkeypatch, regime)


def test_one_trainer_for_two_methods_shows_both_the_same_batches(monkeypatch):
    task, regime = toy_tasks(1)[0], Regime(epochs=1, batch=16)
    fit = Trainer(regime)
    first = batches(Method(mlp()), task, monkeypatch, regime, fit=fit)
    assert batches(Method(mlp()), task, monkeypatch, regime, fit=fit) == first


def test_dropout_follows_the_seed_alone():
    def trained(seed):
        net = mlp()
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        torch.rand(np.random.randint(10))
        Method(net).learn(toy_tasks(1)[0], Trainer(Regime(epochs=2, batch=1000), seed=seed))
        return net.heads[0].weight.detach()

    assert torch.equal(trained(0), trained(0))
    assert not torch.equal(trained(0), trained(1))


def test_the_loss_of_an_epoch_is_the_mean_over_its_examples():
    class Known(Method):
        def loss(self, batch: Batch):
            return super().loss(batch) * 0 + batch.y.float().mean()

    task = regression(examples=7)  # labels 0 1 2 0 1 2 0: mean 6 / 7, whatever the batches
    fitted = Trainer(Regime(epochs=1, batch=3))(Known(linear()), task)
    assert fitted.epochs[0].loss == pytest.approx(6 / 7)
    assert fitted.epochs[0].valid_loss is None


# Which weights a fit ends with


def contrary():
    """A task whose validation labels contradict its training labels: the more is learned, the worse."""
    task = toy_tasks(1)[0]
    return replace(task, valid=replace(task.train, y=(task.train.y + 1) % 3))


def weights(regime, task):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Network(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16)), [3], torch.zeros(2, 1, 4, 4))
    fitted = Trainer(regime)(Method(net), task)
    return {name: value.clone() for name, value in net.state_dict().items()}, fitted


def assert_equal(a, b):
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_best_weights_are_restored():
    task = contrary()
    best, fitted = weights(Regime(epochs=6, schedule="constant"), task)
    losses = [e.valid_loss for e in fitted.epochs]
    assert losses == sorted(losses)  # it only got worse
    assert fitted.best == 0
    one, _ = weights(Regime(epochs=1, schedule="constant"), task)
    assert_equal(best, one)  # the statistics of the batch norm are restored as well
    last, fitted = weights(Regime(epochs=6, schedule="constant", restore=False), task)
    assert fitted.best == 5
    assert not torch.equal(last["heads.0.weight"], one["heads.0.weight"])


def test_the_last_weights_stay_when_they_are_the_best():
    task = toy_tasks(1)[0]
    best, fitted = weights(Regime(epochs=4, schedule="constant"), task)
    assert fitted.best == 3
    last, _ = weights(Regime(epochs=4, schedule="constant", restore=False), task)
    assert_equal(best, last)


def test_without_validation_data_the_last_weights_stay():
    task = regression()
    method = Method(linear())
    fitted = Trainer(Regime(epochs=5, batch=8, lr=3.0, schedule="constant"))(method, task)
    other = Method(linear())
    Trainer(Regime(epochs=5, batch=8, lr=3.0, schedule="constant", restore=False))(other, task)
    assert torch.equal(method.net.heads[0].weight, other.net.heads[0].weight)
    assert fitted.best == 4


def test_a_whole_plateau_training():
    class Flat(Method):
        def loss(self, batch: Batch):
            return super().loss(batch) * 0 + 1

    fitted = Trainer()(Flat(linear()), regression())
    assert len(fitted.epochs) == 31
    assert fitted.epochs[-1].lr == pytest.approx(0.05 / 3**5)


def test_progress_is_told_of_every_epoch():
    told = []
    fit = Trainer(Regime(epochs=3), progress=lambda moment: told.append((moment.task.name, len(moment.result.epochs))))
    Method(linear()).learn(regression(), fit)
    assert told == [("task 0", 1), ("task 0", 2), ("task 0", 3)]


# The device of the method


def test_a_fit_brings_the_task_to_the_device_of_the_method():
    """There is no second device in this test, but one without values."""
    method = Method(mlp()).to("meta")
    task = toy_tasks(1)[0]
    course = Trainer(Regime(epochs=1), engine="eager").start(method, task)
    assert course.task.train.x.device.type == "meta"
    assert course.device.type == "meta"
    assert task.train.x.device.type == "cpu"


def test_a_call_brings_the_task_to_the_device_of_the_method(monkeypatch):
    seen = []
    fit = Trainer(Regime(epochs=1))
    monkeypatch.setattr(fit, "_fit", lambda method, task, plain, changes: seen.append(task.test.y.device.type))
    fit(Method(mlp()).to("meta"), toy_tasks(1)[0])
    assert seen == ["meta"]


def test_gradients_are_gone_after_a_fit():
    method = Method(linear())
    method.learn(regression(), Trainer(Regime(epochs=1)))
    assert all(p.grad is None for p in method.parameters())


def test_nothing_to_train():
    net = linear()
    for p in net.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'task 0'.*no parameter to train"):
        Method(net).learn(regression(), Trainer(Regime(epochs=1)))


# A loss that is not finite


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(value):
    class Broken(Method):
        def loss(self, batch: Batch):
            return super().loss(batch) * value

    with pytest.raises(Diverged, match=rf"'task 0', epoch 1, step 1 of 1: the loss is {value}; no update had been made"):
        Broken(linear()).learn(regression(), Trainer(Regime(epochs=2)))


def test_a_rate_that_is_too_large():
    with pytest.raises(Diverged, match=r"the learning rate is too large: try one under 1e\+30"):
        Method(mlp()).learn(toy_tasks(1)[0], Trainer(Regime(lr=1e30, clip=0.0, epochs=3)))


def test_weights_that_the_very_last_step_spoiled_are_noticed():
    # one step: its loss is finite, what it leaves is not
    with pytest.raises(Diverged):
        Method(mlp()).learn(toy_tasks(1)[0], Trainer(Regime(lr=1e38, clip=0.0, epochs=1, batch=1000)))


def test_a_kept_state_of_another_optimizer_is_not_used():
    tasks = toy_tasks(2)
    method, fit = Method(mlp()), Trainer(Regime(epochs=1, optimizer="momentum", keep_state=True))
    method.learn(tasks[0], fit)
    fit(method, tasks[1], optimizer="adam")
    assert "exp_avg" in fit.carried[method].optimizer["net.heads.1.weight"]


# Steps in place of epochs


@pytest.mark.parametrize(
    ("steps", "sizes"), [(1, [16]), (3, [16, 16, 16]), (4, [16, 16, 16, 16]), (7, [16, 16, 16] * 2 + [16])]
)
def test_a_fit_has_so_many_steps(steps, sizes):
    seen = []

    class Witness(Method):
        def loss(self, batch):
            seen.append((len(batch.y), batch.step.item(), batch.steps.item()))
            return super().loss(batch)

    tasks = toy_tasks(1)  # 48 training images, three batches of 16
    method = Witness(make("sgd", tasks).net)
    result = method.learn(tasks[0], Trainer(Regime(steps=steps, batch=16, schedule="constant")))
    assert [size for size, *_ in seen] == sizes
    assert result.epochs == math.ceil(steps / 3)
    last = seen[-1]
    assert last[1] == last[2] - 1, "an epoch that is cut ends with its last batch"


def test_whole_epochs_of_steps_are_epochs():
    tasks = toy_tasks(1)
    states = []
    for regime in (Regime(epochs=3, batch=16), Regime(steps=9, batch=16)):
        method = make("sgd", tasks)
        method.learn(tasks[0], Trainer(regime))
        states.append(method.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))


def test_steps_are_for_fits_that_ask_for_no_epochs():
    tasks = toy_tasks(1)

    class Twice(Method):
        def learn_task(self, task, fit):
            fit(self, task)
            fit(self, task, epochs=2)

    fit = Trainer(Regime(steps=5, batch=16, schedule="constant"))
    Twice(make("sgd", tasks).net).learn(tasks[0], fit)
    assert [len(result.epochs) for result in fit.fits] == [2, 2]


def test_epochs_do_nothing_beside_steps():
    with pytest.raises(ValueError, match="--epochs does nothing with --steps 5"):
        Regime(steps=5, epochs=3).check_effect(["epochs"], "sgd", {})
    Regime(steps=5).check_effect(["steps"], "sgd", {})


# Warm-up, accumulation, early stopping, label smoothing


def test_the_rate_grows_at_the_start_of_a_fit():
    seen = []

    class Seeing(Method):
        def constrain(self):
            seen.append(self.rate())

    tasks = toy_tasks(1)
    regime = Regime(epochs=3, batch=len(tasks[0].train) // 2, lr=0.08, warmup=3, schedule="exponential", gamma=0.5)
    method, trainer = Seeing(Network(nn.Flatten(), tasks=tasks)), Trainer(regime, engine="eager")
    loop = trainer.start(method, tasks[0])
    method.rate = lambda: loop.optimizers.lrs[0].item()
    while not loop.finished:
        loop.epoch()
    assert seen == pytest.approx([0.08 / 3, 0.16 / 3, 0.04, 0.04, 0.02, 0.02])  # the third step is in the second epoch


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_parts_of_a_batch_give_the_gradient_of_the_whole(optimizer):
    tasks = toy_tasks(1)

    def learned(parts):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(tasks[0].shape), 9), nn.Tanh())
        net = Network(trunk, tasks=tasks)
        method = Method(net)
        method.learn(tasks[0], Trainer(Regime(epochs=2, batch=7, lr=0.01, optimizer=optimizer, accumulate=parts)))
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    whole = learned(1)
    for parts in (2, 3, 7, 50):
        assert learned(parts) == pytest.approx(whole, abs=2e-5)


def test_methods_that_need_whole_batches_say_so():
    tasks = toy_tasks(1)
    with pytest.raises(ValueError, match="accumulate=2 is not for ER"):
        ER(Network(nn.Flatten(), tasks=tasks)).learn(tasks[0], Trainer(Regime(epochs=1, accumulate=2)))


def scripted(scores, **regime):
    """The epochs, and the best of them, of a fit with these losses and accuracies on validation data."""
    tasks = toy_tasks(1)
    regime = Regime(epochs=len(scores), schedule="constant", **regime)
    loop = Trainer(regime).start(Method(Network(nn.Flatten(), tasks=tasks)), tasks[0])
    given = iter(scores)
    loop.validate = lambda: Score(*next(given))
    while not loop.finished:
        loop.epoch()
    return len(loop.result.epochs), loop.result.best


def test_the_best_epoch_and_the_end_by_loss_or_accuracy():
    scores = [(1.0, 0.1), (0.5, 0.3), (0.6, 0.4), (0.7, 0.2), (0.8, 0.3), (0.9, 0.9)]
    assert scripted(scores) == (6, 1)
    assert scripted(scores, best_by="accuracy") == (6, 5)
    assert scripted(scores, stop_after=2) == (4, 1)
    assert scripted(scores, stop_after=2, best_by="accuracy") == (5, 2)
    assert scripted(scores, stop_after=3, best_by="accuracy") == (6, 5)


def test_an_epoch_whose_score_is_no_number_is_never_the_best():
    scores = [(1.0, math.nan), (1.0, 0.3), (1.0, math.nan), (1.0, 0.2), (1.0, 0.1)]
    with pytest.warns(UserWarning, match="epoch 1: the validation score is nan") as said:
        assert scripted(scores, best_by="accuracy") == (5, 1)
    assert len(said) == 1, "once in a fit"
    with pytest.warns(UserWarning, match="nan"):
        assert scripted(scores, best_by="accuracy", stop_after=3) == (5, 1)
    with pytest.warns(UserWarning, match="nan"):
        assert scripted(scores, best_by="accuracy", stop_after=2) == (4, 1)
    assert scripted(scores, stop_after=2) == (3, 0), "the loss decides"


def test_options_that_need_validation_data_say_so():
    task = Task.from_arrays(0, "all", torch.rand(8, 3), torch.arange(8) % 2, torch.rand(8, 3), torch.arange(8) % 2, valid=0)
    method = Method(Network(nn.Flatten(), tasks=[task]))
    with pytest.warns(UserWarning, match="'all' has no validation data: stop_after=1 and best_by='accuracy' do nothing"):
        method.learn(task, Trainer(Regime(epochs=1, stop_after=1, best_by="accuracy")))
    method.learn(task, Trainer(Regime(epochs=1)))  # no warning, which would be an error here


@pytest.mark.parametrize(
    ("options", "said"), [({"batch": 4, "accumulate": 4}, "accumulate=4"), ({"batch": 1}, "a batch of 1")]
)
def test_a_batch_norm_needs_two_examples(options, said):
    task = Task.from_arrays(0, "all", torch.rand(8, 3), torch.arange(8) % 2, torch.rand(8, 3), torch.arange(8) % 2, valid=0)
    method = Method(Network(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), tasks=[task]))
    with pytest.raises(ValueError, match=f"task 'all': {said}.* batch norm") as error:
        method.learn(task, Trainer(Regime(epochs=1, **options)))
    assert "\n" not in str(error.value)


def test_labels_are_spread_over_the_classes_of_their_own_task_where_tasks_are_mixed():
    """Against a plain loop. Classes that a task lacks have outputs so low that a share of them made the loss infinite."""
    torch.manual_seed(0)
    net = Network(nn.Flatten(), [2, 5, 3], torch.randn(2, 4))
    x, task, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 1, 0, 2]), torch.tensor([1, 4, 2, 0, 0, 1])
    rows = [F.cross_entropy(net(x[k : k + 1], int(task[k])), y[k : k + 1], label_smoothing=0.2) for k in range(6)]
    batch = Batch(x, y, task, *torch.zeros(3), CLASSES.smoothed(0.2))
    loss = batch.loss(net(x, task))
    assert loss.item() == pytest.approx(torch.stack(rows).mean().item(), rel=1e-6)
    loss.backward()
    ours = [p.grad.clone() for p in net.heads.parameters()]
    net.zero_grad()
    torch.stack(rows).mean().backward()
    assert all(torch.allclose(a, p.grad, atol=1e-7) for a, p in zip(ours, net.heads.parameters(), strict=True))


@pytest.mark.parametrize("name", ["joint", "er", "derpp"])
def test_label_smoothing_with_tasks_of_other_numbers_of_classes(name):
    tasks = [toy_tasks(3, classes=count)[k] for k, count in enumerate((2, 5, 3))]
    method = make(name, tasks)
    fit = learn(method, tasks, Trainer(Regime(epochs=2, batch=16, lr=0.05, smoothing=0.2)))
    assert all(math.isfinite(epoch.loss) for result in fit.fits for epoch in result.epochs)
    assert fit.fits[-1].epochs[-1].loss < 5


def test_label_smoothing_is_in_the_loss_of_training_only():
    tasks = toy_tasks(1)
    losses = {}
    for share in (0.0, 0.3):
        method = Method(Network(nn.Flatten(), tasks=tasks))
        loop = Trainer(Regime(epochs=1, batch=1000, smoothing=share, lr=1e-9)).start(method, tasks[0])
        loop.epoch()
        losses[share] = loop.result.epochs[0]
    net = Network(nn.Flatten(), tasks=tasks)
    split = tasks[0].train
    logs = torch.log_softmax(net(split.inputs(torch.arange(len(split))), 0).double(), 1)
    plain = -logs[torch.arange(len(split)), split.y].mean().item()
    spread = -(0.7 * logs[torch.arange(len(split)), split.y] + 0.3 * logs.mean(1)).mean().item()
    assert losses[0.0].loss == pytest.approx(plain, rel=1e-5)
    assert losses[0.3].loss == pytest.approx(spread, rel=1e-5)
    assert losses[0.3].valid_loss == pytest.approx(losses[0.0].valid_loss, rel=1e-6)
