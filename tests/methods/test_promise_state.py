"""State that a method must keep: in a forward pass in training mode, after a task that failed, in copies and state_dicts."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hatrack as hr
from hatrack import METHODS, Network, Regime, Trainer
from tests.helpers.learning import UNTRAINED, every_method, learn, logits, make
from tests.helpers.tiers import QUICK, quick_and_slow
from tests.helpers.toys import toy_tasks

FIT = Regime(epochs=4, batch=16, optimizer="adamw", lr=0.01)


class Average(nn.Module):
    """A trunk that keeps an average as a plain attribute, and one of a list, written by training passes alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 24)
        self.mean, self.past, self.calls = torch.zeros(24), [torch.zeros(24)], 0

    def forward(self, x):
        h = torch.relu(self.a(x.flatten(1)))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            self.past[0] += 0.1 * h.detach().mean(0)
            self.calls += 1
        return torch.relu(self.b(h - self.mean - self.past[0] / (1 + self.calls)))


def normed(name, tasks):
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1))
    return METHODS[name](Network(trunk, tasks=tasks))


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet", "independent", "frozen"])
@pytest.mark.parametrize("several", [False, True])
def test_a_forward_pass_in_training_mode_leaves_a_finished_task_as_it_was(name, several):
    tasks = toy_tasks(3)
    method = normed(name, tasks)
    learn(method, tasks[:2])
    before = [logits(method, task) for task in tasks[:2]]
    x = torch.randn(20, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    for task in (0, 1):
        out = method.train()(x, torch.full((20,), task) if several else task)
        assert not torch.equal(out, method.eval()(x, task)), "it is a pass with the statistics of the batch"
        out.sum().backward()  # the pass can be differentiated as ever
    assert all(torch.equal(logits(method, task), then) for task, then in zip(tasks, before, strict=False))
    method.zero_grad()
    method.learn(tasks[2], Trainer(FIT))
    assert all(torch.equal(logits(method, task), then) for task, then in zip(tasks, before, strict=False))


def test_a_task_that_is_not_finished_still_gets_its_statistics():
    tasks = toy_tasks(2)
    method = normed("independent", tasks)
    learn(method, tasks[:1])
    before = method.trunks[1][2].running_mean.clone()
    method.train()(torch.randn(20, 1, 4, 4), 1)
    assert not torch.equal(method.trunks[1][2].running_mean, before)
    Trainer(FIT)(method, tasks[0])  # a fit by itself trains the statistics of a task, finished or not
    assert method.trunks[0][2].num_batches_tracked > 16


@pytest.mark.parametrize("name", ["pmask", "hat", "packnet"])
def test_what_is_rolled_back_includes_state_outside_the_state_dict(name):
    tasks = toy_tasks(2)
    torch.manual_seed(0)
    trunk = Average()
    method = METHODS[name](Network(trunk, tasks=tasks))
    learn(method, tasks[:1])
    before, calls, past = logits(method, tasks[0]), trunk.calls, trunk.past
    assert calls > 0
    with pytest.raises(ValueError, match=r"task 0 .*rolled back$"):
        learn(method, tasks[1:])
    assert torch.equal(logits(method, tasks[0]), before)
    assert (trunk.calls, trunk.past is past, list(method.history)) == (calls, True, [0])


SEEN = [torch.zeros(24)]


class Global(nn.Module):
    """A trunk whose state is not in any module."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 24)

    def forward(self, x):
        h = torch.relu(self.a(x.flatten(1)))
        if self.training:
            SEEN[0] = 0.9 * SEEN[0] + 0.1 * h.detach().mean(0)
        return h - SEEN[0]


def test_state_that_cannot_be_rolled_back_is_reported_as_such():
    tasks = toy_tasks(2)
    SEEN[0] = torch.zeros(24)
    method = METHODS["pmask"](Network(Global(), tasks=tasks))
    learn(method, tasks[:1])
    with pytest.raises(ValueError, match=r"task 0 .'toy 0'. answers differently although the state was rolled back"):
        learn(method, tasks[1:])


class Broken(nn.Module):
    """A trunk that fails from a certain call on."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 24)

    def forward(self, x):
        BROKEN[0] -= 1
        if BROKEN[0] < 0:
            raise MemoryError("no memory")
        return torch.relu(self.a(x.flatten(1)))


BROKEN = [0]


def test_the_first_error_is_raised_if_the_trunk_fails_for_good():
    tasks = toy_tasks(2)
    BROKEN[0] = 10**6
    method = METHODS["hat"](Network(Broken(), tasks=tasks))
    learn(method, tasks[:1])
    BROKEN[0] = 10
    with pytest.raises(MemoryError, match="no memory"):
        learn(method, tasks[1:])
    assert list(method.history) == [0]


# Copies


def same(one, two, tasks):
    """Whether two methods have the same state, list the same tasks and give the same answers."""
    state, other = one.state_dict(), two.state_dict()
    return (
        state.keys() == other.keys()
        and all(torch.equal(state[key], other[key]) for key in state)
        and (one.history, one.digests, one.options) == (two.history, two.digests, two.options)
        and all(torch.equal(logits(one, task), logits(two, task)) for task in tasks)
    )


def by_pickle(method, folder):
    torch.save(method, folder / "method.pt")
    return torch.load(folder / "method.pt", weights_only=False)


@pytest.mark.parametrize("name", quick_and_slow(METHODS, (*QUICK, "er", "packnet", "pmask", "pnn")))
@pytest.mark.parametrize(
    "copied",
    [lambda method, folder: copy.deepcopy(method), pytest.param(by_pickle, marks=pytest.mark.slow)],
    ids=["deepcopy", "torch.save"],
)
def test_a_copy_is_an_equal_method_and_goes_on_alike(name, copied, tmp_path):
    tasks = toy_tasks(3)
    method = make(name, tasks)
    learn(method, tasks[:2])
    hr.save(method, tmp_path / "model.safetensors")
    twin = copied(method, tmp_path)
    assert same(method, twin, tasks)
    if name == "joint":  # its data are no part of a state
        for task in tasks[:2]:
            twin.restore_data(task)
    fits = [Trainer(FIT), Trainer(FIT)]
    method.learn(tasks[2], fits[0])
    assert name in UNTRAINED or not same(method, twin, tasks), "the copy shares nothing"
    twin.learn(tasks[2], fits[1])
    assert same(method, twin, tasks)


@every_method
def test_a_state_dict_says_which_tasks_are_learned(name, tmp_path):
    tasks = toy_tasks(2)
    one, two = make(name, tasks), make(name, tasks)
    learn(one, tasks[:1])
    torch.save(one.state_dict(), tmp_path / "state.pt")
    two.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert two.history == {0: "toy 0"}
    assert torch.equal(two.predict(tasks[0].test.x, 0), one.predict(tasks[0].test.x, 0))
    other = replace(tasks[0], name="quite another")
    with pytest.raises(ValueError, match="'toy 0', which has been learned"):
        two.learn(other, Trainer(FIT))


def test_a_state_within_another_module_says_it_too():
    tasks = toy_tasks(2)
    one, two = nn.ModuleDict({"hat": make("hat", tasks)}), nn.ModuleDict({"hat": make("hat", tasks)})
    learn(one["hat"], tasks[:1])
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert two["hat"].history == {0: "toy 0"}


def test_a_plain_dictionary_of_tensors_leaves_the_list_as_it_is():
    tasks = toy_tasks(2)
    one, two = make("hat", tasks), make("hat", tasks)
    learn(one, tasks[:1])
    two.load_state_dict(dict(one.state_dict()))
    assert two.history == {}


def everything(method):
    """All that a load may change: the notes of finished tasks, and every tensor and module."""
    state = method.state_dict()
    tensors = {name: value.clone() for name, value in [*state.items(), *method.named_buffers()]}
    objects = [id(part) for part in (*method.modules(), *method.parameters(), *method.buffers())]
    return copy.deepcopy(state._metadata[""]["learned"]), tensors, objects


@every_method
@pytest.mark.parametrize("how", [{}, {"strict": False}, {"assign": True}])
def test_a_state_that_does_not_fit_leaves_the_method_as_it_was(name, how):
    """That of an earlier month, with fewer tasks: it would take the last one off the list, and part of its values."""
    tasks = toy_tasks(3)
    one, two = make(name, tasks, known=2), make(name, tasks, known=3)
    learn(one, tasks[:1])
    learn(two, tasks[:2])
    state = {**copy.deepcopy(one.state_dict()), "net.heads.0.weight": torch.zeros(2, 2)}
    early = type(one.state_dict())(state)
    early._metadata = copy.deepcopy(one.state_dict()._metadata)
    answers, before = [logits(two, task) for task in tasks[:2]], everything(two)
    with pytest.raises(RuntimeError, match="Error"):
        two.load_state_dict(early, **how)
    after = everything(two)
    assert after[0] == before[0]
    assert after[2] == before[2]
    assert after[1].keys() == before[1].keys()
    assert all(torch.equal(value, before[1][key]) for key, value in after[1].items())
    assert all(torch.equal(logits(two, task), then) for task, then in zip(tasks, answers, strict=False))


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_a_task_outlives_a_failed_load_and_the_task_after_it(name):
    tasks = toy_tasks(3)
    method = make(name, tasks, known=1)
    learn(method, tasks[:1])
    early = copy.deepcopy(method.state_dict())
    method.net.add_task(tasks[1].classes)
    learn(method, tasks[1:2])
    answers = [logits(method, task) for task in tasks[:2]]
    with pytest.raises(RuntimeError, match="Missing key"):
        method.load_state_dict(early)
    method.net.add_task(tasks[2].classes)
    learn(method, tasks[2:])
    assert all(torch.equal(logits(method, task), then) for task, then in zip(tasks, answers, strict=False))


def test_a_failed_load_leaves_what_a_trunk_keeps_as_a_plain_attribute():
    class Counting(Average):
        def get_extra_state(self):
            return torch.tensor(self.calls)

        def set_extra_state(self, state):
            self.calls, self.mean = int(state), self.mean + 1

    tasks = toy_tasks(1)
    method = METHODS["sgd"](Network(Counting(), tasks=tasks))
    learn(method, tasks)
    calls, mean = method.net.trunk.calls, method.net.trunk.mean.clone()
    with pytest.raises(RuntimeError, match="Missing key"):
        method.load_state_dict({"net.trunk._extra_state": torch.tensor(3)})
    assert method.net.trunk.calls == calls > 3
    assert torch.equal(method.net.trunk.mean, mean)


# One network, one method


def test_a_second_method_on_a_network_is_refused():
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    learn(method, tasks[:1])
    with pytest.raises(ValueError, match="belongs to another method, HAT, which has learned 'toy 0'"):
        METHODS["ewc"](method.net)
    other = METHODS["ewc"](copy.deepcopy(method.net))
    learn(other, tasks[1:])
    learn(method, tasks[1:])


def test_a_method_whose_network_was_taken_is_refused():
    tasks = toy_tasks(2)
    first = make("hat", tasks)
    second = METHODS["ewc"](first.net)  # the first has learned nothing: perhaps it could not be built
    with pytest.raises(ValueError, match="belongs to another method, EWC"):
        learn(first, tasks)
    learn(second, tasks)
    with pytest.raises(ValueError, match="belongs to another method"):
        learn(first, tasks)


def test_a_method_that_is_gone_owns_nothing():
    tasks = toy_tasks(1)
    method = make("sgd", tasks)
    learn(method, tasks)
    net = method.net
    del method
    gc.collect()
    learn(METHODS["ewc"](net), tasks)


# What stands still


class Standardised(nn.Module):
    """A trunk most of whose weights are standardised, a layer that is called twice, and one that no input reaches."""

    def __init__(self):
        super().__init__()
        self.a, self.wide, self.twice = nn.Linear(4, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.narrow = nn.Linear(24, 8)
        self.idle = nn.Linear(3, 3)

    def forward(self, x):
        h = torch.relu(self.a(x.flatten(1, 2)))
        for layer in (self.wide, self.narrow):
            h = F.linear(h, layer.weight - layer.weight.mean(1, keepdim=True), layer.bias)
        return self.twice(torch.relu(self.twice(h.mean(1))))


def test_what_is_held_whole_is_announced_and_listed_with_its_reason():
    tasks = toy_tasks(2)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"\d+% of the trunk's weights are held whole .*wide\.weight"):
        method = METHODS["hat"](Network(Standardised(), tasks=tasks))
    assert method.held["idle.weight"] == "not used on the example"
    assert {"wide.weight", "narrow.weight"} < set(method.held)
    held = {name.partition(" ")[0]: share for name, share in method.usage().items() if "(held whole: " in name}
    assert set(held) == set(method.held)
    assert set(held.values()) == {0.0}, "nothing is held before a task is learned"
    result = method.learn(tasks[0], Trainer(FIT))
    assert len(result.held) == len(method.held)
    assert f"{len(method.held)} parameters held whole" in str(result)
    assert {method.usage()[name] for name in result.held} == {1.0}
    layers = {name: share for name, share in method.usage().items() if name not in result.held}
    assert result.capacity == pytest.approx(sum(layers.values()) / len(layers))


def test_a_layer_that_is_called_twice_is_counted_once():
    tasks = toy_tasks(1)
    layer = nn.Linear(16, 16)
    method = METHODS["hat"](Network(nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer), tasks=tasks))
    learn(method, tasks)
    assert method.units.layers == {"1": slice(0, 16)}
    assert list(method.usage()) == ["1"]
    assert method.usage()["1"] == pytest.approx(method.gates[0].float().mean().item())
