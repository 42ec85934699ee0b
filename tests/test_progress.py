"""What is shown while runs go on."""

import io
import time

from rich.console import Console

from hatrack import progress
from hatrack.progress import Display


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    """In a file or a pipe there is no bar: at most one line a minute."""
    seen, now = io.StringIO(), [1000.0]
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=seen, width=40))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Display(runs=4) as display:
        for minute in (0.1, 0.9, 1.2, 1.9, 2.4, 2.5):
            now[0] = 1000.0 + 60 * minute
            display.show(1, minute / 10, f"hat seed 1: [a] task, epoch {minute}, a line that is wider than forty letters")
        display.show(1, 1.0, "")
    assert seen.getvalue().splitlines() == [
        f"hatrack: {share} after {minutes} min; hat seed 1: [a] task, epoch {epoch}, a line that is wider than forty letters"
        for share, minutes, epoch in (("3%", 1, 1.2), ("6%", 2, 2.4))
    ]


def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch):
    seen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=seen, force_terminal=True))
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with Display(runs=1) as display:
        display.show(0, 0.5, "half")
    assert "after" not in seen.getvalue()
    assert "half" in seen.getvalue()
