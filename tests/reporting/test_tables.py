"""Settings and rankings: numbers against values worked out here."""

import csv
import io
import random
import re
import statistics
import time
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from rich.console import Console

from hatrack.experiments.record import Record
from hatrack.experiments.record_parts import Costs, Seconds
from hatrack.experiments.records import _independent
from hatrack.regime import Regime
from hatrack.reporting import tables
from hatrack.reporting.drawing import looks_of
from hatrack.reporting.export import export
from hatrack.reporting.figures import mean_matrix, scale_of, static_lines
from hatrack.reporting.page import collect, render_page
from hatrack.reporting.references import reference_accuracy
from hatrack.reporting.tables import csv_text, label, option_text, ranking, settings, terminal
from tests.helpers.records import ACCURACY, make, with_spec

EVERYTHING = [make(method, seed) for method, seed in ACCURACY]
ALONE = [[[0.95, 0.10], [0.95, 0.90]], [[0.80, 0.10], [0.80, 0.85]]]  # the accuracy of independent at two seeds


def with_all_measures() -> list[Record]:
    """Records in which no measure is missing: with a shared head, costs, and `independent`."""
    alone = [make("independent", seed, ALONE[seed], heads="shared") for seed in (0, 1)]
    every = [make(method, seed, heads="shared") for method, seed in ACCURACY] + alone
    return [replace(record, costs=costs(record.spec.seed)) for record in every]


def costs(seed: int) -> Costs:
    kept = {"weights": 100 + seed, "buffers": 20, "masks": 3, "images": 4000}
    return Costs(kept, 5000 + seed, 60 + 2 * seed, 700, 80_000 + seed, 9.5 + seed)


def test_the_numbers_are_means_and_deviations_over_seeds() -> None:
    row = next(r for r in ranking(settings(with_all_measures())[0]) if r.label == "sgd")
    expected = {
        "accuracy": [(0.50 + 0.80) / 2, (0.70 + 0.75) / 2],
        "learning": [(0.90 + 0.80) / 2, (0.80 + 0.75) / 2],
        "forgetting": [0.90 - 0.50, 0.80 - 0.70],
        "backward": [0.50 - 0.90, 0.70 - 0.80],
        "forward": [0.20 - 0.25, 0.30 - 0.25],
        "without_task_id": [0.1, 0.2],
        "forgetting_ratio": [
            ((0.50 - 0.30) / (0.95 - 0.30) + (0.80 - 0.40) / (0.85 - 0.40)) / 2 - 1,
            ((0.70 - 0.35) / (0.90 - 0.35) + (0.75 - 0.30) / (0.80 - 0.30)) / 2 - 1,
        ],
        "intransigence": [((0.95 - 0.90) + (0.90 - 0.80)) / 2, ((0.80 - 0.80) + (0.85 - 0.75)) / 2],
        "forgetting_mirzadeh": [0.90 - 0.50, 0.80 - 0.70],
        "loss_forgetting": [0.50 - 0.10, 0.30 - 0.20],
        "parameters": [1234, 1234],
        "seconds": [10, 12],
        "bytes": [4123, 4124],
        "bytes_weights": [100, 101],
        "bytes_buffers": [20, 20],
        "bytes_masks": [3, 3],
        "bytes_images": [4000, 4000],
        "peak_bytes": [5000, 5001],
        "steps": [60, 62],
        "examples": [700, 700],
        "flops": [80_000, 80_001],
        "joules": [9.5, 10.5],
    }
    assert row.measures.keys() == expected.keys()
    for key, values in expected.items():
        found = row.measures[key]
        assert found is not None
        assert found.mean == pytest.approx(statistics.mean(values)), key
        assert found.std == pytest.approx(statistics.stdev(values)), key


def test_intransigence_needs_independent_at_the_same_seed() -> None:
    records = [make("sgd", 0), make("sgd", 1), make("independent", 1, ALONE[1])]
    found = ranking(settings(records)[0])
    (sgd,) = (row for row in found if row.label == "sgd")
    assert sgd.measures["intransigence"] == (pytest.approx(0.05), None, 1), "seed 0 has no partner"
    (alone,) = (row for row in found if row.label == "independent")
    assert alone.measures["intransigence"] == (0.0, None, 1)
    assert ranking(settings(records[:2])[0])[0].measures["intransigence"] is None


