"""The progress of a Trainer: a bar in a terminal, one line per task, nothing elsewhere."""

import io
import math
import re
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from hatrack import Batch, Diverged, Method, Network, Regime, Trainer
from hatrack.training import progress, trainer
from tests.helpers.learning import make
from tests.helpers.toys import toy_tasks


def small() -> Network:
    return make("sgd", toy_tasks(1)).net


def lines_of(out):
    """What was written to a terminal, line by line, without control sequences."""
    return [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[a-zA-Z]", out.getvalue()) if line.strip()]


@pytest.fixture
def terminal(monkeypatch):
    """A function that makes standard error a terminal of some width, and returns what is written there."""

    def make(width):
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=width, color_system=None)
        for module in (progress, trainer):
            monkeypatch.setattr(module, "find_console", lambda: console)
        return out

    return make


@pytest.mark.parametrize("width", [120, 80])
@pytest.mark.parametrize("name", ["short", "a name that is much too long for one line of a terminal " * 3])
def test_a_terminal_gets_a_bar_and_a_line_per_task(terminal, width, name):
    out = terminal(width)
    method = Method(small())
    result = method.learn(replace(toy_tasks(1)[0], name=name), Trainer(Regime(epochs=12, batch=16)))
    *bars, last = lines_of(out)
    assert last == str(result)
    assert result.epochs == 12
    ended = [bar for bar in bars if "epoch 12 of max 12" in bar]
    best = result.fits[0].epochs[-1]
    assert ended
    for bar in ended:
        assert f"loss {best.loss:.3g}, accuracy {best.valid_accuracy:.1%}" in bar
        assert re.search(r"━{8} left 0:00:00$", bar)
    for bar in bars:
        assert len(bar) == width
        assert bar.startswith("short, " if name == "short" else "a name")
        assert re.search(r" left [-\d]:[-\d]{2}:[-\d]{2}$", bar)


def test_a_narrow_terminal_keeps_the_bar_and_the_time(terminal):
    out = terminal(45)
    Trainer(Regime(epochs=2))(Method(small()), toy_tasks(1)[0])
    for bar in lines_of(out):
        assert len(bar) == 45
        assert re.search(r" left [-\d]:[-\d]{2}:[-\d]{2}$", bar)


def test_a_task_of_several_fits_gets_one_line(terminal):
    class Twice(Method):
        def learn_task(self, task, fit):
            fit(self, task)
            fit(self, task, epochs=3)

    out = terminal(80)
    result = Twice(small()).learn(toy_tasks(1)[0], Trainer(Regime(epochs=2)))
    assert result.epochs == 5
    assert [line for line in lines_of(out) if line.startswith("learned")] == [str(result)]
    assert any("epoch 3 of max 3" in line for line in lines_of(out))


def test_a_fit_without_validation_data_shows_no_accuracy(terminal):
    out = terminal(80)
    Method(small()).learn(toy_tasks(1, valid=0.0)[0], Trainer(Regime(epochs=2)))
    assert any("epoch 2 of max 2, loss" in line for line in lines_of(out))
    assert not any("accuracy" in line for line in lines_of(out))


@pytest.mark.parametrize("shown", [False, lambda event: None], ids=["none", "own"])
def test_no_bar_if_nobody_wants_one(terminal, shown):
    out = terminal(80)
    Method(small()).learn(toy_tasks(1)[0], Trainer(Regime(epochs=2), progress=shown))
    assert out.getvalue() == ""


def test_a_fit_that_fails_leaves_no_bar_and_no_line(terminal):
    class Broken(Method):
        def loss(self, batch: Batch):
            return super().loss(batch) * math.nan

    out = terminal(80)
    with pytest.raises(Diverged):
        Broken(small()).learn(toy_tasks(1)[0], Trainer(Regime(epochs=2)))
    assert not any("learned" in line for line in lines_of(out))
    assert out.getvalue().endswith("\x1b[1A\x1b[2K")  # one line up, and cleared


def test_nothing_is_shown_without_a_terminal(capfd):
    for fit in (Trainer(Regime(epochs=2)), Trainer(Regime(epochs=2), progress=True)):
        Method(small()).learn(toy_tasks(1)[0], fit)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_standard_error_that_is_gone_is_no_terminal(monkeypatch, stream):
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert progress.find_console() is None


def test_a_real_terminal_is_found(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert progress.find_console().is_terminal


def test_progress_is_a_callable_or_says_yes_or_no():
    with pytest.raises(ValueError, match=r"progress must be .* not 'bar'"):
        Trainer(progress="bar")
