"""The recipes of the five papers: they can be built, their rows are distinct, and records that exist are found."""

import math
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hatrack.cli import execute
from hatrack.cli.group import main
from hatrack.experiments.record_parts import Spec
from hatrack.recipes import RECIPES
from hatrack.recipes.grids import PERCENT, learning_gaps
from hatrack.recipes.hat_annealing import annealing_gradients, ranges
from hatrack.recipes.quantities import accuracy_on, summary
from hatrack.recipes.quick import quick
from hatrack.recipes.reproduce import missing_rows, read_records, wanted_runs
from hatrack.recipes.results import Records, Results, index
from hatrack.recipes.verdicts import verdict
from hatrack.reporting.measures import format_number
from hatrack.reporting.words import run_command
from tests.helpers.records import make, with_spec
from tests.recipes.toys import PART, RECIPE, TABLE_1

RESULTS = Path(__file__).parent.parent.parent / "docs" / "results"


@pytest.fixture(scope="module")
def records():
    """Those of the project, which take a second to read."""
    return read_records(RESULTS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_consistent(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert len({part.name for part in recipe.parts}) == len(recipe.parts)
    for part in recipe.parts:
        runs = [(row.run.name, row.first) for row in part.rows]
        assert len(set(runs)) == len(runs), f"two rows of {part.name} are one run"
        keys = {quantity.key for quantity in part.columns}
        assert all(set(row.published) <= keys for row in part.rows)
        rows = {row.label: row for row in part.rows}
        for row in part.rows:
            if any(key.startswith("ratio") for key in keys) and not row.reference:
                assert rows.keys() & set(row.joint), f"{row.label} has no joint reference"
                assert row.random in rows
            for label in rows.keys() & {*row.joint, row.random} if row.joint else ():
                other = rows[label].run
                same = (row.run.benchmark, _but_tasks(row.run)) == (other.benchmark, _but_tasks(other))
                assert same, f"{row.label} and its reference {label} have other tasks"


def _but_tasks(run):
    """The options of a benchmark; of cifar fewer tasks are the first of more (tests/benchmarks), so that references fit."""
    return {k: v for k, v in run.benchmark_options.items() if (run.benchmark, k) != ("cifar", "tasks")}


@pytest.mark.parametrize("name", RECIPES)
def test_claims_are_open_without_records_and_decided_with_them(name):
    for part in RECIPES[name].parts:
        empty = Results(part, Records())
        assert [claim.holds(empty) for claim in part.claims] == [None] * len(part.claims)


@pytest.mark.parametrize("name", RECIPES)
def test_the_quick_version_keeps_methods_and_needs_no_download(name):
    recipe, small = RECIPES[name], quick(RECIPES[name])
    for part, short in zip(recipe.parts, small.parts, strict=True):
        assert {row.run.method for row in short.rows} == {row.run.method for row in part.rows}
        for row in short.rows:
            assert row.run.benchmark_options["data"] == "sample"
            assert row.run.regime.epochs == 1
            assert not row.published


TABLE_2 = {  # of 004: accuracy in % and forgetting, each with its standard deviation over five runs
    "permuted": {
        "naive SGD": (44.4, 2.46, 0.53, 0.03), "EWC": (70.7, 1.74, 0.23, 0.01), "A-GEM": (65.7, 0.51, 0.29, 0.01),
        "ER": (72.4, 0.42, 0.16, 0.01), "stable SGD": (80.1, 0.51, 0.09, 0.01), "multi-task": (86.5, 0.21, 0.0, None),
    },
    "rotated": {
        "naive SGD": (46.3, 1.37, 0.52, 0.01), "EWC": (48.5, 1.24, 0.48, 0.01), "A-GEM": (55.3, 1.47, 0.42, 0.01),
        "ER": (69.2, 1.10, 0.21, 0.01), "stable SGD": (70.8, 0.78, 0.10, 0.02), "multi-task": (87.3, 0.47, 0.0, None),
    },
    "cifar100": {
        "naive SGD": (40.4, 2.83, 0.31, 0.02), "EWC": (42.7, 1.89, 0.28, 0.03), "A-GEM": (50.7, 2.32, 0.19, 0.04),
        "ER": (46.9, 0.76, 0.21, 0.03), "stable SGD": (59.9, 1.81, 0.08, 0.01), "multi-task": (64.8, 0.72, 0.0, None),
    },
}  # fmt: skip


def test_published_numbers_of_table_1():
    """As the paper prints them, typed here a second time."""
    for part in RECIPES["hat-2018"].only(("mixture-open", "mixture")):
        rows = {row.label: row.published for row in part.rows if row.published}
        assert {label: (*n["ratio_2"][:2], *n["ratio_8"][:2]) for label, n in rows.items()} == TABLE_1
        assert {number.runs for numbers in rows.values() for number in numbers.values()} == {10}


@pytest.mark.parametrize("part", TABLE_2)
def test_published_numbers_of_table_2(part):
    again = ("stable SGD, published script", *(("stable SGD, random classes",) if part == "cifar100" else ()))
    table = TABLE_2[part] | dict.fromkeys(again, TABLE_2[part]["stable SGD"])
    rows = {row.label: row.published for row in RECIPES["regimes"].only((part,))[0].rows}
    assert rows.keys() == table.keys()
    for label, (accuracy, std, *forgetting) in table.items():
        assert rows[label]["accuracy"] == pytest.approx((accuracy / 100, std / 100, 5))
        assert rows[label]["forgetting_mirzadeh"] == (*forgetting, 5)
    for row in RECIPES["regimes"].only((f"{part}-23",))[0].rows if part != "cifar100" else ():
        assert row.published["accuracy"].mean == pytest.approx(TABLE_2[part][row.label][0] / 100)


def test_numbers_that_001_gives_in_its_text_alone():
    """It does not say over how many runs they are, and gives no standard deviation."""
    found = {
        (part.name, row.label): row.published[key]
        for part in RECIPES["hat-2018"].only(("cifar", "pmnist", "smnist"))
        for row in part.rows
        for key in row.published
    }
    held, trained = "HAT, 15 % held out", "HAT, validated on the training data"
    assert found == {
        ("cifar", "HAT"): (-0.09, None, 1),
        ("cifar", "EWC"): (-0.18, None, 1),
        **{("pmnist", label): (0.986, None, 1) for label in (held, trained)},
        **{("smnist", label): (0.99, None, 1) for label in (held, trained)},
    }


def test_what_a_note_says_of_the_records(records):
    """In 003's first table the claims about tasks 2 and 3 and about EWC fail by PathNet alone, whatever method is asked;
    PathNet takes 120 epochs per task of cifar."""
    (part,) = RECIPES["pmask"].only(("cifar10",))
    results = Results(part, records)
    ends = {row.label: [results.mean(row.label, accuracy_on(task, 5)) for task in (1, 2, 3)] for row in part.rows}
    assert [label for label, (first, *middle) in ends.items() if max(middle) >= first] == ["PathNet"]
    assert max(ends["PathNet"]) < 0.51
    assert [claim.holds(results) for claim in part.claims] == [True, False, False]
    (cifar,) = RECIPES["hat-2018"].only(("cifar",))
    (record,) = Results(cifar, records).records("PathNet")
    epochs = Counter(curve.task for curve in record.curves for _ in curve.epochs)
    assert max(epochs.values()) == 120


def test_what_003_says_of_figure_3_is_judged_by_its_methods_alone():
    """PackNet, which the paper does not have, drops on no task; and on CIFAR-100 nothing is said of tasks 2 and 3."""
    accuracies = {"pmask": [0.9, 0.8, 0.7, 0.9, 0.9], "sgd": [0.6, 0.5, 0.5, 0.6, 0.9], "packnet": [0.9] * 5}
    accuracies |= {"ewc": [0.8, 0.7, 0.7, 0.8, 0.8], "pathnet": [0.85, 0.7, 0.7, 0.8, 0.82]}
    (part,) = RECIPES["pmask"].only(("cifar10",))
    specs = {row.run.method: row.run.spec for row in part.rows}
    names = [str(task) for task in range(5)]
    found = [with_spec(make(name, 0, [end] * 5, names), **specs[name]) for name, end in accuracies.items()]
    assert [claim.holds(Results(part, index(found))) for claim in part.claims] == [True, True, True]
    assert len(RECIPES["pmask"].only(("cifar100",))[0].claims) == 1


def test_what_000_calls_always_and_slightly(records):
    """Every task immediately after it was learned, HAT with norms per task less plain SGD, by a plain loop."""
    (part,) = RECIPES["hat-resnet"].only(("figure-4",))
    results = Results(part, records)
    hat, sgd = (results.records(label)[0].accuracy for label in ("resnet-hat-bn", "resnet-sgd"))
    gaps = [100 * (hat[t][t] - sgd[t][t]) for t in range(10)]
    assert learning_gaps(results, "resnet-hat-bn", "resnet-sgd")[0] == pytest.approx([gap / 100 for gap in gaps])
    assert max(gaps) == gaps[0] > 0
    classes = [task.classes for task in results.records("resnet-sgd")[0].tasks]
    of = {count: sum(gap for gap, own in zip(gaps, classes, strict=True) if own == count) / 5 for count in (2, 20)}
    assert of[20] < 2 * of[2] < 0, "as the note says"
    answers = {claim.text: claim.holds(results) for claim in part.claims}
    assert answers["They are always worse (on every task)."] == all(gap < 0 for gap in gaps) is False
    assert answers["They are only slightly worse (the mean over tasks)."] == (sum(gaps) / 10 > -5) is False
    table = next(g for make in part.grids if (g := make(results)) and "immediately" in g.title)
    assert table.rows[0][2:] == [format_number(PERCENT, gap / 100) for gap in (*gaps, sum(gaps) / 10)]


def test_what_000_concludes_of_forgetting_and_of_pnn(records):
    """HAT forgets less than plain SGD in both networks; PNN learns a task worse than both do in AlexNet."""
    (part,) = RECIPES["hat-resnet"].only(("figure-4",))
    results = Results(part, records)
    claims = {claim.text: claim for claim in part.claims}
    for network, labels in {"AlexNet": ("hat", "sgd"), "ResNet-18, norms per task": ("hat-bn", "sgd")}.items():
        (claim,) = (claim for text, claim in claims.items() if text.endswith(f"regardless of the architecture ({network})."))
        kind = network.partition("-")[0].lower().removesuffix("net") + "net"
        (compared,) = claim.compared
        assert [compared.label, *compared.others] == [f"{kind}-{label}" for label in labels]
        assert claim.holds(results) is True
    (claim,) = (claim for text, claim in claims.items() if text.startswith("PNN shows a higher bias"))
    pnn, sgd, hat = (results.mean(f"alexnet-{label}", summary("learning")) for label in ("pnn", "sgd", "hat"))
    assert claim.holds(results) is (pnn < min(sgd, hat)) is True


def test_the_records_of_the_project_belong_to_rows(records):
    """A record that no recipe shows would be left over from a row that was changed."""
    shown = {
        record.name
        for name in RECIPES
        for part in RECIPES[name].parts
        for row in part.rows
        for record in Results(part, records).records(row.label)
    }
    assert len(shown) > 80
    assert {path.stem for path in (RESULTS / "records").glob("*.json")} - shown == set()


def test_what_differs_from_the_paper_has_a_note(records):
    """A number that is not reached stays on the page, with what was tried and what we believe to be the reason."""
    silent = set()
    for name in RECIPES:
        for part in (part for part in RECIPES[name].parts if not part.order_by):
            results = Results(part, records)
            for row, quantity in ((row, q) for row in part.rows for q in part.columns if q.key in row.published):
                found = results.summary(row.label, quantity)
                words = verdict(found, row.published[quantity.key], part.tolerance.get(quantity.key, 0.0))
                if words in ("higher", "lower") and not row.note:
                    silent.add((name, part.name, row.label, words))
    assert silent == set()


def test_the_quick_version_shows_the_numbers_of_the_same_runs_once():
    parts = {part.name: part for part in quick(RECIPES["pmask"]).parts}
    assert parts["cifar10"].columns
    assert parts["cifar10"].plots
    same = parts["cifar100"]
    assert [row.run.name for row in same.rows] == [row.run.name for row in parts["cifar10"].rows]
    assert (same.columns, same.plots) == ((), ())
    assert parts["cifar10"].title in same.text
    assert all(part.columns for part in RECIPES["pmask"].parts), "the control: the recipe itself shows them"


def test_the_quick_version_shows_other_numbers_of_the_same_runs():
    rows = tuple(replace(row, published={}) for row in PART.rows)
    two = (PART, replace(PART, title="Table 2", rows=rows, columns=(summary("forgetting"),), tolerance={}, claims=()))
    shown = [[quantity.key for quantity in part.columns] for part in quick(replace(RECIPE, parts=two)).parts]
    assert shown == [["accuracy", "ratio"], ["forgetting"]]


def test_missing_rows_are_priced_by_similar_records(records):
    found = missing_rows(RECIPES["hat-2018"].only(("cifar",)), records)
    costs = [item.cost for item in found]
    assert costs == sorted(costs)
    assert all(item.seeds for item in found)
    toy = make("hat", 0)
    priced = {item.row.label: item for item in missing_rows([PART], Records({"": {0: toy}}))}
    assert priced["HAT"].seconds == 10.0  # of its other seed
    assert priced["HAT"].similar == "its other seeds"
    assert priced["SGD"].similar == "other methods"
    assert missing_rows([PART], Records())[0].seconds is None


def test_runs_of_several_parts_are_carried_out_once():
    runs = wanted_runs(RECIPES["hat-2018"].parts)
    names = [run.name for group in runs.values() for run in group]
    assert len(names) == len(set(names))
    assert {precision for precision, _ in runs} == {"tf32", "bfloat16"}
    assert all(run.benchmark == benchmark for (_, benchmark), group in runs.items() for run in group)


def test_the_gradients_of_figure_2():
    """Annealing narrows the range in which an embedding learns; the compensation widens it, with the magnitude of smax."""
    found = annealing_gradients()
    plain, hard, annealed, compensated = (y for _, y in found.values())
    for x, y in found.values():
        assert abs(x[y.argmax()]) < 0.05
    assert (plain.max(), hard.max()) == pytest.approx((0.25, 100))  # s / 4
    assert annealed.max() == pytest.approx((400 + 1 / 400) / 2 / 4)  # at e = 0 the mean of all s / 4
    assert compensated.max() == pytest.approx(100)
    far = 1200  # e = -3
    assert found["s = 1, no annealing"][0][far] == pytest.approx(-3)
    assert hard[far] < 1e-4
    assert annealed[far] < 2e-2
    # the compensation makes every batch's gradient smax times that of a plain sigmoid as long as s |e| is at most 50
    assert compensated[far] == pytest.approx(400 * plain[far] * 50 / (400 * 3), rel=0.05)


def test_magnitudes_and_ranges_of_figure_2():
    """A sigmoid's slope is a hundredth of its largest value where cosh(s e / 2) = 10."""
    rows = {row[0]: row[1:] for row in ranges(None).rows}
    edge = 2 * math.acosh(10)
    assert rows["s = 1, no annealing"] == ["0.25", f"{int(edge * 400) / 400:.2f}"]
    assert rows["s = 400"] == ["100", f"{int(edge / 400 * 400) / 400:.2f}"]
    assert rows["annealed"][0] == "50"
    assert 0.01 < float(rows["annealed"][1]) < float(rows["annealed and compensated"][1]) < 6


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_of_a_row_is_its_run(name, monkeypatch):
    """What a page prints for a row gives the same spec on the command line, so that its record is found."""
    runs = []
    monkeypatch.setattr(execute, "carry_out", lambda wanted, *rest, **how: runs.extend(wanted))
    rows = {row.run.name: row for part in RECIPES[name].parts for row in part.rows}
    for row in rows.values():
        command = run_command(Spec.from_dict(row.run.spec), [0, 2])
        assert main(shlex.split(command)[1:]) == 0, command
        assert [run.name for run in runs[-2:]] == [row.at(0).name, row.at(2).name], command


@pytest.mark.parametrize("name", RECIPES)
def test_references_of_the_quick_version_have_the_same_tasks(name):
    for part in quick(RECIPES[name]).parts:
        rows = {row.label: row for row in part.rows}
        for row in part.rows:
            for label in rows.keys() & {*row.joint, row.random} if row.joint else ():
                assert rows[label].run.benchmark_options == row.run.benchmark_options, (part.name, row.label, label)


@pytest.mark.parametrize("name", RECIPES)
def test_the_quick_version_draws_every_sweep(name):
    """Its sequences are shorter, so that a quantity after ten tasks would have no value."""
    rng = np.random.default_rng(0)
    for part in quick(RECIPES[name]).parts:
        found = [
            replace(
                make(row.run.method, 0, rng.random((5, 5)), "abcde"), spec=Spec.from_dict(row.run.spec), name=row.run.name
            )
            for row in part.rows
        ]
        results = Results(part, index(found))
        if any(row.x is not None for row in part.rows):
            assert [plot.name for plot in part.plots if plot.draw(results) is None] == []
