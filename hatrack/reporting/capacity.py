"""The part of the page about capacity: what each task of a method with masks uses of the weights, and what is left."""

import numpy as np
from matplotlib.figure import Figure

from hatrack.experiments.record import Record
from hatrack.inspection.capacity import Capacity
from hatrack.reporting.drawing import MUTED, PALETTE, Scale, accuracy_panel
from hatrack.reporting.tables import Setting

NEW, REUSED = PALETTE[2], PALETTE[5]
MOST = 20  # tasks in a table of reuse
TEXT = (
    "Each bar is a task, in percent of the weights of the trunk. Dark is what the task was the first to use, light what it "
    "uses of earlier tasks; the line is what all tasks so far use together. Means over seeds."
)
REUSE = (
    "Of the weights that the task of a row uses, the share that the task of a column uses as well, in percent, and how much "
    "of the trunk each uses. Means over seeds."
)


def capacities(records: list[Record]) -> list[Capacity]:
    """Return what the records hold about the use of weights; those of methods without masks and old ones hold nothing."""
    return [Capacity.from_dict(record.weights_used) for record in records if record.weights_used]


def capacity_panel(setting: Setting, label: str) -> Figure | None:
    """Draw what each task uses of the weights; None for a method without masks."""
    found = capacities(setting.methods[label])
    if not found:
        return None
    own, used = (100 * np.mean([getattr(one, name) for one in found], axis=0) for name in ("own", "used"))
    new = np.diff(used, prepend=0.0)
    figure, axes = accuracy_panel(label, 2.2, Scale(0.0))
    x = np.arange(len(own)) + 1
    axes.bar(x, new, color=NEW, width=0.72)
    axes.bar(x, own - new, bottom=new, color=REUSED, width=0.72)
    axes.plot(x, used, color=MUTED, linewidth=1.4, marker="." if len(x) < 30 else "")
    axes.set_xticks(x if len(x) <= 10 else x[:: -(-len(x) // 10)])
    axes.set_xlabel("task")
    return figure
