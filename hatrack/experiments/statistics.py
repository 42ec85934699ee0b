"""Paired comparisons of methods over seeds: how large a difference is, how sure it is, and what may be said of it.

Runs with the same seed have the same tasks and the same initial weights, so methods are compared seed by seed. All pairs of
methods are tested at once with Student's paired test, and the p-values are corrected after Holm: if no methods differ, the
chance that any of them is called better is at most 5 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Differences = NDArray[np.float64]
LEVEL = 0.05  # the chance of a false statement that is accepted
FEWEST = 3  # seeds; with fewer nothing is said
DIGITS = 12  # of a difference: what is smaller is rounding
DRAWS = 10_000  # of the bootstrap


@dataclass(frozen=True, eq=False)
class Difference:
    """The difference of two methods over the seeds that both have.

    Attributes:
        better: the method with the larger mean.
        other: the other one.
        seeds: the seeds that both have.
        values: the difference at each of these seeds.
        p: the p-value of the paired t-test, after Holm's correction over all pairs; 1 with fewer than three seeds.
    """

    better: str
    other: str
    seeds: tuple[int, ...]
    values: Differences
    p: float

    @property
    def mean(self) -> float:
        """The mean difference, not negative; not a number if there is no common seed."""
        return float(self.values.mean()) if len(self.seeds) else math.nan

    @property
    def wins(self) -> int:
        """In how many seeds `better` is larger."""
        return int((self.values > 0).sum())

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean by Student's t; not a number with fewer than two seeds."""
        return t_interval(self.values)

    @property
    def bootstrap(self) -> tuple[float, float]:
        """The same by resampling the seeds."""
        return bootstrap_interval(self.values)

    @property
    def verdict(self) -> str:
        """Return "ahead", "tied", or "too few seeds"."""
        if len(self.seeds) < FEWEST:
            return "too few seeds"
        return "ahead" if self.p < LEVEL else "tied"


def compare(values: Mapping[str, Mapping[int, float]]) -> list[Difference]:
    """Compare all pairs of methods.

    Args:
        values: for every method its values by seed, such as average accuracies; larger is better.

    Returns:
        The differences, in the order of the methods. Values that are not finite are left out.
    """
    found = [_difference(pair, values) for pair in combinations(values, 2)]
    testable = [k for k, difference in enumerate(found) if len(difference.seeds) >= FEWEST]
    for k, p in zip(testable, holm([found[k].p for k in testable]), strict=True):
        found[k] = replace(found[k], p=p)
    return found


def _difference(pair: tuple[str, str], values: Mapping[str, Mapping[int, float]]) -> Difference:
    one, two = (values[name] for name in pair)
    seeds = tuple(sorted(s for s in one.keys() & two.keys() if math.isfinite(one[s]) and math.isfinite(two[s])))
    differences = np.array([one[s] - two[s] for s in seeds], dtype=np.float64).round(DIGITS)
    first, second = pair
    if len(seeds) and differences.mean() < 0:
        first, second, differences = second, first, -differences
    return Difference(first, second, seeds, differences, t_test(differences) if len(seeds) >= FEWEST else 1.0)


def t_test(differences: Differences) -> float:
    """Return the two-sided p-value of Student's test that the mean of the differences is 0.

    Differences that are all the same have no variance to judge by; then it is the p-value of the sign test.
    """
    mean, error = _mean_and_error(differences)
    if error < 10**-DIGITS:
        return 1.0 if abs(mean) < 10**-DIGITS else 2.0 ** (1 - len(differences))
    from scipy.special import stdtr  # it takes most of a second to import, and single runs do not need it

    return float(2 * stdtr(len(differences) - 1, -abs(mean / error)))


def t_interval(differences: Differences) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean by Student's t."""
    if len(differences) < 2:
        return math.nan, math.nan
    from scipy.special import stdtrit

    mean, error = _mean_and_error(differences)
    half = float(stdtrit(len(differences) - 1, 1 - LEVEL / 2)) * error
    return mean - half, mean + half


def bootstrap_interval(differences: Differences) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean by resampling, the same for the same differences."""
    if len(differences) < 2:
        return math.nan, math.nan
    drawn = _draws(len(differences))
    low, high = np.quantile(differences[drawn].mean(1), [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)


@lru_cache(maxsize=8)
def _draws(count: int) -> NDArray[np.int64]:
    """Return the draws of the bootstrap, the same for every pair with so many seeds."""
    return np.random.default_rng(0).integers(0, count, (DRAWS, count))


def _mean_and_error(differences: Differences) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(differences.mean()), float(differences.std(ddof=1) / math.sqrt(len(differences)))


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values after Holm's correction: the k-th smallest of n times n - k + 1, and no smaller than those before."""
    result, largest = [1.0] * len(ps), 0.0
    for rank, k in enumerate(sorted(range(len(ps)), key=lambda k: ps[k])):
        largest = max(largest, min(1.0, ps[k] * (len(ps) - rank)))
        result[k] = largest
    return result


def leaders(values: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Return the methods that may be the best, the largest mean first. Methods with fewer than three seeds don't count.

    Args:
        values: for every method its values by seed; larger is better. Values that are not finite are left out.

    Returns:
        One method if it is ahead of all others; several if they are tied: those that no other is ahead of, and those that
        these are not ahead of, if only one is left. Of these only the ones whose difference to the largest mean has an
        interval with 0 in it, and at least the nearest one. Those of one mean are in the order given. None if fewer than
        two methods have three seeds, or if two of these share fewer.
    """
    finite = {name: {seed: value for seed, value in found.items() if math.isfinite(value)} for name, found in values.items()}
    known = {name: found for name, found in finite.items() if len(found) >= FEWEST}
    pairs = compare(known)
    if not pairs or any(pair.verdict == "too few seeds" for pair in pairs):
        return []
    ahead = {(pair.better, pair.other) for pair in pairs if pair.verdict == "ahead"}
    best = {name for name in known if not any((other, name) in ahead for other in known)}
    if len(best) == 1:
        best |= {name for name in known if name not in best and (next(iter(best)), name) not in ahead}
    ranked = sorted((name for name in known if name in best), key=lambda name: -float(np.mean(list(known[name].values()))))
    apart = {pair.other for pair in pairs if ranked[:1] == [pair.better] and pair.interval[0] > 0}
    return ranked[:2] + [name for name in ranked[2:] if name not in apart]
