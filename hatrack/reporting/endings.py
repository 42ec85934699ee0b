"""What is said in the terminal when runs have ended: what to doubt, which methods are tied, and which layers are full."""

from collections.abc import Sequence

from hatrack.experiments.record import Record
from hatrack.experiments.statistics import leaders
from hatrack.reporting.differences import cautions
from hatrack.reporting.tables import Setting, accuracies
from hatrack.reporting.words import count_text, join_names
from hatrack.text import SCARCE, is_held, printable

LAYERS = 5  # that are named


def endings(setting: Setting) -> list[str]:
    """Return what is to be said about the runs of a setting, a sentence each.

    Args:
        setting: one of `settings(records)`.
    """
    best = leaders(accuracies(setting))
    tied = [f"tied for the highest {setting.score}: {join_names(best)}"] if len(best) > 1 else []
    found = [f"caution: {text}" for text in cautions(setting)] + tied
    for label, records in setting.methods.items():
        found += [f"{label}: {text}" for text in (capacity_text(records), *_held(records)) if text]
        found += [f"{r.spec.method} seed {r.spec.seed}: {r.halvings}" for r in records if r.halvings]
    return [printable(text) for text in found]


def _held(records: Sequence[Record]) -> list[str]:
    """Return the sentences about parameters that were held, each once."""
    return [*dict.fromkeys(record.held for record in records if record.held)]


def capacity_text(records: Sequence[Record]) -> str:
    """Return how full the fullest layer is, the mean over seeds; and by name the layers that are full, with what to do."""
    shares: dict[str, list[float]] = {}
    for record in records:
        for name, share in _taken(record).items():
            shares.setdefault(name, []).append(share)
    if not shares:
        return ""
    means = {name: sum(found) / len(found) for name, found in shares.items()}
    fullest = max(means, key=lambda name: means[name])
    text = f"the fullest layer, {fullest}, is {means[fullest]:.0%} taken"
    full = [name for name, share in means.items() if 1 - share < SCARCE]
    if not full:
        return text
    advice = "a wider network or a larger c" if "c" in records[0].spec.method_options else "a wider network"
    more = f" and {count_text(len(full) - LAYERS, 'other layer')}" if len(full) > LAYERS else ""
    return f"{text}; under {SCARCE:.0%} is free in {'; '.join(full[:LAYERS])}{more}: {advice} leaves more room"


def _taken(record: Record) -> dict[str, float]:
    """Return the share of every layer that is taken at the end, by a name that a person knows where there is one."""
    titles = {layer["name"].removesuffix(".weight"): layer["title"] for layer in record.weights_used.get("layers", [])}
    last = record.usage[-1] if record.usage else {}
    known = {name: share for name, share in last.items() if share is not None and not is_held(name)}
    return {titles.get(name.removeprefix("trunk.").removesuffix(".weight"), name): share for name, share in known.items()}
