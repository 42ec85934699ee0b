"""Checkpoints that a thread writes: training goes on meanwhile, one write is under way at a time, and errors arrive."""

import threading
import time

import pytest
import torch

from hatrack import Regime, Trainer, run
from hatrack.experiments.run import folder_of
from hatrack.files import tensors
from hatrack.training.background import Background
from hatrack.training.checkpoint import Checkpointer, Stopped, stopping
from tests.helpers.killing import OFTEN, Killed, assert_same, killed_at, spec, to_the_end
from tests.helpers.learning import make
from tests.helpers.toys import toy_tasks

WRITE = tensors.write


class SlowDisk:
    """In place of `tensors.write`: a write goes on only when it is told to."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.may_end, self.under_way, self.most = threading.Semaphore(0), threading.Semaphore(0), 0, 0
        monkeypatch.setattr(tensors, "write", self)

    def __call__(self, path, content, **how) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.begun.release()
        assert self.may_end.acquire(timeout=60)
        WRITE(path, content, **how)
        self.under_way -= 1


def attempt(one, out, save_every):
    """What the run says if it fails."""
    try:
        run(one, out, save_every=save_every)
    except ValueError as error:
        return str(error)
    return ""


def full(path, content, **how):
    raise OSError(28, "No space left on device")


def test_jobs_run_one_at_a_time_and_an_error_is_raised_once():
    order, go, background = [], threading.Event(), Background()

    def first():
        go.wait(60)
        order.append("first")

    def fails():
        raise KeyError("lost")

    background.start(first)
    assert order == [], "it is under way"
    threading.Timer(0.05, go.set).start()
    background.start(lambda: order.append("second"))
    background.wait()
    assert order == ["first", "second"]
    background.start(fails)
    with pytest.raises(KeyError, match="lost"):
        background.start(lambda: order.append("third"))
    assert not background.failed
    background.wait()
    assert order == ["first", "second"], "after an error, nothing is started"


def test_what_is_written_is_the_state_at_the_save_though_training_went_on(tmp_path, monkeypatch):
    task = toy_tasks(1)[0]
    method, disk, checkpointer = make("sgd", [task]), SlowDisk(monkeypatch), Checkpointer(tmp_path / "x.part", {})
    rows = {"before": [0.5], "tests": [], "trains": [], "seconds": [], "usage": []}
    before = {name: value.clone() for name, value in method.state_dict().items()}
    checkpointer.begin_task(0, method, Trainer(), {**rows, "spent": 0.0})
    assert disk.begun.acquire(timeout=60)
    method.learn(task, Trainer(Regime(epochs=1)))  # a whole task, while the write is under way
    rows["seconds"].append(1.0)
    assert not list(checkpointer.folder.glob("task-*")), "nothing is there until it is whole"
    disk.may_end.release()
    checkpointer.wait()
    found = make("sgd", [task], seed=1)
    assert Checkpointer(tmp_path / "x.part", {}).resume(found, Trainer()) == {**rows, "seconds": [], "spent": 0.0, "task": 0}
    for name, value in found.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert any(not torch.equal(value, before[name]) for name, value in method.state_dict().items())


def test_one_write_is_under_way_at_a_time(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    for _ in range(1000):
        disk.may_end.release()
    one = spec("hat")
    record = run(one, tmp_path, save_every=OFTEN)
    assert disk.most == 1
    assert disk.begun.acquire(timeout=60)
    assert_same(record, run(one))


@pytest.mark.parametrize("save_every", [OFTEN, pytest.param(5.0, marks=pytest.mark.slow)])
def test_a_full_disk_ends_the_run_wherever_it_fills_up(save_every, tmp_path, monkeypatch):
    """Also in the last write of a run, for which nothing but the end of the run waits."""
    one, writes = spec("sgd", epochs=1, batch=900), 0
    whole = run(one)
    while True:
        calls, allowed = [], writes

        def fills_up(path, content, calls=calls, allowed=allowed, **how):
            calls.append(path)
            (WRITE if len(calls) <= allowed else full)(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(tensors, "write", fills_up)
            out = tmp_path / str(writes)
            said = attempt(one, out, save_every)
        if not said:
            break
        assert f"{calls[-1]}: No space left on device; what was saved before is still there" in said
        assert len(calls) == allowed + 1, "nothing is written after the error"
        assert not list(out.glob("*.json"))
        assert_same(run(one, out), whole)
        writes += 1
    assert writes == len(calls) >= 2 * len(whole.tasks), "every task has a beginning and a fit that ends"


def test_a_failed_write_is_noticed_at_the_next_step_not_at_the_next_save(tmp_path, monkeypatch):
    one, steps, after = spec("sgd"), [], Checkpointer.after_step

    def counted(self, loop):
        steps.append(self.writer._thread is None or not self.writer._thread.is_alive())
        time.sleep(0.05)
        after(self, loop)

    monkeypatch.setattr(Checkpointer, "after_step", counted)
    monkeypatch.setattr(tensors, "write", full)
    with pytest.raises(ValueError, match="No space left"):
        run(one, tmp_path, save_every=5.0)
    assert 1 <= len(steps) <= 5


def test_a_stop_waits_for_the_disk(tmp_path, monkeypatch):
    one, after = spec("sgd"), Checkpointer.after_step

    def stop(self, loop):
        stopping.set()
        after(self, loop)

    def slow(path, content, **how):
        time.sleep(0.3)
        WRITE(path, content, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "after_step", stop)
        patch.setattr(tensors, "write", slow)
        try:
            with pytest.raises(Stopped, match="and saved"):
                run(one, tmp_path)
        finally:
            stopping.clear()
    assert {path.name for path in tmp_path.glob("*.part/*.safetensors")} == {"task-0.safetensors", "fit-0-0-1.safetensors"}
    assert_same(run(one, tmp_path), run(one))


def test_no_other_process_comes_in_before_the_last_write_has_ended(tmp_path, monkeypatch):
    one, disk = spec("sgd"), SlowDisk(monkeypatch)
    folder = folder_of(one, tmp_path)
    killed_at(monkeypatch, 1.0, 0, most=1)

    def killed():
        with pytest.raises(Killed):
            run(one, tmp_path)

    thread = threading.Thread(target=killed)
    thread.start()
    assert disk.begun.acquire(timeout=60)
    time.sleep(0.3)  # it was killed at its first step, and the beginning of the task is being written
    assert "is being run by another process" in folder.blocked
    disk.may_end.release()
    thread.join(60)
    assert folder.blocked == ""
    monkeypatch.setattr(tensors, "write", WRITE)
    assert_same(to_the_end(one, tmp_path), run(one))


def test_fits_of_a_damaged_beginning_are_removed_before_the_task_begins(tmp_path):
    """A thread removes what is older; no fit may take up what belongs to another beginning of its task."""
    task = toy_tasks(1)[0]
    checkpointer, method = Checkpointer(tmp_path, {}), make("sgd", [task])
    for name in ("fit-1-0-0", "fit-0-0-1", "task-0", "task-1"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"damaged")
    checkpointer.begin_task(1, method, Trainer(), {})
    assert checkpointer.next_fit() is None
    assert checkpointer.notes == []
    checkpointer.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"task-0.safetensors", "task-1.safetensors"}


def test_copies_share_no_memory():
    matrix = torch.arange(6.0).view(2, 3)
    given = {"matrix": matrix, "turned": matrix.t(), "wide": torch.ones(1).expand(4), "part": matrix[0, 1:]}
    copies = tensors.host_copies(given)
    assert all(torch.equal(copies[name], value) and copies[name].is_contiguous() for name, value in given.items())
    assert len({copy.untyped_storage().data_ptr() for copy in copies.values()}) == len(given)
    matrix.zero_()
    assert copies["part"].tolist() == [1.0, 2.0]
    assert copies["turned"].untyped_storage().nbytes() == copies["turned"].nbytes
