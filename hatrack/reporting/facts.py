"""What a page says in words about a setting: three cards, what was run, certificates, and what tasks use of the weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hatrack.benchmarks import BENCHMARKS
from hatrack.experiments.record import Record
from hatrack.experiments.record_parts import Spec
from hatrack.experiments.statistics import FEWEST, leaders
from hatrack.regime import Regime
from hatrack.reporting.capacity import capacities
from hatrack.reporting.differences import cautions
from hatrack.reporting.measures import format_number, measure_of
from hatrack.reporting.tables import Setting, accuracies, option_text
from hatrack.reporting.words import (
    HAT_EPOCHS,
    RUN_OPTIONS,
    all_others,
    allowed_epochs,
    count_text,
    defaults_of,
    join_names,
    length_text,
    network_function,
    with_unit,
)
from hatrack.text import duration, printable

GUARANTEED = ("hat", "pmask", "packnet", "pathnet", "pnn", "lora", "independent", "frozen")  # unless options loosen them
LOOSE = {"masks": "soft", "norms": "shared"}  # options with which nothing is guaranteed
MOST = 4  # names in a card


def checked(record: Record) -> bool:
    """Return whether the run of a record verified, bit for bit, that no finished task changed.

    The bits that finished tasks use are compared after every task (`hatrack.methods.guarantees`), and a run that fails has
    no record.
    """
    options = record.spec.method_options
    return record.spec.method in GUARANTEED and not any(options.get(name) == value for name, value in LOOSE.items())


def forgets_nothing(records: list[Record]) -> bool:
    """Return whether the runs were checked, and no accuracy on an earlier task fell at any seed."""
    return all(checked(record) and record.summary["forgetting"] == 0 for record in records)


def short_names(setting: Setting) -> dict[str, str]:
    """Return a name for every label: the method without its options, if it has only one variant here."""
    methods = [printable(records[0].spec.method) for records in setting.methods.values()]
    return {
        label: method if methods.count(method) == 1 else label
        for label, method in zip(setting.methods, methods, strict=True)
    }


def cards(setting: Setting) -> list[dict[str, Any]]:
    """Return the three cards of the first screen, each with a title, a large text and lines."""
    return [_best(setting), _forgets(setting), _trust(setting)]


def _listed(lines: list[str]) -> list[str]:
    """Return the first lines, and how many others there are."""
    return lines if len(lines) <= MOST else [*lines[: MOST - 1], count_text(len(lines) - MOST + 1, "other")]


def _best(setting: Setting) -> dict[str, Any]:
    values = accuracies(setting)
    means = {row.label: value.mean for row in setting.rows if not row.reference and (value := row.measures["accuracy"])}
    best = leaders(values)
    if not means:
        return {"title": "Best", "large": "no method", "lines": ["There are only references."]}
    if len(best) == 1:
        large, how = best[0], f"Ahead of {all_others(values)}: paired t-tests over seeds, corrected after Holm, p < 0.05."
    elif best:
        large, how = f"{len(best)} tied", "No difference is shown between them: paired t-tests over seeds, after Holm."
        how += _not_compared(values)
    else:
        large = max(means, key=lambda name: means[name])
        few = f"Too few seeds to name a winner: {FEWEST} or more are needed."
        how = few if len(values) > 1 else "The only method."
    names = short_names(setting)
    if len(best) > 1:
        lines = [f"{names[name]}: {with_unit(setting.score, means[name])}" for name in best]
    else:
        lines = [with_unit(setting.score, means[large])]
        large = names[large]
    return {"title": f"Best average {setting.score}", "large": large, "lines": [*_listed(lines), how]}


def _not_compared(values: Mapping[str, Mapping[int, float]]) -> str:
    """Return a sentence if some methods are in no comparison."""
    few = any(len(found) < FEWEST for found in values.values())
    return f" Methods with fewer than {count_text(FEWEST, 'seed')} are not compared." if few else ""


def _forgets(setting: Setting) -> dict[str, Any]:
    if len(setting.tasks) < 2:
        return {"title": "Forgetting", "large": "—", "lines": ["With a single task, nothing can be forgotten."]}
    measure = measure_of(setting.score, "accuracy")
    found = {row.label: value.mean for row in setting.rows if not row.reference and (value := row.measures["forgetting"])}
    none = [name for name in found if forgets_nothing(setting.methods[name])]
    rest = sorted((name for name in found if name not in none), key=lambda name: found[name])
    unit = " points" if measure.unit == "%" else ""
    names = short_names(setting)
    lines = [f"{join_names(_listed([names[name] for name in none]))}: exactly zero, checked bit for bit"] if none else []
    ends = rest if len(rest) <= 3 else [rest[0], rest[-1]]
    lines += [f"{names[name]}: {format_number(measure, found[name])}{unit}" for name in ends]
    large = (
        f"{len(none)} of {len(found)} forget nothing"
        if none
        else f"{format_number(measure, found[rest[0]])}{unit} at best"
        if rest
        else "—"
    )
    if none and len(found) == 1:
        large = "nothing"
    return {"title": "Forgetting", "large": large, "lines": lines, "checked": bool(none)}


def _trust(setting: Setting) -> dict[str, Any]:
    """Return the card that says how far to trust the numbers; a line that asks for care starts with "!"."""
    seeds = sorted({len(row.seeds) for row in setting.rows})
    enough = seeds[0] >= FEWEST
    count = count_text(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    doubts = cautions(setting)
    devices = sorted({printable(r.versions.get("device", "unknown")) for r in setting.records})
    sample = setting.spec.benchmark_options.get("data") == "sample"
    lines = [
        f"{'✓' if enough else '!'} {count} per method" + ("" if enough else f", fewer than {FEWEST}"),
        _regime_line(setting),
        "! a sample of the data" if sample else "✓ the whole data set",
        f"{'✓' if len(devices) == 1 else '!'} device: {', '.join(devices)}",
    ]
    if doubts:
        lines.append(f"! {count_text(len(doubts), 'caution')}, below")
    good = sum(line.startswith("✓") for line in lines)
    return {"title": "Trust", "large": f"{good} of {len(lines)} checks", "lines": lines}


def _regime_line(setting: Setting) -> str:
    """Return how the training compares with the HAT paper's: at most 200 epochs, until the validation loss stops falling."""
    if setting.spec.regime.get("schedule") != "plateau":
        return f"✓ a regime of its own: {length_text(setting)} per task"
    whole = allowed_epochs(setting) >= HAT_EPOCHS
    return "✓ trained as long as the HAT paper allows" if whole else "! shorter training than the HAT paper's"


