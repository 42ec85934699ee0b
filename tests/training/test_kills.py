"""Real kills: SIGKILL at a random moment, at every task, at every file operation; the run goes on to the same record.

The processes are forked off a server that has imported everything and done nothing else, so that each starts at once.
"""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from hatrack import METHODS, Record, Run, run
from hatrack.experiments.run import stopped_runs
from hatrack.files.atomic import write
from hatrack.training.checkpoint import Checkpointer
from tests.helpers.killing import assert_same, spec
from tests.helpers.tiers import cases

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch._dynamo", "pytest", "tests.training.test_kills"])
CHOSEN = ("sgd", "hat", "ewc", "pnn", "er", "pmask")
pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


def go_on(
    one: Run,
    out: Path,
    save_every: float,
    last_task: int = -1,
    last_operation: int = 0,
    again: bool = False,
    last_step: int = 0,
    log: Path | None = None,
) -> None:
    """In a process of its own: the run from where it stands, to its end or to what kills it."""
    torch.set_num_threads(1)
    if log:
        die_after_step(last_step, log)
    if last_task >= 0:
        die_after_task(last_task)
    if last_operation:
        die_at_operation(last_operation, str(out))
    run(one, out, save_every=save_every, again=again)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_task(task: int) -> None:
    """When it is learned and measured, and the next one is about to be."""
    begin = Checkpointer.begin_task

    def last(self, number, *how):
        begin(self, number, *how)
        if number == task + 1:
            self.wait()
            die()

    Checkpointer.begin_task = last


def die_after_step(last: int, log: Path) -> None:
    """After so many steps of this process (0: never), whether or not their state is on the disk yet; all are logged."""
    tick, done = Checkpointer.after_step, []

    def counted(self, loop):
        done.append(loop)
        with log.open("a") as file:
            file.write(f"{loop.task.index} {self.fit} {len(loop.result.epochs)} {loop.step_index}\n")
        tick(self, loop)
        if len(done) == last:
            die()

    Checkpointer.after_step = counted


def die_at_operation(number: int, folder: str) -> None:
    """Before that file operation in the folder: to open, rename or remove a file, make or remove a folder."""
    seen = []

    def hook(event, args):
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            relative = event in ("os.remove", "os.rmdir") and args[1] not in (-1, None)  # as in shutil.rmtree
            if relative or folder in str(args[0]):
                seen.append(event)
                if len(seen) == number:
                    die()

    sys.addaudithook(hook)


def in_a_process(*args: object, until: float | None = None) -> bool:
    """Whether it came to its end; after so many seconds it is killed."""
    process = SERVER.Process(target=go_on, args=args)
    process.start()
    process.join(until)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def whole_run(one: Run, out: Path) -> tuple[Record, float]:
    """Its record when nothing happens, and how long a process takes for it."""
    started = time.monotonic()
    assert in_a_process(one, out, 5.0)
    return run(one, out), time.monotonic() - started


def kill(one: Run, out: Path, save_every: float, seconds: float, kills: int) -> None:
    """At random moments, at least once and until it ends or so often."""
    draw, count = random.Random(one.name), 0
    while count < kills:
        if not in_a_process(one, out, save_every, until=draw.uniform(0.1, 0.9) * seconds):
            count += 1
        elif count:
            return
        else:  # it was quicker than before
            shutil.rmtree(out)
            seconds /= 2


def assert_goes_on(one: Run, out: Path, whole: Record) -> None:
    assert_same(whole, run(one, out))
    assert [path.name for path in out.iterdir()] == [f"{one.name}.json"], "nothing else is left"


@pytest.mark.slow
@pytest.mark.parametrize("method", CHOSEN)
def test_a_kill_at_a_random_moment(method, tmp_path):
    one = spec(method, batch=100)
    whole, seconds = whole_run(one, tmp_path / "whole")
    kill(one, tmp_path / "killed", 1e-4, seconds, kills=1)
    assert_goes_on(one, tmp_path / "killed", whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(cases(2, 9)))
@pytest.mark.parametrize("method", CHOSEN)
def test_many_kills(method, seed, tmp_path):
    one = spec(method, seed, epochs=4, batch=64)
    whole, seconds = whole_run(one, tmp_path / "whole")
    kill(one, tmp_path / "killed", 0.0005 * (seed % 3), seconds, kills=6)
    assert_goes_on(one, tmp_path / "killed", whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(cases(1, 50)))
