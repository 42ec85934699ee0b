"""A compiled step is the same step."""

import copy
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hatrack import METHODS, Method, Network, Regime, Trainer, in_scenario
from hatrack.engine import compiled, decompositions
from hatrack.engine.choice import can_compile
from hatrack.engine.compiled import Compiled
from hatrack.engine.graph import capture
from hatrack.engine.signature import input_signature
from tests.helpers.learning import ISOLATED, OPTIMIZERS, learn, logits, make
from tests.helpers.pictures import pictures
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

needs_a_compiler = pytest.mark.skipif(not can_compile(gpu=False), reason="no C++ compiler")


@pytest.fixture
def captured_only(monkeypatch):
    """Run the captured operations without compiling them, which takes seconds each time."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: copy.deepcopy(graph))
    monkeypatch.setattr(compiled, "_code_cache", {})


def eager_and_compiled(name, *, epochs=2, tasks=2, heads="multi", **regime):
    """A method after some tasks, once by eager and once by compiled steps."""
    found = []
    for engine in ("eager", "compiled"):
        placed = in_scenario(toy_tasks(tasks), "class" if heads == "class" else "task")
        method = make(name, placed, heads=heads)
        learn(method, placed, Trainer(Regime(**{"epochs": epochs, "batch": 16, "lr": 0.1, **regime}), engine=engine))
        found.append(method)
    return found


def assert_close(one, two, tolerance=1e-5):
    for key, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", quick_and_slow(METHODS))
def test_all_operations_of_a_step_are_captured(name, captured_only):
    """With dropout on: the same random numbers are drawn."""
    assert_close(*eager_and_compiled(name))


@pytest.mark.parametrize("name", quick_and_slow([name for name in METHODS if "class" in METHODS.about(name).scenarios]))
def test_with_one_head_of_all_classes(name, captured_only):
    assert_close(*eager_and_compiled(name, tasks=3, heads="class", steps=8, schedule="constant"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_every_optimizer(optimizer, captured_only):
    assert_close(*eager_and_compiled("hat", **OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("name", quick_and_slow(ISOLATED))
def test_nothing_is_forgotten(name, captured_only):
    tasks = toy_tasks(2)
    method = make(name, tasks)
    fit = Trainer(Regime(epochs=2, batch=16, **OPTIMIZERS["kept adamw with decay"]), engine="compiled")
    method.learn(tasks[0], fit)
    first = logits(method, tasks[0])
    learn(method, tasks[1:], fit)
    assert torch.equal(first, logits(method, tasks[0]))


def test_two_steps_with_the_same_graph_are_compiled_once(captured_only):
    """Of two seeds, of data sets of two sizes, and of all tasks, also the first, in which nothing is frozen."""
    for seed in (0, 1):
        tasks = toy_tasks(4, train=60 + 30 * seed)
        learn(make("hat", tasks, seed=seed), tasks, Trainer(Regime(epochs=1, batch=16), seed=seed, engine="compiled"))
    assert len(compiled._code_cache) == 1
    tasks = toy_tasks(2, classes=4)
    learn(make("hat", tasks), tasks, Trainer(Regime(epochs=1, batch=16), engine="compiled"))
    assert len(compiled._code_cache) == 2, "other heads have another signature"


def test_capturing_changes_nothing(captured_only):
    weight, count = torch.nn.Parameter(torch.ones(3)), torch.zeros(())

    def step(x):
        weight.grad = None
        (weight * x).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad * torch.rand(3))
            return count.add_(1)

    torch.manual_seed(0)
    fast = Compiled(step, 3)
    fast(torch.full((3,), 2.0))
    torch.manual_seed(0)
    assert torch.equal(weight.detach(), 1 - 2 * torch.rand(3))
    assert count == 1
    assert weight.grad is not None, "of the captured call; a fit clears it at its end"


def test_everything_that_a_function_uses_becomes_an_input():
    weight, table = torch.nn.Parameter(torch.ones(3)), torch.arange(4.0)
    graph, tensors = capture(lambda index: table[index] @ weight, (torch.tensor([0, 1, 3]),))
    assert {t.data_ptr() for t in tensors} == {weight.data_ptr(), table.data_ptr()}
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]
    other = [2 * t for t in tensors]
    assert graph(torch.tensor([1, 2, 3]), *other) == 4 * 6


def test_what_can_t_be_compiled_runs_eagerly(monkeypatch):
    def fail(graph, inputs, key):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(compiled, "compile_graph", fail)
    fast = Compiled(lambda x: x + 1, 1)
    with pytest.warns(UserWarning, match="not compiled: no compiler$"):
        assert fast(torch.ones(1)) == 2
    assert fast(torch.ones(1)) == 2


def test_a_batch_of_another_size_runs_eagerly(captured_only):
    """Even if it comes first, as it may when a run continues."""
    seen = []
    fast = Compiled(lambda x: seen.append(len(x)) or x.sum(), 3)
    for size in (2, 3, 3, 2):
        assert fast(torch.ones(size)) == size
    assert seen == [2, 3, 2], "of size 3 the first was captured, and the second did not run"


def test_code_that_fails_when_it_runs_is_not_used(monkeypatch):
    def broken(*inputs):
        weight.zero_()
        raise TypeError("expected Tensor() for op")

    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: broken)
    monkeypatch.setattr(compiled, "_code_cache", {})
    weight = torch.ones(2)
    fast = Compiled(lambda x: weight.add_(x), 2)
    with pytest.warns(UserWarning, match="not compiled: expected Tensor"):
        fast(torch.ones(2))
    assert weight.tolist() == [2, 2], "the failed attempt was rolled back"


class Counting(Method):
    """Changes a tensor that is in no state_dict, and a row of a table of which it has views."""

    def __init__(self, net):
        super().__init__(net)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("bank", torch.zeros(3, 4))
        self.rows, self.row = [self.bank[k] for k in range(3)], 0

    def learn_task(self, task, fit):
        self.row = task.index
        fit(self, task)

    def loss(self, batch):
        return super().loss(batch) * (1 + self.calls) + 0 * self.bank.sum()

    def constrain(self):
        self.calls.add_(0.1)
        self.rows[self.row].add_(1)


@needs_a_compiler
@pytest.mark.parametrize("compiler", quick_and_slow(("captured only", "real"), ("captured only",)))
def test_tensors_in_no_state_dict_and_views_of_one_tensor(compiler, request):
    if compiler == "captured only":
        request.getfixturevalue("captured_only")
    found = []
    for engine in ("eager", "compiled"):
        tasks = toy_tasks(3)
        method = Counting(make("sgd", tasks).net)
        learn(method, tasks, Trainer(Regime(epochs=2, batch=16, lr=0.01), engine=engine))
        found.append(method)
    assert found[0].bank[:, 0].tolist() == [6, 6, 6]
    assert found[1].calls == found[0].calls
    assert_close(*found)


class Reads(Method):
    """Breaks the rule of the step: its steps depend on a value."""

    def loss(self, batch):
        return super().loss(batch) * (1.0 if float(self.net.heads[0].bias[0].detach()) < 100 else 2.0)


class Counts(Method):
    """Breaks it too: a Python number changes."""

    steps = 0

    def loss(self, batch):
        self.steps += 1
        return super().loss(batch) / self.steps


@pytest.mark.parametrize(("kind", "reason"), [(Reads, "reads a tensor's value"), (Counts, "rebinds something")])
def test_a_step_that_breaks_the_rule_is_not_compiled(kind, reason, captured_only):
    tasks = toy_tasks(1)
    method = kind(make("sgd", tasks).net)
    fit = Trainer(Regime(epochs=2, batch=16), engine="compiled")
    with pytest.warns(UserWarning, match=f"not compiled.*{reason}"):
        learn(method, tasks, fit)
    assert [fitted.engine for fitted in fit.fits] == ["eager"], "which the record will contain"


def test_random_numbers_that_nobody_uses_are_drawn_all_the_same():
    def step(x):
        torch.rand(3)
        return x + torch.rand(1)

    graph, _ = capture(step, (torch.zeros(1),))
    torch.manual_seed(0)
    expected = step(torch.zeros(1))
    torch.manual_seed(0)
    assert graph(torch.zeros(1)) == expected


def test_one_example_more_than_a_batch(captured_only):
    """They are one batch, and it is compiled."""
    tasks = toy_tasks(1, train=17, valid=0.0)
    learn(make("sgd", tasks), tasks, Trainer(Regime(epochs=1, batch=16), engine="compiled"))
    assert len(compiled._code_cache) == 1


def test_the_signature_contains_all_that_code_depends_on():
    memory = torch.zeros(8)
    one, two = ([memory, memory[k : k + 4]] for k in (0, 4))
    assert input_signature(one) != input_signature(two)
    number, before = torch.get_num_threads(), input_signature(one)
    torch.set_num_threads(number + 1)
    try:
        assert input_signature(one) != before
    finally:
        torch.set_num_threads(number)


def test_a_step_waits_for_the_import_of_the_compiler(captured_only, monkeypatch):
    done, imported = threading.Event(), []
    monkeypatch.setattr(compiled, "_importing", [])
    monkeypatch.setattr(compiled, "_import", lambda: done.wait(10) and imported.append(time.monotonic()))
    compiled.import_compiler()
    compiled.import_compiler()
    threading.Timer(0.2, done.set).start()
    captured = []
    assert Compiled(lambda x: captured.append(time.monotonic()) or x + 1, 1)(torch.ones(1)) == 2
    assert len(imported) == 1
    assert imported < captured


@pytest.mark.slow
@needs_a_compiler
def test_the_real_compiler():
    """The same to rounding, and what is frozen stays frozen bit for bit."""
    eager, fast = eager_and_compiled("hat", epochs=4, **OPTIMIZERS["kept adamw with decay"])
    assert_close(eager, fast, 1e-4)
    tasks = toy_tasks(2)
    again = make("hat", tasks)
    fit = Trainer(Regime(epochs=4, batch=16, **OPTIMIZERS["kept adamw with decay"]), engine="compiled")
    again.learn(tasks[0], fit)
    first = logits(again, tasks[0])
    again.learn(tasks[1], fit)
    assert torch.equal(first, logits(again, tasks[0]))
    for key, value in fast.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), f"{key}: the same run, the same bits"


@pytest.mark.slow
@needs_a_compiler
def test_the_next_process_finds_the_compiled_code(monkeypatch, tmp_path):
    """And needs no processes that compile: for one thread torch starts none."""
    with warnings.catch_warnings(action="ignore"):  # those of the import
        from torch._dynamo.utils import counters
        from torch._inductor import compile_fx

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weight, draws, threads, real = torch.ones(5), torch.randn(4, 5), [], compile_fx.compile_fx

    def seen(*given, config_patches=None, **more):
        if config_patches:  # it calls itself without
            threads.append(config_patches.get("compile_threads"))
        return real(*given, config_patches=config_patches, **more)

    monkeypatch.setattr(compile_fx, "compile_fx", seen)
    for found in (0, 1):
        monkeypatch.setattr(compiled, "_code_cache", {})  # as in another process
        counters.clear()
        step = Compiled(lambda x: weight.sub_(0.1 * (x * weight).sum(0)).sum(), 4)
        before = weight.clone()
        step(draws)
        torch.testing.assert_close(weight, before - 0.1 * (draws * before).sum(0))
        assert not step.failed
        assert counters["inductor"]["fxgraph_cache_hit"] == found
    assert threads == [None, 1]


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_real_compiler_on_every_method(name):
    assert_close(*eager_and_compiled(name), 1e-4)


@pytest.mark.parametrize("read", [True, False])
def test_statistics_of_a_batch_norm_count_every_batch_once(read, captured_only):
    """The schema of its operation does not say that it writes them. Without `read` nothing uses its output."""
    means = []
    for wrap in (lambda f: f, lambda f: Compiled(f, 4)):
        norm, draw = nn.BatchNorm1d(2), torch.Generator().manual_seed(0)

        def step(x, norm=norm):
            seen = norm(x)
            return (seen if read else x).sum()

        step = wrap(step)
        for _ in range(5):
            step(torch.randn(4, 2, generator=draw) + 5)
        means.append(norm.running_mean)
    torch.testing.assert_close(means[0], means[1])
    assert means[0].min() > 1


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x):
        return checkpoint(lambda h: self.drop(self.layer(h).relu()), x.flatten(1), use_reentrant=False)


def test_dropout_that_is_drawn_a_second_time_is_not_compiled(captured_only):
    tasks = toy_tasks(1)
    method = Method(Network(Checkpointed(), [3], tasks[0].train.inputs(torch.arange(2))))
    fit = Trainer(Regime(epochs=1, batch=16), engine="compiled")
    with pytest.warns(UserWarning, match="not compiled.*sets a generator"):
        method.learn(tasks[0], fit)
    assert fit.fits[0].engine == "eager"


# Layouts, as on a GPU


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: True)


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("drop", [False, True])
def test_the_gradient_of_a_convolution_before_a_batch_norm(drop, as_on_a_gpu):
    """Torch gives the norm's gradient in another layout than its compiler expects."""
    draw = torch.Generator().manual_seed(0)
    x, wanted = (torch.randn(shape, dtype=torch.float64, generator=draw) for shape in ((4, 3, 8, 8), (4, 5)))
    conv, norm = nn.Conv2d(3, 5, 3).double(), nn.BatchNorm2d(5, momentum=0.0).double()

    def step(x):
        conv.weight.grad = None
        h = norm(conv(x))
        h = torch.native_dropout(h, 0.0, True)[0] if drop else h
        (h.mean((2, 3)) * wanted).sin().sum().backward()
        return conv.weight.grad.clone()

    expected = step(x)
    fast = Compiled(step, 4)
    torch.testing.assert_close(fast(x), expected, rtol=1e-9, atol=1e-9)
    assert not fast.failed


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.flatten(1).mul_(0.5),
        lambda h: h.reshape(len(h), -1)[:, :5].zero_(),
        lambda h: h.contiguous().mul_(2),
        lambda h: h.as_strided((4, 5), (180, 1)).mul_(3),
    ],
)
def test_what_is_written_through_a_view_of_images_is_not_lost(change, as_on_a_gpu, captured_only):
    conv, x = nn.Conv2d(3, 5, 3), torch.randn(4, 3, 8, 8)

    def step(x):
        h = conv(x)
        change(h)
        return h.sum((1, 2, 3))

    fast = Compiled(step, 4)
    torch.testing.assert_close(fast(x), step(x))
    assert not fast.failed


