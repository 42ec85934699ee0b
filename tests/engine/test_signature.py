"""A step that executes the operations of an earlier one takes its code; any other step does not."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import Method, Network, Regime, Trainer
from hatrack.engine import compiled, decompositions, signature
from hatrack.engine.choice import can_compile
from hatrack.engine.compiled import Compiled
from hatrack.engine.decompositions import DECOMPOSITIONS
from hatrack.engine.graph import capture
from hatrack.engine.signature import OperationLog
from tests.helpers.learning import OPTIMIZERS, learn, make
from tests.helpers.pictures import pictures
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks


@pytest.fixture
def captures(monkeypatch):
    """The functions that were captured, and the cache of code is empty."""
    seen = []
    monkeypatch.setattr(compiled, "_code_cache", {})
    monkeypatch.setattr(compiled, "capture", lambda function, *given: seen.append(function) or capture(function, *given))
    return seen


@pytest.fixture
def captured_only(monkeypatch, captures):
    """Run the captured operations without compiling them, which takes seconds each time."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: copy.deepcopy(graph))


def log_of(function, *inputs):
    log = OperationLog(inputs, DECOMPOSITIONS)
    with log:
        result = function(*inputs)
    log.finish(result)
    return log


def sign(function, *inputs):
    log = log_of(function, *inputs)
    assert log.signature(), log.inexact
    return log.signature()


# Later tasks and other runs


def two_runs(name, tasks, **regime):
    """The states of a method after two runs in one process, of two seeds."""
    states = []
    for seed in (0, 1):
        method = make(name, tasks, seed=seed)
        fit = Trainer(Regime(**{"epochs": 2, "batch": 16, "lr": 0.1, **regime}), seed=seed, engine="compiled")
        learn(method, tasks, fit)
        assert {fitted.engine for fitted in fit.fits} == {"compiled"}
        states.append(method.state_dict())
    return states


def assert_same_bits(found, expected):
    for one, two in zip(found, expected, strict=True):
        for key, value in two.items():
            assert torch.equal(one[key], value), key


FORMS = {"hat": 1, "pmask": 1, "ewc": 1, "si": 1, "sgd": 1, "lwf": 3, "pnn": 3}  # how many forms three tasks have


@pytest.mark.parametrize("name", quick_and_slow(FORMS, quick=("ewc",)))
def test_a_step_is_captured_once_for_all_tasks_and_seeds(name, captured_only, captures, monkeypatch):
    """And the result is that of runs whose every step is captured, bit for bit."""
    tasks = toy_tasks(3)
    reused = two_runs(name, tasks)
    assert len(captures) == FORMS[name]
    captures.clear()
    monkeypatch.setattr(OperationLog, "signature", lambda log: "")
    monkeypatch.setattr(compiled, "_code_cache", {})
    assert_same_bits(reused, two_runs(name, tasks))
    assert len(captures) >= 6, "every step was captured"


@pytest.mark.parametrize("optimizer", quick_and_slow(OPTIMIZERS, ["kept adamw with decay"]))
def test_with_every_optimizer(optimizer, captured_only, captures):
    two_runs("hat", toy_tasks(3), **OPTIMIZERS[optimizer], clip=1.0)
    assert len(captures) == 1


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(gpu=False), reason="no C++ compiler")
def test_compiled_code_of_an_earlier_task(captures, monkeypatch):
    tasks = toy_tasks(3)
    reused = two_runs("hat", tasks)
    assert len(captures) == 1
    monkeypatch.setattr(OperationLog, "signature", lambda log: "")
    assert_same_bits(reused, two_runs("hat", tasks))
    assert len(captures) == 1 + 6
    assert len(compiled._code_cache) == 1


