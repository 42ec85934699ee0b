"""What a worker does with a job, with the mailbox in this process: records, states that travel, and every kind of end."""

import errno
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from hatrack import Record, Regime, run
from hatrack.clusters import sent_data, worker
from hatrack.clusters.jobs import Job, read_files
from hatrack.clusters.mailbox import Mailbox
from hatrack.clusters.worker import carry_out
from hatrack.datasets import folder as data_folder
from hatrack.datasets.catalog import SETS
from hatrack.experiments.run import folder_of
from hatrack.experiments.sameness import differences
from hatrack.training.checkpoint import Checkpointer, Stopped, stopping
from tests.helpers.runs import small

HOW = {"engine": "eager", "save_every": 0.0}


def job_of(spec, **changes):
    return Job(spec.name, spec, {**HOW, **changes.pop("how", {})}, "out", **changes)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(worker, "SPEAK", 0.01)
    monkeypatch.setattr(worker, "SEND", 0.02)
    yield
    assert list(place.iterdir()) == [], "a worker leaves nothing on its node"
    assert not stopping.is_set()


def test_a_worker_gives_the_record_of_this_process():
    spec, mailbox = small("hat"), Mailbox()
    result = carry_out(job_of(spec, how={"keep_model": True}), mailbox, "n1")
    assert (result.end, result.node) == ("record", "n1")
    assert differences(run(spec), Record.from_dict(json.loads(result.text))) == []
    assert f"{spec.name}.safetensors" in result.files
    kinds = [message.kind for message in mailbox.take()]
    assert kinds[0] == "began"
    assert "files" in kinds


@pytest.mark.slow
def test_a_later_attempt_goes_on_from_what_an_earlier_one_sent(monkeypatch, tmp_path):
    """The first attempt is lost after it has learned a task. The second one asks for the states and does not begin anew."""
    spec, mailbox, begun = small("hat", regime=Regime(epochs=3, batch=100)), Mailbox(), []
    begin = Checkpointer.begin_task

    def stop_at_the_second(self, task, *rest):
        begun.append(task)
        begin(self, task, *rest)
        if len(begun) == 2:
            stopping.set()

    monkeypatch.setattr(Checkpointer, "begin_task", stop_at_the_second)
    first = carry_out(job_of(spec), mailbox, "n1")
    assert first.end == "stopped"
    assert any(name.endswith("task-1.safetensors") for name in first.files)
    answered = threading.Event()

    def answer():
        while not answered.wait(0.01):
            for message in mailbox.take():
                if message.kind == "question":
                    mailbox.give(message.name, message.attempt, first.files)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        second = carry_out(job_of(spec), mailbox, "n2")  # the job of the first attempt, as Ray tries it again
    finally:
        answered.set()
        thread.join()
    assert begun == [0, 1], "the first task was learned twice"
    assert differences(run(spec), Record.from_dict(json.loads(second.text))) == []


def test_a_worker_that_was_taken_for_lost_is_told_to_stop(monkeypatch):
    spec, mailbox = small(regime=Regime(epochs=10_000, patience=10_000)), Mailbox()
    begin = Checkpointer.begin_task

    def another_begins(self, *rest):
        begin(self, *rest)
        mailbox.begin(spec.name, "n2")

    monkeypatch.setattr(Checkpointer, "begin_task", another_begins)
    result = carry_out(job_of(spec), mailbox, "n1")
    assert result.end == "stopped"
    messages = mailbox.take()
    second = next(k for k, message in enumerate(messages) if (message.kind, message.attempt) == ("began", 2))
    assert {message.attempt for message in messages[second:] if message.kind == "files"} <= {2}


def test_no_run_begins_after_a_stop():
    mailbox = Mailbox()
    mailbox.stop()
    assert carry_out(job_of(small()), mailbox, "n1").end == "stopped"
    assert mailbox.take() == []


def test_a_full_disk_is_the_nodes_fault(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hatrack.training.checkpoint.tensor_files.write_copies", full)
    result = carry_out(job_of(small()), Mailbox(), "n1")
    assert result.end == "node"
    assert "No space left on device" in result.text
    assert tempfile.gettempdir() in result.text, "the place is that of the node, not that of the driver"


def test_what_can_not_be_run_is_the_runs_fault(monkeypatch):
    monkeypatch.setattr(worker, "run", lambda *_, **__: 1 / 0)
    result = carry_out(job_of(small()), Mailbox(), "n1")
    assert (result.end, result.text) == ("failed", "ZeroDivisionError: division by zero")


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_diverges_says_where_its_state_is():
    result = carry_out(job_of(small(regime=Regime(lr=1e30, epochs=2, batch=100))), Mailbox(), "n1")
    assert result.end == "diverged"
    assert "stays in out/" in result.text


def test_in_a_shared_folder_nothing_travels(tmp_path):
    spec = small()
    result = carry_out(job_of(spec, folder=tmp_path / "shared"), Mailbox(), "n1")
    assert (result.end, result.files) == ("record", {})
    assert (tmp_path / "shared" / f"{spec.name}.json").exists()


def test_a_set_is_sent_once_to_a_node_that_lacks_it(tmp_path, monkeypatch):
    """The driver's folder and the node's are two; the file that arrives is the one that was sent."""
    name, asked = next(iter(SETS)), []
    driver, node = tmp_path / "driver", tmp_path / "node"
    driver.mkdir()
    np.savez(driver / f"{name}.npz", x=np.arange(3))

    def ask(wanted):
        asked.append(wanted)
        monkeypatch.setenv("HATRACK_DATA", str(driver))
        files = sent_data.files_of_set(wanted)
        monkeypatch.setenv("HATRACK_DATA", str(node))
        return files

    monkeypatch.setenv("HATRACK_DATA", str(node))
    assert sent_data.fetch_set(name, ask)
    assert sent_data.fetch_set(name, ask)
    assert asked == [name]
    assert data_folder.place(name).read_bytes() == (driver / f"{name}.npz").read_bytes()
    assert not sent_data.fetch_set(next(other for other in SETS if other != name), ask)


def test_leftovers_of_killed_workers_are_removed(tmp_path):
    gone = Path(tempfile.gettempdir()) / f"{worker.LEFT}999999999-x"
    gone.mkdir()
    (gone / "state").write_bytes(b"x")
    carry_out(job_of(small()), Mailbox(), "n1")
    assert not gone.exists()


def test_files_of_a_stopped_run_are_those_of_one_machine(tmp_path, monkeypatch):
    """`hatrack resume` goes on from what a fleet has left."""
    spec, after = small("hat"), Checkpointer.after_step

    def stop(self, loop):
        stopping.set()
        after(self, loop)

    monkeypatch.setattr(Checkpointer, "after_step", stop)
    result = carry_out(job_of(spec), Mailbox(), "n1")
    with pytest.raises(Stopped):
        run(spec, tmp_path / "here", **HOW)
    stopping.clear()
    assert sorted(result.files) == sorted(read_files(folder_of(spec, tmp_path / "here")))


def test_the_mailbox_needs_no_torch():
    """Its actor is then there before the workers are."""
    code = "import sys, hatrack.clusters.mailbox; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
