"""A task under a guard is learned as by a Trainer: the formulas, the annealing, statistics, and accuracy on images."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hatrack as hr
from hatrack import BENCHMARKS, HAT, PMASK, Network, Regime, Trainer
from hatrack.guard.backbone import GATES
from hatrack.methods.parts.annealing import hardness
from hatrack.networks.mlp import mlp
from hatrack.seeds import derive, generator, seeded
from hatrack.tasks.batches import split_batches
from hatrack.tasks.split import Batch
from tests.helpers.guarded import BACKBONES, PROBE, WIDTH, data, differing, make_loop, state
from tests.helpers.toys import toy_tasks


def one_step(kind, smax, x, y, step, steps):
    """The embedding, its gradient and those of the weights in a step of a method by itself, as the Trainer makes it."""
    torch.manual_seed(0)
    net = Network(BACKBONES["mlp"](), [3, 3], PROBE[:2])
    method = kind(net, smax=smax)
    head = nn.Linear(WIDTH, 3)
    net.heads[1].load_state_dict(head.state_dict())
    method.begin_task(1)
    batch = Batch(x, y, 1, torch.tensor(step), torch.tensor(steps), torch.tensor(step / steps))
    method.loss(batch).backward()
    method.edit_grads(batch, None)
    e = method.embeddings[1] if kind is HAT else method.embeddings
    return e.detach().clone(), e.grad, [p.grad for p in net.trunk.parameters()], head


@pytest.mark.parametrize(("name", "kind"), [("hat", HAT), ("pmask", PMASK)])
@pytest.mark.parametrize("step", [0, 2, 5])
def test_a_step_is_the_step_of_the_method(name, kind, step):
    """The user's loss has no capacity term, but the gates move as if it had."""
    x, y = data(0)
    start, grad, weights, head = one_step(kind, 30.0, x, y, step, 6)
    torch.manual_seed(0)
    backbone = BACKBONES["mlp"]()
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.0)
    guard = hr.protect(backbone, optimizer, example=PROBE[:2], method=name, smax=30.0)
    with guard.learn("a", steps=6, own=[head]):
        guard.lesson.done = step
        guard.lesson._set_hardness()
        e = guard.module.embedding
        assert torch.equal(e, start)
        F.cross_entropy(head(backbone.train()(x)), y).backward()
        for own, other in zip(backbone.parameters(), weights, strict=False):
            torch.testing.assert_close(own.grad, other, rtol=1e-4, atol=1e-7)
        optimizer.step()
        moved = (start - e.detach()) / guard.method.gate_rate
        free = e.abs() < 6
        assert free.float().mean() > 0.5
        torch.testing.assert_close(moved[free], grad[free], rtol=1e-3, atol=1e-3 * grad.abs().max().item())
        optimizer.step()  # without a gradient: not counted
        guard.lesson.done = 6


@pytest.mark.parametrize(
    ("name", "options"),
    [("hat", {"smax": 30.0}), ("hat", {"smax": 60.0, "slope": "exact"}), ("pmask", {"smax": 30.0})],
    ids=["hat", "hat with the exact slope", "pmask"],
)
def test_a_task_ends_with_the_weights_of_the_trainer(name, options):
    """With its gates, its batches and no choice of a best epoch; batches in another order lead elsewhere."""
    (task,) = toy_tasks(1)
    steps = len(split_batches(task.train.y, 8))

    def network():
        torch.manual_seed(0)
        return Network(BACKBONES["mlp"](), tasks=[task])

    def learn(names):
        net, other = network(), hr.METHODS[name](network(), **options)
        other.begin_task(0)
        gates = other.embeddings[0] if name == "hat" else other.embeddings
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        guard = hr.protect(net.trunk, optimizer, example=net.example, method=name, **options)
        with guard.learn("a", steps=steps, own=[net.heads[0]]):
            guard.module.embedding.data.copy_(gates)
            for epoch in range(2):
                order = torch.randperm(len(task.train), generator=generator(derive(0, *names), "batches", epoch))
                for rows in split_batches(order, 8):
                    optimizer.zero_grad()
                    features = net.trunk.train()(task.train.inputs(rows))
                    F.cross_entropy(net.heads[0](features), task.train.y[rows]).backward()
                    optimizer.step()
        return [p.detach() for key, p in net.named_parameters() if GATES not in key]

    method = hr.METHODS[name](network(), **options)
    regime = Regime(epochs=2, batch=8, lr=0.1, schedule="constant", restore=False)
    method.learn(task, Trainer(regime, engine="eager"))
    expected = list(method.net.parameters())
    for own, weight in zip(learn(("task", 0, "fit", 0)), expected, strict=True):
        torch.testing.assert_close(own, weight, rtol=1e-4, atol=1e-5)
    elsewhere = zip(learn(("other",)), expected, strict=True)
    assert max((own - weight).abs().max().item() for own, weight in elsewhere) > 1e-2


