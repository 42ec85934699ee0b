"""A watched folder: what it shows of runs that go on, were killed or are of other machines, and that it reads little."""

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest

from hatrack import Record
from hatrack.reporting.page import collect, page_json, render_page
from hatrack.tracking import reader
from hatrack.tracking.lines import RunLines
from hatrack.tracking.reader import FILE
from hatrack.watching import folder as folder_module
from hatrack.watching.folder import WatchedFolder
from hatrack.watching.state import curve, run_state
from tests.helpers.lines import about, epoch, learned, write
from tests.helpers.records import make, save


def test_the_state_of_a_run():
    lines = RunLines(
        [about(layers={"2": "linear 1, 50 units"}), epoch(0, 0), epoch(0, 1), *learned(0, [0.9, 0.1, 0.1], **{"2": 0.25})]
    )
    for line in (epoch(1, 0), epoch(1, 1), *learned(1, [0.7, 0.8, 0.1], **{"2": 0.5}), epoch(2, 0, 0.625, seconds=90.0)):
        lines.add(line)
    state = run_state("x", lines)
    assert (state["name"], state["status"], state["message"]) == ("x", "running", "")
    assert (state["benchmark"], state["method"], state["seed"]) == ("smnist", "hat", 2)
    assert (state["task"], state["tasks"], state["task_name"], state["epoch"], state["epochs"]) == (3, 3, "task 2", 1, 10)
    assert (state["accuracy"], state["forgetting"]) == (pytest.approx(0.75), pytest.approx(0.2))
    assert state["capacity"] == {"linear 1, 50 units": 0.5}
    assert state["curve"] == [[1, 1, 0.5, 1.0], [1, 2, 0.5, 1.0], [2, 1, 0.5, 1.0], [2, 2, 0.5, 1.0], [3, 1, 0.625, 1.0]]
    assert state["done"] == pytest.approx((2 + 1 / 2) / 3)  # tasks took two epochs
    assert state["left"] == pytest.approx(90 * (1 - state["done"]) / state["done"])