@pytest.mark.parametrize("method", ["sgd", "hat"])
def test_ten_kills_of_one_run_and_little_is_done_again(method, seed, tmp_path):
    """1,000 kills in `make test-long`. With a save after every step, only the last step before a kill is done twice."""
    one = spec(method, seed, epochs=2, batch=250)
    whole, draw, log = run(one), random.Random(f"{method} {seed}"), tmp_path / "steps"
    for _ in range(10):
        assert not in_a_process(one, tmp_path / "killed", 0.0, -1, 0, False, draw.randint(1, 3), log)
    assert in_a_process(one, tmp_path / "killed", 0.0, -1, 0, False, 0, log)
    assert_goes_on(one, tmp_path / "killed", whole)
    steps = [line.split() for line in log.read_text().splitlines()]
    again = len(steps) - len({tuple(step) for step in steps})
    assert again <= 10, "one save interval per kill"


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_after_every_task_a_new_process(method, tmp_path):
    one = Run.from_spec({**spec(method).spec, "benchmark_options": {"data": "sample", "tasks": 5}})
    whole = run(one)
    for task in range(4):
        assert not in_a_process(one, tmp_path, 5.0, task)
    assert in_a_process(one, tmp_path, 5.0)
    assert_goes_on(one, tmp_path, whole)


@pytest.mark.slow
def test_a_kill_at_every_file_operation(tmp_path):
    one, number = spec("sgd", epochs=1, batch=900), 1
    whole = run(one)
    while not in_a_process(one, out := tmp_path / str(number), 0.0, -1, number):
        out.mkdir(exist_ok=True)
        assert_goes_on(one, out, whole)
        number += 1
    assert number > 30, "every operation of a whole run, and one more"


@pytest.mark.slow
def test_a_kill_at_every_file_operation_of_a_run_that_replaces_its_record(tmp_path):
    """The old record stays until the new one is there, and every command goes on, with --again and without."""
    one, number = spec("hat", epochs=1, batch=900), 1
    whole = run(one, tmp_path / "whole")
    while True:
        out = tmp_path / str(number)
        out.mkdir()
        shutil.copy(tmp_path / "whole" / f"{one.name}.json", out)
        if in_a_process(one, out, 0.0, -1, number, True):
            break
        assert_same(whole, Record.load(out / f"{one.name}.json"))
        assert stopped_runs(out)[0] in ([], [one])
        saved = set(out.glob("*.part/task-*"))
        assert not in_a_process(one, out, 0.0, -1, 3, True), "killed once more, before anything is saved"
        if stopped_runs(out)[0]:
            assert set(out.glob("*.part/task-*")) == saved, "it goes on, and does not start anew a second time"
        assert_goes_on(one, out, whole)
        number += 1
    assert number > 30


def test_nothing_is_renamed_before_it_is_on_the_disk_nor_removed_before_its_successor_is(tmp_path, monkeypatch):
    """For a power cut, after which only what was flushed is sure to be there."""
    log, fsync, replace, unlink = [], os.fsync, os.replace, os.unlink

    def flushed(handle):
        fsync(handle)
        log.append(("flush", os.fstat(handle).st_ino))

    def renamed(old, new):
        assert log[-1] == ("flush", os.stat(old).st_ino)
        replace(old, new)
        log.append(("rename", os.stat(Path(new).parent).st_ino))

    def removed(path, *how, **more):
        if Path(path).suffix == ".safetensors":
            assert log[-1][0] != "rename"
            log.append(("remove", str(path)))
        unlink(path, *how, **more)

    for name, function in (("fsync", flushed), ("replace", renamed), ("unlink", removed)):
        monkeypatch.setattr(os, name, function)
    run(spec("hat", epochs=1), tmp_path, save_every=0.0)
    kinds = [kind for kind, _ in log]
    assert kinds.count("rename") > 10
    assert kinds.count("remove") > 3
    for before, after in itertools.pairwise(log):
        if before[0] == "rename":
            assert after == ("flush", before[1]), "the folder, which holds the name"


def test_what_a_killed_save_left_is_removed_later(tmp_path):
    path, other = tmp_path / "model", tmp_path / ".model.1"
    other.write_bytes(b"half")
    write(path, "whole")
    assert other.exists(), "it may be another process's, and under way"
    os.utime(other, (0, 0))
    write(path, "whole")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