@pytest.mark.parametrize("anneal", ["paper", "authors"])
def test_the_hardness_follows_the_steps_of_an_epoch(anneal):
    loop, seen = make_loop(options={"anneal": anneal}), []
    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
        for batch in loop.batches(0) * 2:
            seen.append(loop.guard.lesson.s.item())
            loop.train("a", [batch])
    place = [
        Batch(PROBE, PROBE, 0, torch.tensor(k % 4), torch.tensor(4), torch.tensor(k % 4 / 4)) for k in range(8)
    ]  # fmt: skip
    assert seen == [hardness(batch, 400.0, anneal).item() for batch in place]
    assert seen[3] == (400.0 if anneal == "paper" else pytest.approx(300.0, rel=1e-3))


def test_statistics_are_those_of_the_final_gates():
    """The running mean of the first norm is the mean of its inputs over the data; without `settle` users are warned."""
    loop = make_loop("cnn")
    batches = loop.batches(0)
    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]], settle=batches):
        loop.train("a", batches)
    x = torch.cat([x for x, _ in batches])
    with torch.no_grad():
        expected = F.conv2d(x, loop.backbone[0].weight, loop.backbone[0].bias, padding=1).mean((0, 2, 3))
    torch.testing.assert_close(loop.guard.method.norms.of(1)["1.running_mean"], expected, rtol=1e-4, atol=1e-5)
    with (
        pytest.warns(UserWarning, match=r"learn\('b', \.\.\., settle=loader\)"),
        loop.guard.learn("b", steps=4, own=[loop.heads["b"]]),
    ):
        loop.train("b", loop.batches(1))
    loop.guard.verify()


@pytest.mark.parametrize(("wrong", "message"), [([{"x": 1}], "first part is a tensor"), ([], "no batch of two or more")])
def test_batches_that_are_no_inputs(wrong, message):
    loop = make_loop("cnn")

    def learn():
        with loop.guard.learn("a", steps=4, own=[loop.heads["a"]], settle=wrong):
            loop.train("a", loop.batches(0))

    with pytest.raises(ValueError, match=message):
        learn()
    assert not loop.guard.tasks


def test_too_few_steps_are_told():
    loop = make_loop()
    with pytest.warns(UserWarning, match="ended after 4 steps.*fewer than steps=40"):  # noqa: SIM117
        with loop.guard.learn("a", steps=40, own=[loop.heads["a"]]):
            loop.train("a", loop.batches(0))


def test_training_mode_that_is_forgotten_is_told_once():
    """The gates stand still then: no step is counted."""
    loop = make_loop()

    def learn():
        with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
            loop.train("a", loop.batches(0))
            loop.backbone.eval()
            for x, y in loop.batches(0):
                loop.optimizer.zero_grad()
                F.cross_entropy(loop.heads["a"](loop.backbone(x)), y).backward()
                loop.optimizer.step()
            assert loop.guard.lesson.done == 4

    with pytest.warns(UserWarning, match="evaluation mode") as told:
        learn()
    assert len(told) == 1
    assert "'a'" in str(told[0].message)
    assert "backbone.train()" in str(told[0].message)


def test_training_mode_that_is_missing_is_told_at_the_first_step():
    loop, steps = make_loop(), []

    def learn():
        with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
            loop.backbone.eval()
            for x, y in loop.batches(0):
                F.cross_entropy(loop.heads["a"](loop.backbone(x)), y).backward()
                steps.append(x)
                loop.optimizer.step()

    before = state(loop.backbone, loop.heads["a"])
    with pytest.raises(ValueError, match=r"task 'a'.*evaluation mode.*backbone\.train\(\)"):
        learn()
    assert len(steps) == 1
    assert differing(before, state(loop.backbone, loop.heads["a"])) == []


def test_a_gradient_in_evaluation_mode_that_no_step_follows_is_not_told():
    """As of adversarial examples, or of what an image shows: warnings are errors in tests."""
    loop = make_loop()
    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
        for x, y in loop.batches(0):
            x = x.clone().requires_grad_()
            F.cross_entropy(loop.heads["a"](loop.backbone.eval()(x)), y).backward()
            loop.train("a", [((x + 0.1 * x.grad.sign()).detach(), y)])
        assert loop.guard.lesson.done == 4


