"""Stored images: a change of old answers that shows on them alone is noticed; they are saved, counted and deleted."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hatrack import METHODS, Network, Regime, Run, Task, load, run, save
from hatrack.files import tensors
from hatrack.methods import guarantees
from hatrack.options import parameters
from hatrack.seeds import seeded
from hatrack.training.checkpoint import Checkpointer
from tests.helpers.killing import OFTEN, assert_same, killed_at, to_the_end
from tests.helpers.learning import ISOLATED, SMALLER, FunctionFit, learn, logits, make
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")  # networks so small are soon full
IMAGE = 4 * 16  # bytes of an image of 4x4 floats
isolated = pytest.mark.parametrize("name", ISOLATED)


class Hidden(nn.Module):
    """Every training step changes what this trunk answers to bright images, by something that no method sees."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(16, 24), torch.zeros(())

    def forward(self, x):
        if self.training:
            self.seen += 1
        bright = (x.flatten(1).mean(1, keepdim=True) > 5).float()
        return torch.relu(self.layer(x.flatten(1))) + bright * self.seen


def bright_and_dark():
    """Two tasks, of which only the first has bright images; and an example of dark ones."""
    tasks = []
    for index, task in enumerate(toy_tasks(2)):
        x, y = task.train.inputs(torch.arange(48)) + (0 if index else 10), task.train.y
        tasks.append(Task.from_arrays(index, task.name, x, y, x, y, classes=3, mean=0.0, std=1.0, scale=1.0))
    return tasks, torch.zeros(2, 1, 4, 4)


def on_hidden(name, probes):
    """A method that has learned the first of the two tasks, and the second task."""
    (first, second), example = bright_and_dark()
    with seeded(0, "weights"):
        method = METHODS[name](Network(Hidden(), [3, 3], example), probes=probes)
    learn(method, [first])
    return method, first, second


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet", "frozen"])
def test_a_change_that_shows_on_stored_images_alone_is_noticed(name):
    for probes in (0, 1, 5):
        method, first, second = on_hidden(name, probes)
        before = logits(method, first)
        state = {key: value.clone() for key, value in method.state_dict().items()}
        if not probes:
            learn(method, [second])
            assert not torch.allclose(logits(method, first), before), "the control: without stored images nobody notices"
            continue
        with pytest.raises(ValueError, match=r"task 0 \('toy 0'\) would no longer answer as it did"):
            learn(method, [second])
        assert torch.equal(logits(method, first), before), "the state was rolled back"
        assert list(method.history) == [0]
        assert method.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[key]) for key, value in method.state_dict().items())


@isolated
def test_they_change_nothing_that_is_learned(name):
    tasks = toy_tasks(2)
    plain, method = make(name, tasks), with_probes(name, tasks, 3)
    learn(plain, tasks)
    learn(method, tasks)
    own = {key: value for key, value in method.state_dict().items() if not key.startswith("stored_images.")}
    assert list(own) == list(plain.state_dict())
    assert all(torch.equal(value, own[key]) for key, value in plain.state_dict().items())
    assert sorted(method.state_dict().keys() - own) == ["stored_images.task_0", "stored_images.task_1"]
    assert method.num_bytes() - plain.num_bytes() == 2 * 3 * IMAGE


def with_probes(name, tasks, probes):
    """A method like that of `make`, with stored images."""
    return METHODS[name](Network(trunk(tasks), tasks=tasks), probes=probes, **SMALLER.get(name, {}))


def trunk(tasks):
    """The trunk of `make`."""
    return make("sgd", tasks).net.trunk


def test_only_methods_that_promise_have_the_option():
    assert sorted(name for name in METHODS if "probes" in parameters(METHODS[name])) == sorted(ISOLATED)
    with pytest.raises(ValueError, match="probes must be at least 0, not -1"):
        with_probes("hat", toy_tasks(1), -1)


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_release_deletes_them(name):
    tasks = toy_tasks(3)
    method = with_probes(name, tasks, 4)
    learn(method, tasks)
    before = method.num_bytes()
    method.release(1)
    assert before - method.num_bytes() == 4 * IMAGE
    assert [len(method.stored_images.of(task)) for task in range(3)] == [4, 0, 4]
    learn(method, tasks[1:2])
    assert method.num_bytes() == before


def test_a_task_that_is_learned_again_has_its_new_images():
    tasks, others = toy_tasks(1), toy_tasks(1, seed=5)
    method = with_probes("hat", tasks, 4)
    learn(method, tasks)
    old = method.stored_images.of(0).clone()
    learn(method, others)
    images = method.stored_images.of(0)
    assert len(images) == 4
    assert not torch.equal(images, old)
    assert all(any(torch.equal(image, x) for x in others[0].train.inputs(torch.arange(48))) for image in images)


