"""Verdicts: whether a measured number agrees with the published one, a claim holds, an order is the same."""

import math

from hatrack.experiments.statistics import FEWEST, LEVEL, Differences, holm, t_test
from hatrack.recipes.recipe import Claim, Part, Published
from hatrack.recipes.results import Results, rank_correlation
from hatrack.reporting.measures import MeanStd

NOT_RUN, NOT_PUBLISHED = "not run yet", "—"
RULES = (  # how a page compares numbers
    "A number agrees with the published one if they differ by no more than two standard errors of the difference; this is a "
    "rough measure with few seeds. Where one side has no standard deviation, that of the other is taken for both.",
    "It is close if they differ by more, but by no more than the tolerance of the table; else it is higher or lower.",
    "A claim holds or not by the means in the tables.",
    "Beside a claim is the p-value of Student's test: paired over the n seeds that two rows share, or of a row or a "
    "correlation against a number. If a row is compared with several, p-values are corrected after Holm: shown is the "
    "largest if the claim holds, else the smallest of those against it. Of a claim about some of several it is the "
    "smallest of those for it, else the largest.",
    "Numbers are means ± standard deviations over n seeds.",
)
NO_TEST = "—"


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


def sureness(results: Results, claim: Claim) -> str:
    """Return how sure it is that a claim holds, or does not: a p-value, and over how many seeds.

    Args:
        results: the rows that it is about.
        claim: the claim.

    Returns:
        A few words; a dash if a row is missing or if no test of the claim is known.
    """
    answer = claim.holds(results)
    if answer is None or (claim.compared is None and claim.values is None):
        return NO_TEST
    found = list(results.differences(claim.compared).values()) if claim.compared else _per_seed(results, claim)
    every = answer != (claim.compared is not None and claim.compared.some)  # each difference counts, not one of them alone
    deciding = [k for k, values in enumerate(found) if every or (len(values) and (values.mean() > 0) == answer)]
    counts = [len(found[k]) for k in deciding]
    tested = [k for k, values in enumerate(found) if len(values) >= FEWEST]
    ps = dict(zip(tested, holm([t_test(found[k]) for k in tested]), strict=True))
    if not ps.keys() & deciding:
        return f"too few seeds to test (n = {min(counts, default=0)})"
    k = (max if every else min)(ps.keys() & deciding, key=ps.__getitem__)
    if every and min(counts) < FEWEST and ps[k] < LEVEL:  # what was not tested may still be chance; what is known to be, is
        return f"too few seeds to test (n = {min(counts)})"
    p = ps[k] if (found[k].mean() > 0) == answer else 1.0  # seeds that only one row has may turn a mean
    said = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    return f"{said} (n = {len(found[k])})" + ("" if p < LEVEL else ": may be chance")


def _per_seed(results: Results, claim: Claim) -> list[Differences]:
    return [claim.values(results)] if claim.values else []


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
    return (
        f"By {quantity.measure.title.lower()}, the order of {len(both)} of {len(published)} approaches has a rank "
        f"correlation (Spearman) of {value:.2f} with the published order."
    )
