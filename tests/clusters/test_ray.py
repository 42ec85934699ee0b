"""Runs on a real Ray of this machine: the same records, a worker that is killed, Ctrl-C, and a search."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hatrack.__main__ import main
from hatrack.clusters import ray_cluster
from hatrack.clusters.ray_cluster import connected
from hatrack.clusters.ray_engine import check_places
from hatrack.clusters.request import Request, parse_request
from tests.helpers.on_ray import PATIENCE, assert_same, finish, needs_ray, planned, start, until

pytestmark = needs_ray
FOUR = ("run", "smnist", "hat,sgd", "--seeds", "0-1", "--data", "sample", "--widths", "20", "--batch", "20")
HOW = ("--save-every", "0.01", "--device", "cpu", "--engine", "eager", "--train-examples", "200", "--out")


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The workers of Ray in the session of a command that carry out a run now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text()
            if words.startswith("ray::hatrack run") and any(Path("/tmp").glob(f"hatrack-run-{folder.name}-*")):
                found += [int(folder.name)] if os.getsid(int(folder.name)) == process.pid else []  # not of a test beside it
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
def test_on_ray_with_a_worker_killed_and_ctrl_c(tmp_path):
    """A worker is killed, then Ctrl-C comes while runs are under way. Given again without Ray, the command has the same
    records. (On Ray it goes on in test_ray_nodes.py.)"""
    # A run takes longer than the five seconds after which the driver notes at the latest that one was begun again.
    ray, words = tmp_path / "ray", (*FOUR, "--epochs", "60", "--patience", "100", *HOW)
    process, alone = start(*words, str(ray), "--on", "ray"), start(*words, str(tmp_path / "one"))
    killed = until(lambda: list(ray.glob("*.part/*")) and workers_of(process), process)
    os.kill(killed[0], signal.SIGKILL)
    until(lambda: max(run.get("attempts", 1) for run in planned(ray).values()) > 1, process)  # Ray begins the run again
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "stopped, and saved:" in err
    said, _ = finish("status", str(ray))
    assert "stopped" in said
    assert "running" not in said
    finish(*words, str(ray), "--parallel", "2")
    assert alone.communicate(timeout=PATIENCE)
    assert alone.returncode == 0
    assert_same(tmp_path / "one", ray)


@pytest.mark.slow
def test_a_search_on_ray_has_the_trials_of_one_process(tmp_path):
    """A grid does not depend on which trial ends first."""
    words = ("tune", "smnist", "sgd", "--data", "sample", "--widths", "10", "--epochs", "1", "--over", "lr=0.01|0.05|0.1")
    grid = (*words, "--sampler", "grid", "--protocol", "one-seed", "--trials", "3", "--device", "cpu", "--out")
    on_ray = start(*grid, str(tmp_path / "ray"), "--on", "ray")
    finish(*grid, str(tmp_path / "one"))
    _, err = on_ray.communicate(timeout=PATIENCE)
    assert on_ray.returncode == 0, err
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


def test_an_address_where_something_else_listens_is_told_at_once(tmp_path, capsys):
    """Ray itself would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            there, _ = server.accept()
            with there:
                there.recv(1000)
                there.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        assert main([*FOUR, *HOW, str(tmp_path / "out"), "--on", f"ray:{address}"]) == 2
    assert f"at {address}: something else answers there" in capsys.readouterr().err
    assert time.monotonic() - began < 30


def test_no_cluster_is_started_for_a_folder_that_can_not_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ray_cluster, "load_ray", lambda: pytest.fail("Ray was loaded"))
    (tmp_path / "file").touch()
    assert main([*FOUR, *HOW, str(tmp_path / "file"), "--on", "ray"]) == 2
    assert f"can't write to the folder {tmp_path / 'file'}" in capsys.readouterr().err


@pytest.mark.parametrize(("ask", "text"), [("cpus=3", "3 CPUs"), ("gpus=1", "1 GPUs"), ("memory=9", "9 GB")])
def test_what_no_node_has_is_told(ask, text):
    nodes = [{"CPU": 2.0, "memory": 8.0 * 2**30}, {"CPU": 1.0}]
    check_places(nodes, parse_request("ray", "cpus=2,memory=8"))
    with pytest.raises(ValueError, match=f"a run asks for {text}, but the largest node"):
        check_places(nodes, parse_request("ray", ask))