def test_a_task_that_failed_leaves_no_images():
    tasks = toy_tasks(2)
    method = with_probes("hat", tasks, 4)
    learn(method, tasks[:1])
    before = method.num_bytes()

    def fail(*_, **__):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.learn(tasks[1], FunctionFit(fail))
    assert method.num_bytes() == before


def test_sorted_data_give_images_of_all_classes_and_a_small_task_all_it_has(monkeypatch):
    x = np.repeat(np.arange(10, dtype=np.float32), 10)[:, None, None, None] * np.ones((1, 1, 4, 4), np.float32)
    y = np.repeat(np.arange(10), 10)
    tasks = [Task.from_arrays(k, f"sorted {k}", x, y, x, y, valid=0.0, mean=0.0, std=1.0, scale=1.0) for k in range(2)]
    method = with_probes("independent", tasks, 10)
    in_order = tasks[0].train.part(tasks[0].train.y.argsort())
    assert method.stored_images.select(in_order)[:, 0, 0, 0].tolist() == list(range(10))
    monkeypatch.setattr(guarantees, "BATCH", 7)  # probes of several batches
    method = with_probes("independent", tasks, 1000)
    learn(method, tasks)
    assert [len(method.stored_images.of(task)) for task in range(2)] == [100, 100]


@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_soft_gates_promise_nothing_and_store_nothing(name):
    tasks = toy_tasks(1)
    method = METHODS[name](Network(trunk(tasks), tasks=tasks), masks="soft", probes=4)
    learn(method, tasks)
    assert len(method.stored_images.of(0)) == 0


@isolated
def test_saved_loaded_and_copied(name, tmp_path):
    tasks = toy_tasks(3)
    method, path = with_probes(name, tasks, 4), tmp_path / "model.safetensors"
    learn(method, tasks[:2])
    save(method, path)
    twin = with_probes(name, tasks, 4)
    learn(twin, tasks[2:])
    twin.load_state_dict(copy.deepcopy(method.state_dict()))
    for other in (load(path, trunk(tasks)), copy.deepcopy(method), twin):
        assert [len(other.stored_images.of(task)) for task in range(3)] == [4, 4, 0]
        assert all(torch.equal(other.stored_images.of(k), method.stored_images.of(k)) for k in range(2))
        assert other.num_bytes() == method.num_bytes() or name == "pnn"  # of which the twin has more columns


def test_a_loaded_method_notices_a_change(tmp_path):
    method, first, second = on_hidden("hat", 2)
    method.net.trunk.seen.zero_()  # what no file holds
    save(method, tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors", Hidden())
    before = logits(loaded, first)
    with pytest.raises(ValueError, match="would no longer answer"):
        learn(loaded, [second])
    assert torch.equal(logits(loaded, first), before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stored_images.task_0": torch.zeros(4, 1, 5, 4)},
        {"stored_images.task_0": torch.zeros(4, 1, 4, 4, dtype=torch.float64)},
        {"stored_images.task_0": torch.zeros(0, 1, 4, 4)},
        {"stored_images.other": torch.zeros(4, 1, 4, 4)},
        {"stored_images.none": torch.zeros(4, 1, 4, 4)},
    ],
)
def test_files_with_other_images_are_refused(wrong, tmp_path):
    tasks, path = toy_tasks(1), tmp_path / "model.safetensors"
    method = with_probes("hat", tasks, 4)
    learn(method, tasks)
    save(method, path)
    found, about = tensors.load(path)
    tensors.save(path, {**found, **{f"state.{name}": value for name, value in wrong.items()}}, about)
    with pytest.raises(ValueError, match="does not fit HAT"):
        load(path, trunk(tasks))


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_them(tmp_path, monkeypatch):
    spec = Run(
        "smnist", "hat", benchmark_options={"data": "sample"}, train_examples=100,
        network_options={"widths": (12, 12), "input_dropout": 0.0},
        method_options={"probes": 3}, regime=Regime(epochs=2, batch=50, optimizer="adam", lr=0.003, keep_state=True),
    )  # fmt: skip
    whole = run(spec, tmp_path / "whole")
    begun, begin = [], Checkpointer.begin_task

    def noted(self, task, method, *rest):
        begun.append(sorted(key for key in method.state_dict() if key.startswith("stored_images.")))
        begin(self, task, method, *rest)

    monkeypatch.setattr(Checkpointer, "begin_task", noted)
    kills = killed_at(monkeypatch, 0.2, seed=0, most=4)
    again = to_the_end(spec, tmp_path / "again", save_every=OFTEN)
    assert len(kills) == 4
    assert_same(whole, again)
    assert begun[-1] == [f"stored_images.task_{k}" for k in range(len(whole.tasks) - 1)]
    assert whole.spec.method_options["probes"] == 3
    assert "probes" not in Run("smnist", "hat", benchmark_options={"data": "sample"}).spec["method_options"]
