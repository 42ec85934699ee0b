"""The same code on a GPU: `make test-gpu` on a machine that has one."""

import pytest
import torch

from hatrack import METHODS, NETWORKS, Method, Network, Regime, Run, Trainer, evaluate, run
from hatrack.engine.precision import precision_scope
from hatrack.methods.evaluate import without_task_id
from hatrack.seeds import seeded
from hatrack.tasks.device import all_to_device
from tests.helpers.learning import ISOLATED, OPTIMIZERS, learn, logits, make
from tests.helpers.pictures import convolutional, pictures
from tests.helpers.streams import streamed
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.gpu


REPLAY = ["er", "derpp", "agem"]  # draw from memory on the device, and the two devices draw different numbers


@pytest.mark.parametrize("name", [name for name in METHODS if name not in REPLAY])
def test_learns_on_the_gpu_as_on_the_cpu(name):
    tasks = toy_tasks(2)
    results = []
    for device in ("cpu", "cuda"):
        placed = all_to_device(tasks, device)
        method = make(name, tasks).to(device)
        for module in method.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # the two devices draw different numbers
        learn(method, placed, Trainer(Regime(epochs=3, batch=16, lr=0.1)))
        results.append([logits(method, task).cpu() for task in placed])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ISOLATED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_earlier_tasks_are_unchanged_bit_for_bit(name, optimizer):
    tasks = all_to_device(toy_tasks(3), "cuda")
    method = make(name, tasks).to("cuda")
    fit = Trainer(Regime(epochs=4, batch=16, **OPTIMIZERS[optimizer]))
    method.learn(tasks[0], fit)
    first = logits(method, tasks[0])
    learn(method, tasks[1:], fit)
    assert torch.equal(first, logits(method, tasks[0]))


@pytest.mark.parametrize("name", METHODS)
def test_recorded_steps_are_the_same_steps(name):
    """Bit for bit, over two tasks of more than 50 steps each; a warning would say that nothing was recorded."""
    tasks = all_to_device(toy_tasks(2), "cuda")
    states = []
    for engine in ("eager", "recorded"):
        method = make(name, tasks).to("cuda")
        for module in method.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        learn(method, tasks, Trainer(Regime(epochs=18, batch=16, lr=0.1), engine=engine))
        states.append(method.state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


def test_runs_side_by_side_are_the_runs_one_by_one(tmp_path):
    from hatrack.experiments.parallel import run_all

    specs = [
        Run("smnist", method, seed, benchmark_options={"data": "sample"}, regime=Regime(epochs=3), network_options=small)
        for method in ("hat", "sgd")
        for seed in (0, 1)
        for small in [{"widths": (50, 50)}]
    ]
    alone = run_all(specs, tmp_path / "alone", device="cuda", engine="recorded")
    together = run_all(specs, tmp_path / "together", device="cuda", engine="recorded", parallel=4)
    for one, two in zip(alone, together, strict=True):
        assert one.accuracy == two.accuracy
        assert one.curves == two.curves


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", METHODS)
def test_no_step_waits_for_the_gpu(name):
    tasks = all_to_device(toy_tasks(2), "cuda")
    method = make(name, tasks).to("cuda")

    class Strict(Trainer):
        def start(self, method, task, **how):
            course = super().start(method, task, **how)
            step = course.step

            def strict(index, number):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return step(index, number)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            course.step = strict
            return course

    learn(method, tasks, Strict(Regime(epochs=2, batch=16)))


@pytest.mark.parametrize("name", ["sgd", "joint", "hat"])
def test_images_that_stay_in_the_host_s_memory(name):
    """More images than there is room for: fetched ahead in parts, with the same outcome."""
    tasks = toy_tasks(2, train=400)
    results = []
    for room in (None, 1):
        placed = all_to_device(tasks, "cuda", room=room)
        assert placed[0].train.on_host == (room == 1)
        assert placed[0].train.x.is_cuda == (room is None)
        method = make(name, tasks).to("cuda")
        learn(method, placed, Trainer(Regime(epochs=3, batch=4, lr=0.1)))
        results.append([logits(method, task) for task in placed])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("engine", ["eager", "recorded", "compiled"])
@pytest.mark.parametrize("name", ["sgd", "joint", "hat", "er"])
def test_streamed_images(name, engine):
    """Read by worker processes and copied into a room on the device, with the same outcome as images that lie there."""
    tasks = toy_tasks(2, train=200)
    results = []
    for world in (tasks, [streamed(task, workers=2) for task in tasks]):
        method = make(name, tasks).to("cuda")
        fit = learn(method, world, Trainer(Regime(epochs=3, batch=16, lr=0.1), engine=engine))
        assert {one.engine for one in fit.fits} == {engine}
        results.append([logits(method, task) for task in all_to_device(tasks, "cuda")])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", METHODS)
def test_tasks_in_the_host_s_memory_go_to_the_method_s_device(name):
    """A network on the GPU, tasks that nobody moved: learning, evaluation and prediction work."""
    tasks = toy_tasks(2)
    method = make(name, tasks).to("cuda")
    fit = Trainer(Regime(epochs=2, batch=16))
    for task in tasks:
        method.learn(task, fit)
    placed = all_to_device(tasks, "cuda")
    for task, there in zip(tasks, placed, strict=True):
        assert evaluate(method, task.test) == evaluate(method, there.test)
        assert without_task_id(method, task.test, [0, 1]) == without_task_id(method, there.test, [0, 1])
        assert method.predict(task.test.x, task.index).is_cuda
        assert not task.train.x.is_cuda


def test_a_fit_that_is_called_directly():
    task = toy_tasks(1)[0]
    method = make("sgd", [task]).to("cuda")
    assert len(Trainer(Regime(epochs=2))(method, task).epochs) == 2
    assert Trainer(Regime(epochs=2)).start(method, task).task.train.x.is_cuda


def test_a_network_on_the_gpu_for_tasks_in_the_host_s_memory():
    tasks = toy_tasks(2)
    trunk = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).cuda()
    for net in (Network(trunk, tasks=tasks), Network.from_classifier(trunk, tasks=tasks)):
        assert net.example.is_cuda
        learn(Method(net), tasks)


