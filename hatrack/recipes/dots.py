"""The figure of one quantity of the rows of a part against others: a panel for each of these, a dot for each row."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from hatrack.recipes.plots import styles
from hatrack.recipes.quantities import Quantity
from hatrack.recipes.recipe import Plot
from hatrack.recipes.results import Results
from hatrack.reporting.drawing import MUTED, LineStyle
from hatrack.reporting.measures import MeanStd


def dots(name: str, title: str, quantity: Quantity, against: Sequence[Quantity]) -> Plot:
    """Return the plot of a quantity of every row against other quantities, means over seeds with standard deviations.

    Args:
        name: of the file.
        title: of the figure.
        quantity: the y axis.
        against: the x axes, which are logarithmic.
    """

    def figure(results: Results) -> Figure | None:
        y = {label: found for label in results.rows if (found := results.summary(label, quantity))}
        looks = styles(results)
        drawn = Figure(figsize=(2.6 * len(against) + 2.4, 3.1), layout="constrained")
        panels = drawn.subplots(1, len(against), sharey=True, squeeze=False)[0]
        for axes, other in zip(panels, against, strict=True):
            axes.set_xscale("log")  # first: it would forget the ticks
            pairs = {label: (found, y[label]) for label in y if (found := results.summary(label, other))}
            if not pairs:
                return None
            _draw(axes, pairs, looks)
            axes.set_xlabel(other.measure.title.lower())
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        whole = quantity.measure.title
        panels[0].set_title(whole[:1].lower() + whole[1:], loc="left", fontsize=11, color=MUTED)
        panels[-1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        return drawn

    return Plot(name, title, figure)


def _draw(axes: Axes, pairs: dict[str, tuple[MeanStd, MeanStd]], looks: dict[str, LineStyle]) -> None:
    for label, (x, y) in pairs.items():
        axes.errorbar(x.mean, y.mean, y.std or 0, x.std or 0, color=looks[label].colour, marker=looks[label].marker or ".",
                      linestyle="", capsize=2, elinewidth=1, label=label)  # fmt: skip