def test_a_process_that_was_killed_is_noticed(tmp_path):
    """Nobody could write a last line."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = run_state("x", RunLines([about(pid=ended.pid), epoch(0, 0)]))
    assert (gone["status"], gone["left"]) == ("stopped", None)
    assert "is gone" in gone["message"]
    assert run_state("x", RunLines([about(), epoch(0, 0)]))["status"] == "running"


@pytest.mark.parametrize(
    ("lines", "status", "message"),
    [
        (lambda: [about(host="other", pid=2**22 + 5), epoch(0, 0)], "running", ""),
        (lambda: [about(host="other"), epoch(0, 0, time=time.time() - 3600)], "running", "no line for 60 min"),
        (lambda: [about(), epoch(0, 0), {"kind": "end", "why": "stopped"}], "stopped", "hatrack resume"),
        (lambda: [about(), {"kind": "end", "why": "Diverged: the loss is inf"}], "stopped", "the loss is inf"),
        (lambda: [about(), {"kind": "end", "why": "stopped"}, about(), epoch(0, 1)], "running", ""),
        (list, "stopped", "no lines"),
    ],
)
def test_runs_that_ended_or_are_silent(lines, status, message):
    state = run_state("x", RunLines(lines()))
    assert state["status"] == status
    assert message in state["message"]
    assert message or not state["message"]


def test_a_long_curve_is_thinned_out_but_keeps_the_ends_of_tasks():
    lines = RunLines([about(), *(epoch(task, k, accuracy=k / 1000) for task in range(3) for k in range(1000))])
    whole, thin = curve(lines, 10_000), curve(lines, 100)
    assert len(whole) == 3000
    assert len(thin) <= 104
    assert [point for point in thin if point[1] == 1000] == [[task + 1, 1000, 0.999, 1.0] for task in range(3)]
    assert all(point in whole for point in thin)


# Folders


def test_records_and_runs_of_several_machines_are_seen(tmp_path):
    save(tmp_path, [make("sgd", 0), make("hat", 0)])
    write(tmp_path, "one", about(), epoch(0, 0))
    write(tmp_path, "two", about(host="other"), epoch(0, 0))
    (tmp_path / "broken.json").write_text("{}")
    watched = WatchedFolder(tmp_path, collect)
    data = watched.data()
    assert [(run["name"], run["host"]) for run in data["running"]] == [("one", socket.gethostname()), ("two", "other")]
    assert data["count"] == 2
    assert [line["name"] for line in data["left_out"]] == ["broken.json"]
    page = render_page(data, live=True)
    assert "broken.json" in page
    assert "HATRACK_LIVE" in page


def test_a_new_record_changes_the_digest_and_ends_the_run(tmp_path):
    record = make("hat", 0)
    save(tmp_path, [make("sgd", 0)])
    write(tmp_path, record.name, about(), epoch(0, 0))
    watched = WatchedFolder(tmp_path, collect)
    before = watched.data()
    save(tmp_path, [record])
    watched._next = 0.0
    after = watched.data()
    assert [run["name"] for run in before["running"]] == [record.name]
    assert after["running"] == []  # also while its folder is still there
    assert before["digest"] != after["digest"]
    (tmp_path / f"{record.name}.part" / "again").write_text("{}")
    assert [run["name"] for run in watched.data()["running"]] == [record.name]


def test_hostile_names_do_not_reach_the_page(tmp_path):
    bad = "<script>alert(1)</script>"
    spec = {"benchmark": bad, "method": bad, "seed": bad}
    write(tmp_path, "x", about(spec=spec, tasks=1, host=bad) | {"tasks": [bad]}, epoch(0, 0), {"kind": "end", "why": bad})
    data = WatchedFolder(tmp_path, collect).data()
    assert "<script>alert" not in json.loads(page_json(data))["running_html"]
    page = render_page(data, live=True)
    assert "<script>alert" not in page


def test_what_has_not_changed_is_not_read_again(tmp_path, monkeypatch):
    """With hundreds of records and runs, a look at the folder reads only the run that goes on."""
    first = make("sgd", 0)
    save(tmp_path, [first])
    for number in range(300):
        write(tmp_path, f"run-{number}", about(), epoch(0, 0))
    loads, opened, load, path_open = [], [], Record.load, Path.open
    monkeypatch.setattr(folder_module, "_load", lambda path: loads.append(path) or load(path))
    monkeypatch.setattr(Path, "open", lambda self, *how: opened.append(self) or path_open(self, *how))
    watched = WatchedFolder(tmp_path, collect)
    watched.data()
    assert (len(loads), len([path for path in opened if path.name == FILE])) == (1, 300)
    opened.clear()
    watched.data()
    assert opened == []
    write(tmp_path, "run-7", epoch(0, 1))
    opened.clear()
    watched.data()
    assert [path.parent.name for path in opened] == ["run-7.part"]
    assert len(loads) == 1


def test_a_run_that_is_killed_and_goes_on_has_one_curve(tmp_path):
    watched = WatchedFolder(tmp_path, collect)
    write(tmp_path, "x", about(pid=2**22 + 5), *(epoch(0, k, accuracy=0.1 * k) for k in range(6)))
    killed = watched.data()["running"][0]
    with (tmp_path / "x.part" / FILE).open("ab") as file:
        file.write(b'{"kind":"epo\n')  # torn by the kill
    write(tmp_path, "x", about(), *(epoch(0, k, accuracy=0.1 * k) for k in range(3, 9)))
    goes_on = watched.data()["running"][0]
    assert (killed["status"], goes_on["status"]) == ("stopped", "running")
    assert [point[1] for point in killed["curve"]] == [1, 2, 3, 4, 5, 6]
    assert [point[1] for point in goes_on["curve"]] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert goes_on["curve"][:6] == killed["curve"]


def test_limits_of_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MOST", 500)
    write(tmp_path, "x", about(), *(epoch(0, k) for k in range(100)))
    assert len(WatchedFolder(tmp_path, collect).data()["running"][0]["curve"]) < 5


def test_a_folder_that_is_gone_is_empty(tmp_path):
    assert WatchedFolder(tmp_path / "none", collect).data()["running"] == []


def test_a_process_that_dies_without_a_new_line_is_noticed(tmp_path):
    """What is kept of a run between two looks does not hide it."""
    child = subprocess.Popen(["sleep", "60"])
    write(tmp_path, "x", about(pid=child.pid), epoch(0, 0))
    watched = WatchedFolder(tmp_path, collect)
    before = watched.data()["running"][0]
    child.kill()
    child.wait()
    after = watched.data()["running"][0]
    assert (before["status"], after["status"]) == ("running", "stopped")
    assert (before["left"] is None, after["left"]) == (False, None)
    assert before["curve"] == after["curve"]


def test_of_very_many_runs_only_some_have_curves(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "CURVES", 3)
    for number in range(5):
        write(tmp_path, f"run-{number}", about(), epoch(0, 0))
    assert [len(run["curve"]) for run in WatchedFolder(tmp_path, collect).data()["running"]] == [1, 1, 1, 0, 0]


def test_a_run_of_which_nothing_is_known_is_shown(tmp_path):
    """A folder of an earlier version has no lines, and lines may lack a spec."""
    (tmp_path / "old.part").mkdir()
    write(tmp_path, "bare", {"kind": "run", "tasks": []}, epoch(0, 0))
    data = WatchedFolder(tmp_path, collect).data()
    assert [run["name"] for run in data["running"]] == ["bare", "old"]
    assert "old" in json.loads(page_json(data))["running_html"]
    assert "old" in render_page(data, live=True)


def test_a_score_that_is_no_percentage_is_told_as_it_is():
    state = run_state("x", RunLines([about(score="R²"), epoch(0, 0), *learned(0, [0.5, 0.1, 0.1])]))
    assert (state["accuracy"], state["message"]) == (None, "R² so far 0.5")