def test_a_run_on_the_gpu(tmp_path):
    spec = Run("smnist", "hat", regime=Regime(epochs=3), benchmark_options={"data": "sample"})
    record = run(spec, tmp_path, device="cuda")
    assert record.summary["forgetting"] == 0
    assert record.summary["accuracy"] > 0.8


def test_a_helper_leaves_code_on_the_gpu_that_this_process_loads(tmp_path, monkeypatch):
    """The second task of `lfl` has a form of its own, which a helper compiles while this process compiles the first."""
    from torch._dynamo.utils import counters

    from hatrack.engine import compiled, helpers

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(helpers, "COUNT", 1)
    monkeypatch.setattr(helpers, "_jobs", {})
    monkeypatch.setattr(compiled, "_code_cache", {})
    counters.clear()
    spec = Run("smnist", "lfl", regime=Regime(epochs=1), benchmark_options={"data": "sample"})
    record = run(spec, tmp_path / "runs", device="cuda", engine="compiled")
    assert record.versions["engine"] == "compiled"
    assert counters["inductor"]["fxgraph_cache_miss"] == 1
    assert counters["inductor"]["fxgraph_cache_hit"] == 1


def test_a_step_of_a_first_task_on_the_gpu_is_compiled_for_all_tasks(monkeypatch):
    from hatrack.engine import compiled

    monkeypatch.setattr(compiled, "_code_cache", {})
    tasks = all_to_device(toy_tasks(3), "cuda")
    learn(make("hat", tasks).to("cuda"), tasks, Trainer(Regime(epochs=1, batch=16), engine="compiled"))
    assert len(compiled._code_cache) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "kept adamw with decay"])
