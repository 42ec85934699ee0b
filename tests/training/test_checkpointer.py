"""The Checkpointer by itself, without runs: which files it writes and removes, which state it takes, what it refuses."""

import stat
import time
from types import SimpleNamespace

import pytest
import torch

from hatrack import Regime, Trainer
from hatrack.files import tensors
from hatrack.training import checkpoint
from hatrack.training.checkpoint import FORMAT, Checkpointer, Stopped, random_state, set_random_state, stopping
from hatrack.training.stopwatch import Stopwatch
from tests.helpers.learning import make
from tests.helpers.toys import toy_tasks

SPEC = {"run": 1}


def rows(done: int, tasks: int = 12) -> dict[str, object]:
    """What was measured before a task."""
    scores = [[[0.5, 0.5]] * tasks] * done
    return {"before": [0.1] * tasks, "tests": scores, "trains": scores, "seconds": [1.0] * done, "usage": [{}] * done,
            "spent": 1.0}  # fmt: skip


def world(seed: int = 0):
    """A method, and a trainer that has not fitted anything."""
    return make("sgd", toy_tasks(2), seed=seed), Trainer(Regime(epochs=2, batch=10), progress=False)


def begun(folder, task: int = 0, **how) -> Checkpointer:
    """Return the Checkpointer of a run that has just begun a task."""
    saver = Checkpointer(folder, SPEC, **how)
    saver.begin_task(task, *world(), rows(task))
    saver.wait()
    return saver


def fit(task: int = 0, *, keep_state: bool = False):
    """Return what the Checkpointer uses of a fit under way."""
    kept = {"method/w": torch.ones(2), "best/w": torch.ones(2), "optimizer/w/momentum": torch.ones(2)}
    result = {"task": task, "epochs": [], "best": 0, "engine": "eager", "halved": 0}
    pace = {"lr": 0.1, "patience": 1, "lowest": 1.0, "over": False}
    return SimpleNamespace(
        state=lambda: (kept, {"fitted": result, "pace": pace, "place": 0}),
        regime=Regime(keep_state=keep_state),
        task=SimpleNamespace(name="digits"),
        result=SimpleNamespace(epochs=[0, 0]),
        stopwatch=Stopwatch(),
    )


def names(folder) -> list[str]:
    return sorted(file.stem for file in folder.iterdir())


# Tasks


def test_the_time_between_saves(tmp_path):
    assert Checkpointer(tmp_path, SPEC).seconds == 300
    assert Checkpointer(tmp_path, SPEC, minutes=2).seconds == 120
    assert Checkpointer(tmp_path, SPEC, minutes=0).seconds == 0
    for minutes in (-0.5, float("nan")):
        with pytest.raises(ValueError, match=f"not {minutes:g}"):
            Checkpointer(tmp_path, SPEC, minutes=minutes)


def test_the_beginning_of_a_task_comes_back(tmp_path):
    method, trainer = world()
    method.history = {0: "digits 0-4"}
    trainer.start(method, toy_tasks(2)[0])
    saver = Checkpointer(tmp_path / "part", SPEC)
    saver.begin_task(1, method, trainer, rows(1))
    saver.wait()
    assert names(tmp_path / "part") == ["task-1"]
    assert stat.S_IMODE((tmp_path / "part").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "part" / "task-1.safetensors").stat().st_mode) == 0o600
    metadata = tensors.load(tmp_path / "part" / "task-1.safetensors")[1]
    assert (metadata["format"], metadata["spec"], metadata["task"]) == (2, SPEC, 1)
    other, fresh = world(seed=1)
    later = Checkpointer(tmp_path / "part", SPEC)
    assert later.resume(other, fresh) == {"task": 1, **rows(1)}
    assert (later.task, later.fit, other.history) == (1, -1, {0: "digits 0-4"})
    assert fresh.carried[other].fits == {0: 1}
    state, found = method.state_dict(), other.state_dict()
    assert all(torch.equal(state[key], found[key]) for key in state)


def test_without_states_there_is_nothing_to_resume(tmp_path):
    assert Checkpointer(tmp_path / "none", SPEC).resume(*world()) is None
    (tmp_path / "fit-0-0-0.safetensors").write_text("no beginning of a task")
    assert Checkpointer(tmp_path, SPEC).resume(*world()) is None