def test_the_layouts_of_a_gpu(captured_only, captures, monkeypatch):
    """The decompositions are applied before the operations are logged."""
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: True)
    tasks = pictures(2)

    def make_trunk(flatten):
        trunk = nn.Sequential(nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), flatten, nn.LazyLinear(9))
        trunk(tasks[0].train.inputs(torch.arange(2)))
        return trunk

    class View(nn.Module):
        def forward(self, x):
            return x.view(len(x), -1)

    counts = []
    for flatten in (nn.Flatten(), View()):
        for _ in range(2):
            net = Network(make_trunk(flatten), [t.classes for t in tasks], tasks[0].train.inputs(torch.arange(2)))
            fit = Trainer(Regime(epochs=1, batch=16, lr=0.02), engine="compiled")
            learn(Method(net), tasks, fit)
            assert [fitted.engine for fitted in fit.fits] == ["compiled", "compiled"]
            counts.append(len(captures))
    assert counts == [1, 1, 5, 9], "a view fails at the first attempt; its steps are captured each time"


def test_the_tensors_of_a_step_are_its_own(captured_only, captures):
    tensors = [torch.full((3,), float(k)) for k in range(4)]
    for k in range(3):
        a, b = tensors[k], tensors[k + 1]
        step = Compiled(lambda x, a=a, b=b: (x * a).sub_(b) * b, 3)
        assert step(torch.full((3,), 2.0)).tolist() == [(2 * k - k - 1) * (k + 1)] * 3
    assert len(captures) == 1


def test_what_a_known_step_writes_is_written_once(captured_only, captures):
    for _ in range(2):
        weight, total = nn.Parameter(torch.ones(3)), torch.zeros(())

        def step(x, weight=weight, total=total):
            weight.grad = None
            (weight * x).sum().backward()
            with torch.no_grad():
                weight.sub_(weight.grad * torch.rand(3))
                return total.add_(1)

        torch.manual_seed(0)
        fast = Compiled(step, 3)
        fast(torch.full((3,), 2.0))
        torch.manual_seed(0)
        assert torch.equal(weight.detach(), 1 - 2 * torch.rand(3))
        assert total == 1
    assert len(captures) == 1


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0]  # not the derivative, so that one sees that it is used


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.func.grad(lambda v: (v * v * x).sum())(w),
        lambda x, w: torch.func.vmap(lambda row: row * w)(x[:, None].expand(3, 3)).sum(0),
        lambda x, w: torch.autograd.grad(Square.apply(w).sum(), w)[0] * x,
        lambda x, w: torch._foreach_mul([x, w], [2.0, 3.0])[1] + x,
        lambda x, w: F.dropout(x + w.detach(), 0.5),
        lambda x, w: (h := x * 2, h.data.mul_(w.data), h)[2],
    ],
)
def test_transforms_and_functions_of_autograd(function, captured_only, captures):
    x = torch.arange(3.0)
    for scale in (1.0, 2.0):
        w = nn.Parameter(torch.full((3,), scale))
        fast = Compiled(lambda x, w=w: function(x, w).detach(), 3)
        torch.manual_seed(0)
        found = fast(x)
        torch.manual_seed(0)
        assert torch.equal(found, function(x, w).detach())
        assert not fast.failed
    assert len(captures) == 1


# Steps that differ


def test_other_tensors_have_the_same_signature():
    pairs = [torch.rand(2, 3).unbind() for _ in range(3)]
    pairs = [(a.clone(), b.clone()) for a, b in pairs]
    assert len({sign(lambda x, a=a, b=b: x * a + b, torch.rand(3)) for a, b in pairs}) == 1


