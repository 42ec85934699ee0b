"""Measures after every number of tasks and by position, also if the joint reference was trained after some tasks only."""

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest

from hatrack.experiments.record import Record
from hatrack.reporting.by_task import by_task, by_task_csv
from hatrack.reporting.figures import mean_matrix
from hatrack.reporting.page import collect
from hatrack.reporting.report import report
from hatrack.reporting.tables import Setting, ranking, ratios, settings
from tests.helpers.records import ACCURACY, Reader, make, save, with_spec

EVERYTHING = [make(method, seed) for method, seed in ACCURACY]
WITHOUT_JOINT = [record for record in EVERYTHING if record.spec.method != "joint"]


def joint_at(*at: int, seed: int = 0, first: float = 0.9) -> Record:
    """A record of joint training with the option `at`; what it did not train after is nonsense."""
    trained = {1: [first, 0.1], 2: [0.95, 0.85]}
    accuracy = [trained[t] if t in at else [0.01, 0.02] for t in trained]
    return with_spec(make("joint", seed, accuracy), method_options={"at": list(at)})


def one(records: list[Record]) -> Setting:
    (setting,) = settings(records)
    return setting


def test_every_number_of_tasks_by_hand() -> None:
    row = next(row for row in by_task(one(EVERYTHING)) if row.label == "sgd")
    after_one = [(0.9 - 0.3) / (0.9 - 0.3) - 1, (0.8 - 0.35) / (0.85 - 0.35) - 1]  # seeds 0 and 1
    assert row.forgetting_ratio[0] == pytest.approx((np.mean(after_one), np.std(after_one, ddof=1), 2))
    assert row.average_accuracy[1] == pytest.approx((0.6875, np.std([0.65, 0.725], ddof=1), 2))
    assert [value.mean for value in row.when_learned if value] == pytest.approx([0.85, 0.775])
    assert [value.mean for value in row.at_the_end if value] == pytest.approx([0.6, 0.775])


def test_the_csv_has_a_row_per_method_and_number_of_tasks(tmp_path: Path) -> None:
    report(save(tmp_path, EVERYTHING))
    text = (tmp_path / "by_task.csv").read_text(encoding="utf-8")
    assert text == by_task_csv([one(EVERYTHING)])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["method"], row["tasks"]) for row in rows] == [
        (m, t) for m in ("hat", "sgd", "joint", "random") for t in "12"
    ]
    sgd = rows[3]
    assert float(sgd["average_accuracy"]) == pytest.approx(0.6875)
    assert float(sgd["at_the_end"]) == pytest.approx(0.775)
    assert sgd["forgetting_ratio_n"] == "2"
    alone = list(csv.DictReader(io.StringIO(by_task_csv([one([make()])]))))
    assert [(row["forgetting_ratio"], row["forgetting_ratio_n"], row["average_accuracy_std"]) for row in alone] == [
        ("", "0", "")
    ] * 2


def test_the_tables_of_the_page(tmp_path: Path) -> None:
    page = Reader(report(save(tmp_path, EVERYTHING)).read_text(encoding="utf-8"))
    rows = [[" ".join(cell.split()) for cell in row] for row in page.rows]
    by_hand = np.mean([0, (0.8 - 0.35) / (0.85 - 0.35) - 1])
    (ratio,) = [row for row in rows if row and row[0] == "sgd" and len(row) == 3 and row[1].startswith("−")]  # noqa: RUF001
    assert ratio[1].startswith(f"{by_hand:.3f}".replace("-", "−"))  # noqa: RUF001
    assert ["sgd", "learned", "85.0 ± 7.1", "77.5 ± 3.5"] in rows
    assert ["sgd", "at the end", "60.0 ± 14.1", "77.5 ± 3.5"] in rows
    alone = Reader(report(save(tmp_path / "alone", [make()])).read_text(encoding="utf-8"))
    assert rows.count(["Method", "1", "2"]) == 2, "the forgetting ratio and the average accuracy"
    assert alone.rows.count(["Method", "1", "2"]) == 1


@pytest.mark.parametrize(("at", "known"), [((1,), [True, False]), ((2,), [False, True]), ((1, 2), [True, True])])
def test_only_the_rows_that_joint_was_trained_for_count(at: tuple[int, ...], known: list[bool]) -> None:
    setting = one([*WITHOUT_JOINT, joint_at(*at)])
    whole = one(EVERYTHING)
    found, expected = (ratios(s, make("sgd", 0)) for s in (setting, whole))
    assert found is not None
    assert expected is not None
    assert np.isfinite(found).tolist() == known
    np.testing.assert_array_equal(found[known], expected[known])
    assert ratios(setting, make("sgd", 1)) is None, "no reference at this seed"


def test_a_complete_record_comes_before_one_with_lengths() -> None:
    setting = one([*EVERYTHING, joint_at(1, first=0.5)])
    reference = setting.reference("joint", 0)
    assert reference is not None
    assert "at" not in reference.spec.method_options
    found, expected = ratios(setting, make("sgd", 0)), ratios(one(EVERYTHING), make("sgd", 0))
    np.testing.assert_array_equal(found, expected)


def test_rows_of_two_records_are_put_together() -> None:
    setting = one([*WITHOUT_JOINT, joint_at(1), joint_at(2)])
    np.testing.assert_array_equal(ratios(setting, make("sgd", 0)), ratios(one(EVERYTHING), make("sgd", 0)))


def test_another_variant_of_joint_is_no_reference_beside_the_plain_one() -> None:
    warm = with_spec(make("joint", 0, [[0.6, 0.1], [0.7, 0.6]]), method_options={"warm": True})
    setting = one([*WITHOUT_JOINT, joint_at(1), warm])
    assert setting.reference("joint", 0) == joint_at(1)
    found, expected = ratios(setting, make("sgd", 0)), ratios(one(EVERYTHING), make("sgd", 0))
    assert found is not None
    assert expected is not None
    np.testing.assert_array_equal(found, [expected[0], math.nan])
    alone = ratios(one([*WITHOUT_JOINT, warm]), make("sgd", 0))
    assert alone is not None
    assert alone[0] == pytest.approx((0.9 - 0.3) / (0.6 - 0.3) - 1), "it serves if there is no other"


def test_what_joint_did_not_train_for_is_missing_everywhere(tmp_path: Path) -> None:
    setting = one([*WITHOUT_JOINT, joint_at(1)])
    row = next(row for row in ranking(setting) if row.label.startswith("joint"))
    assert row.measures["accuracy"] is None
    assert row.measures["without_task_id"] is None
    assert row.measures["learning"] is None
    assert row.measures["parameters"] is not None
    last = next(row for row in ranking(one([*WITHOUT_JOINT, joint_at(2)])) if row.label.startswith("joint"))
    assert last.measures["accuracy"] is not None
    assert last.measures["accuracy"].mean == pytest.approx(0.9)
    assert last.measures["forgetting"] is None
    assert math.isnan(mean_matrix(setting.methods[row.label])[1, 1])
    page = Reader(report(save(tmp_path, setting.records)).read_text(encoding="utf-8"))
    rows = [[" ".join(cell.split()) for cell in row] for row in page.rows]
    assert ["joint (at=1)", "learned", "90.0", "—"] in rows
    assert ["joint (at=1)", "at the end", "—", "—"] in rows
    found = {m["label"]: m for m in collect(setting.records)["sections"][0]["chart"]["methods"]}
    assert found["joint (at=1)"]["matrices"] == [[9000, 1000, None, None]]
