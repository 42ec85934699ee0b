"""The recipe of the training regimes (004): claims on curvature by hand, its further tables and its figures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from hatrack.experiments.record_parts import Curve
from hatrack.inspection.flatness import Flatness
from hatrack.recipes import RECIPES
from hatrack.recipes.convergence import validation_curves
from hatrack.recipes.dots import dots
from hatrack.recipes.page import main_table
from hatrack.recipes.quantities import summary
from hatrack.recipes.recipe import Part, Published
from hatrack.recipes.regimes_table_2 import memoryless
from hatrack.recipes.regimes_theory import EIGENVALUE, MOVED, SHARE, first_experiment, flatness, together
from hatrack.recipes.reproduce import read_records
from hatrack.recipes.results import Records, Results, index
from hatrack.recipes.verdicts import sureness
from tests.helpers.records import ACCURACY, make
from tests.recipes.toys import PART, row

RESULTS = Path(__file__).parent.parent.parent / "docs" / "results"
MEMORYLESS = {"naive SGD": "yes", "EWC": "yes", "A-GEM": "no", "ER": "no", "stable SGD": "yes", "multi-task": "N/A"}


def curved(*pairs: tuple[float, float]) -> Flatness:
    """Return the flatness of a run whose tasks but the last have these eigenvalues and were forgotten so much at the end."""
    count = len(pairs) + 1
    losses = [[1.0] * (count - k - 1) + [1.0 + pairs[k][1]] for k in range(len(pairs))] + [[1.0]]
    distances = [[float(j) for j in range(count - k)] for k in range(count)]
    tops = [[top] for top, _ in pairs] + [[1.0]]
    return Flatness([f"task {k}" for k in range(count)], 2, [5] * count, tops, distances=distances, losses=losses)


PAIRS = {  # by method and seed: the largest eigenvalues of two tasks, and what was forgotten of them
    ("sgd", 0): ((6.0, 0.5), (5.0, 0.4)),
    ("hat", 0): ((1.0, 0.1), (2.0, 0.2)),
    ("sgd", 1): ((6.0, 0.1), (5.0, 0.4)),
    ("hat", 1): ((1.0, 0.2), (2.0, 0.3)),
}


def of(pairs, rows=("HAT", "SGD")):
    records = [make(method, seed) for method, seed in ACCURACY]
    found = {make(*key).name: curved(*values) for key, values in pairs.items()}
    part = Part("flat", "", "", tuple(replace(r, published={}) for r in PART.rows if r.label in rows))
    return Results(part, index(records, found))


def test_a_claim_that_two_things_go_together_takes_all_tasks_of_all_rows_at_every_seed():
    results, claim = of(PAIRS), together("", "eigenvalue")
    expected = [
        spearmanr(*np.array([pair for (_, s), values in PAIRS.items() if s == seed for pair in values]).T).statistic
        for seed in (0, 1)
    ]
    assert expected == [pytest.approx(1), pytest.approx(-0.2)]  # ranks 4 3 1 2 with 4 3 1 2, and with 1 4 2 3
    assert claim.values(results) == pytest.approx(expected)
    assert claim.holds(results) is True
    assert sureness(results, claim).test == "too few seeds to test (n = 2)"
    turned = {key: tuple((top, -lost) for top, lost in values) for key, values in PAIRS.items()}
    assert claim.holds(of(turned)) is False


def test_a_seed_counts_only_if_the_flatness_of_all_rows_is_known():
    claim = together("", "eigenvalue")
    one = {key: values for key, values in PAIRS.items() if key != ("hat", 1)}
    assert len(claim.values(of(one))) == 1
    assert claim.holds(of({("sgd", 0): PAIRS["sgd", 0]})) is None
    assert claim.holds(of(PAIRS, ("HAT", "SGD", "EWC"))) is None, "EWC has no record"


def test_the_bound_is_kept_in_every_run_or_in_none():
    """Forgotten 0.5 at a distance of 2 with an eigenvalue of 6: far below 1/2 * 6 * 4."""
    (claim,) = (claim for claim in flatness().claims if "bound" in claim.text)
    assert claim.holds(of(PAIRS)) is True
    assert claim.holds(of({**PAIRS, ("hat", 1): ((1.0, 0.2), (2.0, 1.1))})) is False, "more than 1/2 * 2 * 1"
    assert claim.holds(of(PAIRS, ("HAT", "SGD", "EWC"))) is None


def test_the_second_order_by_hand():
    """Errors of 0.5 and 0 times the forgetting of task 2 at one seed, of 0.1 and 3 times it at the other. Of task 1 the next
    one makes nothing forget, so that it does not count."""
    (claim,) = (claim for claim in flatness().claims if claim.text.startswith("F₁ ≈"))
    quadratic = {  # of two tasks by the next one, which moves by 1; the losses of `curved` rise at the end only
        ("sgd", 0): ((0.0, 1.0), (0.0, 0.6)),
        ("hat", 0): ((0.0, 1.0), (0.0, 0.2)),
        ("sgd", 1): ((0.0, 1.0), (0.0, 0.44)),
        ("hat", 1): ((0.0, 1.0), (0.0, 1.2)),
    }
    results = of(PAIRS)
    results.flatness = {
        make(*key).name: replace(curved(*PAIRS[key]), quadratic=[[*one, 9.0], [*two], [0.0]])
        for key, (one, two) in quadratic.items()
    }
    expected = [0.5 - np.median([0.5, 0.0]), 0.5 - np.median([0.1, 3.0])]
    assert claim.values(results) == pytest.approx(expected)
    assert claim.holds(results) is False


def test_what_the_text_says_of_the_second_order(of_the_project):
    results = Results(flatness(), of_the_project)
    groups = [[row[seed] for row in map(results.flatness_of, results.rows)] for seed in range(3)]
    for terms, expected in (("quadratic",), (1.893, 1.898, 1.046)), (("linear", "quadratic"), (0.279, 0.398, 0.302)):
        found = [
            np.median(
                [
                    abs(1 - sum(getattr(one, term)[k][1] for term in terms) / one.forgetting[k][1])
                    for one in group
                    for k in range(4)
                ]
            )
            for group in groups
        ]
        assert found == pytest.approx(expected, abs=0.001)


@pytest.fixture(scope="module")
def of_the_project():
    return read_records(RESULTS)


def test_the_figures_of_every_task_have_one_scale(of_the_project):
    results = Results(first_experiment(), of_the_project)
    lowest = {}
    for plot in results.part.plots[1:]:
        (axes,) = plot.draw(results).axes
        lowest[plot.name] = min(line.get_ydata().min() for line in axes.lines if line.get_label().startswith("task"))
        assert axes.get_ylim()[0] == 50
        assert axes.get_ylim()[1] > 97
    assert lowest["tasks-plastic"] < lowest["tasks-stable"] - 20, "the control: their own scales would differ"


def test_what_the_notes_say_of_curvature_and_distance(of_the_project):
    """Wider minima do not forget less by themselves; the numbers are those of docs/flatness.md."""
    results = Results(flatness(), of_the_project)
    found = {
        label: [results.mean(label, quantity) for quantity in (EIGENVALUE, MOVED, summary("forgetting_mirzadeh"))]
        for label in results.rows
    }
    eigenvalues, moved, forgotten = ({label: row[k] for label, row in found.items()} for k in range(3))
    for label in ("naive", "lr alone"):
        assert eigenvalues[label] < eigenvalues["plastic"]
        assert moved[label] > moved["plastic"]
        assert forgotten[label] == pytest.approx(forgotten["plastic"], abs=0.002)
    assert max(eigenvalues, key=eigenvalues.__getitem__) == min(moved, key=moved.__getitem__) == "decay alone"
    assert forgotten["decay alone"] == pytest.approx(forgotten["stable"], abs=0.002)
    assert max(share for label in results.rows for share in results.values(label, SHARE)) < 1 / 70


def test_what_the_note_says_of_23_permuted_tasks(of_the_project):
    """They bring the baselines of 004 at most three points nearer to the published accuracy; ER learns a task to 95.7 %."""
    short, long = (Results(part, of_the_project) for part in RECIPES["regimes"].only(("permuted", "permuted-23")))
    accuracy = summary("accuracy")
    for label, shown in long.rows.items():
        published = shown.published["accuracy"].mean
        twenty, more = (abs(results.mean(label, accuracy) - published) for results in (short, long))
        assert -0.01 < twenty - more < 0.03, label
        assert more > 0.08, "the control: they are far off"
    assert long.mean("ER", summary("learning")) == pytest.approx(0.957, abs=0.0005)
    for label, best in {
        "ER": 88,
        "A-GEM": 95,
        "EWC": 94,
    }.items():  # what dropout at test costs would be missing in all three
        both = long.rows[label].published
        assert round(100 * (both["accuracy"].mean + both["forgetting_mirzadeh"].mean)) == best
        assert f"{best}" in long.rows[label].note


def test_what_the_note_says_of_23_rotated_tasks(of_the_project):
    """They bring ER and A-GEM further from the published accuracy."""
    short, long = (Results(part, of_the_project) for part in RECIPES["regimes"].only(("rotated", "rotated-23")))
    further = {
        label: 100
        * (abs(long.mean(label, summary("accuracy")) - number) - abs(short.mean(label, summary("accuracy")) - number))
        for label, shown in long.rows.items()
        for number in [shown.published["accuracy"].mean]
    }
    assert further == {"ER": pytest.approx(2, abs=0.5), "A-GEM": pytest.approx(4, abs=0.5), "EWC": pytest.approx(0, abs=0.5)}
    assert all("ER comes two points and A-GEM four points further" in shown.note for shown in long.rows.values())


@pytest.mark.parametrize("name", ["rotated", "permuted", "cifar100"])
def test_the_methods_that_keep_images_are_those_of_table_2(name):
    (part,) = RECIPES["regimes"].only((name,))
    assert memoryless(Results(part, Records())).rows == [[label, word, word] for label, word in MEMORYLESS.items()]


def test_a_reference_without_a_value_has_no_verdict():
    """Multi-task training was measured after all tasks only, so that it has no forgetting; Table 2 has 0.0."""
    joint = row("joint", "joint", published={"forgetting_mirzadeh": Published(0.0)}, reference=True)
    joint = replace(joint, run=replace(joint.run, method_options={"at": (2,)}))
    part = replace(PART, rows=(joint,), columns=(summary("forgetting_mirzadeh"),), claims=())
    table = main_table(Results(part, index([make("joint", 0, method_options={"at": (2,)})])))
    assert table.rows == [["joint", "1", "0.000", "—", "—", "—"]]


def test_dots_are_means_over_seeds():
    quantity, other = summary("accuracy"), summary("learning")
    (axes,) = dots("dots", "", quantity, (other,)).draw(Results(PART, index(make(*key) for key in ACCURACY))).axes
    found = [container.lines[0].get_xydata()[0].tolist() for container in axes.containers]
    hat = [np.mean([0.9, 0.7, 0.8, 0.76]), np.mean([0.9, 0.7, 0.8, 0.76])]  # it forgets nothing
    sgd = [np.mean([0.9, 0.8, 0.8, 0.75]), np.mean([0.5, 0.8, 0.7, 0.75])]
    assert found[:2] == [pytest.approx(hat), pytest.approx(sgd)]
    drawn = [container.lines[0] for container in axes.containers]
    assert len({(dot.get_color(), dot.get_marker()) for dot in drawn}) == len(found), "as in the other figures of the rows"
    assert {dot.get_marker() for dot in drawn}.isdisjoint({"", "None", None}), "a reference has no line to be seen by"
    assert dots("dots", "", quantity, (other,)).draw(Results(PART, Records())) is None


def test_validation_curves_have_a_panel_per_place_and_a_line_per_group():
    rows = tuple(replace(r, label=f"{r.label}, {x}", x=x) for r in PART.rows[:2] for x in (0.1, 0.2))
    records = [make(method, seed) for method in ("hat", "sgd") for seed in (0, 1)]
    for seed, record in enumerate(records[:2]):  # HAT's
        values = (0.2, 0.6, 0.9)[: 3 - seed]
        points = [p._replace(valid_accuracy=v) for p, v in zip(record.curves[1].epochs, values, strict=False)]
        record.curves[1] = Curve(1, 1, points)
    results = Results(replace(PART, rows=rows), index(records))
    panels = validation_curves("curves", "", 2, ("HAT", "SGD")).draw(results).axes
    assert [axes.get_title("left") for axes in panels] == ["learning rate 0.1", "learning rate 0.2"]
    for axes in panels:
        hat, sgd = axes.lines
        assert hat.get_xydata() == pytest.approx(np.array([[1, 20], [2, 60]])), "as far as both seeds go"
        assert sgd.get_ydata() == pytest.approx([50, 70, 60])
        assert hat.get_color() != sgd.get_color()
    assert validation_curves("curves", "", 2, ("HAT",)).draw(Results(replace(PART, rows=rows), Records())) is None
