"""Several runs at once: the same records as one by one, and a word and a saved state if they don't come to their end."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from hatrack import Record, Regime
from hatrack.experiments.parallel import run_all
from hatrack.experiments.run import folder_of
from hatrack.training.checkpoint import Checkpointer, Stopped, stopping
from tests.helpers.killing import assert_same, here, start, wait_for
from tests.helpers.runs import small
from tests.helpers.tiers import quick_and_slow

THREE = ("--seeds", "0-2")
OFTEN = ("--save-every", "0.001", "--parallel", "2")
STOPPED = r"hatrack: stopped, and saved: \d of 3 runs are finished, and the same command goes on with the others\n"
processes_are_listed = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs a list of processes")


def test_side_by_side_gives_the_same_records(tmp_path):
    """Every run has one thread here, alone or in company, so that the results are the same to the bit."""
    runs = [small(seed=seed) for seed in range(2)]
    one, two = (run_all(runs, tmp_path / str(n), parallel=n) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert b.versions["threads"] == 1
        assert json.dumps(a.accuracy) == json.dumps(b.accuracy)
        assert a.loss == b.loss
        assert a.curves == b.curves
    assert sorted(p.name for p in (tmp_path / "1").iterdir()) == sorted(p.name for p in (tmp_path / "2").iterdir())


def test_a_run_that_is_named_twice_is_run_once(tmp_path):
    records = run_all([small(seed=seed) for seed in (3, 4, 3)], tmp_path)
    assert [record.spec.seed for record in records] == [3, 4, 3]
    assert records[0] is records[2]


@pytest.mark.slow
@pytest.mark.parametrize("engine", quick_and_slow(("eager", "auto"), ("eager",)))
def test_an_error_in_one_process_reaches_the_user(engine, tmp_path, capfd):
    """And nothing else does, such as complaints of processes that were just starting, or that import the compiler while they
    end. The others stop and are saved."""
    runs = [small("hat", seed, regime=Regime(epochs=1000, patience=1000)) for seed in range(3)]
    with (
        folder_of(runs[0], tmp_path),
        pytest.raises(ValueError, match=f"{runs[0].name} is being run by another process"),
    ):
        run_all(runs, tmp_path, parallel=2, engine=engine)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.glob("*.json")), "nobody waited for the others"


def test_a_stop_of_runs_that_replace_their_records(tmp_path, monkeypatch):
    """Those that were not begun are not taken for finished afterwards."""
    runs = [small(seed=seed) for seed in range(3)]
    old = run_all(runs, tmp_path)
    begin = Checkpointer.begin_task

    def stop_in_the_second(self, *how):
        if self.spec["seed"] == 1:
            stopping.set()
        begin(self, *how)

    monkeypatch.setattr(Checkpointer, "begin_task", stop_in_the_second)
    with pytest.raises(Stopped, match="1 of 3 runs are finished, and the same command without --again goes on"):
        run_all(runs, tmp_path, again=True)
    monkeypatch.undo()
    first = Record.load(tmp_path / f"{runs[0].name}.json")
    new = run_all(runs, tmp_path)
    assert new[0].seconds == first.seconds != old[0].seconds
    for one, two in zip(new[1:], old[1:], strict=True):
        assert one.seconds != two.seconds
        assert_same(one, two)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}


# Signals


def members(group: int) -> list[tuple[int, str]]:
    """The number and the command line of the processes of a group that are alive."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append((int(folder.name), (folder / "cmdline").read_text()))
        except OSError:  # it ended just now
            continue
    return found


def workers(group: int, count: int) -> list[int]:
    """When there are so many, their numbers."""
    until = time.monotonic() + 60
    while len(found := [number for number, words in members(group) if "spawn_main" in words]) < count:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def assert_all_ended(group: int) -> None:
    until = time.monotonic() + 20
    while members(group):
        assert time.monotonic() < until, members(group)
        time.sleep(0.05)


def assert_goes_on(out: Path, whole: Path) -> None:
    for one, two in zip(here(out, *THREE), here(whole, *THREE), strict=True):
        assert_same(one, two)
    assert {path.suffix for path in out.iterdir()} == {".json"}


@pytest.mark.slow
@processes_are_listed
def test_ctrl_c_stops_all_and_the_same_command_goes_on(tmp_path):
    """Ctrl-C goes to every process of a terminal's foreground group at once."""
    process = start(tmp_path / "out", *THREE, *OFTEN)
    wait_for(tmp_path / "out", "fit", runs=2)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate()[1]
    assert re.fullmatch(STOPPED, said)
    assert process.returncode == 130
    assert_all_ended(process.pid)
    assert_goes_on(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
@processes_are_listed
@pytest.mark.parametrize("whom", ["the parent", "all"])
def test_a_request_to_end_stops_all(whom, tmp_path):
    """As from a batch system, to the process that it started or to all; some ask twice."""
    process = start(tmp_path / "out", *THREE, *OFTEN)
    wait_for(tmp_path / "out", "fit", runs=2)
    for _ in range(2):
        if whom == "all":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.terminate()
    assert re.fullmatch(STOPPED, process.communicate()[1])
    assert process.returncode == 130
    assert_all_ended(process.pid)
    assert_goes_on(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
@processes_are_listed
@pytest.mark.parametrize("moment", [0.0, 0.1, 0.3, 1.0, 1.5, 2.0, 2.5, 3.0])
def test_ctrl_c_while_processes_start(moment, tmp_path):
    process = start(tmp_path / "out", *THREE, *OFTEN)
    workers(process.pid, 1)
    time.sleep(moment)
    os.killpg(process.pid, signal.SIGINT)
    assert re.fullmatch(STOPPED, process.communicate()[1])
    assert process.returncode == 130
    assert_all_ended(process.pid)


@pytest.mark.slow
@processes_are_listed
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    process = start(tmp_path / "out", *THREE, *OFTEN)
    wait_for(tmp_path / "out", "fit", runs=2)
    for number in workers(process.pid, 2):
        os.kill(number, signal.SIGSTOP)  # so that they can't end as they are asked to
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate()[1]
    assert said == "hatrack: stopped at once; a run goes on with the same command, from what was saved before\n"
    assert process.returncode == 130
    assert_all_ended(process.pid)
    assert_goes_on(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
@processes_are_listed
@pytest.mark.parametrize("whom", ["the parent", "a worker"])
def test_a_process_that_is_killed_leaves_no_orphans_and_loses_nothing(whom, tmp_path):
    process = start(tmp_path / "out", *THREE, *OFTEN)
    wait_for(tmp_path / "out", "fit", runs=2)
    os.kill(process.pid if whom == "the parent" else workers(process.pid, 2)[0], signal.SIGKILL)
    said = process.communicate()[1]
    if whom == "a worker":
        assert said == "hatrack: a run's process was killed; too little memory? Try a smaller --parallel\n"
        assert process.returncode == 2
    assert_all_ended(process.pid)
    assert_goes_on(tmp_path / "out", tmp_path / "whole")
