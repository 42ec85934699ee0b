"""Promises that ten changes of the code broke without a test that noticed: dev/mutants.py makes these changes again."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import hatrack as hr
from dev.mutants import BY_HAND, ROOT
from hatrack import Network, Record, Regime, Trainer, run
from hatrack.experiments.run import folder_of
from hatrack.files import tensors
from hatrack.methods.guarantees import take_probes
from hatrack.methods.hat import LIMIT
from hatrack.methods.parts.freeze import Freeze
from hatrack.training.checkpoint import Checkpointer
from hatrack.training.fit_loop import FitLoop
from tests.helpers.killing import OFTEN, Killed, assert_same, spec
from tests.helpers.learning import learn, make
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


@pytest.mark.parametrize("mutant", BY_HAND, ids=lambda mutant: mutant.name)
def test_the_places_of_the_changes_are_there(mutant):
    """So that `make test-mutants` does not end before its last change when code was moved."""
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1


def stop_in(monkeypatch, task: int, epoch: int, step: int) -> None:
    """Kill a run once, after a step of an epoch (both from 0) of a task."""
    tick, done = Checkpointer.after_step, []

    def deadly(self, loop):
        tick(self, loop)
        if not done and (loop.task.index, len(loop.result.epochs), loop.step_index - 1) >= (task, epoch, step):
            done.append(loop)
            self.wait()
            raise Killed

    monkeypatch.setattr(Checkpointer, "after_step", deadly)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_fit_that_goes_on_has_the_best_weights_of_before(seed, tmp_path, monkeypatch):
    """The learning rate is so large that the first epochs are the best: their weights come from before the kill."""
    hard = {"batch": 100, "optimizer": "sgd", "lr": 3.0, "schedule": "constant", "clip": 0.0, "keep_state": False}
    one = replace(spec("sgd", seed, epochs=8, **hard), network_options={"widths": (12, 12)})
    whole = run(one)
    best = whole.curves[0].best
    assert best < 7, "there are epochs behind the best one, in which the run is killed"
    stop_in(monkeypatch, 0, best + 1, 0)
    with pytest.raises(Killed):
        run(one, tmp_path, save_every=OFTEN)
    assert_same(run(one, tmp_path), whole)


def test_states_are_there_until_the_record_is(tmp_path, monkeypatch):
    one, save, seen = spec("sgd", epochs=1), Record.save, []

    def watched(self, folder):
        seen.append(sorted(file.name for file in folder_of(one, tmp_path).path.iterdir()))
        return save(self, folder)

    monkeypatch.setattr(Record, "save", watched)
    run(one, tmp_path)
    assert "task-1.safetensors" in seen[0], "a kill now would lose nothing"


def test_the_states_before_are_there_until_the_next_is_written(tmp_path, monkeypatch):
    one, write, seen = spec("sgd", epochs=2), tensors.write, {}

    def watched(path, data, **how):
        before = {file.name for file in path.parent.iterdir()}
        write(path, data, **how)
        seen[path.name] = (before, {file.name for file in path.parent.iterdir()})

    monkeypatch.setattr(tensors, "write", watched)
    run(one, tmp_path, save_every=OFTEN)
    before, after = seen["task-1.safetensors"]
    assert "task-0.safetensors" in before
    assert any(name.startswith("fit-0-0-") for name in before), "the end of the first task, from which it can be told"
    assert before < after, "nothing is removed before the new state is on the disk"


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_no_more_than_one_save_interval_is_done_again(steps, tmp_path, monkeypatch):
    """The later of two states is used: with a save after every step, a run that goes on begins with the next step."""
    one = spec("sgd", epochs=2, batch=250)
    with monkeypatch.context() as patch:
        stop_in(patch, 1, 0, steps)
        with pytest.raises(Killed):
            run(one, tmp_path, save_every=0.0)
    done, train = [], FitLoop.train_step

    def counted(self, *inputs):
        done.append((self.task.index, len(self.result.epochs), int(inputs[-1])))
        return train(self, *inputs)

    monkeypatch.setattr(FitLoop, "train_step", counted)
    record = run(one, tmp_path)
    assert done[0] == (1, 0, steps + 1)
    assert len(set(done)) == len(done)
    monkeypatch.undo()
    assert_same(record, run(one))


class Listener(nn.Module):
    """Answers differently, by a value that no method sees, on images that are brighter than those of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(16, 8), [0.0]

    def forward(self, x):
        bright = (x.flatten(1).mean(1, keepdim=True) > 3).float()
        return torch.relu(self.first(x.flatten(1))) + bright * self.hidden[0]


