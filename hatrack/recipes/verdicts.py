"""Verdicts: whether a measured number agrees with the published one, a claim holds, an order is the same."""

import math
from typing import NamedTuple

from hatrack.experiments.statistics import FEWEST, LEVEL, Differences, holm, t_test
from hatrack.recipes.recipe import Claim, Part, Published
from hatrack.recipes.results import Results, rank_correlation
from hatrack.reporting.measures import MeanStd

NOT_RUN, NOT_PUBLISHED = "not run yet", "—"
RULES = (  # how a page compares numbers
    "A number agrees with the published one if they differ by no more than two standard errors of the difference; this is a "
    "rough measure with few seeds. Where one side has no standard deviation, that of the other is taken for both.",
    "It is close if they differ by more, but by no more than the tolerance of the table; else it is higher or lower.",
    "A claim holds or not by the means in the tables: one mean is above another. That alone may be chance, since other "
    "seeds have other means. Seeds support the answer if the differences at single seeds are so large and so much alike "
    f"that chance would rarely make them (p < {LEVEL:g}). Where p is larger, the answer may be chance; where nothing was "
    "tested, it is open whether it is.",
    "p is of Student's test: paired over the n seeds that two rows share, or of a row or a correlation against a number. If "
    "there are several comparisons, p-values are corrected after Holm: shown is the largest if the claim holds, else the "
    "smallest of those against it. Of a claim about some of several it is the smallest of those for it, else the largest. "
    f"A comparison with fewer than {FEWEST} seeds is not tested: the claim is then tested in part.",
    "Numbers are means ± standard deviations over n seeds.",
)


class Sureness(NamedTuple):
    """How sure it is that a claim holds, or does not.

    Attributes:
        words: what stands behind the answer "holds" or "does not hold".
        test: a p-value and over how many seeds, or why there is none.
    """

    words: str
    test: str

    @property
    def firm(self) -> bool:
        """Whether more stands behind the answer than the means of a few seeds."""
        return self.words not in (CHANCE, UNTESTED)


SUPPORTED = ", and seeds support this"  # behind "holds" or "does not hold"
PARTLY = " by the means, and seeds support what is tested"
CHANCE = " by the means, but it may be chance"
UNTESTED = " by the means, not tested"
NO_TEST = Sureness(", without a test", "—")  # of no rows, or of such as no test is known for


def verdict(ours: MeanStd | None, published: Published | None, tolerance: float = 0.0) -> str:
    """Return whether a number agrees with the published one.

    Args:
        ours: mean and standard deviation over our seeds; None if there is no record.
        published: the paper's; None if it gives none.
        tolerance: a difference that is close enough, even if it is more than chance.

    Returns:
        "agrees", "close", "higher", "lower", or why there is no verdict.
    """
    if ours is None:
        return NOT_RUN
    if published is None:
        return NOT_PUBLISHED
    difference = ours.mean - published.mean
    if abs(difference) <= 2 * standard_error(ours, published) + 1e-12:
        return "agrees"
    if abs(difference) <= tolerance + 1e-12:
        return "close"
    return "higher" if difference > 0 else "lower"


def standard_error(ours: MeanStd, published: Published) -> float:
    """Return the standard error of the difference of two means; 0 if neither has a standard deviation."""
    stds = [std for std in (ours.std, published.std) if std is not None] or [0.0]
    return math.hypot(stds[0] / math.sqrt(ours.seeds), stds[-1] / math.sqrt(published.runs))


def sureness(results: Results, claim: Claim) -> Sureness:
    """Return how sure it is that a claim holds, or does not.

    Args:
        results: the rows that it is about.
        claim: the claim.
    """
    answer, found = claim.holds(results), _differences(results, claim)
    if answer is None or not found:
        return NO_TEST
    every = answer != any(one.some for one in claim.compared)  # each difference counts, not one of them alone
    deciding = [k for k, values in enumerate(found) if every or (len(values) and (values.mean() > 0) == answer)]
    tested = [k for k, values in enumerate(found) if len(values) >= FEWEST]
    ps = dict(zip(tested, holm([t_test(found[k]) for k in tested]), strict=True))
    few = [len(found[k]) for k in deciding if k not in ps]
    if not ps.keys() & deciding:
        return Sureness(UNTESTED, f"too few seeds to test (n = {min(few, default=0)})")
    k = (max if every else min)(ps.keys() & deciding, key=ps.__getitem__)
    p = ps[k] if (found[k].mean() > 0) == answer else 1.0  # seeds that only one row has may turn a mean
    said = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    rest = f"; too few seeds for {len(few)} of {len(deciding)} comparisons" if few else ""
    words = CHANCE if p >= LEVEL else PARTLY if every and few else SUPPORTED
    return Sureness(words, f"{said} (n = {len(found[k])}){rest}")


def _differences(results: Results, claim: Claim) -> list[Differences]:
    """Return what is tested of a claim, per comparison: a number per seed that is above 0 if it holds."""
    if claim.values:
        return [claim.values(results)]
    return [values for compared in claim.compared for values in results.differences(compared).values()]


def order(results: Results) -> str:
    """Return how the order of the approaches correlates with the published one, in a sentence; empty without an order."""
    part: Part = results.part
    quantity = part.order_by
    if quantity is None:
        return ""
    published = {row.label: row.published[quantity.key].mean for row in part.rows if quantity.key in row.published}
    ours = {label: results.mean(label, quantity) for label in published}
    both = {label: value for label, value in ours.items() if value is not None}
    if len(both) < 3:
        return (
            f"Too few approaches have a measured {quantity.measure.title.lower()} to compare their order with the paper's."
        )
    value = rank_correlation(list(both.values()), [published[label] for label in both])
    seeds = min(found.seeds for label in both if (found := results.summary(label, quantity)))
    return (
        f"By {quantity.measure.title.lower()}, the order of {len(both)} of {len(published)} approaches has a rank "
        f"correlation (Spearman) of {value:.2f} with the published order (n = {seeds} at least)."
    )
