"""What EWC's penalty and its Fisher cost (002, "Impact on training time"), as `python -m speed.penalty` measured it.

These are no runs, so they have no records: the command writes a file of its own into the folder `timings` beside them.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.figure import Figure

from hatrack.files.atomic import read_bytes
from hatrack.recipes.recipe import Claim, Grid, Part, Plot
from hatrack.reporting.drawing import MUTED, PALETTE, TEXT
from hatrack.reporting.measures import MISSING

if TYPE_CHECKING:
    from hatrack.recipes.results import Results

TIMINGS = "timings"  # the folder of these files within that of the pages
EPOCHS = 30  # of a task in 002
SMALL, FLAT = 0.1, 1.25  # what is overshadowed; up to which factor a time does not grow, or is not noticeably longer
OWN = 5  # tasks that the report learns
GROWTH = (1.6, 2.4)  # of what is proportional to the number of tasks, when that doubles


class StepTimes(NamedTuple):
    """Seconds of a step after so many tasks: without a penalty, with L2 (NaN in older files), with one spring per
    weight, with one per task."""

    tasks: int
    plain: float
    l2: float
    summed: float
    naive: float


@dataclass(frozen=True)
class PenaltyTimes:
    """What `python -m speed.penalty` measured on one machine.

    Attributes:
        where: network, batch, device and version of torch, as a text.
        steps: the times of a step, by the number of tasks.
        images: how many images the Fisher was measured on.
        fisher: its seconds.
        epoch: the seconds of an epoch of training on as many images.
    """

    where: str
    steps: tuple[StepTimes, ...]
    images: int
    fisher: float
    epoch: float

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "PenaltyTimes":
        """Read what the command writes."""
        network, batch, device, version = (found[name] for name in ("network", "batch", "device", "torch"))
        where = f"{network}, batch {batch}, {device}, torch {version}"
        names = ("sgd", "l2", "summed", "naive")
        steps = tuple(StepTimes(int(s["tasks"]), *(float({"l2": math.nan, **s}[n]) for n in names)) for s in found["steps"])
        fisher = found["fisher"]
        return cls(where, steps, int(fisher["images"]), float(fisher["fisher"]), float(fisher["epoch"]))

    @property
    def growth(self) -> float:
        """How many times as long the naive penalty takes after the last number of tasks as after half of them."""
        last = self.steps[-1]
        half = next(step for step in self.steps if 2 * step.tasks == last.tasks)
        return (last.naive - last.plain) / (half.naive - half.plain)


def read_timings(folder: Path) -> dict[str, PenaltyTimes]:
    """Return the measurements in a folder of pages by the names of their files; none if there are none."""
    return {path.stem: _read(path) for path in sorted((folder / TIMINGS).glob("*.json"))}


def _read(path: Path) -> PenaltyTimes:
    try:
        return PenaltyTimes.from_dict(json.loads(read_bytes(path)))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no file of python -m speed.penalty: {error}") from None


Timings = Mapping[str, PenaltyTimes]


def step_times(timings: Timings) -> Grid | None:
    """Return the milliseconds of a step against the number of tasks."""
    rows = [
        [
            found.where,
            str(step.tasks),
            *(_number(1e3 * seconds, 0 if seconds >= 0.1 else 2) for seconds in step[1:]),
            *(_number(r, 2) for r in (step.summed / step.plain, step.summed / step.l2, step.naive / step.summed)),
        ]
        for found in timings.values()
        for step in found.steps
    ]
    heads = ["measured on", "earlier tasks", "no penalty", "L2", "one spring per weight", "one per task"]
    heads += ["one spring / none", "one spring / L2", "one per task / one spring"]
    return Grid("Milliseconds per step (medians)", heads, rows) if rows else None


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else MISSING


def fisher_times(timings: Timings) -> Grid | None:
    """Return the seconds of the Fisher against those of training."""
    rows = [
        [
            found.where,
            f"{found.images:,}",
            f"{found.fisher:.2f}",
            f"{found.epoch:.2f}",
            f"{found.fisher / found.epoch:.2f}",
            f"{100 * found.fisher / found.epoch / EPOCHS:.1f}",
        ]
        for found in timings.values()
    ]
    heads = ["measured on", "images", "Fisher, s", "an epoch, s", "Fisher / epoch", f"of {EPOCHS} epochs, %"]
    return Grid("The Fisher against training on the same images (medians)", heads, rows) if rows else None


def draw_step_times(timings: Timings) -> Figure | None:
    """Draw the milliseconds of a step against the number of tasks, a panel per machine."""
    if not timings:
        return None
    found = Figure(figsize=(0.6 + 4.2 * len(timings), 3.0), layout="constrained")
    names = {"plain": "no penalty", "l2": "L2", "summed": "one spring per weight", "naive": "one spring per task"}
    for k, times in enumerate(timings.values()):
        axes = found.add_subplot(1, len(timings), k + 1)
        tasks = [step.tasks for step in times.steps]
        shown = {name: label for name, label in names.items() if math.isfinite(getattr(times.steps[0], name))}
        for (name, label), colour in zip(shown.items(), (TEXT, *PALETTE), strict=False):
            axes.plot(tasks, [1e3 * getattr(step, name) for step in times.steps], "o-", color=colour, label=label)
        axes.set_xticks(tasks, [str(number) for number in tasks])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("earlier tasks")
        axes.set_title(f"ms per step, {', '.join(times.where.split(', ')[:3])}", loc="left", fontsize=9, color=MUTED)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    return found


def _after(times: PenaltyTimes, tasks: int) -> StepTimes:
    """Return the times after the most tasks that were measured, up to so many."""
    return max((step for step in times.steps if step.tasks <= tasks), key=lambda step: step.tasks, default=times.steps[0])


def _claim(text: str, holds: Callable[[PenaltyTimes], bool]) -> Claim:
    """Return a claim that must hold on every machine that was measured."""
    return Claim(text, lambda r: all(map(holds, r.timings.values())) if r.timings else None)


def _no_slower(text: str, seconds: Callable[[StepTimes], float], tasks: int) -> Claim:
    """Return the claim that a step after so many tasks, or the most before them, is not noticeably slower than with L2."""

    def holds(results: "Results") -> bool | None:
        found = [_after(times, tasks) for times in results.timings.values()]
        known = [step for step in found if math.isfinite(step.l2)]  # older files lack it
        return all(seconds(step) <= FLAT * step.l2 for step in known) if known else None

    return Claim(text, holds)


PART = Part(
    "times",
    'Section "Impact on training time"',
    "Seconds of a step and of the Fisher diagonal on random images, by `python -m speed.penalty --out "
    f"docs/results/{TIMINGS}/NAME.json`. The report has one quadratic term per earlier task and notes that their sum is one "
    "quadratic; its formula for that lacks a factor 2, and what is summed here is the right one. The Fisher is that of "
    "single images. L2 is a penalty on the squares of all weights, in the loss. On a CPU times are processor time of one "
    f"thread. A claim holds if it does on every machine: not noticeably slower means that a step takes at most {FLAT:g} "
    f"times as long, overshadowed at most {100 * SMALL:g} % of the {EPOCHS} epochs of a task, proportional that the penalty "
    f"takes {GROWTH[0]:g} to {GROWTH[1]:g} times as long after twice as many tasks, avoided that a step grows by no more "
    f"than a factor of {FLAT:g}.",
    claims=(
        _no_slower(
            "Training with EWC is not noticeably slower than with any other regularization function (here: with one spring "
            f"per weight after {OWN} tasks than with L2).",
            lambda step: step.summed,
            OWN,
        ),
        _no_slower(
            f"The same of the penalty as the report computes it (one term per task, after {OWN} tasks).",
            lambda step: step.naive,
            OWN,
        ),
        _claim(
            "Computing the Fisher diagonal is overshadowed by the actual training.",
            lambda t: t.fisher <= SMALL * EPOCHS * t.epoch,
        ),
        _claim(
            "The time of the penalty is proportional to the number of tasks.", lambda t: GROWTH[0] <= t.growth <= GROWTH[1]
        ),
        _claim("One sum over tasks avoids that.", lambda t: t.steps[-1].summed <= FLAT * t.steps[0].summed),
    ),
    plots=(Plot("steps", "A step against the number of earlier tasks", lambda r: draw_step_times(r.timings)),),
    grids=(lambda r: step_times(r.timings), lambda r: fisher_times(r.timings)),
)
