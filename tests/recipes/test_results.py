"""Results and verdicts of recipes, against numbers worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from hatrack.experiments.record_parts import Routed
from hatrack.experiments.spec import Run
from hatrack.inspection.flatness import Flatness
from hatrack.recipes.hat_table_1 import all_of
from hatrack.recipes.quantities import (
    References,
    accuracy_on,
    accuracy_over_epochs,
    accuracy_range,
    epochs_to,
    fluctuation,
    largest_loss,
    less,
    lowest_accuracy,
    ratio,
    share_of_bound,
    summary,
)
from hatrack.recipes.recipe import Claim, Comparison, Part, Published, Row, above, above_some, below, exceeds
from hatrack.recipes.results import Results, index, rank_correlation
from hatrack.recipes.verdicts import CHANCE, NO_TEST, PARTLY, SUPPORTED, UNTESTED, order, sureness, verdict
from hatrack.reporting.measures import MeanStd
from tests.helpers.records import ACCURACY as MATRICES
from tests.helpers.records import make, with_spec
from tests.recipes.toys import ACCURACY, PART, RATIO


@pytest.fixture
def results():
    return Results(PART, index(make(method, seed) for method, seed in MATRICES))


def test_a_row_finds_its_records_at_any_seed(results):
    assert [r.spec.seed for r in results.records("HAT")] == [0, 1]
    assert results.records("EWC") == []
    assert results.missing(results.rows["EWC"]) == [0, 1]
    more = Results(PART, index([make("hat", 0, [[0.5, 0.5], [0.5, 0.5]]), with_spec(make("hat", 1), seed=7)]))
    assert [r.spec.seed for r in more.records("HAT")] == [0, 7]
    assert more.missing(more.rows["HAT"]) == [1]


def test_a_row_that_shows_every_epoch_misses_records_without_them():
    """Their numbers are shown all the same."""
    part = Part("epochs", "", "", (Row("HAT", Run("digits-and-clothes", "hat", watch_tasks=True), (0, 1)),))
    plain, watched = make("hat", 0), make("hat", 1, watch_tasks=True)
    found = Results(part, index([plain, watched]))
    assert found.missing(part.rows[0]) == [0]
    assert len(found.values("HAT", ACCURACY)) == 2
    assert Results(part, index([plain, watched, make("hat", 0, watch_tasks=True)])).missing(part.rows[0]) == []


def test_a_record_of_another_setting_is_not_taken():
    other = with_spec(make("hat", 0), heads="shared")
    assert Results(PART, index([other])).records("HAT") == []


@pytest.mark.parametrize("routed_first", [True, False])
def test_a_row_with_a_router_takes_records_with_its_results_alone(routed_first):
    routed = make("hat", 0, router="distance")
    routed.routed = Routed("distance", [0.6, 0.4], [0.5, 0.5])
    records = [routed, make("hat", 0), make("hat", 1)][:: 1 if routed_first else -1]
    part = Part("router", "", "", (Row("HAT", Run("digits-and-clothes", "hat", router="distance"), (0, 1)),))
    found = Results(part, index(records))
    assert found.values("HAT", summary("routed")) == [pytest.approx(0.5)]
    assert found.missing(part.rows[0]) == [1]
    alone = Results(PART, index([routed]))
    assert [record.name for record in alone.records("HAT")] == [routed.name], "a row without a router takes it as well"


def test_ratio_by_hand(results):
    # seed 0, after two tasks: ((0.90 - 0.30) / (0.95 - 0.30) + (0.70 - 0.40) / (0.85 - 0.40)) / 2 - 1
    first = ((0.90 - 0.30) / (0.95 - 0.30) + (0.70 - 0.40) / (0.85 - 0.40)) / 2 - 1
    second = ((0.80 - 0.35) / (0.90 - 0.35) + (0.76 - 0.30) / (0.80 - 0.30)) / 2 - 1
    assert results.values("HAT", RATIO) == pytest.approx([first, second])
    found = results.summary("HAT", RATIO)
    assert found.mean == pytest.approx((first + second) / 2)
    assert found.std == pytest.approx(abs(first - second) / math.sqrt(2))
    assert results.values("HAT", ratio(1))[0] == pytest.approx((0.90 - 0.30) / (0.90 - 0.30) - 1)
    assert math.isnan(results.values("HAT", ratio(3))[0])


def test_ratio_needs_both_references_at_the_same_seed():
    records = index(make(*key) for key in [("hat", 0), ("hat", 1), ("joint", 0), ("random", 0), ("random", 1)])
    values = Results(PART, records).values("HAT", RATIO)
    assert math.isfinite(values[0])
    assert math.isnan(values[1])
    assert Results(PART, records).summary("HAT", RATIO).seeds == 1


def test_joint_training_that_was_fitted_at_some_lengths_only():
    rows = tuple(
        replace(row, run=replace(row.run, method_options={"at": (2,)})) if row.label == "joint" else row for row in PART.rows
    )
    part = replace(PART, rows=rows)
    joint = make("joint", 0, method_options={"at": (2,)})
    results = Results(part, index([make("hat", 0), joint, make("random", 0)]))
    (line,) = results.ratios("HAT")
    assert np.isnan(line[0])
    assert np.isfinite(line[1])


def test_a_row_about_the_first_tasks_of_a_run_and_references_of_more_tasks():
    tables = {  # after each of three tasks
        "hat": [[0.9, 0.2, 0.1], [0.9, 0.7, 0.3], [0.9, 0.7, 0.6]],
        "joint": [[0.9, 0.1, 0.1], [0.95, 0.85, 0.2], [0.9, 0.9, 0.9]],
        "random": [[0.3, 0.4, 0.5]] * 3,
    }
    records = [make(method, 0, table, names=("a", "b", "c")) for method, table in tables.items()]
    ewc = make("ewc", 0, [[0.9, 0.2], [0.5, 0.7]])  # a run of two tasks
    labels = {"HAT": "hat", "HAT of 2": "hat", "EWC": "ewc", "joint": "joint", "random": "random"}
    rows = tuple(
        Row(label, Run("digits-and-clothes", method), (0,), first=2 if label.endswith("2") else 0)
        for label, method in labels.items()
    )
    found = Results(Part("lengths", "", "", rows), index([*records, ewc]))
    assert found.values("HAT", ACCURACY) == [pytest.approx((0.9 + 0.7 + 0.6) / 3)]
    assert found.values("HAT of 2", ACCURACY) == [pytest.approx(0.8)]
    guessed = ((0.9 - 0.3) / (0.95 - 0.3) + (0.7 - 0.4) / (0.85 - 0.4)) / 2 - 1
    assert found.values("HAT of 2", RATIO) == [pytest.approx(guessed)]
    assert found.values("HAT", ratio(2)) == [pytest.approx(guessed)]
    assert found.values("EWC", RATIO) == [pytest.approx(((0.5 - 0.3) / 0.65 + (0.7 - 0.4) / 0.45) / 2 - 1)]
    assert found.values("HAT", RATIO) != found.values("HAT of 2", RATIO)


def test_a_comparison_knows_when_a_row_is_missing(results):
    def holds(make, *labels, **options):
        return make("", ACCURACY, *labels, **options).holds(results)

    assert holds(above, "HAT", "SGD") is True
    assert holds(above, "SGD", "HAT") is False
    assert holds(above, "HAT", "SGD", by=0.5) is False
    assert holds(above, "HAT", "SGD", "EWC") is None
    assert holds(above, "SGD", "HAT", "EWC") is False  # EWC is missing, but HAT refutes it already
    assert holds(above, "EWC", "SGD") is None
    assert holds(below, "SGD", "HAT") is True
    assert holds(below, "SGD", "HAT", by=0.5) is False
    assert holds(below, "HAT", "SGD") is False


def at_seeds(**values):
    """Return the results of rows whose average accuracies at seeds 0, 1, ... are given."""
    records = [
        with_spec(make(method, 0, [[value, value], [value, value]]), seed=seed)
        for method, group in values.items()
        for seed, value in enumerate(group)
    ]
    return Results(PART, index(records))


def test_the_p_value_of_a_claim_by_hand():
    # differences 0.10, 0.12, 0.14: t = 0.12 / (0.02 / sqrt 3), 2 degrees of freedom
    found = at_seeds(hat=[0.80, 0.82, 0.84], sgd=[0.70, 0.70, 0.70], ewc=[0.79, 0.83, 0.81])
    p = ttest_1samp([0.10, 0.12, 0.14], 0).pvalue
    assert sureness(found, above("", ACCURACY, "HAT", "SGD")) == (SUPPORTED, f"p = {p:.3f} (n = 3)")
    assert sureness(found, below("", ACCURACY, "SGD", "HAT")) == (SUPPORTED, f"p = {p:.3f} (n = 3)")
    assert sureness(found, above("", ACCURACY, "SGD", "HAT")) == (
        SUPPORTED,
        f"p = {p:.3f} (n = 3)",
    )  # so sure is it that it fails
    # with a margin of 0.05 the differences are 0.05, 0.07, 0.09
    p = ttest_1samp([0.05, 0.07, 0.09], 0).pvalue
    assert sureness(found, above("", ACCURACY, "HAT", "SGD", by=0.05)) == (SUPPORTED, f"p = {p:.3f} (n = 3)")
    # against two: the weaker of them decides, which Holm's correction leaves alone
    p = ttest_1samp([0.01, -0.01, 0.03], 0).pvalue
    assert sureness(found, above("", ACCURACY, "HAT", "SGD", "EWC")) == (CHANCE, f"p = {p:.2f} (n = 3)")
    # it fails because of both: the surer p-value, twice as large after Holm
    p = 2 * ttest_1samp([0.10, 0.12, 0.14], 0).pvalue
    assert sureness(found, above("", ACCURACY, "SGD", "HAT", "EWC")) == (SUPPORTED, f"p = {p:.3f} (n = 3)")


def test_a_claim_about_some_of_several():
    found = at_seeds(hat=[0.80, 0.82, 0.84], sgd=[0.70, 0.70, 0.70], ewc=[0.85, 0.86, 0.90])
    some = above_some("", ACCURACY, "HAT", "SGD", "EWC")
    assert some.holds(found) is True
    assert above("", ACCURACY, "HAT", "SGD", "EWC").holds(found) is False, "the control: not of all"
    p = 2 * ttest_1samp([0.10, 0.12, 0.14], 0).pvalue  # against SGD; twice as large after Holm
    assert sureness(found, some) == (SUPPORTED, f"p = {p:.3f} (n = 3)")
    none = above_some("", ACCURACY, "SGD", "HAT", "EWC")
    assert none.holds(found) is False
    sure, less_sure = sorted(ttest_1samp(values, 0).pvalue for values in ([0.10, 0.12, 0.14], [0.15, 0.16, 0.20]))
    assert 2 * sure > less_sure, "so that both are as large after Holm; it fails only if both are better"
    assert sureness(found, none) == (SUPPORTED, f"p = {2 * sure:.3f} (n = 3)")


def test_a_claim_about_some_of_several_with_a_missing_row():
    found = at_seeds(hat=[0.80, 0.82, 0.84], sgd=[0.70, 0.70, 0.70])
    assert above_some("", ACCURACY, "HAT", "SGD", "EWC").holds(found) is True
    assert above_some("", ACCURACY, "SGD", "HAT", "EWC").holds(found) is None, "EWC may still be worse"
    assert above_some("", ACCURACY, "EWC", "HAT", "SGD").holds(found) is None


def test_a_claim_with_a_number_per_seed_is_tested_against_zero():
    found = at_seeds(hat=[0.80])
    p = ttest_1samp([0.1, 0.3, 0.4], 0).pvalue
    assert sureness(found, Claim("", lambda _: True, values=lambda _: np.array([0.1, 0.3, 0.4]))) == (
        CHANCE,
        f"p = {p:.3f} (n = 3)",
    )
    against = Claim("", lambda _: False, values=lambda _: np.array([-0.1, -0.12, -0.14]))
    assert sureness(found, against) == (SUPPORTED, f"p = {ttest_1samp([0.10, 0.12, 0.14], 0).pvalue:.3f} (n = 3)")
    assert sureness(found, Claim("", lambda _: True, values=lambda _: np.array([0.1, 0.3]))) == (
        UNTESTED,
        "too few seeds to test (n = 2)",
    )


def test_a_claim_without_seeds_is_not_tested():
    found = at_seeds(hat=[0.80, 0.82], sgd=[0.70, 0.70, 0.71])
    assert sureness(found, above("", ACCURACY, "HAT", "SGD")) == (UNTESTED, "too few seeds to test (n = 2)")
    assert sureness(found, above("", ACCURACY, "SGD", "HAT")) == (UNTESTED, "too few seeds to test (n = 2)")
    assert sureness(found, above("", ACCURACY, "HAT", "EWC")) == NO_TEST
    assert sureness(found, Claim("", lambda r: True)) == NO_TEST


def test_a_claim_about_a_number_is_tested_over_seeds():
    found = at_seeds(hat=[0.89, 0.91, 0.898], sgd=[0.70, 0.71, 0.72], ewc=[0.9])
    near = exceeds("", ACCURACY, "HAT", 0.9)
    assert near.holds(found) is False  # the mean is 0.8993, which says nothing at three seeds
    p = ttest_1samp([-0.01, 0.01, -0.002], 0).pvalue
    assert sureness(found, near) == (CHANCE, f"p = {p:.2f} (n = 3)")
    clear = exceeds("", ACCURACY, "SGD", 0.5)
    assert clear.holds(found) is True
    assert ttest_1samp([0.20, 0.21, 0.22], 0).pvalue < 0.001
    assert sureness(found, clear) == (SUPPORTED, "p < 0.001 (n = 3)")
    one = exceeds("", ACCURACY, "EWC", 0.9)
    assert one.holds(found) is False
    assert sureness(found, one) == (UNTESTED, "too few seeds to test (n = 1)")
    assert exceeds("", ACCURACY, "EWC", 0.9).holds(at_seeds(hat=[0.5])) is None


def test_a_claim_with_a_row_of_few_seeds_may_be_known_to_be_chance():
    found = at_seeds(hat=[0.80, 0.82, 0.84], sgd=[0.79, 0.83, 0.81], ewc=[0.60])
    p = ttest_1samp([0.01, -0.01, 0.03], 0).pvalue  # against SGD; EWC has one seed
    rest = "; too few seeds for 1 of 2 comparisons"
    assert sureness(found, above("", ACCURACY, "HAT", "SGD", "EWC")) == (CHANCE, f"p = {p:.2f} (n = 3){rest}")
    sure = at_seeds(hat=[0.80, 0.82, 0.84], sgd=[0.70, 0.70, 0.70], ewc=[0.60])
    p = ttest_1samp([0.10, 0.12, 0.14], 0).pvalue
    assert sureness(sure, above("", ACCURACY, "HAT", "SGD", "EWC")) == (PARTLY, f"p = {p:.3f} (n = 3){rest}")
    # it fails as SGD alone shows, whatever the comparison with one seed would say
    assert sureness(sure, above("", ACCURACY, "SGD", "HAT", "EWC")) == (SUPPORTED, f"p = {p:.3f} (n = 3)")


def test_a_claim_of_several_comparisons_is_tested_as_one():
    found = at_seeds(hat=[0.80, 0.82, 0.84], sgd=[0.70, 0.71, 0.72], ewc=[0.60])
    both = all_of("", [Comparison(ACCURACY, "HAT", ("SGD", "EWC")), Comparison(ACCURACY, "EWC", ("SGD",), by=-1.0)])
    assert both.holds(found) is True
    p = ttest_1samp([0.10, 0.11, 0.12], 0).pvalue  # the one comparison with three seeds
    assert sureness(found, both) == (PARTLY, f"p = {p:.3f} (n = 3); too few seeds for 2 of 3 comparisons")


def test_quantities_by_hand(results):
    record, none = results.records("SGD")[0], results.references("SGD", 0)
    assert accuracy_on(1, 2).value(record, none) == 0.50
    assert math.isnan(accuracy_on(1, 3).value(record, none))
    assert lowest_accuracy().value(record, none) == 0.50
    assert less(accuracy_on(2, 2), accuracy_on(1, 2)).value(record, none) == record.accuracy[1][1] - 0.50
    assert largest_loss().value(record, none) == pytest.approx(0.50)  # of task 1 after task 2
    assert largest_loss().value(replace(record, loss=[[0.1, 0.2], [None, 0.2]]), none) == math.inf
    assert accuracy_range().value(record, none) == pytest.approx(0.80 - 0.50)
    assert epochs_to(0.7, 2).value(record, none) == 2
    assert math.isnan(epochs_to(0.8, 2).value(record, none))
    assert accuracy_over_epochs(2).value(record, none) == pytest.approx((0.5 + 0.7 + 0.6) / 3)
    assert math.isnan(accuracy_over_epochs(3).value(record, none)), "there is no third task"
    curve = record.curves[1]
    unknown = replace(curve, epochs=[curve.epochs[0]._replace(valid_accuracy=None), *curve.epochs[1:]])
    assert math.isnan(accuracy_over_epochs(2).value(replace(record, curves=[record.curves[0], unknown]), none))


def test_the_largest_share_of_a_bound_by_hand():
    # bounds 1/2 * 4 * 1, 1/2 * 4 * 9 = 2, 18 and 1/2 * 2 * 4 = 4; forgotten 1, 3 and 3
    distances, losses = [[0.0, 1.0, 3.0], [0.0, 2.0], [0.0]], [[1.0, 2.0, 4.0], [1.0, 4.0], [1.0]]
    found = Flatness(["a", "b", "c"], 2, [9] * 3, [[4.0], [2.0], [7.0]], distances=distances, losses=losses)
    record = make("sgd", 0)
    assert share_of_bound().value(record, References(None, None, found)) == pytest.approx(3 / 4)
    still = replace(found, distances=[[0.0] * 3, [0.0] * 2, [0.0]])
    assert math.isnan(share_of_bound().value(record, References(None, None, still))), "nothing moved: there is no bound"


def test_fluctuation_by_hand():
    """While task 2 is learned, task 1 goes from 0.9 to 0.5 and back to 0.7: 0.6 in all, 0.4 more than the change, in two
    epochs. What happens to task 2 itself and to later ones does not count, nor does a steady decline."""
    record, none = make("sgd", 0), References(None, None)
    assert math.isnan(fluctuation().value(record, none)), "it was not watched"

    def watched(*epochs):
        return replace(record, curves=[replace(record.curves[0], watched=[[0.1, 0.2], [0.9, 0.1]]),
                                       replace(record.curves[1], watched=[list(epoch) for epoch in epochs])])  # fmt: skip

    assert fluctuation().value(watched((0.9, 0.1), (0.5, 0.8), (0.7, 0.2)), none) == pytest.approx(0.4 / 2)
    assert fluctuation().value(watched((0.9, 0.1), (0.7, 0.8), (0.5, 0.2)), none) == pytest.approx(0)


@pytest.mark.parametrize(
    ("ours", "published", "tolerance", "words"),
    [
        (None, Published(0.5), 0.0, "not run yet"),
        (MeanStd(0.5, None, 1), None, 0.0, "—"),
        (MeanStd(0.5, None, 1), Published(0.5), 0.0, "agrees"),
        (MeanStd(0.503, None, 1), Published(0.5), 0.003, "close"),
        (MeanStd(0.48, 0.001, 4), Published(0.5, 0.002, 4), 0.02, "close"),  # 2 standard errors are 0.0022
        (MeanStd(0.479, 0.001, 4), Published(0.5, 0.002, 4), 0.02, "lower"),
        (MeanStd(0.504, None, 1), Published(0.5), 0.003, "higher"),
        (MeanStd(0.48, 0.01, 4), Published(0.5, 0.02, 4), 0.0, "agrees"),  # 2 sqrt(0.01^2 / 4 + 0.02^2 / 4) = 0.0224
        (MeanStd(0.477, 0.01, 4), Published(0.5, 0.02, 4), 0.0, "lower"),
        (MeanStd(0.52, 0.02, 4), Published(0.5, None, 4), 0.0, "agrees"),  # 2 sqrt(2 * 0.02^2 / 4) = 0.0283
        (MeanStd(0.53, 0.02, 4), Published(0.5, None, 4), 0.0, "higher"),
        (MeanStd(0.46, None, 1), Published(0.5, 0.02, 4), 0.0, "agrees"),  # 2 sqrt(0.02^2 + 0.02^2 / 4) = 0.0447
        (MeanStd(0.45, None, 1), Published(0.5, 0.02, 4), 0.0, "lower"),
    ],
)
def test_verdict(ours, published, tolerance, words):
    assert verdict(ours, published, tolerance) == words


def test_rank_correlation_by_hand():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # without ties it is 1 - 6 sum d^2 / (n (n^2 - 1)); d = 1, -1, 0, 0
    assert rank_correlation([2, 1, 3, 4], [1, 2, 3, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    # ranks 0.5, 0.5, 2 and 0, 1, 2: covariance 1.5, variances 1.5 and 2
    assert rank_correlation([5, 5, 9], [1, 2, 3]) == pytest.approx(1.5 / math.sqrt(1.5 * 2))


def test_order_counts_the_approaches_that_were_run(results):
    part = replace(PART, order_by=RATIO)
    assert order(results) == ""
    assert "Too few" in order(Results(part, index(make(*key) for key in MATRICES)))
    ewc = [make("ewc", 0, [[0.90, 0.20], [0.80, 0.80]]), make("ewc", 1, [[0.8, 0.3], [0.75, 0.7]])]
    text = order(Results(part, index([*(make(*key) for key in MATRICES), *ewc])))
    assert "3 of 3 approaches" in text
    assert "1.00" in text or "0.50" in text
