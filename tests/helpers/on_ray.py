"""Commands on a real Ray, and a cluster of several nodes on this machine, each of them processes of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hatrack import Record
from hatrack.experiments.sameness import differences

ROOT = Path(__file__).parent.parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
PATIENCE = 600.0  # seconds; beside other work a node of Ray alone takes a minute to start
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")  # importing it takes seconds


def start(*words: str) -> subprocess.Popen[str]:
    """Start a command of hatrack in a session of its own."""
    command = [sys.executable, "-m", "hatrack", *words]
    return subprocess.Popen(
        command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(*words: str, code: int = 0) -> tuple[str, str]:
    """Carry out a command of hatrack; return what it printed and what it said to the terminal."""
    process = start(*words)
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it did not end: {_killed(process)}")
    assert process.returncode == code, err
    return out, err


def until(there: Callable[[], Any], process: subprocess.Popen[str] | None = None) -> Any:
    """Wait until something is there, and return it; the process must live so long."""
    end = time.monotonic() + PATIENCE
    while not (found := there()):
        if time.monotonic() > end:
            pytest.fail(f"it did not come: {process and _killed(process)}")
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)
    return found


def _killed(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill a command, so that it does not disturb other tests, and return what it printed."""
    process.kill()
    return process.communicate()


def plan_of(folder: Path) -> dict[str, Any]:
    """What the driver of the last command wrote down."""
    plans = sorted((folder / "jobs").glob("*.plan"), key=lambda path: path.stat().st_mtime)
    return json.loads(plans[-1].read_text()) if plans else {}


def planned(folder: Path) -> dict[str, dict[str, Any]]:
    """What the driver of the last command wrote down of its runs, by name."""
    return plan_of(folder).get("runs", {})


def records_in(folder: Path) -> dict[str, Record]:
    """The records in a folder, by the names of their runs."""
    return {path.stem: Record.load(path) for path in folder.glob("*.json")}


def assert_same(one: Path, two: Path) -> None:
    """Both folders have the same records but for times, and the second has nothing left over."""
    a, b = records_in(one), records_in(two)
    assert a.keys() == b.keys()
    assert a
    for name, record in a.items():
        assert differences(record, b[name]) == []
    assert not [path for path in two.iterdir() if path.suffix in (".part", ".lock")]


@contextmanager
def cluster_of(*nodes: Mapping[str, str], cpus: int = 1) -> Iterator[Any]:
    """A cluster with a head that carries out as many runs as it has processors, and nodes for one run each, which have these
    variables in their environment."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0")
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=cpus, include_dashboard=False)
        for number, more in enumerate(nodes):
            cluster.add_node(num_cpus=1, env_vars=dict(more), resources={f"node-{number}": 1})
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
