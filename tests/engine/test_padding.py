"""Compiled steps of tasks with other numbers of classes have one form: heads have room for the most classes of a task."""

import copy
import gc
import io

import numpy as np
import pytest
import torch
from torch import nn

import hatrack as hr
from hatrack import METHODS, Method, Network, Regime, Run, Trainer, run
from hatrack.engine import compiled
from hatrack.engine.choice import can_compile
from hatrack.engine.compiled import Compiled
from hatrack.engine.padding import Padding, Widened, padded
from hatrack.methods.evaluate import evaluate
from hatrack.tasks.device import all_to_device
from hatrack.training.checkpoint import Checkpointer
from hatrack.training.paddings import UNLIKELY
from tests.helpers.killing import OFTEN, Killed, assert_same, to_the_end
from tests.helpers.learning import ISOLATED, OPTIMIZERS, learn, logits, make
from tests.helpers.pretended_cuda import pretended_cuda
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

MANY = [
    "joint",
    "lwf",
    "er",
    "derpp",
    "den",
    "pathnet",
]  # methods whose steps have more forms than there are numbers of classes
DECAYS = {"momentum": {"optimizer": "momentum", "lr": 0.05, "weight_decay": 0.01}, **OPTIMIZERS}


@pytest.fixture
def captured_only(monkeypatch):
    """Run the captured operations without compiling them, which takes seconds each time."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: copy.deepcopy(graph))


@pytest.fixture(autouse=True)
def no_code(monkeypatch):
    monkeypatch.setattr(compiled, "_code_cache", {})


def of_classes(*classes, **how):
    return [toy_tasks(len(classes), classes=count, **how)[k] for k, count in enumerate(classes)]


def learned(name, tasks, engine="compiled", **regime):
    method = make(name, tasks)
    fit = learn(method, tasks, Trainer(Regime(**{"epochs": 2, "batch": 16, "lr": 0.1, **regime}), engine=engine))
    return method, fit


def losses(fit):
    return torch.tensor([epoch.loss for result in fit.fits for epoch in result.epochs])


def assert_like_eager(method, fit, name, tasks, **regime):
    """The losses and the state of a method are those of eager steps, to rounding, and its heads have memory of their own."""
    eager, slow = learned(name, tasks, "eager", **regime)
    torch.testing.assert_close(losses(fit), losses(slow), rtol=1e-5, atol=1e-5)
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(method.state_dict()[key], value, rtol=1e-5, atol=1e-5)
    assert_own_memory(method)


def assert_own_memory(method):
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in method.net.heads.parameters())


@pytest.mark.parametrize("name", quick_and_slow(METHODS, ["sgd", "hat", "ewc", "lora", "er"]))
def test_tasks_with_other_classes_take_the_same_code(name, captured_only):
    """With dropout and a last batch that is smaller, and runs eagerly."""
    tasks = of_classes(2, 5, 3)
    method, fit = learned(name, tasks)
    found = len(compiled._code_cache)
    assert_like_eager(method, fit, name, tasks)
    if name not in MANY:
        compiled._code_cache.clear()
        learned(name, of_classes(5, 5, 5))
        assert found == len(compiled._code_cache), "as many forms as with equal classes"


@pytest.mark.parametrize("optimizer", quick_and_slow(DECAYS, ["momentum", "kept adam"]))
def test_rows_of_no_class_get_no_gradient(optimizer, captured_only, monkeypatch):
    wide, close = [], Compiled.close
    monkeypatch.setattr(Compiled, "close", lambda self: wide.append(self.tensors) or close(self))
    tasks = of_classes(2, 5)
    method, fit = learned("hat", tasks, **DECAYS[optimizer])
    assert len(compiled._code_cache) == 1
    weights, *kept = (t for t in wide[0] if t.shape == (5, 24))
    biases, *others = (t for t in wide[0] if t.shape == (5,))
    assert len(kept) == len(others) == {"sgd": 0, "momentum": 1, "kept momentum": 1}.get(optimizer, 2)
    decays = DECAYS[optimizer].get("weight_decay", 0)
    for tensor in (weights, *kept, *([] if decays else others)):
        assert tensor[:2].any()
        assert not tensor[2:].any()
    assert (biases[2:] <= 0.5 * UNLIKELY).all() if decays else biases[2:].eq(UNLIKELY).all()
    assert_like_eager(method, fit, "hat", tasks, **DECAYS[optimizer])


@pytest.mark.parametrize("name", quick_and_slow(ISOLATED, ["hat"]))
def test_finished_tasks_keep_their_bits(name, captured_only):
    tasks = of_classes(2, 5, 3)
    method, fit = (
        make(name, tasks),
        Trainer(Regime(epochs=2, batch=16, **DECAYS["kept adamw with decay"]), engine="compiled"),
    )
    first = []
    for task in tasks:
        method.learn(task, fit)
        first.append(logits(method, task))
    assert all(torch.equal(before, logits(method, task)) for before, task in zip(first, tasks, strict=True))


def test_a_task_with_more_classes_that_is_added_later(captured_only):
    """It has a form of its own, and so has every task after it."""
    methods = []
    tasks = of_classes(2, 5, 7, 2)
    for engine in ("eager", "compiled"):
        method, fit = make("hat", tasks, known=2), Trainer(Regime(epochs=2, batch=16, lr=0.1), engine=engine)
        learn(method, tasks[:2], fit)
        for task in tasks[2:]:
            method.net.add_task(task.classes)
            method.learn(task, fit)
        methods.append(method)
    assert len(compiled._code_cache) == 2
    for one, two in zip(methods[0].parameters(), methods[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["hat", "lora"])
def test_a_trunk_that_grows_and_a_task_that_is_learned_again(name, captured_only):
    methods, tasks = [], of_classes(2, 5)
    for engine in ("eager", "compiled"):
        method, fit = make(name, tasks), Trainer(Regime(epochs=2, batch=16, lr=0.1, keep_state=True), engine=engine)
        learn(method, tasks, fit)
        if name == "hat":
            method.grow(4)
        method.forget_task(0)
        method.learn(tasks[0], fit)
        methods.append(method)
    for one, two in zip(methods[0].parameters(), methods[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("regime", [{"weight_decay": 5.0, "epochs": 8}, {"smoothing": 0.1}])
def test_regimes_that_would_make_more_classes_count(regime, captured_only):
    """A strong decay brings unlikely logits near 0, and smoothed labels need the mean of all."""
    tasks = of_classes(2, 5)
    method, fit = learned("sgd", tasks, **regime)
    assert len(compiled._code_cache) == 2
    assert_like_eager(method, fit, "sgd", tasks, **regime)


class Mean(Method):
    """Its loss depends on the number of logits."""

    def loss(self, batch):
        found = self(batch.x, batch.task)
        return batch.loss(found) + found.square().mean()


class Renamed(hr.HAT):
    """Its step is HAT's."""

    def learn_task(self, task, fit):
        super().learn_task(task, fit)


