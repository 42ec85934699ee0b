"""The part of the page about capacity: what each task of a method with masks uses of the weights, and what is left."""

import numpy as np
from matplotlib.figure import Figure

from hatrack.experiments.record import Record
from hatrack.inspection.capacity import Capacity
from hatrack.reporting.drawing import MUTED, PALETTE, Drawing, LineStyle, Scale, accuracy_panel, cell_colours
from hatrack.reporting.elements import coloured_label, table, unbroken
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


def capacity_part(setting: Setting, labels: list[str], drawings: list[Drawing], styles: dict[str, LineStyle]) -> str:
    """Return the figures and the tables of reuse; empty if no method of the setting has masks."""
    figures = [f"<figure>{drawing.svg}</figure>" for drawing in drawings if drawing.kind == "capacity"]
    if not figures:
        return ""
    tables = "".join(_reuse(setting, label, styles) for label in labels if capacities(setting.methods[label]))
    count = min(MOST, len(setting.tasks)) + 1
    sizes = f"--wide:{150 + 62 * count}px;--narrow:{90 + 36 * count}px;--letters:{min(8.5, 120 / count):.1f}pt"
    matrices = f'<p>{REUSE}</p><div class="grid matrices" style="{sizes}">{tables}</div>'
    return f'<p>{TEXT}</p><div class="grid small">{"".join(figures)}</div>{matrices}'


def _reuse(setting: Setting, label: str, styles: dict[str, LineStyle]) -> str:
    found = capacities(setting.methods[label])
    reuse, own = (np.mean([getattr(one, name) for one in found], axis=0) for name in ("reuse", "own"))
    names = setting.tasks[:MOST]
    heads = ["<td>of</td>", '<th scope="col">all</th>', *(f'<th scope="col">{unbroken(name)}</th>' for name in names)]
    rows = []
    for i, name in enumerate(names):
        cells = "".join(_cell(reuse[i, j], faded=i == j) for j in range(len(names)))
        rows.append(f'<tr><th scope="row">{unbroken(name, 18)}</th>{_cell(own[i])}{cells}</tr>')
    return table(heads, ["<tbody>", *rows, "</tbody>"], "matrix", coloured_label(label, styles))


def _cell(share: float, *, faded: bool = False) -> str:
    background, colour = cell_colours(share, 0.0, faded)
    return f'<td style="background:{background};color:{colour}">{100 * share:.0f}</td>'