@pytest.mark.parametrize("backwards", [False, True])
def test_the_latest_task_that_can_be_read_is_taken(backwards, tmp_path, monkeypatch):
    """Whatever the order in which the disk lists the files."""
    for task in (9, 10):
        begun(tmp_path, task)
    listed = Checkpointer._states
    monkeypatch.setattr(Checkpointer, "_states", lambda self: sorted(listed(self), reverse=backwards))
    assert names(tmp_path) == ["task-10", "task-9"]
    assert Checkpointer(tmp_path, SPEC).resume(*world())["task"] == 10
    (tmp_path / "task-10.safetensors").write_text("damaged")
    later = Checkpointer(tmp_path, SPEC)
    assert later.resume(*world())["task"] == 9
    assert len(later.notes) == 1
    (tmp_path / "task-9.safetensors").write_text("damaged")
    with pytest.raises(ValueError, match=r"holds no state that can be used.*task-10"):
        Checkpointer(tmp_path, SPEC).resume(*world())


def test_a_state_of_another_method_is_refused(tmp_path):
    begun(tmp_path)
    other = make("ewc", toy_tasks(2, shape=(1, 5, 5)))
    with pytest.raises(ValueError, match=r"task-0\.safetensors does not fit the method") as caught:
        Checkpointer(tmp_path, SPEC).resume(other, world()[1])
    assert "\n" not in str(caught.value)


def test_a_task_removes_what_is_older_than_the_task_before_it_and_nothing_else(tmp_path):
    for name in ("task-0", "task-1", "fit-1-0-0", "fit-2-0-1", "fit-1-0-2", "other"):
        (tmp_path / f"{name}.safetensors").write_text("x")
    (tmp_path / "task-7.safetensors").mkdir()
    begun(tmp_path, 2)
    assert names(tmp_path) == ["fit-1-0-2", "other", "task-1", "task-2", "task-7"]


def test_fits_of_a_task_that_begins_anew_are_removed_before_it_is_written(tmp_path, monkeypatch):
    for name in ("fit-2-0-1", "fit-1-0-1", "fit-22-0-1"):
        (tmp_path / f"{name}.safetensors").write_text("x")
    seen, write = [], tensors.write_copies
    monkeypatch.setattr(
        checkpoint.tensor_files, "write_copies", lambda *a, **k: (seen.append(names(tmp_path)), write(*a, **k))
    )
    begun(tmp_path, 2)
    assert seen == [["fit-1-0-1", "fit-22-0-1"]]


# Fits


def test_states_of_a_fit_take_turns_and_the_last_one_is_used(tmp_path):
    saver = begun(tmp_path)
    assert saver.next_fit() is None
    assert (saver.fit, saver.saves) == (0, 0)
    for saved, last in ((1, "fit-0-0-1"), (2, "fit-0-0-0"), (3, "fit-0-0-1"), (4, "fit-0-0-0")):
        saver.save_fit(fit())
        saver.wait()
        metadata = tensors.load(tmp_path / f"{last}.safetensors")[1]
        assert (metadata["saves"], metadata["task"], metadata["fit"], metadata["ended"]) == (saved, 0, 0, False)
        later = Checkpointer(tmp_path, SPEC)
        later.resume(*world())
        found, metadata = later.next_fit()
        assert (metadata["saves"], later.saves) == (saved, saved)
        assert found.keys() == {"method/w", "best/w", "optimizer/w/momentum"}
    assert names(tmp_path) == ["fit-0-0-0", "fit-0-0-1", "task-0"]
    saver.next_fit()
    saver.save_fit(fit())
    saver.wait()
    assert (saver.fit, saver.saves) == (1, 1)
    assert "fit-0-1-1" in names(tmp_path)


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("before", [2, 3])
def test_the_end_of_a_fit_replaces_both_states_and_has_only_what_is_needed(keep_state, before, tmp_path):
    saver = begun(tmp_path)
    saver.next_fit()
    for _ in range(before):
        saver.save_fit(fit())
    saver.save_fit(fit(keep_state=keep_state), ended=True)
    saver.wait()
    assert names(tmp_path) == [f"fit-0-0-{(before + 1) % 2}", "task-0"]
    found, metadata = tensors.load(next(tmp_path.glob("fit-*")))
    assert metadata["ended"] is True
    assert found.keys() == {"method/w", *(["optimizer/w/momentum"] if keep_state else [])}


