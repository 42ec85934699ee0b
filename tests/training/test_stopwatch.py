"""The seconds of the parts of a run: by hand with a clock that is moved, and in records."""

import time
from contextlib import suppress

import pytest

from hatrack import Record, run
from hatrack.training import stopwatch
from hatrack.training.checkpoint import Checkpointer
from hatrack.training.stopwatch import Stopwatch
from tests.helpers.killing import OFTEN, killed_at, spec, to_the_end

PARTS = {"data", "method", "first steps", "steps", "validation", "evaluation", "other"}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_an_inner_part_counts_for_itself_alone(clock):
    watch = Stopwatch()
    clock(1)
    with watch("steps"):
        clock(2)
        with watch("first steps"):
            clock(4)
        clock(8)
    clock(16)
    assert watch.seconds() == {"other": 17, "steps": 10, "first steps": 4}


def test_a_part_that_fails_and_one_that_comes_again(clock):
    watch = Stopwatch()
    for seconds in (1, 2):
        with suppress(ZeroDivisionError), watch("steps"):
            clock(seconds)
            raise ZeroDivisionError
    clock(4)
    assert watch.seconds() == {"other": 4, "steps": 3}


def test_a_run_that_goes_on_adds_to_what_was_spent(clock):
    watch = Stopwatch()
    watch.go_on_from({"steps": 5.0, "data": 1.0})
    with watch("steps"):
        clock(2)
    assert watch.seconds() == {"other": 0, "steps": 7, "data": 1}
    watch.go_on_from(None)
    assert watch.seconds() is None, "a part of the time is not known"


def adds_up(record: Record) -> bool:
    return sum(record.seconds.parts.values()) == pytest.approx(record.seconds.total, rel=0.01, abs=0.01)


@pytest.mark.parametrize("method", ["sgd", "hat"])
def test_the_parts_of_a_run_are_all_of_its_time(method):
    record = run(spec(method))
    assert set(record.seconds.parts) == PARTS
    assert adds_up(record)
    within = sum(record.seconds.parts[part] for part in ("first steps", "steps", "validation"))
    assert 0 < within < sum(record.seconds.learn)
    assert Record.from_dict(record.to_dict()).seconds == record.seconds


def test_saving_within_an_epoch_is_no_step(tmp_path, monkeypatch):
    plain = Checkpointer._save_fit

    def slow(self, *given, **how):
        time.sleep(0.02)
        plain(self, *given, **how)

    monkeypatch.setattr(Checkpointer, "_save_fit", slow)
    parts = run(spec("sgd"), tmp_path, save_every=OFTEN).seconds.parts
    assert parts["saving"] > 20 * 0.02
    assert parts["steps"] < parts["saving"]


def test_a_run_that_is_killed_has_the_time_of_what_it_did_not_do_again(tmp_path, monkeypatch):
    kills = killed_at(monkeypatch, 0.3, 0, 3)
    record = to_the_end(spec("sgd"), tmp_path, save_every=OFTEN)
    assert kills
    assert adds_up(record)
    assert set(record.seconds.parts) == {*PARTS, "saving"}
