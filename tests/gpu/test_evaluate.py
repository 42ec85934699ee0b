"""Evaluations on a GPU: what is recorded equals what runs eagerly, and results are read from the device once per row."""

import pytest
import torch

from hatrack import METHODS, Regime, Run, Trainer, evaluate, run
from hatrack.engine.recorded import WARM_UP, Recorded, own_stream
from hatrack.methods import evaluate as evaluation
from hatrack.methods.evaluate import Evaluations, without_task_ids
from hatrack.tasks.device import all_to_device
from tests.helpers.learning import learn, make
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
READS_VALUES = ("frozen", "lora", "random", "pathnet", "pnn")  # whether a task was learned, its guess, path or column
QUIET = [name for name in METHODS if name not in READS_VALUES]


@pytest.fixture
def small_batches(monkeypatch):
    """Several batches per data set of a few images."""
    monkeypatch.setattr(evaluation, "BATCH", 10)
    monkeypatch.setattr(evaluation, "LARGE", 0)


def learned(name):
    tasks = all_to_device(toy_tasks(3), "cuda")
    method = make(name, tasks).to("cuda")
    learn(method, tasks[:2], Trainer(Regime(epochs=2, batch=16)))
    return method, [split for task in tasks for split in (task.test, task.train)]


@pytest.mark.parametrize("name", QUIET)
def test_recorded_evaluations_are_the_eager_ones(name, small_batches):
    """Bit for bit, in the warm-up, when it is recorded, and after the weights have changed; a refusal would be a warning."""
    method, splits = learned(name)
    with own_stream(GPU):
        eager, recorded = Evaluations(method, splits), Evaluations(method, splits, wrap=Recorded)
        for _ in range(WARM_UP + 2):
            assert recorded() == eager()
        assert all(isinstance(part.add, Recorded) and part.add.graphs for part in recorded.parts)
        with torch.no_grad():
            for parameter in method.parameters():
                parameter.mul_(0.9)
        assert recorded() == eager()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("wrap", [None, Recorded], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", QUIET)
def test_results_are_read_once_per_row(name, wrap, small_batches):
    method, splits = learned(name)
    reads = []

    def strict(work):
        """Every wait for the GPU is an error until the results are to be read."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            return work()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def wait():
        reads.append(1)
        torch.cuda.set_sync_debug_mode("default")

    with own_stream(GPU):
        evaluations = Evaluations(method, splits, wrap=wrap, wait=wait)
        for _ in range(WARM_UP + 2 if wrap else 0):  # to record is to wait
            evaluations()
        reads.clear()
        strict(evaluations)
        assert reads == [1]
        strict(lambda: without_task_ids(method, splits[::2], range(3), wait=wait))
        assert reads == [1, 1]


@pytest.mark.parametrize("name", METHODS)
def test_large_batches_give_what_small_ones_do(name, monkeypatch):
    if name == "random":
        pytest.skip("its guesses depend on the position in the batch")
    method, splits = learned(name)
    large = Evaluations(method, splits)()
    alone = without_task_ids(method, splits[::2], range(3))
    monkeypatch.setattr(evaluation, "BATCH", 10)
    monkeypatch.setattr(evaluation, "LARGE", 0)
    for one, two, split in zip(large, Evaluations(method, splits)(), splits, strict=True):
        assert one.loss == pytest.approx(two.loss, rel=1e-4)
        assert one.accuracy == pytest.approx(two.accuracy, abs=1.5 / len(split))
        assert evaluate(method, split).loss == pytest.approx(one.loss, rel=1e-4)
    assert without_task_ids(method, splits[::2], range(3)) == pytest.approx(alone, abs=1.5 / 30)


@pytest.mark.parametrize("name", ["hat", "sgd", "pathnet"])
def test_a_run_measures_what_a_run_on_the_cpu_measures_before_training(name):
    """Before any training the two devices have the same weights."""
    spec = Run("smnist", name, regime=Regime(epochs=1), benchmark_options={"data": "sample"})
    here, there = run(spec), run(spec, device="cuda", precision="float32")
    assert there.before == pytest.approx(here.before, abs=0.005)