def test_forward_transfer_is_blank_unless_the_head_is_shared() -> None:
    assert ranking(settings([make()])[0])[0].measures["forward"] is None
    assert ranking(settings([make(heads="shared")])[0])[0].measures["forward"] == (pytest.approx(-0.05), None, 1)


def test_titles_name_as_few_options_as_tell_settings_apart() -> None:
    def titles(*regimes: Regime) -> list[str]:
        records = [make(regime=regime) for regime in regimes]
        return [setting.title.removeprefix("digits-and-clothes") for setting in settings(records)]

    assert titles(Regime()) == [""]
    assert set(titles(Regime(epochs=3, lr=0.1), Regime(epochs=4, lr=0.2))) == {" (epochs=3)", " (epochs=4)"}
    three = titles(Regime(epochs=3, lr=0.1), Regime(epochs=3, lr=0.2), Regime(epochs=4, lr=0.2))
    assert set(three) == {" (epochs=3, lr=0.1)", " (epochs=3, lr=0.2)", " (epochs=4, lr=0.2)"}, "one does not suffice"


def one_at_a_time(count: int) -> list[Record]:
    """The records of an ablation: a base, and for each of so many options the base with another value of it."""
    base = with_spec(make(), regime={f"option{k:03}": 0 for k in range(count)})
    return [base, *(with_spec(base, regime={**base.spec.regime, name: 1}) for name in base.spec.regime)]


def test_titles_of_an_ablation_name_every_option_that_was_changed() -> None:
    began = time.monotonic()
    found = {setting.title for setting in settings(one_at_a_time(100))}
    assert time.monotonic() - began < 5
    assert len(found) == 101
    assert all(f"option{k:03}=1" in " ".join(found) for k in range(100))


