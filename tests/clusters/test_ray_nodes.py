"""A cluster of Ray with three nodes: nodes and drivers that are killed after states were saved, full disks, divergence."""

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hatrack.clusters.ray_cluster import connected
from hatrack.clusters.ray_engine import RayEngine
from hatrack.clusters.request import Request
from hatrack.files import tensors
from tests.helpers.on_ray import (
    PATIENCE,
    assert_same,
    cluster_of,
    finish,
    needs_ray,
    plan_of,
    planned,
    records_in,
    start,
    until,
)
from tests.helpers.tiers import cases

pytestmark = [pytest.mark.slow, needs_ray]
SMALL = (
    "--data",
    "sample",
    "--widths",
    "20",
    "--batch",
    "20",
    "--train-examples",
    "200",
    "--device",
    "cpu",
    "--engine",
    "eager",
)
HOW = ("--save-every", "0.005", "--patience", "100", "--out")
SIX = ("run", "smnist", "hat,ewc,sgd", "--seeds", "0-1", *SMALL, "--epochs", "15", *HOW)


def saved(folder: Path) -> dict[str, list[float]]:
    """The seconds of finished tasks in the latest states of runs: a run that learns a task again takes others."""
    found = {}
    for path in sorted(folder.glob("*.part/task-[1-9]*.safetensors")):
        with suppress(ValueError, OSError):  # its run has ended just now
            found[path.parent.stem] = tensors.load(path)[1]["rows"]["seconds"]
    return found


@pytest.mark.parametrize("seed", range(cases(0, 10)))  # minutes of killing: `make test-long`
def test_a_node_and_then_the_driver_are_killed_after_states_were_saved(tmp_path, seed):
    """The runs go on from these states, on other nodes and with another driver, to the same bits. No run is done twice."""
    draw, out = random.Random(seed), tmp_path / "ray"
    finish(*SIX, str(tmp_path / "one"))
    with cluster_of({}, {}) as cluster:
        words = (*SIX, str(out), "--on", f"ray:{cluster.address}")
        driver = start(*words)

        def on_a_node_to_kill() -> tuple[str, str] | None:
            """A run that has saved, on a node that is not the driver's."""
            others = {other.node_id for other in cluster.worker_nodes} - {plan_of(out).get("node")}
            for name in {path.parent.stem for path in out.glob("*.part/fit-*")}:
                node = planned(out).get(name, {}).get("node")
                if node in others and not (out / f"{name}.json").exists():
                    return name, node
            return None

        name, node = until(on_a_node_to_kill, driver)
        time.sleep(draw.uniform(0, 0.5))
        cluster.remove_node(next(other for other in cluster.worker_nodes if other.node_id == node), allow_graceful=False)
        until(lambda: planned(out)[name].get("attempts", 1) > 1, driver)
        time.sleep(draw.uniform(0, 0.5))
        until(lambda: saved(out), driver)
        driver.kill()
        driver.communicate()
        states, records = saved(out), {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
        assert states, "no state was there when the driver was killed"
        finish(*words)
    assert_same(tmp_path / "one", out)
    assert {path: path.stat().st_mtime_ns for path in records} == records, "a run with its record was run again"
    for name, seconds in states.items():
        assert records_in(out)[name].seconds.learn[: len(seconds)] == seconds, "a task was learned again"


@pytest.mark.skipif(not cases(0, 1), reason="beside other clusters on a small machine Ray is too slow: `make test-long`")
def test_the_mailbox_is_on_the_node_of_the_driver():
    """So no other node takes it along when it is lost: the driver would end with it."""
    with cluster_of({}, {}) as cluster, connected(Request("ray", cluster.address)) as ray:
        engines = [RayEngine(ray, Request("ray", cluster.address)) for _ in range(8)]
        asked = [one.mailbox.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for one in engines]
        assert set(ray.get(asked)) == {engines[0].node}


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for 100 kB; only root may make it."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(place)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"a small disk can't be made here: {made.stderr.decode()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def taken(address: str, node: str) -> Iterator[Callable[[], None]]:
    """The only place of a node is taken until the function that this yields is called, so that runs begin on others."""
    with connected(Request("ray", address)) as ray:

        class Holder:
            pass

        holder = ray.remote(Holder).options(num_cpus=1, resources={node: 1}).remote()
        ray.get(holder.__ray_ready__.remote())
        yield lambda: ray.kill(holder)


def test_a_full_disk_on_one_node_and_runs_that_diverge(tmp_path, small_disk):
    """Runs leave the node whose disk is full, and every run ends in its record or with a reason."""
    one, out = tmp_path / "one", tmp_path / "ray"
    sweep = ("sweep", "smnist", "sgd", "--lr", "0.05,1e30", "--seeds", "0-1", *SMALL, "--epochs", "2", *HOW)
    finish(*sweep, str(one), code=2)
    with cluster_of({"TMPDIR": str(small_disk)}, {}, cpus=0) as cluster, taken(cluster.address, "node-1") as release:
        driver = start(*sweep, str(out), "--on", f"ray:{cluster.address}")
        # A run that is queued and had a node was moved away from it.
        until(lambda: any("node" in run and run["state"] == "queued" for run in planned(out).values()), driver)
        release()
        _, said = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 2, said
    assert "No space left on device" in said
    assert "moved to other nodes" in said
    assert "2 of 4 runs have their records" in said
    assert records_in(one).keys() == records_in(out).keys()
    states, _ = finish("status", str(out))
    assert "2 failed" in states
    assert "2 done" in states
    assert states.count("its last good state stays") + states.count("the loss") >= 2


def test_a_full_disk_on_the_only_node(tmp_path, small_disk):
    """The reason is told at once: Ray would wait for another node without a word."""
    words = ("run", "smnist", "sgd", *SMALL, "--epochs", "2", *HOW, str(tmp_path / "ray"))
    with cluster_of({"TMPDIR": str(small_disk)}, cpus=0) as cluster:
        _, said = finish(*words, "--on", f"ray:{cluster.address}", code=2)
    assert "No space left on device" in said
    assert "moved to other nodes" not in said
