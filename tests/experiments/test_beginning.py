"""The beginning of a run against a run of the first tasks alone."""

from dataclasses import replace

import numpy as np
import pytest

from hatrack import Regime, Run, run
from hatrack.experiments.beginning import beginning
from tests.helpers.records import make
from tests.helpers.tiers import quick_and_slow

THREE = Run(
    "pmnist",
    "sgd",
    benchmark_options={"data": "sample", "tasks": 3, "permutations": "prefix"},
    network_options={"widths": (20, 20), "dropout": 0.2, "input_dropout": 0.0},
    regime=Regime(epochs=2, batch=100),
    train_examples=100,
)
SAME = (
    "name",
    "spec",
    "tasks",
    "before",
    "accuracy",
    "loss",
    "train_loss",
    "valid_accuracy",
    "valid_loss",
    "curves",
    "usage",
)
METHODS = ("hat", "pathnet", "joint", "ewc", "imm-mode", "lwf", "packnet", "random")


def both(method, tmp_path, **options):
    whole = replace(THREE, method=method, method_options=options)
    return run(whole, out=tmp_path), run(replace(whole, first_tasks=2), out=tmp_path)


@pytest.mark.parametrize("method", quick_and_slow(METHODS, ("hat", "pathnet", "joint")))
def test_it_is_the_record_of_a_run_of_the_first_tasks_bit_for_bit(method, tmp_path):
    whole, short = both(method, tmp_path)
    found = beginning(whole, 2)
    differing = [name for name in SAME if repr(getattr(found, name)) != repr(getattr(short, name))]  # repr: NaN equals NaN
    assert differing == []
    assert [list(row) for row in whole.accuracy] != short.accuracy, "the control: the whole is another"
    assert len(found.seconds.learn) == 2


def test_a_budget_that_all_tasks_share_makes_another_network_of_fewer(tmp_path):
    """Why the rows of PNN have runs of their own for every number of tasks."""
    options = {"data": "sample", "permutations": "prefix"}
    three, two = (
        run(
            replace(
                THREE, method="pnn", method_options={"columns": "budget"}, benchmark_options={**options, "tasks": tasks}
            ),
            out=tmp_path,
        )
        for tasks in (3, 2)
    )
    assert beginning(three, 2).accuracy != two.accuracy


def test_what_is_measured_at_the_end_is_not_known():
    record = make("hat", 0, np.eye(3), names=("a", "b", "c"))
    found = beginning(record, 2)
    assert np.isnan(found.without_task_id).all()
    assert found.costs is found.seconds.total is None
    assert found.accuracy == [[1, 0], [0, 1]]
    assert [curve.task for curve in found.curves] == [0, 1]
    assert record.accuracy == np.eye(3).tolist(), "the record itself is as it was"
    assert beginning(record, 3) is record


@pytest.mark.parametrize("tasks", [0, -1, 4])
def test_numbers_of_tasks_that_it_does_not_have(tasks):
    with pytest.raises(ValueError, match=f"has 3 tasks, so that it has no first {tasks}"):
        beginning(make("hat", 0, np.eye(3), names=("a", "b", "c")), tasks)