def test_the_work_for_titles_is_linear_in_records_times_options(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(tables, "option_text", lambda value: calls.append(value) or option_text(value))
    counts = []
    for count in (20, 40):  # 4 times as many records times options
        calls.clear()
        settings(one_at_a_time(count))
        counts.append(len(calls))
    assert counts[1] < 5 * counts[0]


@pytest.mark.parametrize("seed", range(20))
def test_titles_differ_whatever_differs(seed: int) -> None:
    draw = random.Random(seed)
    made = [with_spec(make(), regime={f"o{k}": draw.randrange(3) for k in range(draw.randint(1, 6))}) for _ in range(12)]
    found = settings({record.name: record for record in made}.values())
    assert len({setting.title for setting in found}) == len(found) == len({record.name for record in made})


def test_labels_name_the_options_that_differ() -> None:
    assert label(make("hat")) == "hat"
    assert label(make("hat", method_options={"c": 1.5, "masks": "soft", "smax": 400.0})) == "hat (c=1.5, masks=soft)"
    unknown = with_spec(make(), method="new", method_options={"a": [1, 2.0], "b": True})
    assert label(unknown) == "new (a=1,2, b=true)"


def test_a_run_counts_once() -> None:
    again = replace(make(), seconds=Seconds(total=99.0))
    assert ranking(settings([make(), again])[0])[0].seeds == (0,)
    with pytest.raises(ValueError, match="same run with different results"):
        settings([make(), make(accuracy=[[0.1, 0.1], [0.1, 0.1]])])


def test_tasks_that_depend_on_the_seed_are_numbered() -> None:
    assert settings([make(), make(seed=1)])[0].tasks == ["ones", "twos"]
    assert settings([make(), make(seed=1, names=("threes", "fours"))])[0].tasks == ["task 1", "task 2"]


def test_csv_holds_the_ranking_in_full() -> None:
    setting = settings(with_all_measures())[0]
    rows = list(csv.DictReader(io.StringIO(csv_text([setting]))))
    assert [(row["method"], row["reference"]) for row in rows] == [
        ("independent", "no"),
        ("hat", "no"),
        ("sgd", "no"),
        ("joint", "yes"),
        ("random", "yes"),
    ]
    for row, expected in zip(rows, ranking(setting), strict=True):
        assert int(row["seeds"]) == 2
        for key, value in expected.measures.items():
            assert value is not None
            assert (float(row[key]), float(row[f"{key}_std"])) == (value.mean, value.std)


def test_the_terminal_shows_the_same_numbers_in_100_columns() -> None:
    long = {"c": 1.25, "masks": "soft", "protect": "exact", "anneal": "authors", "gate_lr": 0.125}
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(terminal(settings([*EVERYTHING, make("hat", method_options=long)])[0]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    line = next(line for line in text.splitlines() if "sgd" in line)
    assert re.split(r"\s{2,}", line.strip()) == [
        "sgd", "2", "68.8 ± 5.3", "81.2 ± 5.3", "0.250 ± 0.212", "−0.317 ± 0.120", "11.0"]  # noqa: RUF001  # fmt: skip


def test_a_tuned_reference_is_another_one():
    """Whatever the hashes in the names: plain joint training is the reference at every seed."""
    tuned = {"regime": ["lr"], "regime_without": [0.05]}
    for rate in (0.01, 0.1616, 0.3):  # other names, in another order
        plain = make("joint", 0, [[0.9, 0.1], [0.9, 0.9]])
        other = replace(make("joint", 0, [[0.5, 0.1], [0.5, 0.5]], regime=Regime(lr=rate)), tuned=tuned)
        for records in ([plain, other], [other, plain]):
            assert reference_accuracy(records, "joint", 0)[1, 0] == 0.9
            assert intransigence_base(records) == 0.9


def intransigence_base(records):
    """The accuracy of the record of `independent` that `hr.records` compares with."""
    alone = [replace(r, spec=r.spec.replace(method="independent")) for r in records]
    (found,) = _independent(alone).values()
    return found.accuracy[1][0]


def with_scores(record, *scores):
    """The record with tasks that have these scores."""
    tasks = [replace(task, score=score) for task, score in zip(record.tasks, cycle(scores), strict=False)]
    return replace(record, tasks=tasks)


@pytest.mark.parametrize(
    ("scores", "name", "percent"),
    [
        ((None,), "accuracy", True),
        (("accuracy", None), "accuracy", True),
        (("label accuracy",), "label accuracy", True),
        (("R²",), "R²", False),
        (("R²", None), "score", False),
        (("<script>",), "score", False),
    ],
)
def test_a_table_and_a_page_name_the_score(scores, name, percent):
    (setting,) = settings([with_scores(record, *scores) for record in EVERYTHING])
    assert setting.score == name
    columns = [str(column.header) for column in terminal(setting).columns]
    assert columns[2:4] == ([f"{name} %", "learning %"] if percent else [name, "learning"])
    mean = ranking(setting)[0].measures["accuracy"].mean
    shown = f"{100 * mean:.1f}" if percent else f"{mean:.3f}"
    assert next(iter(terminal(setting).columns[2].cells)).startswith(shown)
    data = collect(setting.records)
    text = re.sub(r"<script.*?</script>", "", render_page(data), flags=re.DOTALL)
    assert f">Average {name}<" in text
    assert (f"average {name}, %" in text) == percent
    assert (f"{shown} %" in text) == percent
    assert ("percentage points" in text) == percent
    assert "<script>" not in text
    assert data["sections"][0]["chart"]["percent"] == percent
    assert f"| Average {name}{', %' * percent} |" in export([setting], "markdown")


@pytest.mark.parametrize("low", [-976.2, -0.3])
def test_scores_of_any_size_are_drawn(low):
    (setting,) = settings(
        [replace(with_scores(r, "score"), accuracy=[[low * v for v in row] for row in r.accuracy]) for r in EVERYTHING]
    )
    matrices = [np.tril(mean_matrix(group)) for name, group in setting.methods.items() if name != "random"]
    scale = scale_of(setting)
    assert scale.low == pytest.approx(min(m.min() for m in matrices))
    assert scale.factor == 1
    assert static_lines(setting, "x", looks_of([setting])).startswith("<svg")
