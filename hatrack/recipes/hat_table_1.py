"""Table 1 and figure 3 of HAT (001): ten approaches, two references, eight data sets, and what the text says of them."""

from collections.abc import Iterable
from typing import Any

from hatrack.recipes.grids import accuracy_by_position, ratio_by_tasks
from hatrack.recipes.hat_approaches import APPROACHES, MERGED, RANDOM, joint
from hatrack.recipes.plots import ratio_lines
from hatrack.recipes.quantities import Quantity, ratio, summary
from hatrack.recipes.recipe import Claim, Comparison, Part, Row, above
from hatrack.recipes.results import Results

RATIO_2, RATIO_8 = ratio(2), ratio(8)
BASELINES = tuple(a.label for a in APPROACHES if a.label != "HAT")
BEST = ("EWC", "PathNet", "PNN")
SLIGHTLY = 0.1  # of a forgetting ratio


def table_1(name: str, title: str, text: str, benchmark: str, **options: Any) -> Part:
    """Return Table 1 and figure 3 on a benchmark of eight data sets."""
    rows = [
        Row(a.label, a.run(benchmark), a.seeds, {"ratio_2": a.after_2, "ratio_8": a.after_8}, a.note)
        for a in APPROACHES
        if a.after_2 and a.after_8
    ]
    rows.append(Row(MERGED.label, MERGED.run(benchmark), note=MERGED.note))
    rows.append(Row("joint", joint().run(benchmark), (0,), reference=True, note="After every number of tasks, at one seed."))
    rows.append(Row("joint, all tasks", joint(2, 8).run(benchmark), reference=True, note="After 2 and 8 tasks only."))
    rows.append(Row("random", RANDOM.run(benchmark), reference=True))
    return Part(
        name,
        title,
        text,
        tuple(rows),
        (RATIO_2, RATIO_8, summary("accuracy")),
        claims=CLAIMS,
        plots=(ratio_lines(title="Figure 3: forgetting ratio against tasks learned"),),
        grids=(ratio_by_tasks, accuracy_by_position("HAT")),
        precision="bfloat16",
        **options,
    )


def but(*labels: str) -> tuple[str, ...]:
    """Return the baselines without these."""
    return tuple(label for label in BASELINES if label not in labels)


def every(found: Iterable[bool | None]) -> bool | None:
    """Return whether all hold: False if one does not, else None if one is not known."""
    answers = list(found)
    return False if False in answers else None if None in answers else True


def always(text: str, lengths: Iterable[int], label: str, *others: str) -> Claim:
    """Return the claim that a row forgets less than others after each of these numbers of tasks."""
    return all_of(text, [Comparison(ratio(tasks), label, others) for tasks in lengths])


def all_of(text: str, compared: Iterable[Comparison]) -> Claim:
    """Return the claim that several comparisons hold."""
    found = tuple(compared)
    return Claim(text, lambda results: every(map(results.holds, found)), found)


def _imm_like_frozen(results: Results) -> bool | None:
    frozen = results.mean("SGD-F", RATIO_8)
    imm = [results.mean(label, RATIO_8) for label in ("IMM-mean", "IMM-mode")]
    return every(None if one is None or frozen is None else abs(one - frozen) <= SLIGHTLY for one in imm)


def _stds(results: Results, quantity: Quantity, labels: Iterable[str]) -> dict[str, float] | None:
    """Return the standard deviations of rows; None if one has none."""
    found = {label: results.summary(label, quantity) for label in labels}
    known = {label: one.std for label, one in found.items() if one and one.std is not None}
    return known if len(known) == len(found) else None


def _widest(results: Results) -> bool | None:
    found = [_stds(results, quantity, BASELINES) for quantity in (RATIO_2, RATIO_8)]
    return every(max(s, key=lambda label: s[label]) in ("LFL", "PathNet") if s else None for s in found)


def _stable(results: Results) -> bool | None:
    found = [_stds(results, quantity, ("HAT", *BASELINES)) for quantity in (RATIO_2, RATIO_8)]
    return every(sum(std > s["HAT"] for std in s.values()) > 2 / 3 * len(BASELINES) if s else None for s in found)


def changes(text: str, label: str, first: Quantity, last: Quantity, *, falls: bool) -> Claim:
    """Return the claim that a row has less of the last quantity than of the first, or more."""

    def holds(results: Results) -> bool | None:
        before, after = results.mean(label, first), results.mean(label, last)
        return None if before is None or after is None else (after < before) == falls

    return Claim(text, holds)


CLAIMS = (
    above("HAT forgets least of all approaches after two tasks.", RATIO_2, "HAT", *BASELINES),
    above("HAT forgets least of all approaches after eight tasks.", RATIO_8, "HAT", *BASELINES),
    always("HAT performs better than all baselines for all t ≥ 2.", range(2, 9), "HAT", *BASELINES),
    above("The best baseline after two tasks is EWC.", RATIO_2, "EWC", *but("EWC")),
    above("The best baseline after eight tasks is PNN.", RATIO_8, "PNN", *but("PNN")),
    all_of(
        "The best performing baselines are EWC, PathNet and PNN (here: after eight tasks).",
        [Comparison(RATIO_8, label, but(*BEST)) for label in BEST],
    ),
    above("LwF does not perform better than the SGD references (here: after eight tasks).", RATIO_8, "SGD", "LwF"),
    above("LFL does not perform better than the SGD references (here: after eight tasks).", RATIO_8, "SGD", "LFL"),
    above("LwF is still competitive after two tasks (here: better than SGD and SGD-F).", RATIO_2, "LwF", "SGD", "SGD-F"),
    Claim(
        f"IMM performs similarly to SGD-F, or slightly better (here: within {SLIGHTLY} after eight tasks).", _imm_like_frozen
    ),
    changes("PathNet has difficulties that grow (here: from one task to eight).", "PathNet", ratio(1), RATIO_8, falls=True),
    changes("PNN becomes better as t increases (here: from one task to eight).", "PNN", ratio(1), RATIO_8, falls=False),
    Claim("LFL and PathNet have the highest standard deviations.", _widest),
    Claim("The standard deviation of HAT is lower than those of most baselines (here: of more than two thirds).", _stable),
)
