"""How far a run is, how long it will go on, and where it stands in one line of text, read off its lines."""

from collections import Counter

from hatrack.text import is_percent, printable, score_text, shorten
from hatrack.tracking.lines import RunLines
from hatrack.tracking.tracker import average, forgetting

NAME = 24  # letters of a method or a task that are shown


def share_done(lines: RunLines) -> float:
    """Return the share of a run that is done, from 0 to 1.

    A task counts as long as those before it took, in epochs; the first as long as it may take.
    """
    names, last = lines.about.get("tasks", []), lines.last
    learned = 1 + max([*lines.tasks, *lines.scores, -1])
    if not names:
        return 0.0
    if not last or last["task"] < learned:
        return min(1.0, learned / len(names))
    counts = Counter[int]()
    for (task, _, _), own in lines.kept_fits():
        counts[task] += len(own)
    now = counts.pop(last["task"])
    known = [number for task, number in counts.items() if task >= 0]
    expected = sum(known) / len(known) if known else last["epochs"] + now - 1 - last["epoch"]  # that of several fits
    within = now / max(expected, now, 1) if last["task"] >= 0 else 0.0
    return min(1.0, max(0.0, float(max(0, last["task"]) + within) / len(names)))


def seconds_left(lines: RunLines) -> float | None:
    """Return how long a run will go on if it goes on as fast; None if that is not known yet."""
    done, last = share_done(lines), lines.last
    if not done or last.get("seconds") is None:
        return None
    pretraining = [own[-1].get("seconds") or 0.0 for (task, _, _), own in lines.kept_fits() if task < 0]
    return max(0.0, float(last["seconds"] - sum(pretraining[-1:])) * (1 - done) / done)


def status_text(lines: RunLines) -> str:
    """Return where a run stands: the accuracy so far and what was forgotten come first, for narrow terminals."""
    spec, last = lines.about.get("spec", {}), lines.last
    parts = [f"{shorten(printable(spec.get('method', 'run')), NAME)} seed {printable(spec.get('seed', '?'))}:"]
    if lines.scores:
        parts.append(_results_text(lines))
    learned = max([*lines.tasks, *lines.scores, -1])
    if last and last["task"] > learned:
        parts.append(_epoch_text(lines))
    elif not lines.scores:
        parts.append("measuring" if lines.tasks else "starting")
    return " ".join(filter(None, parts)).rstrip(";")


def _results_text(lines: RunLines) -> str:
    task = max(lines.scores)
    mean, lost = average(lines.scores[task]), forgetting(lines.scores[task], lines.scores)
    score = lines.about.get("score")
    shown = [_value(score, mean), f"forgot {_value(score, lost)}"] if mean is not None and lost is not None else []
    return f"{', '.join(shown)};" if shown else ""


def _value(score: str | None, value: float) -> str:
    return f"{value:.1%}" if is_percent(score) else f"{value:.3g}"


def _epoch_text(lines: RunLines) -> str:
    last, names = lines.last, lines.about.get("tasks", [])
    number = last["task"]
    where = "pretraining" if number < 0 else f"task {number + 1}/{len(names)}" if names else f"task {number + 1}"
    name = f", {shorten(printable(names[number]), NAME)}" if 0 <= number < len(names) else ""
    accuracy, loss = last.get("valid_accuracy"), last.get("loss")
    found = "" if accuracy is None else f", {score_text(lines.about.get('score'), accuracy)}"
    found += "" if loss is None else f", loss {loss:.3g}"
    return f"{where}, epoch {last['epoch'] + 1}/{last['epochs']}{found}{name}"