class Scaled(Network):
    """A user's network, which may do anything with logits."""

    def head(self, features, task):
        found = super().head(features, task)
        return found - found.mean(1, keepdim=True)


def without_bias(net):
    net.heads[0] = nn.Linear(net.features, 2, bias=False)


def with_a_hook(part):
    part.register_forward_hook(lambda layer, given, result: result - result.mean(1, keepdim=True))


def smaller(grad):
    """Return a gradient divided by what depends on its number of rows."""
    return grad / (1 + grad.abs().mean())


def with_a_gradient_hook(kind):
    def change(net):
        head = net.heads[0]
        if kind == "module":
            head.register_full_backward_hook(lambda layer, given, result: (given[0] - result[0].mean(),))
        elif kind == "tensor":
            head.weight.register_hook(smaller)
        else:
            head.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", smaller(weight.grad)))

    return change


def with_a_forward_of_its_own(net):
    plain = net.forward
    net.forward = lambda *given: (lambda found: found - found.mean(1, keepdim=True))(plain(*given))


@pytest.mark.parametrize(
    ("kind", "network", "change", "forms"),
    [
        (Mean, Network, None, 2),
        (Renamed, Network, None, 1),
        (Method, Scaled, None, 2),
        (Method, Network, without_bias, 2),
        (Method, Network, with_a_hook, 2),
        (Method, Network, lambda net: with_a_hook(net.heads[0]), 2),
        (Method, Network, with_a_forward_of_its_own, 2),
        (Method, Network, with_a_gradient_hook("module"), 2),
        (Method, Network, with_a_gradient_hook("tensor"), 2),
        (Method, Network, with_a_gradient_hook("accumulated"), 2),
        (Method, Network, None, 1),
    ],
)
def test_what_is_the_users_own_sees_heads_as_they_are(kind, network, change, forms, captured_only):
    tasks, found = of_classes(2, 5), []
    for engine in ("eager", "compiled"):
        torch.manual_seed(0)
        net = network(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU()), tasks=tasks)
        if change:
            change(net)
        found.append(losses(learn(kind(net), tasks, Trainer(Regime(epochs=2, batch=16, lr=0.1), engine=engine))))
    assert torch.allclose(*found, rtol=1e-5, atol=1e-5)
    assert len(compiled._code_cache) == forms


