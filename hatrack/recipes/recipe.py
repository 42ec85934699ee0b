"""What a recipe is: the tables and figures of a paper as rows of runs, with the published numbers and claims."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from matplotlib.figure import Figure

from hatrack.engine.choice import Precision
from hatrack.experiments.spec import Run
from hatrack.options import nearest
from hatrack.recipes.quantities import Quantity

if TYPE_CHECKING:
    from hatrack.experiments.statistics import Differences
    from hatrack.recipes.results import Results

SEEDS = (0, 1, 2)  # of a row that names no others


class Published(NamedTuple):
    """A number that a paper gives: the mean, and the standard deviation over its runs if it gives one, and how many."""

    mean: float
    std: float | None = None
    runs: int = 1


def percent(mean: float, std: float | None = None, runs: int = 1) -> Published:
    """Return a published percentage; records hold fractions of 1."""
    return Published(mean / 100, None if std is None else std / 100, runs)


@dataclass(frozen=True)
class Row:
    """A row of a table: a run at several seeds, and what the paper says about it.

    Attributes:
        label: its name in the table; rows of one part have different ones.
        run: what is run, at any seed.
        seeds: the seeds that make the row complete.
        published: the numbers of the paper, by the key of a `Quantity`.
        note: what the paper does otherwise, or what is not known.
        x: its place on the x axis of a figure that shows a sweep.
        first: the row is about so many tasks from the run's first, whose results are in the record of the whole; 0: all.
        joint: the labels of the rows that are its upper reference, in order of preference; none: it has no forgetting ratio.
        random: the label of the row that is its lower reference.
        reference: whether it is such a reference itself, and no approach.
    """

    label: str
    run: Run
    seeds: tuple[int, ...] = SEEDS
    published: Mapping[str, Published] = field(default_factory=dict)
    note: str = ""
    x: float | None = None
    first: int = 0
    joint: tuple[str, ...] = ("joint", "joint, all tasks")
    random: str = "random"
    reference: bool = False

    def at(self, seed: int) -> Run:
        """Return its run at a seed."""
        return replace(self.run, seed=seed)


class Comparison(NamedTuple):
    """What a claim compares: one row with others, or with a number.

    Attributes:
        quantity: by which number.
        label: the row that is said to have more of it, or less.
        others: the rows that it is compared with; none: it is said to have more than the number `by`.
        by: by how much at least.
        less: whether it is said to have less.
        some: whether that is said of some of the others, of one at least, and not of all.
    """

    quantity: Quantity
    label: str
    others: tuple[str, ...]
    by: float = 0.0
    less: bool = False
    some: bool = False


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that numbers can bear out or contradict.

    Attributes:
        text: the sentence.
        holds: whether it does, by the means of the results; None if a row is missing.
        compared: what it compares, for tests over seeds; empty if it compares no rows.
        values: a number per seed that is above 0 if it holds, for such a test of another claim; None if there is none.
    """

    text: str
    holds: "Callable[[Results], bool | None]"
    compared: tuple[Comparison, ...] = ()
    values: "Callable[[Results], Differences] | None" = None


def above(text: str, quantity: Quantity, label: str, *others: str, by: float = 0.0) -> Claim:
    """Return the claim that a row has more of a quantity than others, by a margin."""
    compared = Comparison(quantity, label, others, by)
    return Claim(text, lambda results: results.holds(compared), (compared,))


def above_some(text: str, quantity: Quantity, label: str, *others: str) -> Claim:
    """Return the claim that a row has more of a quantity than some of the others, than one at least."""
    compared = Comparison(quantity, label, others, some=True)
    return Claim(text, lambda results: results.holds(compared), (compared,))


def below(text: str, quantity: Quantity, label: str, *others: str, by: float = 0.0) -> Claim:
    """Return the claim that a row has less of a quantity than others, by a margin."""
    compared = Comparison(quantity, label, others, by, less=True)
    return Claim(text, lambda results: results.holds(compared), (compared,))


def exceeds(text: str, quantity: Quantity, label: str, number: float) -> Claim:
    """Return the claim that a row has more of a quantity than a number."""
    return above(text, quantity, label, by=number)


def under(text: str, quantity: Quantity, label: str, number: float) -> Claim:
    """Return the claim that a row has less of a quantity than a number."""
    return below(text, quantity, label, by=-number)


class Grid(NamedTuple):
    """A table that follows from the results of a part, beside its main table; every cell is text."""

    title: str
    head: list[str]
    rows: list[list[str]]


class Plot(NamedTuple):
    """A figure that follows from the results of a part."""

    name: str  # of the file, after those of recipe and part
    title: str
    draw: "Callable[[Results], Figure | None]"  # None: the records for it are not there


@dataclass(frozen=True)
class Part:
    """A table or figure of a paper.

    Attributes:
        name: the word for `--only`.
        title: the heading on the page.
        text: what the paper does, and what is done otherwise here and why.
        rows: the runs.
        columns: what is shown of each run.
        tolerance: up to which difference a number is close to the published one, by the key of the quantity.
        order_by: the quantity by whose order the approaches are compared with the paper's; None: number by number.
        claims: sentences of the paper that the results bear out or contradict.
        plots: the figures.
        grids: further tables.
        precision: of matrix products on a GPU, unless the user asks for another.
        flatness: whether the flatness of its runs is measured, for which they keep the model after each task.
    """

    name: str
    title: str
    text: str
    rows: tuple[Row, ...] = ()
    columns: tuple[Quantity, ...] = ()
    tolerance: Mapping[str, float] = field(default_factory=dict)
    order_by: Quantity | None = None
    claims: tuple[Claim, ...] = ()
    plots: tuple[Plot, ...] = ()
    grids: "tuple[Callable[[Results], Grid | None], ...]" = ()
    precision: Precision = "tf32"
    flatness: bool = False

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        if len(labels) != len(set(labels)):
            raise ValueError(f"two rows of the part {self.name} have one label")
        keys = {quantity.key for quantity in self.columns}
        for row in self.rows:
            if unknown := set(row.published) - keys:
                raise ValueError(f"{self.name}, {row.label}: no column is {min(unknown)!r}; {nearest(min(unknown), keys)}")

    def with_seeds(self, seeds: tuple[int, ...]) -> Self:
        """Return the part with these seeds in every row."""
        return replace(self, rows=tuple(replace(row, seeds=seeds) for row in self.rows))

    def of_methods(self, names: tuple[str, ...]) -> Self:
        """Return the part with the rows of these methods alone."""
        return replace(self, rows=tuple(row for row in self.rows if row.run.method in names))


@dataclass(frozen=True)
class Recipe:
    """Everything that is reproduced of a paper.

    Attributes:
        name: the word for `hatrack reproduce`.
        title: the heading of the page.
        paper: who wrote it, and when.
        text: what the page shows, in a few sentences.
        parts: the tables and figures.
    """

    name: str
    title: str
    paper: str
    text: str
    parts: tuple[Part, ...]

    def only(self, names: tuple[str, ...]) -> list[Part]:
        """Return the parts of these names, all if there are none; an error names the nearest part."""
        known = {part.name: part for part in self.parts}
        for name in names:
            if name not in known:
                raise ValueError(f"{self.name} has no part {name!r}; {nearest(name, known)}")
        return [known[name] for name in names] if names else list(self.parts)
