"""What each task of a method with masks uses of the weights, and its figure for papers."""

import numpy as np
from matplotlib.figure import Figure

from hatrack.experiments.record import Record
from hatrack.inspection.capacity import Capacity
from hatrack.reporting.drawing import MUTED
from hatrack.reporting.tables import Setting
from hatrack.text import shorten

NEW, REUSED = "#0b7d62", "#8fd0c0"


def capacities(records: list[Record]) -> list[Capacity]:
    """Return what the records hold about the use of weights; those of methods without masks and old ones hold nothing."""
    return [Capacity.from_dict(record.weights_used) for record in records if record.weights_used]


def capacity_panel(setting: Setting, label: str) -> Figure | None:
    """Draw what each task uses of the weights; None for a method without masks.

    Each bar is a task, in percent of the weights of the trunk: what it was the first to use, and what it uses of earlier
    tasks. The line is what all tasks so far use together. Means over seeds.
    """
    found = capacities(setting.methods[label])
    if not found:
        return None
    own, used = (100 * np.mean([getattr(one, name) for one in found], axis=0) for name in ("own", "used"))
    new = np.diff(used, prepend=0.0)
    figure = Figure(figsize=(3.4, 2.4), layout="constrained")
    axes = figure.add_subplot()
    x = np.arange(len(own)) + 1
    axes.bar(x, new, color=NEW, width=0.72, label="new")
    axes.bar(x, own - new, bottom=new, color=REUSED, width=0.72, label="reused")
    axes.plot(x, used, color=MUTED, marker="." if len(x) < 30 else "", label="all tasks so far")
    axes.set_xticks(x if len(x) <= 10 else x[:: -(-len(x) // 10)])
    axes.set(xlabel="task", ylabel="weights, %", ylim=(0, 104))
    axes.grid(False, axis="x")
    axes.set_title(shorten(label, 40), loc="left", fontsize=8)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
