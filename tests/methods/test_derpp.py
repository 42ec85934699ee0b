"""Dark experience replay against a plain loop in float64."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack import METHODS, Network, Regime, Trainer, evaluate
from hatrack.methods.derpp import DERpp
from hatrack.methods.parts.memory import Examples, Reservoir
from hatrack.seeds import seeded
from hatrack.tasks.split import Batch
from hatrack.tasks.task import Task
from tests.helpers.learning import learn, logits
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

CLASSES = (3, 5, 2)


def uneven_tasks() -> list[Task]:
    """Three tasks of 3, 5 and 2 classes."""
    return [toy_tasks(3, classes=count)[k] for k, count in enumerate(CLASSES)]


def make_derpp(tasks: list[Task], *, known: int | None = None, norm: bool = False, heads: str = "multi", **options) -> DERpp:
    with seeded(0, "weights"):
        layers = [nn.Flatten(), nn.Linear(16, 12), *([nn.BatchNorm1d(12)] if norm else []), nn.ReLU()]
    classes = [max(t.classes for t in tasks) if heads == "shared" else t.classes for t in tasks[:known]]
    return DERpp(Network(nn.Sequential(*layers), classes, tasks[0].train.inputs(torch.arange(2)), heads=heads), **options)


def batch_of(task: Task, count: int) -> Batch:
    return task.train.take(torch.arange(count), torch.tensor(0), torch.tensor(1), count)


def fill(derpp: DERpp, tasks: list[Task], count: int = 20) -> None:
    """So many examples of every task into the memory, with the logits of the network as it is; then the weights move."""
    for task in tasks:
        batch = batch_of(task, count)
        derpp.edit_grads(batch, derpp.loss(batch)[1])
    with torch.no_grad():
        for parameter in derpp.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))


def draws(derpp: DERpp, seed: int) -> tuple[Examples, Examples]:
    """What a step of this seed draws, in its order."""
    torch.manual_seed(seed)
    return derpp.memory.sample(derpp.replay), derpp.memory.sample(derpp.replay)


def by_hand(derpp: DERpp, batch: Batch, dark: Examples, labelled: Examples, task: int) -> float:
    """The loss, example after example in float64. A head is a table of weights; nothing of the method is called."""
    layer = derpp.net.trunk[1]

    def answer(image: Tensor, k: int) -> list[float]:
        head = derpp.net.heads[0 if derpp.net.shared else k]
        hidden = (layer.weight.double() @ image.double().flatten() + layer.bias.double()).clamp(min=0)
        return (head.weight.double() @ hidden + head.bias.double()).tolist()

    def surprise(image: Tensor, label: int, k: int) -> float:
        z = torch.tensor(answer(image, k), dtype=torch.float64)
        return (z.exp().sum().log() - z[label]).item()

    new = sum(surprise(x, int(y), task) for x, y in zip(batch.x, batch.y, strict=True)) / len(batch.y)
    squares = []
    for x, k, kept in zip(dark.x, dark.task.tolist(), dark.more["logits"].tolist(), strict=True):
        now = answer(x, k)
        squares.append(sum((a - b) ** 2 for a, b in zip(now, kept, strict=False)) / len(now))  # only the task's own logits
    labels = zip(labelled.x, labelled.y.tolist(), labelled.task.tolist(), strict=True)
    old = sum(surprise(x, y, k) for x, y, k in labels) / len(labelled.y)
    return new + derpp.alpha * sum(squares) / len(squares) + derpp.beta * old


# The loss


@pytest.mark.parametrize("heads", ["multi", "shared"])
@pytest.mark.parametrize("current", [1, 2])
def test_the_loss_is_that_of_a_plain_loop(heads, current):
    tasks = uneven_tasks()
    derpp = make_derpp(tasks, heads=heads, replay=9, alpha=0.7, beta=0.3)
    fill(derpp, tasks)
    batch = batch_of(tasks[current], 11)
    dark, labelled = draws(derpp, 3)
    assert set(dark.task.tolist()) == set(labelled.task.tolist()) == {0, 1, 2}
    torch.manual_seed(3)
    loss, _ = derpp.loss(batch)
    assert loss.item() == pytest.approx(by_hand(derpp, batch, dark, labelled, current), rel=1e-5)
    # Controls: each term and each draw matters by far more than that.
    assert loss.item() != pytest.approx(by_hand(derpp, batch, labelled, dark, current), rel=1e-3)
    assert loss.item() != pytest.approx(by_hand(derpp, batch, dark, dark, current), rel=1e-3)
    for part in ("alpha", "beta"):
        less = copy.deepcopy(derpp)
        setattr(less, part, 0.0)
        assert loss.item() != pytest.approx(by_hand(less, batch, dark, labelled, current), rel=1e-3)


def test_places_beyond_the_classes_of_a_task_do_not_count():
    """Neither what the table holds there nor how wide it is; in the places of the task itself it does matter."""
    tasks = uneven_tasks()
    derpp = make_derpp(tasks, replay=9)
    fill(derpp, tasks)
    assert derpp.memory.logits.shape == (201, 5)
    batch = batch_of(tasks[0], 8)

    def loss() -> tuple[float, list[Tensor]]:
        torch.manual_seed(1)
        value = derpp.loss(batch)[0]
        return value.item(), list(torch.autograd.grad(value, list(derpp.parameters())))

    before, slopes = loss()
    beyond = torch.arange(5) >= torch.tensor(CLASSES)[derpp.memory.task][:, None]
    for rubbish in (1e30, torch.finfo(torch.float32).min, float("inf")):
        derpp.memory.logits[beyond] = rubbish
        after, same = loss()
        assert after == before
        assert all(torch.equal(a, b) for a, b in zip(slopes, same, strict=True))
    derpp.memory.logits[~beyond] += 1
    assert loss()[0] > before + 0.1


@pytest.mark.parametrize("norm", [False, True])
def test_while_the_memory_is_empty_the_batch_counts_alone(norm):
    tasks = uneven_tasks()
    derpp = make_derpp(tasks, norm=norm, alpha=100.0, beta=100.0).train()
    batch = batch_of(tasks[1], 8)
    loss, _ = derpp.loss(batch)
    if norm:
        mean = derpp.net.trunk[1](batch.x.flatten(1)).mean(0).detach()  # 32 draws are the batch four times over
        torch.testing.assert_close(derpp.net.trunk[2].running_mean, (1 - 0.9**3) * mean, msg="blank images are not counted")
    torch.testing.assert_close(loss, F.cross_entropy(derpp.net(batch.x, 1), batch.y))
    slopes = torch.autograd.grad(loss, list(derpp.net.trunk.parameters()))
    plain = torch.autograd.grad(F.cross_entropy(derpp.net(batch.x, 1), batch.y), list(derpp.net.trunk.parameters()))
    for one, two in zip(slopes, plain, strict=True):
        torch.testing.assert_close(one, two)
    fill(derpp, tasks[:1])
    assert derpp.loss(batch)[0] > loss + 1, "the control: with something in memory the other terms are there"


def test_the_draws_are_two():
    """Of `replay` examples each, and independent: over many steps they have no more in common than chance gives them."""
    tasks = toy_tasks(1)
    derpp = make_derpp(tasks, replay=7)
    fill(derpp, tasks, count=40)
    seen: list[Tensor] = []
    sample = derpp.memory.sample

    def spy(count: int) -> Examples:
        drawn = sample(count)
        assert len(drawn.y) == 7
        seen.append(drawn.x)
        return drawn

    derpp.memory.sample = spy
    torch.manual_seed(0)
    for _ in range(200):
        derpp.loss(batch_of(tasks[0], 4))
    assert len(seen) == 400
    same = torch.stack([(a == b).flatten(1).all(1) for a, b in zip(seen[::2], seen[1::2], strict=True)])
    assert same.float().mean().item() == pytest.approx(1 / 40, abs=4 * (1 / 40 / 1400) ** 0.5)


# The memory


@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_what_is_kept_are_the_logits_before_the_update(heads):
    tasks = uneven_tasks()
    derpp = make_derpp(tasks, heads=heads)
    before = copy.deepcopy(derpp.net)
    rate = 0.5
    batch = batch_of(tasks[2], 10)
    loss, aux = derpp.loss(batch)
    assert not derpp.memory.used.any(), "the batch is not in its own draws"
    loss.backward()
    derpp.edit_grads(batch, aux)
    with torch.no_grad():
        for parameter in derpp.parameters():
            parameter.sub_(rate * parameter.grad if parameter.grad is not None else 0)
        own = 5 if heads == "shared" else 2
        kept = derpp.memory.logits[1:11]
        torch.testing.assert_close(kept[:, :own], before(batch.x, 2))
        assert not kept[:, own:].any()
        assert (kept[:, :own] - derpp.net(batch.x, 2)).abs().mean() > 0.05, "the control: the update moved them"
    assert derpp.memory.used.sum().item() == 10
    assert torch.equal(derpp.memory.task[1:11], torch.full((10,), 2))
    assert torch.equal(derpp.memory.y[1:11], batch.y)


def test_the_trainer_keeps_the_logits_before_the_update():
    """One step of a real fit: those of the initial weights, not of the trained ones."""
    tasks = toy_tasks(1)
    derpp = make_derpp(tasks)
    before = copy.deepcopy(derpp.net)
    learn(derpp, tasks, Trainer(Regime(epochs=1, batch=len(tasks[0].train), lr=0.5)))
    used = derpp.memory.used
    assert used.sum().item() == len(tasks[0].train)
    torch.testing.assert_close(derpp.memory.logits[used], before(derpp.memory.x[used], 0).detach())
    assert (derpp.memory.logits[used] - derpp.net(derpp.memory.x[used], 0)).abs().mean() > 0.01


def test_every_epoch_is_offered():
    """So that logits of all stages of training are kept; the first epoch alone would be those of a beginner."""
    tasks = toy_tasks(2)
    derpp = make_derpp(tasks, memory=20)
    learn(derpp, tasks, Trainer(Regime(epochs=3, batch=7, lr=0.1, schedule="constant")))  # no return to the best epoch
    assert derpp.memory.seen.item() == 3 * sum(len(task.train) for task in tasks)
    assert derpp.memory.used.sum().item() == 20
    assert derpp.memory.tasks() == {0, 1}


def test_batches_that_mix_tasks_are_kept_with_the_logits_of_each():
    tasks = uneven_tasks()
    derpp = make_derpp(tasks)
    owner = torch.arange(12) % 3
    x, y = torch.cat([batch_of(tasks[k], 1).x for k in owner]), torch.zeros(12, dtype=torch.int64)
    batch = batch_of(tasks[0], 12)._replace(x=x, y=y, task=owner)
    for _ in range(2):
        loss, aux = derpp.loss(batch)
        derpp.edit_grads(batch, aux)
    assert loss.isfinite()
    for k, image in enumerate(x):
        width = CLASSES[k % 3]
        torch.testing.assert_close(derpp.memory.logits[1 + k, :width], derpp.net(image[None], k % 3)[0].detach())


def test_a_wider_task_may_come_later():
    """Known from the start or added: the same weights and the same logits, in a table as wide as the widest task so far."""
    tasks = uneven_tasks()
    derpp, twin = make_derpp(tasks, known=1), make_derpp(tasks)
    assert derpp.memory.logits.shape[1] == 3
    fits = [Trainer(Regime(epochs=3, batch=16, lr=0.1)) for _ in range(2)]
    for task in tasks:
        if task.index:
            derpp.net.add_task(task.classes)
        derpp.learn(task, fits[0])
        twin.learn(task, fits[1])
    assert derpp.memory.logits.shape[1] == 5
    torch.testing.assert_close(derpp.memory.logits, twin.memory.logits)
    for task in tasks:
        torch.testing.assert_close(logits(derpp, task), logits(twin, task))


def test_the_memory_is_part_of_the_checkpoint():
    tasks = uneven_tasks()
    derpp, twin = make_derpp(tasks), make_derpp(tasks)
    learn(derpp, tasks[:2])
    state = copy.deepcopy(derpp.state_dict())
    assert {"memory.logits", "memory.x", "memory.seen"} <= state.keys()
    twin.load_state_dict(state)
    other = make_derpp(tasks)
    other.load_state_dict(state)
    other.memory.logits.add_(1)
    for one in (derpp, twin, other):
        learn(one, tasks[2:])
    assert torch.equal(logits(derpp, tasks[0]), logits(twin, tasks[0]))
    assert not torch.equal(logits(derpp, tasks[0]), logits(other, tasks[0])), "the control: the kept logits matter"


@pytest.mark.parametrize("given_up", [True, False])
def test_a_task_that_takes_the_place_of_another_is_not_mixed_with_it(given_up):
    """A task that was given up leaves nothing to be replayed under its number; one that is learned again does."""
    tasks = toy_tasks(2)
    derpp = make_derpp(tasks, memory=1000)
    learn(derpp, tasks)
    old = derpp.memory.x[derpp.memory.used & (derpp.memory.task == 0)][0]
    if given_up:
        derpp.forget_task(0)
    other = dataclasses.replace(toy_tasks(1, seed=5)[0], name="other" if given_up else tasks[0].name)
    learn(derpp, [other])
    assert derpp.memory.tasks() == {0, 1}
    found = (derpp.memory.x[derpp.memory.used] == old).flatten(1).all(1).any().item()
    assert found == (not given_up)


def test_heads_to_come_are_left_alone():
    """A batch of mixed tasks passes through all heads; weight decay must not move those that nothing was learned with."""
    tasks = toy_tasks(3)
    derpp = make_derpp(tasks)
    before = [p.clone() for k in (0, 2) for p in derpp.net.heads[k].parameters()]
    learn(derpp, tasks[1:2], Trainer(Regime(epochs=2, batch=16, optimizer="adamw", weight_decay=0.1, lr=0.01)))
    after = [p for k in (0, 2) for p in derpp.net.heads[k].parameters()]
    assert all(torch.equal(p, q) for p, q in zip(after, before, strict=True))
    first = derpp.net.heads[1].weight.clone()
    learn(derpp, tasks[2:], Trainer(Regime(epochs=1, batch=16)))
    assert not torch.equal(first, derpp.net.heads[1].weight), "the heads of earlier tasks go on learning"


# What it is for


def mean_accuracy(method, tasks: list[Task]) -> float:
    learn(method, tasks, Trainer(Regime(epochs=6, batch=8, lr=0.2)))
    return sum(evaluate(method, task.test).accuracy for task in tasks) / len(tasks)


@pytest.mark.parametrize("weights", quick_and_slow([{}, {"alpha": 0.0, "beta": 1.0}, {"alpha": 1.0, "beta": 0.0}], [{}]))
def test_it_forgets_less_than_sgd(weights):
    """With both terms, and with each by itself."""
    tasks = toy_tasks(8)
    plain = mean_accuracy(METHODS["sgd"](make_derpp(tasks, heads="shared").net), tasks)
    assert mean_accuracy(make_derpp(tasks, heads="shared", memory=72, **weights), tasks) > plain + 0.1


@pytest.mark.slow
def test_logits_of_the_first_epoch_alone_do_not_help(monkeypatch):
    """Why every epoch is offered, unlike in er: logits of a network that has hardly begun are nothing to go back to."""
    tasks = toy_tasks(8)
    accuracies = []
    for first_only in (False, True):
        derpp = make_derpp(tasks, heads="shared", memory=72, alpha=1.0, beta=0.0)
        if first_only:
            train, expect = derpp.learn_task, derpp.memory.expect
            monkeypatch.setattr(derpp, "learn_task", lambda task, fit: (expect(len(task.train)), train(task, fit)))  # noqa: B023
            monkeypatch.setattr(derpp.memory, "expect", lambda count: None)
        accuracies.append(mean_accuracy(derpp, tasks))
        assert (derpp.memory.seen.item() == sum(len(task.train) for task in tasks)) == first_only
    assert accuracies[0] > accuracies[1] + 0.1


def test_without_its_terms_it_is_sgd():
    tasks = toy_tasks(3)
    derpp, sgd = make_derpp(tasks, alpha=0.0, beta=0.0), METHODS["sgd"](make_derpp(tasks).net)
    for one in (derpp, sgd):
        learn(one, tasks)
    for task in tasks:
        torch.testing.assert_close(logits(derpp, task), logits(sgd, task))


def test_the_options_make_the_memory():
    derpp = make_derpp(toy_tasks(2), memory=7)
    assert isinstance(derpp.memory, Reservoir)
    assert len(derpp.memory.y) == 1 + 7
    assert derpp.options == {"memory": 7, "alpha": 0.5, "beta": 0.5, "replay": 32}


@pytest.mark.parametrize("wrong", [{"memory": 0}, {"replay": 0}, {"alpha": -1.0}, {"beta": float("nan")}])
def test_wrong_options(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_derpp(toy_tasks(1), **wrong)