@pytest.mark.parametrize("heads", ["shared", "class"])
def test_one_head_of_all_tasks_stays_as_it_is(heads, captured_only):
    found = []
    for engine in ("eager", "compiled"):
        tasks = hr.in_scenario(
            of_classes(*((3, 3) if heads == "shared" else (2, 5))), "class" if heads == "class" else "task"
        )
        method, fit = make("ewc", tasks, heads=heads), Trainer(Regime(epochs=2, batch=16, lr=0.1), engine=engine)
        found.append(losses(learn(method, tasks, fit)))
    assert {result.engine for result in fit.fits} == {"compiled"}
    assert torch.allclose(*found, rtol=1e-5, atol=1e-5)


def test_a_fit_that_fails_leaves_heads_as_they_were(captured_only):
    """They have their size, their bits and memory of their own; the next try is the same as without the failure."""
    tasks = of_classes(2, 5)

    def fail(event):
        assert len(event.result.epochs) < 2
        head = method.net.heads[0]
        assert head.weight.shape == (2, 24)
        assert head.weight.untyped_storage().nbytes() == 5 * 24 * 4, "padded within the fit"

    method = make("hat", tasks)
    before = copy.deepcopy(method.state_dict())
    with pytest.raises(AssertionError, match="epochs"):
        method.learn(tasks[0], Trainer(Regime(epochs=3, batch=16), engine="compiled", progress=fail))
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())
    assert_own_memory(method)
    fit = learn(method, tasks, Trainer(Regime(epochs=2, batch=16, lr=0.1), engine="compiled"))
    assert_like_eager(method, fit, "hat", tasks)


def test_files_hold_no_more_rows(captured_only, tmp_path):
    tasks, sizes = of_classes(2, 5), []
    for engine in ("eager", "compiled"):
        method, _ = learned("hat", tasks, engine)
        buffer = io.BytesIO()
        torch.save(method.state_dict(), buffer)
        hr.save(method, tmp_path / engine)
        sizes.append((buffer.tell(), (tmp_path / engine).stat().st_size))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("optimizer", ["momentum", "kept adamw with decay"])