def headline(setting: Setting) -> str:
    """Return the finding in one sentence, from the statistics."""
    values = accuracies(setting)
    means = {row.label: value.mean for row in setting.rows if not row.reference and (value := row.measures["accuracy"])}
    if not means:
        return f"References on {setting.title}"
    after = f"after {count_text(len(setting.tasks), 'task')}" if len(setting.tasks) > 1 else "on one task"
    best = leaders(values)
    first = best[0] if best else max(means, key=lambda name: means[name])
    score = f"{with_unit(setting.score, means[first])} average {setting.score} {after}".replace(" %", "\u00a0%")
    names = short_names(setting)
    first, best = names[first], [names[name] for name in best]
    if len(best) == 1:
        return f"{first} is ahead of {all_others(values)}: {score}"
    if best:
        tied = f"{join_names(_listed(best))} are tied for the best average {setting.score} {after}"
        return tied + _not_compared(values).rstrip(".").replace(" Methods", "; methods")
    return f"{first}: {score}" + ("; too few seeds to name a winner" if len(values) > 1 else "")


def setup(setting: Setting) -> dict[str, Any]:
    """Return what decided the numbers: options that differ from the defaults, the others, and facts about the runs."""
    spec = setting.spec
    sources: list[tuple[str, Mapping[str, Any], dict[str, Any]]] = [
        ("run", spec.written, {name: getattr(Spec, name) for name in RUN_OPTIONS}),
        ("regime", spec.regime, defaults_of(Regime)),
        ("benchmark", spec.benchmark_options, defaults_of(BENCHMARKS.get(spec.benchmark))),
        ("network", spec.network_options, defaults_of(network_function(spec.network))),
    ]
    changed: list[list[str]] = []
    same: list[list[str]] = []
    for kind, values, defaults in sources:
        for name in dict.fromkeys([*defaults, *(values if kind != "run" else ())]):
            value, default = values.get(name, defaults.get(name)), defaults.get(name)
            row = [kind, name.replace("_", " "), option_text(value) or "none", option_text(default) or "none"]
            (same if value == default and name in defaults else changed).append(row)
    return {"changed": changed, "same": same, "facts": _facts(setting)}


