"""`python -m speed.table_1`: steps are those that runs counted themselves, and the minutes are their sum at a rate."""

from dataclasses import replace
from pathlib import Path

import pytest

from hatrack.experiments.record import Record
from hatrack.recipes.hat_2018 import MIXTURE_OPEN
from hatrack.recipes.reproduce import read_records
from hatrack.recipes.results import Results
from speed import table_1

FOLDER = Path("docs/results")
COUNTED = ("cifar-hat-seed0-7066e1523ed9", "cifar-joint-seed0-596e725c8035", "cifar-pnn-seed0-f43f3def3a16")


@pytest.mark.parametrize("name", COUNTED)
def test_steps_are_those_that_the_run_counted(name):
    record = Record.load(FOLDER / "records" / f"{name}.json")
    assert table_1.count_steps(record) == record.costs.steps
    assert table_1.count_steps(replace(record, curves=record.curves[:-1])) < record.costs.steps


@pytest.fixture(scope="module")
def lines():
    records = read_records(FOLDER)
    return table_1.estimate(records, Results(MIXTURE_OPEN, records))


def test_hat_is_counted_and_joint_training_has_a_fit_after_every_task_at_one_seed(lines):
    hat, joint = lines[0], lines[-1]
    counted = [table_1.count_steps(Record.load(path)) for path in sorted(FOLDER.glob("records/mixture-open-hat-*.json"))]
    whole = sorted(counted)[-10:]  # ten seeds of eight tasks; the others have one task each
    assert hat.steps == pytest.approx(sum(whole))
    one = Record.load(next(FOLDER.glob("records/mixture-open-joint-seed0-360ebaf89038.json")))
    last = [len(curve.epochs) * -(-sum(task.train for task in one.tasks) // 64) for curve in one.curves][-1]
    assert joint.steps == pytest.approx(last / 8 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 * (2 + 8)))


def test_steps_are_counted_on_the_eight_sets_where_there_are_records(lines):
    counted = [Record.load(path).costs.steps for path in FOLDER.glob("records/mixture-open-sgd-*.json")]
    sgd = next(line for line in lines if line.label == "SGD")
    assert (sgd.benchmark, sgd.records) == ("mixture-open", 3)
    assert sgd.steps == pytest.approx(10 * sum(sorted(counted)[-3:]) / 3)  # the others have one task each


def test_the_minutes_of_the_last_line_are_all_steps_at_the_rate(lines):
    last = [cell.strip() for cell in table_1.table(lines, [1000.0]).splitlines()[-1].split("|")[1:-1]]
    assert last[0] == "all"
    assert float(last[-1]) == pytest.approx(sum(line.steps for line in lines) / 60_000, abs=1)