@pytest.mark.parametrize("method", ["hat", "pmask"])
def test_another_default_type_of_numbers(method, tmp_path):
    """The gates are float32 whatever the default is; a file can be loaded where it is float32 again."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        backbone, heads = BACKBONES["cnn"](), {name: nn.Linear(WIDTH, 3) for name in "ab"}
        held = [*backbone.parameters(), *(p for head in heads.values() for p in head.parameters())]
        optimizer = torch.optim.AdamW(held, lr=0.01)
        guard = hr.protect(backbone, optimizer, example=PROBE[:2].double(), method=method)
        answers = []
        for number, name in enumerate(heads):
            x, y = data(number)
            with guard.learn(name, steps=2, own=[heads[name]], settle=[x.double()]):
                for _ in range(4):
                    optimizer.zero_grad()
                    F.cross_entropy(heads[name](backbone(x.double())), y).backward()
                    optimizer.step()
            with guard.use("a"), torch.no_grad():
                answers.append(heads["a"](backbone(PROBE.double())))
        guard.verify()
        guard.save(tmp_path / "guard.safetensors")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(*answers)
    assert answers[0].std() > 0
    other, head = BACKBONES["cnn"]().double(), nn.Linear(WIDTH, 3).double()
    optimizer, own = torch.optim.SGD(other.parameters()), {"a": [head], "b": [nn.Linear(WIDTH, 3).double()]}
    loaded = hr.load_guard(tmp_path / "guard.safetensors", other, optimizer, own=own)
    with loaded.use("a"), torch.no_grad():
        assert torch.equal(head(other(PROBE.double())), answers[0])


def test_autocast_around_a_block():
    """Weights are cast anew at every use: torch's cache would keep those of the first step."""
    loop = make_loop("mlp", torch.optim.SGD, lr=0.1)
    with torch.autocast("cpu", torch.bfloat16), loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
        loop.train("a", loop.batches(0))
        loop.backbone.eval()
        now = loop.backbone(PROBE)
        torch.clear_autocast_cache()
        assert torch.equal(now, loop.backbone(PROBE))
    loop.learn("b", 1)
    loop.guard.verify()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_accuracy_on_images_is_that_of_the_trainer(name):
    """Two tasks of split MNIST, on the sample: plain loop and Trainer, the same network and optimizer."""
    tasks = BENCHMARKS["smnist"](0, data="sample")[:2]

    def trunk():
        with seeded(0, "weights"):
            return mlp(tasks[0].shape, widths=(100, 100), dropout=0.0, input_dropout=0.0)

    method = hr.METHODS[name](Network(trunk(), tasks=tasks))
    fit = Trainer(Regime(epochs=8, batch=32, lr=0.1))
    reached = [method.learn(task, fit) and hr.evaluate(method, task.test).accuracy for task in tasks]

    # The heads begin as those of the method; others would depend on the random numbers that earlier tests drew.
    backbone, heads = trunk(), list(Network(trunk(), tasks=tasks).heads)
    held = [*backbone.parameters(), *(p for head in heads for p in head.parameters())]
    optimizer = torch.optim.SGD(held, lr=0.1)
    inputs = [task.train.inputs(torch.arange(len(task.train))) for task in tasks]
    guard = hr.protect(backbone, optimizer, example=inputs[0][:2], method=name)
    for task, x, head in zip(tasks, inputs, heads, strict=True):
        torch.manual_seed(0)
        steps = -(-len(x) // 32)
        with guard.learn(task.name, steps=steps, own=[head]):
            backbone.train()
            for _ in range(8):
                for index in torch.randperm(len(x)).split(32):
                    optimizer.zero_grad()
                    F.cross_entropy(head(backbone(x[index])), task.train.y[index]).backward()
                    optimizer.step()
    for task, head, other in zip(tasks, heads, reached, strict=True):
        with guard.use(task.name), torch.no_grad():
            right = head(backbone(task.test.inputs(torch.arange(len(task.test))))).argmax(1) == task.test.y
        assert right.float().mean() > other - 0.03
        assert other > 0.9


class Scaled(nn.Module):
    """A layer that is called with a computed weight in place of its own."""

    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, WIDTH)

    def forward(self, x):
        h = torch.func.functional_call(self.first, {"weight": self.first.weight * 1.5}, (x.flatten(1),))
        return self.last(h.relu())


@pytest.mark.parametrize("width", [16, 24])  # with the first the wrong gates would fit the layer
@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_a_trunk_that_calls_a_layer_with_another_weight(name, width):
    loop = make_loop(Scaled(width), method=name)
    for number, task in enumerate("abc"):
        loop.learn(task, number)
        assert loop.changed() == []
