"""States under another's name: of another task, another fit, another run. None of them gets into a record."""

import shutil

import pytest

from hatrack import Record, run
from hatrack.experiments.run import folder_of
from hatrack.files import tensors
from hatrack.training.checkpoint import Checkpointer
from tests.helpers.killing import OFTEN, Killed, assert_same, spec
from tests.helpers.tiers import quick_and_slow

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


def killed_in(one, out, monkeypatch, task: int, fit: int, steps: int = 3):
    """Carry out a run until it is killed in a fit of a task; return the folder of its states, and copies of all it had."""
    part, begun, every = folder_of(one, out).path, [], out / "every"
    tick, save = Checkpointer.after_step, Checkpointer.save_fit
    every.mkdir(parents=True)

    def deadly(self, loop):
        tick(self, loop)
        begun.append((self.task, self.fit))
        if begun.count((task, fit)) == steps:
            self.wait()
            raise Killed

    def copied(self, loop, *, ended=False):
        save(self, loop, ended=ended)
        self.wait()
        for file in part.glob("fit-*"):
            shutil.copy(file, every)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "after_step", deadly)
        patch.setattr(Checkpointer, "save_fit", copied)
        with pytest.raises(Killed):
            run(one, out, save_every=OFTEN)
    return part, every


@pytest.mark.parametrize("method", quick_and_slow(("ewc", "si", "sgd", "mas"), ("ewc", "si")))
def test_the_fit_of_another_task(method, tmp_path, monkeypatch):
    """The end of the first task's fit has the shapes of the second's; taken for it, the second task is never learned."""
    one = spec(method)
    part, every = killed_in(one, tmp_path, monkeypatch, task=1, fit=0)
    first = max(every.glob("fit-0-0-*"), key=lambda file: tensors.load(file)[1]["saves"])
    assert tensors.load(first)[1]["ended"]
    for parity in (0, 1):
        shutil.copy(first, part / f"fit-1-0-{parity}.safetensors")
    assert_same(run(one, tmp_path), run(one))


def test_another_fit_of_the_same_task(tmp_path, monkeypatch):
    """PackNet has two fits per task: before and after pruning."""
    one = spec("packnet", epochs=2)
    part, every = killed_in(one, tmp_path, monkeypatch, task=0, fit=1)
    found = sorted(every.glob("fit-0-0-*"), key=lambda file: tensors.load(file)[1]["saves"])
    for parity in (0, 1):
        shutil.copy(found[-1], part / f"fit-0-1-{parity}.safetensors")
    assert_same(run(one, tmp_path), run(one))


def test_the_beginning_of_another_task(tmp_path, monkeypatch):
    one = spec("ewc")
    part, _ = killed_in(one, tmp_path, monkeypatch, task=1, fit=0)
    shutil.copy(part / "task-0.safetensors", part / "task-1.safetensors")
    assert_same(run(one, tmp_path), run(one))


def test_a_fit_of_another_run_is_an_error(tmp_path, monkeypatch):
    one, other = spec("ewc"), spec("ewc", seed=1)
    part, _ = killed_in(one, tmp_path / "one", monkeypatch, task=0, fit=0)
    theirs, _ = killed_in(other, tmp_path / "other", monkeypatch, task=0, fit=0)
    for file in theirs.glob("fit-0-0-*"):
        shutil.copy(file, part)
    with pytest.raises(ValueError, match="belongs to another run"):
        run(one, tmp_path / "one")
    assert not list((tmp_path / "one").glob("*.json"))


def test_a_fit_of_version_0_1_has_no_numbers_and_is_gone_on_with(tmp_path, monkeypatch):
    one = spec("ewc")
    part, _ = killed_in(one, tmp_path, monkeypatch, task=1, fit=0)
    for file in part.glob("fit-1-0-*"):
        values, metadata = tensors.load(file)
        tensors.save(file, values, {key: value for key, value in metadata.items() if key not in ("task", "fit")})
    states = []
    next_fit = Checkpointer.next_fit
    monkeypatch.setattr(Checkpointer, "next_fit", lambda self: states.append(next_fit(self)) or states[-1])
    assert_same(run(one, tmp_path), run(one))
    assert states[0] is not None
    assert isinstance(Record.load(tmp_path / f"{one.name}.json"), Record)
