"""The quick version of a recipe: the same methods and the same page in minutes, on the images that come with the package."""

from dataclasses import replace
from typing import Any

from hatrack.benchmarks import BENCHMARKS
from hatrack.experiments.spec import Run
from hatrack.options import parameters
from hatrack.recipes.quantities import ratio
from hatrack.recipes.recipe import Part, Recipe, Row

TASKS = 3  # of a sequence, at most, where their number can be chosen
STAND_IN = 5  # pairs of digits, in place of sequences whose images do not come with the package
BATCH = 200  # of deep networks, whose steps take long however small they are
EXAMPLES = 50  # training images of a task on which the loss is measured after each task
SMALL: dict[str, dict[str, Any]] = {  # options of small networks; those that are not named here become a small perceptron
    "mlp": {"widths": (100, 100)},
    "resnet18": {"width": 4},
    "resnet34": {"width": 4},
    "resnet50": {"width": 4},
    "vgg": {"filters": (8, 16), "widths": (64, 64)},
}
NOTICE = (
    "This is the quick version: one short epoch per task, small networks, one seed, and the sample images that come with "
    "the package: five pairs of digits stand in for every sequence of other images, whatever the headings say. It shows "
    "that everything runs and what the page looks like. Its numbers are not the paper's and must not be compared with them: "
    "one epoch is too short for gates, for example, so that HAT looks worse than it is."
)


def quick(recipe: Recipe) -> Recipe:
    """Return the quick version of a recipe: every row at one seed, small and short."""
    return replace(recipe, parts=_without_repeats([_part(part) for part in recipe.parts]))


def _without_repeats(parts: list[Part]) -> tuple[Part, ...]:
    """Return the parts; of those that show the same of the same runs as one before them, a sentence that says so."""
    first: dict[Any, Part] = {}
    found = []
    for part in parts:
        shown = tuple((row.label, row.run.name, row.first) for row in part.rows), tuple(q.key for q in part.columns)
        before = first.setdefault(shown, part) if part.rows else part
        same = f"In the quick version these are the runs of “{before.title}”, and its numbers are not shown again."
        found.append(part if before is part else replace(part, text=same, columns=(), plots=(), grids=()))
    return tuple(found)


def _part(part: Part) -> Part:
    rows = tuple(_row(row) for row in part.rows)
    columns = {q.key: q for q in (ratio() if q.key.startswith("ratio") else q for q in part.columns)}
    grids = part.grids if part.columns else ()  # without columns they compare with published numbers
    return replace(
        part, text="", rows=_distinct(rows), columns=tuple(columns.values()), order_by=None, claims=(), grids=grids
    )


def _distinct(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the rows without those that became the same tasks of the same run as one before them."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        found.setdefault((row.run.name, row.first), row)
    return tuple(found.values())


def _row(row: Row) -> Row:
    run = quick_run(row.run)
    first = min(row.first, run.benchmark_options.get("tasks", row.first))
    return replace(row, run=run, seeds=(0,), published={}, note="", first=first)


def quick_run(run: Run) -> Run:
    """Return the quick version of a run.

    Args:
        run: a run as the paper has it.

    Returns:
        The same method with the same options, on a few small tasks and for one epoch each.
    """
    network = run.network if run.network in SMALL else "mlp"
    known = parameters(BENCHMARKS.find(run.benchmark))
    benchmark, options = run.benchmark, {**run.benchmark_options, "data": "sample"}
    if "data" not in known:  # its images do not come with the package
        benchmark, options = "smnist", {"data": "sample", "tasks": STAND_IN}
    elif "tasks" in known:
        options["tasks"] = min([TASKS, run.benchmark_options["tasks"], *known["tasks"].choices])
    tasks = options.get("tasks", STAND_IN)
    dropouts = {k: v for k, v in run.network_options.items() if "dropout" in k and network == run.network}
    method = dict(run.method_options)
    if method.get("at"):
        method["at"] = tuple(sorted({min(t, tasks) for t in method["at"]}))
    if "retrain" in method:
        method["retrain"] = 1
    return replace(
        run,
        benchmark=benchmark,
        benchmark_options=options,
        network=network,
        network_options={**SMALL[network], **dropouts},
        method_options=method,
        train_examples=EXAMPLES,
        regime=replace(run.regime, epochs=1, steps=0, batch=run.regime.batch if network == "mlp" else BATCH),
        pretrain="mnist" if run.pretrain else "",
        only_task="0" if run.only_task else "",
    )
