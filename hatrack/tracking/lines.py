"""The lines of a run: one line of JSON per epoch and per task, which the terminal, `hatrack watch` and trackers read.

A file of lines only grows. A run that was killed goes on from an earlier epoch, and a fit that diverged begins again; their
lines replace earlier ones by one rule: **a line takes the place of all lines at the same or a later place of the run.** Then
a curve has neither gaps nor doubles, whoever reads it. What is no line, such as one that was half written when the process
was killed, is passed over.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Line = dict[str, Any]
Place = tuple[int, int, int]  # the number of the task, of its fit, and how often that fit was begun again
SCHEMA = 1  # of the lines
LONGEST = 2**20  # bytes of a line that is read
NUMBERS = ("lr", "loss", "valid_loss", "valid_accuracy", "used", "seconds", "time")


@dataclass
class FitLines:
    """The lines of the epochs of one fit.

    Attributes:
        step: how many epochs of the run come before this fit, without those of fits that were begun again.
        number: the same with them.
        lines: the lines.
    """

    step: int
    number: int
    lines: list[Line] = field(default_factory=list)


class RunLines:
    """The lines of a run that hold, after all that were replaced by later ones are left out.

    Attributes:
        about: the last line that says what is run, and by which process; empty if there is none.
        first: the first such line.
        fits: the lines of epochs by place, in order.
        tasks: the line of every task that was learned, by its number.
        scores: the line with the test accuracies after a task, by its number.
        ended: the line that says how the last process ended; None while it goes on, or if it was killed.
        count: how many lines were taken in.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.about: Line = {}
        self.first: Line = {}
        self.fits: dict[Place, FitLines] = {}
        self.tasks: dict[int, Line] = {}
        self.scores: dict[int, Line] = {}
        self.ended: Line | None = None
        self.count = 0
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> None:
        """Take in a line that `parse` returned, and note in it the number of epochs so far, as "step" and "number"."""
        self.count += 1
        kind = line["kind"]
        self.ended = line if kind == "end" else None
        if kind == "run":
            self.about, self.first = line, self.first or line
        elif kind == "epoch":
            self._add_epoch(line)
        elif kind in ("task", "scores"):
            self._cut((line["task"] + 1, -1, -1))
            own = self.tasks if kind == "task" else self.scores
            _remove_from(own, line["task"])
            own[line["task"]] = line
        line["step"], line["number"] = self.step, self.number

    def _add_epoch(self, line: Line) -> None:
        place: Place = (line["task"], line["fit"], line["halved"])
        self._cut((*place[:2], place[2] + 1))
        for own in (self.tasks, self.scores):
            _remove_from(own, line["task"])
        if place not in self.fits:
            last = next(reversed(self.fits), None)
            again = last is not None and last[:2] == place[:2]  # the same fit with half the learning rate
            step = self.step if last is None or not again else self.fits[last].step
            self.fits[place] = FitLines(step, self.number)
        own_lines = self.fits[place].lines
        while own_lines and own_lines[-1]["epoch"] >= line["epoch"]:
            own_lines.pop()
        own_lines.append(line)

    def _cut(self, place: Place) -> None:
        """Remove the epochs of all fits from a place on; places are in order."""
        while self.fits and next(reversed(self.fits)) >= place:
            self.fits.popitem()

    @property
    def step(self) -> int:
        """How many epochs the run has so far."""
        last = next(reversed(self.fits.values()), None)
        return last.step + len(last.lines) if last else 0

    @property
    def number(self) -> int:
        """How many epochs the run has so far, with those of fits that were begun again."""
        last = next(reversed(self.fits.values()), None)
        return last.number + len(last.lines) if last else 0

    def kept_fits(self) -> Iterator[tuple[Place, list[Line]]]:
        """Yield the places and the lines of all fits in order, without those that were begun again."""
        places = list(self.fits)
        for place, following in zip(places, [*places[1:], None], strict=False):
            if following is None or following[:2] != place[:2]:
                yield place, self.fits[place].lines

    def curve(self) -> Iterator[Line]:
        """Yield the lines of the epochs in order, without those of fits that were begun again."""
        for _, own in self.kept_fits():
            yield from own

    def all(self) -> Iterator[Line]:
        """Yield all lines that hold in the order of the run: epochs, and after those of a task the results of the task; the
        line of the process comes last."""
        done = -2
        for line in self.curve():
            for task in range(done, line["task"]) if line["task"] > done else ():
                yield from self._results(task)
            done = max(done, line["task"])
            yield line
        for task in sorted({task for own in (self.tasks, self.scores) for task in own if task >= done}):
            yield from self._results(task)
        if self.about:
            yield self.about

    def _results(self, task: int) -> Iterator[Line]:
        yield from (own[task] for own in (self.tasks, self.scores) if task in own)

    @property
    def last(self) -> Line:
        """The line of the last epoch; empty if there is none."""
        fit = next(reversed(self.fits.values()), None)
        return fit.lines[-1] if fit else {}


def _remove_from(own: dict[int, Line], task: int) -> None:
    """Remove the results of a task and of later ones."""
    for later in [number for number in own if number >= task]:
        del own[later]


def to_text(line: Line) -> str:
    """Return a line as it is written, without its end; numbers that are not finite become null."""
    kept = {key: value for key, value in line.items() if key not in ("step", "number")}
    return json.dumps(_clean(kept), allow_nan=False, separators=(",", ":"))


def parse(text: bytes) -> Line | None:
    """Return the line that a text holds; None if it is none, half written or of another kind."""
    if len(text) > LONGEST:
        return None
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and _is_line(line) else None


def _is_line(line: Line) -> bool:
    """Return whether a table has what a line of its kind needs, so that readers need not check it again."""
    kind = line.get("kind")
    if not all(_is_number(line.get(name)) for name in NUMBERS):
        return False
    if kind == "run":
        names, titles = line.get("tasks"), line.get("layers", {})
        return _all_texts(names) and isinstance(titles, dict) and _all_texts(list(titles.values()))
    if kind == "end":
        return isinstance(line.get("why"), str)
    if kind == "epoch":
        counts = [line.get(name) for name in ("fit", "halved", "epoch", "epochs")]
        return all(type(n) is int and n >= 0 for n in counts) and type(line.get("task")) is int and line["task"] >= -1
    if kind not in ("task", "scores") or type(line.get("task")) is not int or line["task"] < -1:
        return False
    usage, accuracy = line.get("usage", {}), line.get("accuracy", [])
    return (
        isinstance(usage, dict)
        and all(map(_is_number, usage.values()))
        and isinstance(accuracy, list)
        and all(map(_is_number, accuracy))
    )


def _all_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _clean(v) for key, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, list | tuple) else value