A, B, ONE, DOUBLE = torch.ones(3), torch.ones(3), torch.ones(1), torch.ones(3, dtype=torch.float64)
ROWS, COLUMNS, VIEW, NEGATIVE = (
    torch.ones(2, 3),
    torch.ones(3, 2).t(),
    A.view(3),
    torch.ones(3, dtype=torch.cfloat).conj().imag,
)
MEMORY, OTHER = torch.ones(8), torch.ones(8)[4:7]
W = nn.Parameter(torch.ones(3))
DIFFERENT = {
    "a number": (lambda x: x * 2.0, lambda x: x * 3.0),
    "the type of a number": (lambda x: x * 2, lambda x: x * 2.0),
    "the sign of zero": (lambda x: x + 0.0, lambda x: x + -0.0),
    "the last bit": (lambda x: x * 0.1, lambda x: x * 0.10000000000000002),
    "a made value": (lambda x: x + torch.full((3,), 1.0), lambda x: x + torch.full((3,), 2.0)),
    "which of two is read": (lambda x: x * A * B + A, lambda x: x * A * B + B),
    "one or two": (lambda x: x * A + A, lambda x: x * A + B),
    "an input or another": (lambda x: x * A + x, lambda x: x * A + A),
    "in place": (lambda x: (A * x).add(1), lambda x: (A * x).add_(1)),
    "what is written": (lambda x: (x.clone().add_(A), x * A)[1], lambda x: (x.add_(A), x * A)[1]),
    "a cast": (lambda x: x * A, lambda x: x.double() * A),
    "what is returned": (lambda x: (x + 1, x * 2)[0], lambda x: (x + 1, x * 2)[1]),
    "the order": (lambda x: (x * 2, x * 3)[0], lambda x: (x * 3, x * 2)[1]),
    "a list": (lambda x: torch.cat([x, A]), lambda x: torch.cat([A, x])),
    "the numbers of a list": (
        lambda x: torch._foreach_mul([x, A], [1.0, 2.0])[0],
        lambda x: torch._foreach_mul([x, A], [2.0, 1.0])[0],
    ),
    "the operation": (lambda x: x.sin(), lambda x: x.cos()),
    "an argument by name": (lambda x: torch.add(x, A, alpha=2), lambda x: torch.add(x, A, alpha=3)),
    "the shape of a result": (lambda x: x.sum(0, keepdim=True), lambda x: x.sum(0)),
    "shapes": (lambda x: x * A, lambda x: x * ONE),
    "layouts": (lambda x: (x * ROWS).sum(), lambda x: (x * COLUMNS).sum()),
    "types": (lambda x: x * A, lambda x: x * DOUBLE),
    "parameters": (lambda x: x * A, lambda x: x * W),
    "offsets": (lambda x, w=MEMORY[:3]: x * w, lambda x, w=MEMORY[3:6]: x * w),
    "shared memory": (lambda x, w=MEMORY[:3], v=MEMORY[4:7]: x * w * v, lambda x, w=MEMORY[:3]: x * w * OTHER),
    "a tensor or a view of it": (lambda x: x * A + A, lambda x: x * A + VIEW),
    "what a view writes to": (lambda x: (x * A, B.add_(1), A + x)[2], lambda x: (x * A, VIEW.add_(1), A + x)[2]),
    "gradients": (
        lambda x: torch.autograd.grad((W * x).sum(), W)[0],
        lambda x: torch.autograd.grad((W * x).square().sum(), W)[0],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_steps_that_differ_have_other_signatures(name):
    one, two = DIFFERENT[name]
    x = torch.ones(3)
    assert sign(one, x) != sign(two, x)
    assert sign(one, x) == sign(one, x)


@pytest.mark.parametrize("name", DIFFERENT)
def test_steps_that_differ_do_not_share_code(name, captured_only):
    """One after the other in one process, each gives its own result."""
    for function in DIFFERENT[name] * 2:
        results, fast = [], Compiled(function, 3)
        for run in (function, fast):
            A.fill_(2.0)
            B.fill_(3.0)
            MEMORY.copy_(torch.arange(8))
            results.append((run(torch.arange(3.0)).detach(), A.clone(), B.clone()))
        assert not fast.failed
        assert results[0][0].dtype == results[1][0].dtype
        assert all(map(torch.equal, *results))


def test_settings_belong_to_the_signature():
    def step(x):
        return x * A

    x, found = torch.ones(3), [sign(lambda x: x * A, torch.ones(3))]
    torch.use_deterministic_algorithms(True)
    try:
        found.append(sign(step, x))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    try:
        found.append(sign(step, x))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found.append(sign(step, x))
    number = torch.get_num_threads()
    torch.set_num_threads(number + 1)
    try:
        found.append(sign(step, x))
    finally:
        torch.set_num_threads(number)
    assert len(set(found)) == 5
    assert sign(step, x) == found[0]


# What can't be logged exactly


class Own(torch.Tensor):
    """A subclass, which may compute anything."""


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * torch.tensor(2.0),
        lambda x: x[x > 0],
        lambda x: x + torch.rand(3, generator=torch.Generator()),
        lambda x: x * torch.ones(3).as_subclass(Own),
        lambda x: (torch.eye(3).to_sparse() @ x[:, None]).squeeze(1),
        lambda x: (h := x * 2, nn.Parameter(h).detach().mul_(3), h)[2],
        lambda x: (x * 2).unsqueeze_(0),
        lambda x: A,
        lambda x: x * NEGATIVE,
    ],
    ids=[
        "item",
        "from Python",
        "mask",
        "generator",
        "subclass",
        "sparse",
        "hidden view",
        "in-place view",
        "outside",
        "negative",
    ],
)
def test_no_signature(function):
    log = log_of(function, torch.ones(3))
    assert not log.signature()
    assert log.inexact


