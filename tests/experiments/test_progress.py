"""What is shown while runs go on."""

import io
import re
import sys
import time

import pytest
from rich.console import Console

from hatrack.experiments import progress
from hatrack.experiments.progress import Display

STATUS = "hat seed 0: 96.1%, forgot 0.0%; task 3/10, epoch 120/200, accuracy 97.5%, loss 0.123, a long name of a task "


def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys):
    """In a file or a pipe there is no bar: at most one line a minute."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Display(runs=4) as display:
        for minute in (0.1, 0.9, 1.2, 1.9, 2.4, 2.5):
            now[0] = 1000.0 + 60 * minute
            display.show(1, minute / 10, f"hat seed 1: [a] :cat:\ntask, epoch {minute}")
        display.show(1, 1.0, "")
    assert capsys.readouterr().err.splitlines() == [
        "hatrack: 3% after 1 min, 39 min left; hat seed 1: [a] :cat: task, epoch 1.2",
        "hatrack: 6% after 2 min, 38 min left; hat seed 1: [a] :cat: task, epoch 2.4",
    ]


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream",
    [Full, closed, lambda: None, lambda: io.TextIOWrapper(io.BytesIO(), "ascii")],
    ids=["full", "closed", "none", "ascii"],
)
def test_a_log_that_cannot_be_written_ends_no_run(stream, monkeypatch):
    with Display(runs=1) as display:
        monkeypatch.setattr(progress, "EVERY", 0.0)
        monkeypatch.setattr(sys, "stderr", stream())
        display.show(0, 0.5, "chats \u00e9l\u00e9gants")


def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch):
    seen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=seen, force_terminal=True))
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with Display(runs=1) as display:
        display.show(0, 0.5, "half")
    assert "after" not in seen.getvalue()
    assert "half" in seen.getvalue()


@pytest.mark.parametrize("width", [120, 80, 60])
def test_the_bar_and_the_time_left_stay_visible(width, monkeypatch):
    seen = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda stderr: Console(file=seen, force_terminal=True, width=width, color_system=None)
    )
    with Display(runs=2) as display:
        display.show(0, 0.5, STATUS * 2)
    lines = [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[a-zA-Z]", seen.getvalue()) if line.strip()]
    *_, bar, status = lines
    for line in lines:
        assert len(line) == width or len(line.rstrip()) < width
        if line.strip() == "starting":
            continue
        is_bar = re.search(r"  \d+% +0:00:00 +left +[-\d]:[-\d]{2}:[-\d]{2} *$", line)
        assert bool(is_bar) != line.startswith("hat seed 0: 96.1%, forgot 0.0%; task 3/10")
    assert re.match(r"━{5,}╸? +25% ", bar)
    assert status.rstrip().endswith("…")


@pytest.mark.parametrize("width", [120, 80, 60])
def test_several_runs_at_a_time_have_a_line_each(width, monkeypatch):
    """Each with its bar and its time left, and with accuracy and forgetting in any width."""
    seen = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda stderr: Console(file=seen, force_terminal=True, width=width, color_system=None)
    )
    with Display(runs=5, parallel=3) as display:
        for number in range(3):
            display.show(number, (number + 1) / 4, STATUS.replace("seed 0", f"seed {number}"), 3600.0 * (number + 1))
        display.show(1, 1.0, "")  # it has ended, and its line goes
    lines = [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[a-zA-Z]", seen.getvalue()) if line.strip()]
    bar, first, third = lines[-3:]
    assert re.search(r"━{5}╸? +40% +0:00:00 +left +0:00:\d\d *$", bar)  # (1/4 + 1 + 3/4) / 5
    for line, number, hours in ((first, 0, 1), (third, 2, 3)):
        assert re.match(rf"━{{1,6}}[╸ ] +{hours}:00:00 hat seed {number}: 96.1%, forgot 0.0%; t", line)
        assert len(line) <= width


def test_a_run_that_goes_on_and_a_record_that_is_there_say_nothing_about_the_pace(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = Display(runs=3)
    display.show(0, 1.0, "")  # it has its record
    display.begin(1, 0.5)
    assert display.seconds_left is None
    now[0] = 60.0
    display.show(1, 0.75, STATUS)  # a quarter of a run in a minute; one and a quarter are left
    assert display.seconds_left == pytest.approx(300)


@pytest.mark.parametrize(("seconds", "text"), [(None, "-:--:--"), (0, "0:00:00"), (61.6, "0:01:02"), (90000, "25:00:00")])
def test_times(seconds, text):
    assert progress.clock(seconds) == text
