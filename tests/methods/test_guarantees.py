"""The checks of the guarantees, function by function: what counts as the same answer, and what is probed and rolled back."""

import math

import pytest
import torch
from torch import nn

import hatrack as hr
from hatrack import Network, Regime, Task, Trainer
from hatrack.methods import guarantees
from hatrack.methods.guarantees import BATCH, PROBES, ROUNDING, close, digest, logits, roll_back, take_probes
from tests.helpers.learning import learn, make
from tests.helpers.toys import toy_tasks


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        ([0.0, 0.5], [0.0, 0.5 + 0.9 * ROUNDING], True),  # small logits are compared by an absolute difference
        ([0.0, 0.5], [0.0, 0.5 + 1.2 * ROUNDING], False),
        ([0.0, -50.0], [0.004, -50.0], True),  # large ones by the share of the largest, whatever its sign
        ([0.0, -50.0], [0.006, -50.0], False),
        ([0.0, 1.0], [0.0, 1.0, 2.0], False),
        ([], [], True),
        ([], [1.0], False),
        ([math.nan, 1.0], [math.nan, 1.0], True),
        ([math.nan, 1.0], [0.0, 1.0], False),
        ([0.0, 1.0], [0.0, math.nan], False),
    ],
)
def test_answers_that_differ_by_rounding_are_the_same(then, now, same):
    assert close(torch.tensor(then), torch.tensor(now), ROUNDING) is same


def test_answers_of_another_type_are_compared():
    assert close(torch.ones(2), torch.ones(2, dtype=torch.float64), ROUNDING)


def test_a_state_is_rolled_back_as_far_as_it_was_there():
    method = make("sgd", toy_tasks(1))
    before = {key: value.clone() for key, value in method.state_dict().items()}
    names = list(before)
    gone, grown = names[0], names[1]
    del before[gone]
    before[grown] = torch.zeros(1, 1, 1, 1)
    with torch.no_grad():
        for value in method.state_dict().values():
            value.add_(1)
    after = {key: value.clone() for key, value in method.state_dict().items()}
    roll_back(method, before)
    now = method.state_dict()
    assert torch.equal(now[gone], after[gone])
    assert torch.equal(now[grown], after[grown]), "it had another shape"
    for key in names[2:]:
        assert torch.equal(now[key], before[key])


def test_logits_are_those_of_the_evaluation_and_change_nothing():
    tasks = toy_tasks(1)
    method = hr.Method(
        Network(nn.Sequential(nn.Flatten(), nn.Linear(math.prod(tasks[0].shape), 8), nn.Dropout(0.5)), tasks=tasks)
    )
    learn(method, tasks)
    method.train()
    images = tasks[0].test.inputs(torch.arange(5))
    random = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(method, 0, images)
    assert method.training
    assert torch.equal(torch.get_rng_state(), random)
    assert not found.requires_grad
    assert found.dtype == torch.float32
    method.eval()
    assert torch.equal(found, method(images, 0))
    assert torch.equal(logits(method, 0), method(method.net.example, 0))


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet", "frozen"])
def test_digests_are_computed_once_as_long_as_nothing_was_written(name, monkeypatch):
    tasks, counted = toy_tasks(5), []
    method = make(name, tasks)
    monkeypatch.setattr(guarantees, "digest", lambda *given, **how: counted.append(given[1]) or digest(*given, **how))
    for number, task in enumerate(tasks):
        counted.clear()
        learn(method, [task])
        hr.evaluate(method, tasks[0].test)
        assert len(counted) == (number + 1 if number else 0), "one after the last task, and all after this one"
    counted.clear()
    method.state_dict()["net.heads.0.weight"].add_(0)
    learn(method, [tasks[4]])
    assert len(counted) == 2 * 4, "something was written, so that nothing is known"


@pytest.mark.parametrize("kind", [(), ("cpu",)])
@pytest.mark.parametrize("name", ["hat", "pmask", "packnet", "frozen"])
def test_learn_notices_any_bit_of_a_finished_task_that_changes(name, kind, monkeypatch):
    """Also with fingerprints, which CPUs use here as GPUs do: the smallest change of each tensor that the task uses."""
    monkeypatch.setattr(guarantees, "FINGERPRINTED", kind)
    tasks = toy_tasks(3)
    method = make(name, tasks)
    learn(method, tasks[:2])
    assert digest(method, 0, quick=True).startswith(guarantees.QUICK) == bool(kind)
    state, used, original = method.state_dict(), method.used_by(0), type(method).learn_task
    keys = [key for key, value in state.items() if key.removeprefix("net.") in used and value.is_floating_point()]
    assert len(keys) >= 4
    for key in keys:
        read = used[key.removeprefix("net.")].reshape(-1).nonzero().flatten()[-1]

        def change(given, task, fit, key=key, place=read):
            original(given, task, fit)
            given.state_dict()[key].view(-1).view(torch.int32)[place] ^= 1

        monkeypatch.setattr(type(method), "learn_task", change)
        with pytest.raises(ValueError, match="task 0"):
            learn(method, tasks[2:])
    monkeypatch.undo()
    learn(method, tasks[2:])  # the control: nothing changed


