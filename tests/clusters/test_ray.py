"""Runs on a real Ray of this machine: the same records, a worker that is killed, Ctrl-C, and a search."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hatrack import Record
from hatrack.__main__ import main
from hatrack.clusters import ray_cluster
from hatrack.clusters.ray_cluster import connected
from hatrack.clusters.request import Request
from hatrack.experiments.sameness import differences

pytest.importorskip("ray")
FOUR = ("run", "smnist", "hat,sgd", "--seeds", "0-1", "--data", "sample", "--widths", "20", "--batch", "20")
HOW = ("--save-every", "0.01", "--device", "cpu", "--engine", "eager", "--train-examples", "200", "--out")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hatrack", *words]
    return subprocess.Popen(
        command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(*words: str) -> str:
    process = start(*words)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return out


def records_in(folder: Path) -> dict[str, Record]:
    return {path.stem: Record.load(path) for path in folder.glob("*.json")}


def assert_same(one: Path, two: Path) -> None:
    a, b = records_in(one), records_in(two)
    assert a.keys() == b.keys()
    assert len(a) == 4
    for name, record in a.items():
        assert differences(record, b[name]) == []
    assert not [path for path in two.iterdir() if path.suffix in (".part", ".lock")]


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The workers of Ray in the session of a command that carry out a run now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text()
            if words.startswith("ray::hatrack run") and any(Path("/tmp").glob(f"hatrack-run-{folder.name}-*")):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def attempts(folder: Path) -> list[int]:
    """How often every run of a fleet was begun."""
    plans = [json.loads(path.read_text()) for path in (folder / "jobs").glob("*.plan")]
    return [run.get("attempts", 1) for plan in plans for run in plan["runs"].values()]


@pytest.mark.slow
def test_on_ray_with_a_worker_killed_and_ctrl_c(tmp_path):
    """A worker is killed, then Ctrl-C comes while runs are under way. Given again, the command has the same records."""
    more = ("--epochs", "20", "--patience", "100")
    finish(*FOUR, *more, *HOW, str(tmp_path / "one"))
    words = (*FOUR, *more, *HOW, str(tmp_path / "ray"), "--on", "ray")
    process = start(*words)
    until = time.monotonic() + 200
    while not (killed := workers_of(process)) or not list((tmp_path / "ray").glob("*.part/*")):
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.kill(killed[0], signal.SIGKILL)
    while max(attempts(tmp_path / "ray"), default=0) < 2:  # Ray begins the run again
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "stopped, and saved:" in err
    said = finish("status", str(tmp_path / "ray"))
    assert "stopped" in said
    assert "running" not in said
    finish(*words)
    assert_same(tmp_path / "one", tmp_path / "ray")


@pytest.mark.slow
def test_a_search_on_ray_has_the_trials_of_one_process(tmp_path):
    """A grid does not depend on which trial ends first."""
    words = ("tune", "smnist", "sgd", "--data", "sample", "--widths", "10", "--epochs", "1", "--over", "lr=0.01|0.05|0.1")
    grid = (*words, "--sampler", "grid", "--protocol", "one-seed", "--trials", "3", "--device", "cpu", "--out")
    finish(*grid, str(tmp_path / "one"))
    finish(*grid, str(tmp_path / "ray"), "--on", "ray")
    one, ray = (json.loads(next((tmp_path / name).glob("*.json")).read_text()) for name in ("one", "ray"))
    assert one["trials"] == ray["trials"]
    assert one["value"] == ray["value"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_one_line(tmp_path, capsys, address):
    began = time.monotonic()
    assert main([*FOUR, *HOW, str(tmp_path / "out"), "--on", f"ray:{address}"]) == 2
    said = capsys.readouterr().err
    assert f"no cluster of Ray can be reached at {address}" in said
    assert said.count("\n") == 1
    assert time.monotonic() - began < 60


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'hatrack\[ray\]'"), connected(Request("ray")):
        pass
    assert not ray_cluster._held
