"""What a run would cost by records of similar ones, worked out by hand."""

from dataclasses import replace

import pytest

from hatrack.experiments.costs import expected_cost
from hatrack.experiments.record_parts import Spec
from hatrack.experiments.spec import Run
from hatrack.regime import Regime
from tests.helpers.records import make


def took(seconds: float, run: Run, tasks: int):
    """Return the record of a run with so many tasks that took so long."""
    record = make("sgd", accuracy=[[0.5] * tasks] * tasks, names=[f"task {k}" for k in range(tasks)])
    return replace(record, spec=Spec.from_dict(run.spec), seconds=replace(record.seconds, total=seconds))


def run(method: str = "sgd", benchmark: str = "pmnist", epochs: int = 10, **options) -> Run:
    at = {"at": options.pop("at")} if "at" in options else {}
    return Run(benchmark, method, regime=Regime(epochs=epochs), benchmark_options=options, method_options=at)


@pytest.mark.parametrize(
    ("wanted", "there", "tasks", "seconds"),
    [
        (run(tasks=20), run(tasks=10), 10, 200.0),
        (run(tasks=5, epochs=30), run(tasks=10), 10, 150.0),
        (run("joint", tasks=10), run("joint", tasks=10, at=(10,)), 10, 550.0),  # 1 + ... + 10 tasks against 10
        (run("joint", tasks=4, at=(2, 4)), run("joint", tasks=10, at=(10,)), 10, 60.0),
        (run("joint", tasks=10), run("sgd", tasks=10), 10, 550.0),
        (run(benchmark="smnist", tasks=5), run(benchmark="smnist", tasks=2), 2, 100.0),  # the same images
    ],
)
def test_a_run_of_more_or_fewer_tasks_is_scaled(wanted, there, tasks, seconds):
    assert expected_cost(wanted, [took(100.0, there, tasks)]).seconds == pytest.approx(seconds)


def test_the_nearest_records_decide():
    wanted = run("ewc", tasks=20)
    fewer, other = took(100.0, run("ewc", tasks=10), 10), took(7.0, run("sgd", tasks=20), 20)
    assert expected_cost(wanted, [other]) == (7.0, "other methods")
    assert expected_cost(wanted, [other, fewer]) == (200.0, "its other lengths")
    assert expected_cost(wanted, [other, fewer, took(50.0, wanted, 20)]) == (50.0, "its other seeds")


def test_times_of_a_gpu_come_before_those_of_a_cpu():
    wanted = run("ewc", tasks=20)
    slow = replace(took(900.0, wanted, 20), versions={"device": "cpu"})
    quick = replace(took(7.0, run("sgd", tasks=20), 20), versions={"device": "NVIDIA H200"})
    assert expected_cost(wanted, [slow]) == (900.0, "its other seeds")
    assert expected_cost(wanted, [slow, quick]) == (7.0, "other methods")


def test_tasks_of_another_size_say_nothing():
    sample = took(1.0, run(tasks=10, data="sample"), 10)
    assert expected_cost(run(tasks=20), [sample]).seconds is None
    assert expected_cost(run(tasks=20), [took(1.0, run("random", tasks=10), 10)]).seconds is None  # it trains nothing
