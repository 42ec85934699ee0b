"""What is shown while runs go on."""

import io
import re
import sys
import time

import pytest
from rich.console import Console

from hatrack.experiments import progress
from hatrack.experiments.progress import Display


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
        "hatrack: 3% after 1 min; hat seed 1: [a] :cat: task, epoch 1.2",
        "hatrack: 6% after 2 min; hat seed 1: [a] :cat: task, epoch 2.4",
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
    with Display(runs=1) as display:
        display.show(0, 0.5, "hat seed 0: a long name of a task (1 of 10), epoch 120, loss 0.123, accuracy 97.5% " * 2)
    lines = [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[a-zA-Z]", seen.getvalue()) if line.strip()]
    assert "hat seed 0" in lines[-1]
    for line in lines:
        assert len(line) == width
        assert re.search(r" 0:00:00 +left [-\d]:[-\d]{2}:[-\d]{2} *$", line)
    assert "━━━━━" in lines[-1]