def test_a_state_is_copied_before_training_goes_on(tmp_path):
    saver, loop = begun(tmp_path), fit()
    saver.next_fit()
    saver.save_fit(loop)
    loop.state()[0]["method/w"].add_(5)
    saver.wait()
    assert tensors.load(tmp_path / "fit-0-0-1.safetensors")[0]["method/w"].tolist() == [1, 1]


def test_a_save_is_due_after_the_time_and_not_before(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    saver = begun(tmp_path, minutes=1)
    saver.next_fit()
    counts = []
    for moment in (1060.0, 1060.5, 1120.5, 1121.0):
        now[0] = moment
        saver.after_step(fit())
        counts.append(saver.saves)
    saver.wait()
    assert counts == [0, 1, 1, 2]


def test_a_request_to_stop_is_a_save(tmp_path, monkeypatch):
    saver = begun(tmp_path)
    saver.next_fit()
    stopping.set()
    try:
        with pytest.raises(Stopped, match="task 'digits', epoch 3, and saved"):
            saver.after_step(fit())
    finally:
        stopping.clear()
    assert saver.saves == 1
    assert saver.writer._thread is None, "it is on the disk"


def test_a_full_disk_is_told_of_at_the_next_step(tmp_path, monkeypatch):
    saver = begun(tmp_path)
    saver.next_fit()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.tensor_files, "write_copies", full)
    saver.save_fit(fit())
    saver.writer._thread.join()
    with pytest.raises(ValueError, match=r"can't save to .*fit-0-0-1\.safetensors: No space left on device"):
        saver.after_step(fit())
    saver.save_fit(fit())
    saver.close()
    assert not saver.writer.failed


# Reading


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}, newer"),
        ({"format": "2"}, "format '2', newer"),
        ({"format": None}, "format None, newer"),
        ({"spec": {"run": 2}}, "belongs to another run"),
    ],
)
def test_states_of_other_versions_or_runs_are_errors(changes, said, tmp_path):
    begun(tmp_path)
    change(tmp_path / "task-0.safetensors", changes)
    with pytest.raises(ValueError, match=said):
        Checkpointer(tmp_path, SPEC).resume(*world())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": FORMAT - 1}, "older than this version"),
        ({"history": 5}, "is no state of a run: history"),
        ({"task": 1, "rows": rows(1)}, "the state of another task or fit"),
    ],
)
def test_states_that_are_of_no_use_are_passed_over_with_a_note(changes, said, tmp_path):
    begun(tmp_path)
    change(tmp_path / "task-0.safetensors", changes)
    saver = Checkpointer(tmp_path, SPEC)
    with pytest.raises(ValueError, match=said):
        saver.resume(*world())
    assert len(saver.notes) == 1


def change(file, changes) -> None:
    state, metadata = tensors.load(file)
    tensors.save(file, state, {**metadata, **changes})


@pytest.mark.parametrize(
    ("name", "metadata", "belongs"),
    [
        ("task-3", {"task": 3}, True),
        ("task-3", {"task": 2}, False),
        ("task-3", {}, False),
        ("fit-3-1-0", {"task": 3, "fit": 1}, True),
        ("fit-3-1-0", {"task": 3, "fit": 0}, False),
        ("fit-3-1-0", {"task": 1, "fit": 1}, False),
        ("fit-3-1-0", {"fitted": {"task": 3}}, True),
        ("fit-3-1-0", {"fitted": {"task": 1}}, False),
    ],
)
def test_a_state_belongs_to_what_its_name_says(name, metadata, belongs, tmp_path):
    assert checkpoint._belongs(tmp_path / f"{name}.safetensors", metadata) is belongs


# Random numbers


def test_random_numbers_go_on_from_a_saved_state(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: pytest.fail("there is no GPU"))
    cpu = torch.device("cpu")
    before = torch.get_rng_state()
    try:
        saved = random_state(cpu)
        assert saved.keys() == {"random/cpu"}
        one = torch.rand(3)
        set_random_state({**saved, "random/cuda": torch.zeros(1)}, cpu)  # the run began on a GPU
        assert torch.equal(torch.rand(3), one)
    finally:
        torch.set_rng_state(before)


def test_random_numbers_of_a_gpu_go_on_too(monkeypatch):
    gpu, state, given = torch.device("cuda"), torch.tensor([7], dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *now: given.append(now))
    saved = random_state(gpu)
    assert saved["random/cuda"] is state
    set_random_state(saved, gpu)
    set_random_state({"random/cpu": saved["random/cpu"]}, gpu)  # the run began on a CPU
    assert given == [(state, gpu)]