def test_a_digest_covers_what_a_task_uses_and_its_preprocessing():
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    learn(method, tasks)
    before = digest(method, 0)
    assert digest(method, 1) != before
    row = next(iter(method.net.preprocessing.rows(0).values()))
    with torch.no_grad():
        row.view(-1)[0] += 1
    assert digest(method, 0) != before
    assert digest(make("sgd", tasks), 0) == "", "sgd guarantees nothing"


def test_a_digest_leaves_what_a_method_of_the_users_own_returned_as_it_is(monkeypatch):
    tasks = toy_tasks(1)
    method, kept = make("frozen", tasks), {"own": torch.ones(3)}
    monkeypatch.setattr(type(method), "used_by", lambda self, task: kept)
    learn(method, tasks)
    assert digest(method, 0) == digest(method, 0)
    assert [*kept] == ["own"]


class Counting(nn.Module):
    """A trunk that notes how many images each call has."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(numbers, 6), []

    def forward(self, x):
        self.seen.append(len(x))
        return torch.relu(self.layer(x.flatten(1)))


def large(index: int, count: int) -> Task:
    torch.manual_seed(index)
    x, y = torch.randn(count, 1, 4, 4), torch.arange(count) % 3
    return Task.from_arrays(index, f"task {index}", x, y, x[:9], y[:9], scale=1)


def test_probes_are_few_images_in_batches_of_a_bounded_size(monkeypatch):
    assert (PROBES, BATCH) == (16, 512)
    tasks = [large(0, 60), large(1, 60), large(2, 5)]
    trunk = Counting(16)
    method = hr.Frozen(Network(trunk, tasks=tasks))
    learn(method, tasks[:1])
    examples = len(method.net.example)
    assert len(take_probes(method, tasks[1]).images[0]) == examples + 16
    assert len(take_probes(method, tasks[2]).images[0]) == examples + len(tasks[2].train)
    assert take_probes(method, tasks[0]).logits == {}, "a task that is learned again may change"
    monkeypatch.setattr(guarantees, "BATCH", 7)
    trunk.seen.clear()
    probes = take_probes(method, tasks[1])
    assert max(trunk.seen) == 7
    parts = probes.images[0].split(7)  # of this size: others may be rounded otherwise
    assert torch.equal(probes.logits[0], torch.cat([logits(method, 0, part) for part in parts]))


def test_a_task_of_another_shape_is_not_probed():
    tasks = toy_tasks(1)
    method = make("frozen", tasks)
    learn(method, tasks)
    x, y = torch.randn(30, 1, 2, 2), torch.arange(30) % 3
    other = Task.from_arrays(1, "other", x, y, x[:9], y[:9], scale=1)
    assert take_probes(method, other) == ({}, {})


OUTSIDE = [0.0]  # state that no method sees


class Unsteady(nn.Module):
    """A trunk that answers by a value which no method sees: in a list of its own, or outside of all modules."""

    def __init__(self, numbers: int, *, outside: bool) -> None:
        super().__init__()
        self.layer, self.hidden, self.outside = nn.Linear(numbers, 6), [0.0], outside

    def forward(self, x):
        return torch.relu(self.layer(x.flatten(1))) + (OUTSIDE if self.outside else self.hidden)[0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("outside", "said"), [(False, "would no longer answer as it did"), (True, "answers differently although")]
)
def test_the_first_task_that_changed_is_named_and_what_can_be_is_rolled_back(outside, said, training, monkeypatch):
    tasks = [large(k, 40) for k in range(3)]
    method = hr.Frozen(Network(Unsteady(16, outside=outside), tasks=tasks))
    learn(method, tasks[:2])
    monkeypatch.setitem(globals(), "OUTSIDE", [0.0])

    class Changing(Trainer):
        def __call__(self, method, task, **changes):
            result = super().__call__(method, task, **changes)
            (OUTSIDE if outside else method.net.trunk.hidden)[0] = 1.0
            return result

    method.train(training)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    fit = Changing(Regime(epochs=1))
    with pytest.raises(ValueError, match=rf"^task 0 \('task 0'\) {said}"):
        method.learn(tasks[2], fit)
    assert method.net.trunk.hidden == [0.0]
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())
    assert (method.probes, method.training, list(method.history), fit.fits) == (None, training, [0, 1], [])


@pytest.mark.parametrize("saved", [True, False])
def test_one_bit_that_no_probe_shows_is_noticed_after_a_task_and_rolled_back(saved, tmp_path):
    tasks = toy_tasks(3)
    method = make("frozen", tasks)
    learn(method, tasks[:2])
    if saved:
        hr.save(method, tmp_path / "model")
    before = {key: value.clone() for key, value in method.state_dict().items()}

    class Changing(Trainer):
        def __call__(self, method, task, **changes):
            result = super().__call__(method, task, **changes)
            with torch.no_grad():
                weight = method.net.heads[1].weight
                weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
            return result

    with pytest.raises(
        ValueError, match=r"^task 1 \('toy 1'\) is not what it was.*" + ("saved" if saved else "last compared")
    ):
        method.learn(tasks[2], Changing(Regime(epochs=1)))
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())