def test_a_run_that_is_killed_while_it_learns_fewer_classes(optimizer, captured_only, monkeypatch, tmp_path):
    """Also before the last batch of an epoch, which is smaller: the run goes on with a step that is not compiled."""
    x, files = np.random.default_rng(0).normal(size=(300, 6)).astype(np.float32), []
    for count in (2, 5):
        y = (x[:, :1].argsort(0).argsort(0)[:, 0] * count) // 300
        np.savez(tmp_path / f"{count}.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
        files.append(f'[[task]]\nname = "of {count}"\ndata = "{count}.npz"')
    (tmp_path / "tasks.toml").write_text("\n".join(files))
    own = {"benchmark_options": {"tasks": str(tmp_path / "tasks.toml")}, "network_options": {"widths": (8,)}}
    one = Run("own", "hat", regime=Regime(epochs=3, batch=50, **DECAYS[optimizer]), **own)
    whole = run(one, tmp_path / "whole", engine="compiled")
    assert len(compiled._code_cache) == 1
    tick, kills = Checkpointer.after_step, []

    def deadly(self, course):
        tick(self, course)
        place = course.task.index, len(course.result.epochs), course.step_index
        if place in [(0, 0, 2), (0, 1, 3), (1, 1, 1)] and place not in kills:
            kills.append(place)
            raise Killed

    monkeypatch.setattr(Checkpointer, "after_step", deadly)
    again = to_the_end(one, tmp_path / "again", engine="compiled", save_every=OFTEN)
    assert len(kills) == 3
    assert_same(whole, again)


def test_recorded_validation_follows_the_head():
    """A fit that goes on with a smaller batch may record its validation before its head is padded."""
    with pretended_cuda():
        tasks = all_to_device(of_classes(2, 5), "cuda")
        method = make("sgd", tasks).to("cuda")
        loop = Trainer(Regime(epochs=6, batch=16, lr=0.1), engine="recorded").start(method, tasks[0])
        for _ in range(5):
            before = loop.validate()
        paddings = [Padding(parameter, 5, 0.0) for parameter in method.net.heads[0].parameters()]
        with padded(paddings) as wide:
            pass
        moved = Widened(paddings, wide)
        loop.epoch()
        assert loop.result.epochs[-1].valid_loss == evaluate(method, tasks[0].valid).loss < before.loss
        moved.close()
        loop.close()


def test_gradients_of_more_rows_are_dropped():
    """Counting operations notes gradients and gives them back, which fails if they have other rows than their tensors."""
    weight = nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones(3, 2)
    with padded([Padding(weight, 5, -1.0)]) as wide:
        assert weight.grad is None
        assert weight[3:].eq(-1).all()
        assert wide[0].data_ptr() == weight.data_ptr()
        weight.sum().backward()
        assert weight.grad.shape == (5, 2)
    assert weight.grad is None
    assert torch.equal(weight, torch.ones(3, 2))


def test_a_step_that_cant_be_compiled_goes_on_with_its_own_rows(captured_only):
    """An error that was kept would keep what was computed with more rows, for which later gradients are too small."""
    weight = nn.Parameter(torch.ones(3, 2))

    def step(x):
        weight.grad = None
        loss = (x @ weight.T).sum()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad * min(0.1, loss.detach().item()))
        return loss.detach()

    own, fast = weight.data_ptr(), Compiled(step, 4, paddings=lambda: [Padding(weight, 5, 0.0)])
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="not compiled"):
            found = [fast(torch.ones(4, 2)).item() for _ in range(2)]
    finally:
        gc.enable()
    assert found == pytest.approx([24, 14.4])
    assert weight.data_ptr() == own


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(gpu=False), reason="no C++ compiler")
def test_the_compiler_is_asked_once():
    tasks = of_classes(2, 5)
    method, fit = make("hat", tasks), Trainer(Regime(epochs=3, batch=16, lr=0.1), engine="compiled")
    method.learn(tasks[0], fit)
    first = logits(method, tasks[0])
    method.learn(tasks[1], fit)
    assert [result.engine for result in fit.fits] == ["compiled", "compiled"]
    assert len(compiled._code_cache) == 1
    assert torch.equal(first, logits(method, tasks[0]))
    assert_like_eager(method, fit, "hat", tasks, epochs=3)