def test_finished_tasks_are_probed_on_images_of_the_new_task_too():
    torch.manual_seed(0)
    bright = []
    for k in range(2):
        x, y = torch.randn(40, 1, 4, 4) + 10 * k, torch.arange(40) % 3
        bright.append(hr.Task.from_arrays(k, f"bright {k}", x, y, x[:9], y[:9], scale=1))
    method = hr.Frozen(Network(Listener(), tasks=bright))
    learn(method, bright[:1])
    probes = take_probes(method, bright[1])
    assert len(probes.images[0]) == len(method.net.example) + 16
    assert torch.equal(probes.images[0][len(method.net.example) :], bright[1].train.inputs(torch.arange(16)))

    class Whispering(Trainer):
        def __call__(self, method, task, **changes):
            method.net.trunk.hidden[0] = 5.0
            return super().__call__(method, task, **changes)

    with pytest.raises(ValueError, match=r"task 0 .* answer"):
        method.learn(bright[1], Whispering(Regime(epochs=1)))


@pytest.mark.parametrize("name", ["hat", "packnet", "independent"])
def test_a_task_that_is_learned_again_is_not_bound_by_what_it_was(name, tmp_path):
    tasks = toy_tasks(2)
    method = make(name, tasks)
    learn(method, tasks)
    hr.save(method, tmp_path / "before")  # from now on every finished task has a digest
    last = tasks[1]
    before = {key: value.clone() for key, value in method.used_by(1).items()}
    again = hr.Task(1, last.name, last.classes, last.test, last.valid, last.test)
    method.learn(again, Trainer(Regime(epochs=3, batch=8, lr=0.2), seed=5))
    after = method.used_by(1)
    assert any(not torch.equal(before[key], after[key]) for key in before), "it has changed"
    hr.save(method, tmp_path / "after")


def test_embeddings_stay_within_their_limit():
    tasks = toy_tasks(1)
    method = hr.HAT(make("sgd", tasks).net, gate_lr=50.0, c=5.0)
    seen = []
    fit = Trainer(Regime(epochs=2, batch=10), progress=lambda event: seen.append(method.embeddings[0].abs().max().item()))
    method.learn(tasks[0], fit)
    assert seen
    assert max(seen) == LIMIT == 6.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_free_weights_that_were_infinite_do_not_overflow_in_the_next_products(dtype):
    weight = nn.Parameter(torch.tensor([float("inf"), float("-inf"), float("nan"), 3.0, 7.0], dtype=dtype))
    frozen = torch.tensor([False, False, False, False, True])
    freeze = Freeze(weight, frozen)
    with torch.no_grad():
        weight[4] = 99.0
        freeze.restore()
    assert weight.tolist()[2:] == [0.0, 3.0, 7.0]
    assert (weight * 1e3 * 1e3).sum().isfinite(), "after layers of a thousand units"
    assert (weight[0] * 1e6).isfinite()
    assert weight[1] == -weight[0]
    assert weight[0] > 1e20, "large, so that a divergence shows"


def test_fits_of_one_task_draw_other_batches():
    tasks = toy_tasks(1)
    method, fit = make("sgd", tasks), Trainer(Regime(epochs=1), seed=3)
    seeds = [fit.start(method, tasks[0]).seed for _ in range(3)]
    assert len(set(seeds)) == 3
    others = [Trainer(Regime(epochs=1), seed=3).start(make("sgd", tasks), tasks[0]).seed for _ in range(2)]
    assert others == [seeds[0]] * 2, "the first fit of every trainer is the same"
    for one, two in itertools.combinations(seeds, 2):
        assert not torch.equal(torch.randperm(60, generator=torch.Generator().manual_seed(one)),
                               torch.randperm(60, generator=torch.Generator().manual_seed(two)))  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["hat", "sgd"])
def test_save_leaves_the_mode_as_it_was(name, training, tmp_path):
    tasks = toy_tasks(1)
    method = make(name, tasks)
    learn(method, tasks)
    method.train(training)
    hr.save(method, tmp_path / "model")
    assert {module.training for module in method.modules()} == {training}
