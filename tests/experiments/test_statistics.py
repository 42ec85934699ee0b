"""Paired comparisons: against values worked out by hand, by exact enumeration, and by simulation."""

import math
from itertools import product

import numpy as np
import pytest

from hatrack.experiments.statistics import bootstrap_interval, compare, holm, leaders, t_interval, t_test


def seeds(*values):
    return dict(enumerate(values))


def test_the_paired_t_test_by_hand():
    """Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t = 3.4641; with 2 degrees of freedom P(|T| > t) is known."""
    t = 2 * math.sqrt(3)
    assert t_test(np.array([1.0, 2.0, 3.0])) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)


def test_the_interval_by_hand():
    """With 2 degrees of freedom the quantile q of 0.975 solves q / sqrt(2 + q^2) = 0.95."""
    q = math.sqrt(2 * 0.95**2 / (1 - 0.95**2))
    low, high = t_interval(np.array([1.0, 2.0, 3.0]))
    assert (low, high) == pytest.approx((2 - q / math.sqrt(3), 2 + q / math.sqrt(3)), abs=1e-9)
    assert all(map(math.isnan, t_interval(np.array([1.0]))))


def test_the_bootstrap_is_that_of_all_resamples():
    """Of three values there are 27 resamples; the quantiles of their means are those of many draws."""
    values = [1.0, 2.0, 6.0]
    means = [np.mean(drawn) for drawn in product(values, repeat=3)]
    low, high = bootstrap_interval(np.array(values))
    assert low == np.quantile(means, 0.025, method="inverted_cdf")
    assert high == np.quantile(means, 0.975, method="inverted_cdf")
    assert bootstrap_interval(np.array(values)) == (low, high), "it depends on nothing else"


def test_differences_that_are_all_the_same():
    """They have no variance: the sign test says 2 / 2^n."""
    assert t_test(np.zeros(4)) == 1
    assert t_test(np.full(4, 0.25)) == 0.125
    same = compare({"a": seeds(0.8, 0.7, 0.9), "b": seeds(0.8, 0.7, 0.9 + 1e-16)})[0]
    assert (same.verdict, same.wins, same.p) == ("tied", 0, 1), "rounding"


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.9: times 4, 3, 2, 1; the third may not be smaller than the second."""
    assert holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_pairs_are_compared_at_the_seeds_that_both_have():
    (found,) = compare({"a": {0: 0.5, 1: 0.6, 2: math.nan, 3: 0.9}, "b": {1: 0.7, 2: 0.8, 3: 0.95, 4: 0.1}})
    assert (found.better, found.other, found.seeds, found.wins) == ("b", "a", (1, 3), 2)
    assert found.mean == pytest.approx(0.075)
    assert found.verdict == "too few seeds"
    assert found.p == 1


def test_verdicts():
    close = compare({"a": seeds(0.5, 0.6, 0.7), "b": seeds(0.6, 0.5, 0.7)})[0]
    assert (close.verdict, close.mean, close.wins) == ("tied", pytest.approx(0), 1)
    clear = compare({"a": seeds(0.5, 0.6, 0.7), "b": seeds(0.80, 0.91, 1.0)})[0]
    assert (clear.better, clear.verdict, clear.wins) == ("b", "ahead", 3)


def test_leaders():
    low, high = seeds(0.5, 0.6, 0.7), seeds(0.80, 0.91, 1.0)
    same = seeds(0.81, 0.90, 0.99)
    assert leaders({"low": low, "high": high}) == ["high"]
    assert leaders({"low": low, "same": same, "high": high}) == ["high", "same"]
    assert leaders({"low": seeds(0.1, 0.2), "high": seeds(0.8, 0.9)}) == [], "two seeds"
    assert leaders({"low": {5: 0.1, 6: 0.2, 7: 0.1}, "high": high}) == [], "no seed in common"
    assert leaders({"low": low, "high": high, "new": {0: 0.99}}) == ["high"], "a method with one seed does not count"


def test_leaders_of_one_mean_are_in_the_order_given():
    """A set of names has another order in every process."""
    names = [f"method {k}" for k in range(12)]
    assert leaders({name: seeds(0.5, 0.6, 0.7) for name in names}) == names


def test_a_value_that_is_not_finite_is_no_seed_of_a_leader():
    low, high = seeds(0.5, 0.6, 0.7, 0.8), seeds(0.80, 0.91, 1.0, math.nan)
    assert leaders({"low": low, "high": high}) == ["high"]
    assert leaders({"low": low, "high": seeds(0.80, 0.91, 1.0), "broken": seeds(0.9, 0.9, math.nan)}) == ["high"]


def test_a_method_far_behind_is_not_tied_for_the_best():
    """With three seeds and fifteen pairs hardly a difference is left after Holm's correction."""
    rows = {"best": (0.91, 0.93, 0.92), "near": (0.90, 0.93, 0.90), "far": (0.75, 0.70, 0.66)}
    values = {name: seeds(*row) for name, row in rows.items()}
    values |= {f"other {k}": seeds(0.85 + 0.01 * k, 0.93 - 0.01 * k, 0.90) for k in range(3)}
    (pair,) = [pair for pair in compare(values) if (pair.better, pair.other) == ("best", "far")]
    assert pair.verdict == "tied"
    assert pair.interval[0] > 0.05
    found = leaders(values)
    assert found[:2] == ["best", "near"]
    assert "far" not in found


def test_leaders_by_the_seeds_that_methods_share():
    """b has the larger mean, because it has the easier seeds; at those, a is ahead."""
    a = {**seeds(0.50, 0.52, 0.51), 3: 0.81, 4: 0.90, 5: 0.84}
    b = {3: 0.79, 4: 0.879, 5: 0.821}
    assert leaders({"b": b, "a": a}) == ["a"]
    assert leaders({"only": a}) == [], "there is nothing to compare it with"
    assert leaders({"a": a, "b": {3: 0.99}}) == [], "nor here"
    assert leaders({}) == []


@pytest.mark.parametrize("count", [3, 5])
def test_no_false_winner_in_more_than_5_percent_of_1000_draws(count):
    """Four methods of one quality; the seeds differ more than the methods, and a named leader would be false."""
    draw = np.random.default_rng(count)
    false = 0
    for _ in range(1000):
        seed_effect = draw.normal(0, 3, count)
        values = {name: seeds(*(seed_effect + draw.normal(0, 1, count))) for name in "abcd"}
        false += len(leaders(values)) == 1
    assert false <= 50


def test_a_large_difference_is_found_though_seeds_differ_more():
    draw, found = np.random.default_rng(1), 0
    for _ in range(200):
        seed_effect = draw.normal(0, 10, 5)
        values = {name: seeds(*(seed_effect + draw.normal(3 * (name == "a"), 0.5, 5))) for name in "abcd"}
        found += leaders(values) == ["a"]
    assert found > 180
