"""A run that is stopped anywhere goes on to the same record."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hatrack import METHODS, Record, Regime, Run, run, tensors
from hatrack.checkpoint import FORMAT, Journal, unfinished

SAME = ("spec", "tasks", "parameters", "before", "accuracy", "loss", "train_loss", "without_task_id", "curves", "usage")
OFTEN = 1e-5  # minutes: at every step
pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


class Killed(BaseException):
    """Nobody catches it, as nobody catches a kill."""


def spec(method: str, seed: int = 0, **regime: object) -> Run:
    return Run(
        "smnist",
        method,
        seed,
        benchmark_options={"data": "sample"},
        network_options={"widths": (12, 12)},
        train_examples=100,
        regime=Regime(**{"epochs": 2, "batch": 250, "optimizer": "adam", "lr": 0.003, "keep_state": True, **regime}),
    )


def killed_at(monkeypatch, chance: float, seed: int, most: int):
    """Every step may be the last; `most` kills in all."""
    draw, tick, kills = random.Random(seed), Journal.tick, []

    def deadly(self, course):
        tick(self, course)
        if len(kills) < most and draw.random() < chance:
            kills.append(course.place)
            raise Killed

    monkeypatch.setattr(Journal, "tick", deadly)
    return kills


def to_the_end(one: Run, out: Path, **how: object) -> Record:
    while True:
        try:
            return run(one, out, **how)
        except Killed:
            continue


def assert_same(one: Record, two: Record) -> None:
    for name in SAME:
        assert getattr(one, name) == getattr(two, name), name


@pytest.mark.parametrize("method", METHODS)
def test_stopped_anywhere_every_method_goes_on_to_the_same_record(method, tmp_path, monkeypatch):
    whole = run(spec(method), tmp_path / "whole")
    kills = killed_at(monkeypatch, 0.1, seed=sum(map(ord, method)), most=4)
    again = to_the_end(spec(method), tmp_path / "again", save_every=OFTEN)
    assert kills or method == "random"
    assert_same(whole, again)
    assert [path.suffix for path in (tmp_path / "again").iterdir()] == [".json"], "nothing but the record is left"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("method", ["sgd", "hat", "ewc", "pnn", "er", "pmask"])
def test_many_kills(method, seed, tmp_path, monkeypatch):
    one = spec(method, seed, epochs=4, batch=64)
    whole = run(one, tmp_path / "whole")
    kills = killed_at(monkeypatch, 0.02, seed=seed, most=20)
    assert_same(whole, to_the_end(one, tmp_path / "again", save_every=0.0005 * (seed % 3)))
    assert kills


def command(out: Path, *words: str) -> list[str]:
    options = ["--data", "sample", "--widths", "12,12", "--epochs", "25", "--batch", "50", "--patience", "100"]
    return [sys.executable, "-m", "hatrack", "run", "smnist", "hat", *options, "--device", "cpu", "--out", str(out), *words]


def start(out: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(out, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def wait_for_a_fit(out: Path) -> None:
    until = time.monotonic() + 60
    while not list(out.glob("*.part/fit-*")):
        assert time.monotonic() < until, "no state was saved"
        time.sleep(0.05)


def test_a_killed_process_goes_on(tmp_path):
    """SIGKILL while it writes; a second process is kept out while it lives, and takes over when it is dead."""
    process = start(tmp_path / "killed", "--save-every", "0.0001")
    wait_for_a_fit(tmp_path / "killed")
    second = start(tmp_path / "killed")
    assert "is being run by another process" in second.communicate()[1]
    assert second.returncode == 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(unfinished(tmp_path / "killed")) == 1
    assert start(tmp_path / "killed").communicate()[1] == ""
    assert start(tmp_path / "whole").communicate()[1] == ""
    one, two = (Record.load(next((tmp_path / name).glob("*.json"))) for name in ("killed", "whole"))
    assert_same(one, two)


def test_a_request_to_end_saves_and_says_how_to_go_on(tmp_path):
    process = start(tmp_path, "--save-every", "0.0001")
    wait_for_a_fit(tmp_path)
    process.terminate()
    said = process.communicate()[1]
    assert process.returncode == 130
    assert "saved; the same command goes on from there" in said
    assert said.count("\n") == 1
    assert list(tmp_path.glob("*.part/fit-*"))


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run that was killed in its second task, after several saves."""
    one = spec("hat", epochs=3)
    with monkeypatch.context() as patch:
        tick, steps = Journal.tick, []

        def deadly(self, course):
            tick(self, course)
            steps.append(course.task.index)
            if steps.count(1) == 5:
                raise Killed

        patch.setattr(Journal, "tick", deadly)
        with pytest.raises(Killed):
            run(one, tmp_path, save_every=OFTEN)
    return one, next(tmp_path.glob("*.part"))


def test_a_damaged_state_gives_way_to_the_one_before(stopped, tmp_path):
    one, part = stopped
    for path in sorted(part.glob("fit-1-*")):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        assert_same(run(one), run(one, tmp_path))
        break


@pytest.mark.parametrize("which", ["task-1", "fit-1-0-0", "fit-1-0-1"])
def test_a_state_that_was_cut_off(stopped, tmp_path, which):
    one, part = stopped
    path = part / f"{which}.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_same(run(one, tmp_path), run(one))


def test_nothing_usable_is_said_and_nothing_is_lost(stopped, tmp_path):
    one, part = stopped
    for path in part.glob("task-*"):
        path.write_bytes(b"not a state")
    before = {path: path.read_bytes() for path in part.iterdir()}
    with pytest.raises(ValueError, match="holds no state that can be used"):
        run(one, tmp_path)
    assert before == {path: path.read_bytes() for path in part.iterdir()}
    assert run(one, tmp_path, again=True).accuracy == run(one).accuracy, "--again starts anew"


def change(path: Path, **words: object) -> None:
    kept, old = tensors.load(path)
    tensors.save(path, kept, {**old, **words})


def test_a_state_of_another_run_or_a_newer_version(stopped, tmp_path):
    one, part = stopped
    change(part / "task-1.safetensors", format=FORMAT + 1)
    with pytest.raises(ValueError, match="newer than this version can read"):
        run(one, tmp_path)
    change(part / "task-1.safetensors", format=FORMAT, spec={**one.spec, "seed": 5})
    with pytest.raises(ValueError, match="belongs to another run"):
        run(one, tmp_path)


def test_a_full_disk_is_said_and_the_last_state_stays(stopped, tmp_path, monkeypatch):
    one, part = stopped
    before = sorted(path.name for path in part.iterdir())

    def full(path, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "write", full)
        with pytest.raises(ValueError, match="No space left on device; what was saved before is still there"):
            run(one, tmp_path, save_every=OFTEN)
    assert sorted(path.name for path in part.iterdir()) == before
    assert_same(run(one, tmp_path), run(one))


def test_a_spec_makes_its_run_again():
    one = spec("hat", 3)
    assert Run.from_spec(json.loads(json.dumps(one.spec))) == one


def test_tensors_come_back_as_they_were(tmp_path):
    kept = {
        "matrix": torch.arange(6.0).view(2, 3).t(),
        "bits": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "number": torch.tensor(7, dtype=torch.int16),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    tensors.save(tmp_path / "x", kept, {"words": [1, None, 0.1, float("inf")]})
    found, words = tensors.load(tmp_path / "x")
    assert words == {"words": [1, None, 0.1, float("inf")]}
    assert found.keys() == kept.keys()
    for name, tensor in kept.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