def test_windows_and_strides_given_as_one_number(as_on_a_gpu, captured_only):
    conv, x = nn.Conv2d(3, 5, 3), torch.randn(4, 3, 9, 9)

    def step(x):
        conv.weight.grad = None
        F.max_pool2d(F.conv2d(x, conv.weight, conv.bias, stride=[2]), [2]).square().sum().backward()
        return conv.weight.grad.clone()

    fast = Compiled(step, 4)
    torch.testing.assert_close(fast(x), step(x), rtol=1e-4, atol=1e-4)
    assert not fast.failed


# What the text of a graph does not determine


def test_the_types_of_results_belong_to_the_key(monkeypatch):
    seen = []
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, inputs, key: seen.append(key) or copy.deepcopy(graph))
    monkeypatch.setattr(compiled, "_code_cache", {})
    ones = torch.ones(4)
    for kind in (torch.float32, torch.float64):
        torch.set_default_dtype(kind)
        try:
            assert Compiled(lambda x: x * torch.rand(4), 4)(ones).dtype == kind
        finally:
            torch.set_default_dtype(torch.float32)
    assert len(set(seen)) == 2


def test_a_negative_view_is_not_compiled(captured_only):
    w = torch.randn(6, dtype=torch.complex64).conj().imag
    assert w.is_neg()
    fast = Compiled(lambda x: (x * w).relu() + w.exp(), 6)
    with pytest.warns(UserWarning, match="not compiled.*negative"):
        found = fast(torch.ones(6))
    torch.testing.assert_close(found, w.relu() + w.exp())


def test_another_default_type():
    tasks = toy_tasks(1)
    method = make("sgd", tasks)
    torch.set_default_dtype(torch.float64)
    try:
        learn(method, tasks, Trainer(Regime(epochs=1, batch=16)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits(method, tasks[0]).isfinite().all()


@pytest.mark.slow
@needs_a_compiler
def test_pmask_on_convolutions(as_on_a_gpu):
    """The gradients of their weights have channels last, and the compiler can't write such results into a flat vector."""
    tasks = pictures(1)
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten())
    method = METHODS["pmask"](Network(trunk, tasks=tasks))
    fit = Trainer(Regime(epochs=1, batch=16), engine="compiled")
    method.learn(tasks[0], fit)
    assert fit.fits[0].engine == "compiled"