def test_a_step_without_a_signature_is_captured_each_time(captured_only, captures):
    for factor in (2.0, 3.0):
        fast = Compiled(lambda x, factor=factor: x * torch.tensor(factor), 3)
        assert fast(torch.ones(3)).tolist() == [factor] * 3
        assert Compiled(lambda x: x + 1, 3)(torch.ones(3)).tolist() == [2.0] * 3
    assert len(captures) == 3


def test_a_tensor_of_the_graph_that_the_log_does_not_have():
    log = log_of(lambda x: x * A, torch.ones(3))
    assert log.places([A]) == [1]
    assert log.signature()
    assert log.places([A, A.clone()]) == []
    assert not log.signature()


# What a log leaves behind


def test_code_keeps_no_tensor_of_a_run(captured_only, captures):
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    learn(method, tasks, Trainer(Regime(epochs=1, batch=16), engine="compiled"))
    kept = [weakref.ref(p) for p in method.parameters()]
    memory = [weakref.ref(p.untyped_storage()) for p in method.parameters()]
    assert [code for code in compiled._code_cache.values() if code.places]
    del method
    captures.clear()
    gc.collect()
    assert not [ref for ref in kept + memory if ref() is not None]


def test_gradients_are_as_before_if_a_step_is_not_known(captured_only, captures):
    """A step that adds to gradients would execute other operations when it is captured."""
    assert Compiled(lambda x: x + 1, 3)(torch.ones(3)).tolist() == [2.0] * 3
    weight, found = nn.Parameter(torch.ones(3)), []

    def step(x):
        found.append(weight.grad)
        (weight * x).sum().backward()
        return weight.grad.sum()

    assert Compiled(step, 3)(torch.ones(3)) == 3
    assert found == [None, None], "once with a log and once captured"
    assert len(captures) == 2


class Counts(Method):
    """Breaks the rule of the step: a Python number changes."""

    steps = 0

    def loss(self, batch):
        self.steps += 1
        return super().loss(batch)


def test_a_step_that_breaks_the_rule_is_tried_once(captured_only, captures):
    tasks = toy_tasks(1)
    learn(make("sgd", tasks), tasks, Trainer(Regime(epochs=1, batch=16), engine="compiled"))
    method = Counts(make("sgd", tasks).net)
    fit = Trainer(Regime(epochs=1, batch=16), engine="compiled")
    with pytest.warns(UserWarning, match="not compiled.*rebinds something"):
        learn(method, tasks, fit)
    assert len(captures) == 1, "not that of the step that breaks the rule"
    assert method.steps == 1 + -(-len(tasks[0].train) // 16)
    assert fit.fits[0].engine == "eager"


def test_patches_of_images_are_not_kept(captured_only, monkeypatch):
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: True)
    conv, x = nn.Conv2d(3, 5, 3), torch.randn(4, 3, 8, 8)
    for _ in range(2):
        Compiled(lambda x: conv(x).detach().sum((1, 2, 3)), 4)(x)
        assert not decompositions.patch_cache


def test_a_tensor_of_more_than_one_use_has_one_number():
    log = log_of(lambda x: x * A + A * x, torch.ones(3))
    assert [t is A for t in log.external] == [False, True]
    assert signature.input_signature(log.external) == signature.input_signature([torch.ones(3), torch.ones(3)])