def _facts(setting: Setting) -> list[tuple[str, str]]:
    records = setting.records
    facts = {"benchmark": setting.spec.benchmark, "network": setting.spec.network, "seeds": option_text(setting.seeds)}
    names = dict.fromkeys(name for record in records for name in record.versions)
    versions = {name: sorted({str(record.versions.get(name, "?")) for record in records}) for name in names}
    facts["versions"] = ", ".join(f"{name} {' / '.join(values)}" for name, values in versions.items())
    if reached := [f"seed {r.spec.seed} {r.pretraining.valid_accuracy:.1%}" for r in records
                   if r.pretraining and r.pretraining.valid_accuracy is not None]:  # fmt: skip
        facts["pretraining"] = f"accuracy on validation data: {', '.join(dict.fromkeys(reached))}"
    if halved := [f"{r.spec.method} seed {r.spec.seed} {r.halvings}" for r in records if r.halvings]:
        facts["learning rates"] = "; ".join(halved)
    if held := dict.fromkeys(f"{r.spec.method} {r.held}" for r in records if r.held):
        facts["held whole"] = "; ".join(held)
    total = sum(record.seconds.total or 0 for record in records)
    facts["time"] = f"{duration(total)} for {count_text(len(records), 'run')} together"
    return [(name, printable(text)) for name, text in facts.items()]


def certificates(setting: Setting) -> list[dict[str, Any]]:
    """Return, for every method that guarantees its finished tasks, what was checked and which models were kept."""
    rows = []
    for row in setting.rows:
        records = setting.methods[row.label]
        if not all(map(checked, records)) or len(setting.tasks) < 2:
            continue
        zero = sum(record.summary["forgetting"] == 0 for record in records)
        models = [f"{record.name}: {name} {digest[:12]}" for record in records for name, digest in record.models.items()]
        rows.append({"label": row.label, "runs": len(records), "zero": zero, "models": models})
    return rows


def reuse_tables(setting: Setting) -> list[dict[str, Any]]:
    """Return, for every method with masks, a row per task: what it uses of all weights, and what it shares with each other.

    Values are means over seeds, in percent.
    """
    tables = []
    for row in setting.rows:
        found = capacities(setting.methods[row.label])
        if not found:
            continue
        reuse, own, used = (np.mean([getattr(one, name) for one in found], axis=0) for name in ("reuse", "own", "used"))
        free = 100 * (1 - float(used[-1]))
        full = [layer.title for layer in found[0].layers if 1 - layer.used[-1] < 0.05]
        finding = f"{row.label} leaves {free:.0f} % of the weights free after {count_text(len(own), 'task')}"
        finding += f"; under 5 % is free in {join_names(full[:6])}" + (" and more" if len(full) > 6 else "") if full else ""
        rows = [[f"{100 * own[i]:.0f}", *(f"{100 * value:.0f}" for value in reuse[i])] for i in range(len(own))]
        tables.append({"label": row.label, "finding": printable(finding), "rows": rows})
    return tables