def test_tasks_with_other_classes_are_compiled_once_on_the_gpu(optimizer, monkeypatch):
    """And recorded: heads are views of what the code works on, also for the last, smaller batch of an epoch."""
    from hatrack.engine import compiled

    monkeypatch.setattr(compiled, "_code_cache", {})
    found, tasks = [], [toy_tasks(2, classes=count, train=90)[k] for k, count in enumerate((2, 5))]
    for engine in ("eager", "compiled"):
        placed = all_to_device(tasks, "cuda")
        method, fit = (
            make("hat", placed).to("cuda"),
            Trainer(Regime(epochs=8, batch=16, **OPTIMIZERS[optimizer]), engine=engine),
        )
        method.net.trunk.apply(lambda part: setattr(part, "p", 0.0) if isinstance(part, torch.nn.Dropout) else None)
        learn(method, placed, fit)
        found.append(torch.tensor([(e.loss, e.valid_loss) for result in fit.fits for e in result.epochs]))
    assert len(compiled._code_cache) == 1
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in method.net.heads.parameters())


def test_kernels_are_launched_without_a_c_compiler_and_without_trials(tmp_path, monkeypatch):
    """Triton makes a launcher with a C compiler for kernels with long names, and tries out block sizes, in every process."""
    import triton.runtime.build as build
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from hatrack.engine import compiled

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(compiled, "_code_cache", {})
    make_library, trials, made, tried = build._build, CachingAutotuner.benchmark_all_configs, [], []
    monkeypatch.setattr(build, "_build", lambda name, *given: made.append(name) or make_library(name, *given))
    monkeypatch.setattr(
        CachingAutotuner, "benchmark_all_configs", lambda *given, **how: tried.append(1) or trials(*given, **how)
    )
    tasks = all_to_device(pictures(1), "cuda")
    learn(convolutional(pictures(1), "cuda"), tasks, Trainer(Regime(epochs=1, batch=16), engine="compiled"))
    assert len(compiled._code_cache) == 1
    assert "__triton_launcher" not in made
    assert not tried


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_on_the_gpu_is_captured_once_for_all_tasks_and_seeds(precision, monkeypatch):
    """And the result is that of runs whose every step is captured, bit for bit."""
    from hatrack.engine import compiled
    from hatrack.engine.graph import capture
    from hatrack.engine.signature import OperationLog

    captures, states = [], []
    monkeypatch.setattr(compiled, "_code_cache", {})
    monkeypatch.setattr(compiled, "capture", lambda *given: captures.append(given[0]) or capture(*given))
    tasks = all_to_device(pictures(2), "cuda")
    for known in (True, False):
        if not known:
            monkeypatch.setattr(OperationLog, "signature", lambda log: "")
        for seed in (0, 1):
            method = convolutional(pictures(2), "cuda", dropout=0.0)
            with precision_scope(precision, torch.device("cuda")):
                learn(method, tasks, Trainer(Regime(epochs=2, batch=16, lr=0.02), seed=seed, engine="compiled"))
            states.append(method.state_dict())
        if known:
            assert len(captures) == len(compiled._code_cache), "each form once"
    assert len(captures) == len(compiled._code_cache) + 4
    for one, two in zip(states[:2], states[2:], strict=True):
        for key, value in one.items():
            assert torch.equal(value, two[key]), key


@pytest.mark.parametrize("engine", ["eager", "recorded"])
@pytest.mark.parametrize("network", ["gru", "vit"])
@pytest.mark.parametrize("name", ["hat", "pmask", "packnet", "independent", "sgd"])
def test_recurrent_networks_and_transformers(name, network, engine):
    """cuDNN wants the weights of a recurrent layer in one piece, which computed weights are not."""
    tasks = all_to_device(toy_tasks(3, shape=(1, 8, 8)), "cuda")
    small = {"vit": {"width": 16, "depth": 2, "attention_heads": 2, "mlp_ratio": 2}, "gru": {"width": 16}}[network]
    with seeded(0, "weights"):
        net = Network(NETWORKS[network](tasks[0].shape, **small), tasks=tasks)
    method = METHODS[name](net).to("cuda")
    fit = Trainer(Regime(epochs=4, batch=16, optimizer="adamw", lr=0.01), engine=engine)
    method.learn(tasks[0], fit)
    first = logits(method, tasks[0])
    assert first.isfinite().all()
    for task in tasks[1:]:
        method.learn(task, fit)
    assert torch.equal(logits(method, tasks[0]), first) == (name != "sgd")
    assert torch.backends.cudnn.enabled
