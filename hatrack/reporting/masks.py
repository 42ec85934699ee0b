"""Pictures of the masks of a method: units by task for HAT, the weights of every task for PMASK and PackNet."""

import io
import re
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from hatrack.files.atomic import write
from hatrack.inspection.layers import layer_titles, title_of
from hatrack.methods.method import Method
from hatrack.reporting.drawing import STYLE
from hatrack.text import shorten

COLOURS = ListedColormap(["#eef1f4", "#0072B2"])  # not used, used
WIDEST = 1200  # units or weights in a row of a picture; of a larger layer an even sample is drawn


def draw_masks(method: Method, folder: Path) -> int:
    """Draw the masks of every layer of a method into PNG files.

    Args:
        method: a method with masks.
        folder: where the pictures go; it is made if it is not there.

    Returns:
        How many pictures were drawn.
    """
    masks = {name: method.masks(task) for task, name in method.history.items()}
    titles = layer_titles(method.net.trunk)
    layers = [name for name, mask in next(iter(masks.values()), {}).items() if mask.numel() > 1]
    folder.mkdir(parents=True, exist_ok=True)
    for number, layer in enumerate(layers):
        title = titles.get(layer) or title_of(layer, titles)
        rows = {task: found[layer] for task, found in masks.items()}
        name = re.sub(r"[^\w.-]+", "-", f"{number:02d}-{title}")[:60]
        with style.context([STYLE, {"axes.grid": False}]):
            figure, file = _weights(title, rows) if mask_dim(rows) > 1 else _units(title, rows), io.BytesIO()
            figure.savefig(file, format="png", metadata={"Software": None})
        write(folder / f"{name}.png", file.getvalue())
    return len(layers)


def mask_dim(rows: dict[str, Tensor]) -> int:
    """Return the number of dimensions of the masks of a layer."""
    return next(iter(rows.values())).dim()


def _sample(count: int) -> np.ndarray:
    """Return the places that are drawn: all, or an even sample of them."""
    return np.unique(np.linspace(0, count - 1, min(count, WIDEST)).round().astype(int))


def _units(title: str, rows: dict[str, Tensor]) -> Figure:
    """Draw which units of a layer each task uses: a row per task, a column per unit, sorted by who uses them."""
    values = np.stack([row.cpu().numpy() for row in rows.values()])
    order = np.lexsort(~values[::-1])  # first those of the first task, among them those of the second, and so on
    shown = values[:, order][:, _sample(values.shape[1])]
    figure = Figure(figsize=(7.5, 1.0 + 0.28 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=COLOURS, vmin=0, vmax=1)
    shares = [f"{shorten(name, 24)}  {row.mean():.0%}" for name, row in zip(rows, values, strict=True)]
    axes.set_yticks(range(len(rows)), shares)
    axes.set_title(f"{title}: units that each task uses", loc="left")
    axes.set_xlabel("units, sorted by the first task that uses them")
    axes.set_xticks([])
    return figure


def _weights(title: str, rows: dict[str, Tensor]) -> Figure:
    """Draw which weights of a layer each task uses: a panel per task, a row per output, a column per input."""
    columns = min(5, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(1.9 * columns + 0.4, 2.1 * lines + 0.5), layout="constrained")
    for number, (name, mask) in enumerate(rows.items()):
        values = mask.cpu().numpy().reshape(mask.shape[0], -1)
        axes = figure.add_subplot(lines, columns, number + 1)
        shown = values[_sample(values.shape[0])][:, _sample(values.shape[1])]
        axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=COLOURS, vmin=0, vmax=1)
        axes.set_title(f"{shorten(name, 18)}  {values.mean():.0%}", loc="left", fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.suptitle(f"{title}: weights that each task uses", x=0.01, ha="left")
    return figure
