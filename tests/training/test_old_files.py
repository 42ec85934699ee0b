"""What an earlier version wrote is read, is what it was, and is gone on with. tests/helpers/old_files.py made the files."""

import shutil

import pytest
import torch

import hatrack
from hatrack import Record
from hatrack.experiments import record
from hatrack.files import tensors
from hatrack.methods import guarantees
from hatrack.reporting.report import report
from hatrack.training import checkpoint, saving
from hatrack.training.fit_loop import FitLoop
from hatrack.training.saving import save
from tests.helpers.learning import ISOLATED
from tests.helpers.old_files import DATA, STEPS, carry_on, names, tasks, trainer, trunk

MODELS = sorted(DATA.glob("models-*/*.safetensors"))
RUNS = sorted(DATA.glob("run-*"))
pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


def test_there_are_files_of_the_present_formats():
    """If not: python -m tests.helpers.old_files, and keep the old ones."""
    assert {path.stem for path in (DATA / f"models-{saving.FORMAT}").iterdir()} == set(names())
    assert (DATA / f"run-{checkpoint.FORMAT}-{record.SCHEMA}").is_dir()
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 200_000


@pytest.mark.parametrize("path", MODELS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_model_of_long_ago_learns_another_task(path, tmp_path):
    """Its digests and its answers then are compared by `load`; and a third task leaves the first two as they are."""
    three = tasks()
    method = hatrack.load(path, trunk(norms="norms" in path.stem))
    assert method.history == {0: "toy 0", 1: "toy 1"}
    exact = path.stem.removesuffix("-norms") in ISOLATED
    assert sorted(method.digests) == ([0, 1] if exact else [])
    kept, _ = tensors.load(path)
    for task in three[:2]:
        torch.testing.assert_close(guarantees.logits(method, task.index), kept[f"logits.{task.index}"], rtol=0, atol=1e-4)
        if path.stem == "joint":
            method.restore_data(task)
    before = [guarantees.logits(method, task) for task in (0, 1)]
    method.net.add_task(three[2].classes)
    method.learn(three[2], trainer())
    if exact:
        assert all(torch.equal(guarantees.logits(method, task), before[task]) for task in (0, 1))
    save(method, tmp_path / "model")
    assert list(hatrack.load(tmp_path / "model", trunk(norms="norms" in path.stem)).history) == [0, 1, 2]


@pytest.mark.parametrize("path", [path for path in MODELS if path.stem in ISOLATED], ids=lambda path: path.stem)
def test_changed_bits_in_it_are_noticed(path, tmp_path):
    kept, words = tensors.load(path)
    for name, value in kept.items():
        if name.startswith("state.") and name.endswith("bias"):
            value.view(-1).view(torch.int32)[:] ^= 1
    tensors.save(tmp_path / "model", kept, words)
    with pytest.raises(ValueError, match=r"task 0 \('toy 0'\) is not what it was"):
        hatrack.load(tmp_path / "model", trunk())


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.name)
def test_a_run_of_long_ago_goes_on(folder, tmp_path, monkeypatch):
    """On another machine its last bits may be others."""
    (path,) = folder.glob("*.json")
    expected = Record.load(path)
    spec = tensors.load(folder / "killed.part" / "task-1.safetensors")[1]["spec"]
    shutil.copytree(folder / "killed.part", tmp_path / "killed.part")
    steps, count = [], FitLoop._fetch_and_step

    def counted(course, *inputs):
        steps.append(course.task.index)
        return count(course, *inputs)

    monkeypatch.setattr(FitLoop, "_fetch_and_step", counted)
    found = carry_on(tmp_path / "killed.part", spec)
    assert steps.count(0) == 0
    assert steps.count(1) == steps.count(2) - STEPS, "the second task goes on where it was killed"
    for name in ("accuracy", "loss", "before", "without_task_id"):
        torch.testing.assert_close(
            torch.tensor(getattr(found, name)), torch.tensor(getattr(expected, name)), rtol=0, atol=1e-4
        )
    for number, (row, was) in enumerate(zip(found.train_loss, expected.train_loss, strict=True)):
        torch.testing.assert_close(row[: number + 1], was[: number + 1], rtol=0, atol=1e-4)
    assert [curve.task for curve in found.curves] == [0, 1, 2]
    assert found.valid_accuracy[0] == [None] * 3, "the state of long ago has no values of the first task"
    assert None not in found.valid_accuracy[2]


@pytest.mark.parametrize("path", sorted(DATA.glob("run-*/*.json")), ids=lambda path: path.parent.name)
def test_a_record_of_long_ago_is_reported(path, tmp_path):
    shutil.copy(path, tmp_path)
    assert report(tmp_path).stat().st_size > 10_000
