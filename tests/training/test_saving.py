"""A method kept in a file is the method that was saved: its answers, its tasks, and what it learns next."""

import copy
import json
import pickle
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch
from torch import nn

import hatrack
from hatrack import HAT, METHODS, Method, Network, Record, Regime, Task, Trainer
from hatrack.files import tensors
from hatrack.methods import guarantees
from hatrack.methods.parts.vectors import pieces
from hatrack.networks import NETWORKS
from hatrack.options import Option, check
from hatrack.seeds import seeded
from hatrack.training.saving import save
from tests.helpers.learning import ISOLATED, MULTI_ONLY, UNTRAINED, every_method, learn, logits, make
from tests.helpers.models import fresh
from tests.helpers.toys import toy_tasks

ROOT = Path(__file__).parent.parent.parent
isolated = pytest.mark.parametrize("name", ISOLATED)


def normed() -> nn.Module:
    """Batch norms, and a weight that is used under two names."""
    with seeded(3, "normed"):
        one, two = nn.Linear(12, 12), nn.Linear(12, 12)
        two.weight = one.weight
        layers = [nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), one, nn.ReLU(), two, nn.BatchNorm1d(12)]
    return nn.Sequential(*layers, nn.ReLU())


def fit() -> Trainer:
    return Trainer(Regime(epochs=3, batch=16, lr=0.1))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@cache
def learned(name, count, heads):
    """A method that has learned the first tasks and was saved, and its file."""
    tasks = toy_tasks(count)
    method = make(name, tasks, known=1, heads=heads)
    for task in tasks:
        if task.index:
            method.net.add_task(task.classes)
        method.learn(task, fit())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(method, path)
        return method, path.read_bytes()


def saved(name, path, count=2, heads="multi"):
    """A method that has learned the first toy tasks and was saved here."""
    method, content = learned(name, count, heads)
    path.write_bytes(content)
    return copy.deepcopy(method)


# What was saved is what is loaded


@every_method
@pytest.mark.parametrize("heads", ["multi", pytest.param("shared", marks=pytest.mark.slow)])
def test_loaded_it_answers_and_learns_as_before(name, heads, path):
    if heads == "shared" and name in MULTI_ONLY:
        return
    tasks = toy_tasks(3)
    method = saved(name, path, heads=heads)
    twin = hatrack.load(str(path), fresh())
    assert type(twin) is METHODS[name]
    assert twin.history == {0: "toy 0", 1: "toy 1"}
    assert not twin.training
    if name == "joint":
        for task in tasks[:2]:
            twin.restore_data(task)
    before = [logits(twin, task) for task in tasks[:2]]
    assert all(torch.equal(logits(method, task), kept) for task, kept in zip(tasks, before, strict=False))
    for one in (method, twin):
        one.net.add_task(tasks[2].classes)
        one.learn(tasks[2], fit())
    for task in tasks:
        assert torch.equal(logits(method, task), logits(twin, task)), "to have been in a file makes no difference"
    if name in ISOLATED:
        assert all(torch.equal(logits(twin, task), kept) for task, kept in zip(tasks, before, strict=False))
    save(twin, path)
    third = hatrack.load(path, fresh())
    assert list(third.history.values()) == ["toy 0", "toy 1", "toy 2"]
    assert all(torch.equal(logits(third, task), logits(twin, task)) for task in tasks)
    assert len(third.digests) == (3 if name in ISOLATED else 0)


@pytest.mark.slow
def test_a_new_process_gives_the_same_bits(path, tmp_path):
    tasks = toy_tasks(2)
    expected = torch.cat([logits(saved("hat", path), task) for task in tasks])
    out = tmp_path / "out.safetensors"
    program = f"""
import torch, hatrack
from pathlib import Path
from hatrack.files import tensors
from tests.helpers.learning import logits
from tests.helpers.models import fresh
from tests.helpers.toys import toy_tasks
method = hatrack.load({str(path)!r}, fresh())
tensors.save(Path({str(out)!r}), {{"logits": torch.cat([logits(method, task) for task in toy_tasks(2)])}}, {{}})
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    assert torch.equal(tensors.load(out)[0]["logits"], expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hat", {"masks": "soft", "smax": 50.0, "norms": "shared", "leave": "1"}),
        ("hat", {"protect": "exact", "c": 0.1}),
        ("pmask", {"embedding": "uniform", "c": 2.0}),
        ("pmask", {"masks": "soft", "smax": 50.0}),
        ("packnet", {"biases": "task", "norms": "shared"}),
        ("packnet", {"biases": "task", "prune": 0.5}),
        ("stable-sgd", {"stable": ("lr", "batch")}),
    ],
)
def test_options_norms_and_tied_weights_are_kept(name, options, path):
    tasks = toy_tasks(3)
    method = METHODS[name](
        Network(normed(), [3, 3], tasks[0].train.inputs(torch.arange(4)), init="xavier", seed=4), **options
    )
    learn(method, tasks[:2], fit())
    save(method, path)
    twin = hatrack.load(path, normed())
    given = {key: twin.options[key] for key in options}
    assert given == options
    assert set(twin.options) == set(method.options) > set(options), "those that were not given as well: defaults may change"
    for one in (method, twin):
        one.net.add_task(3)
        one.learn(tasks[2], fit())
    for task in tasks:
        assert torch.equal(logits(method, task), logits(twin, task))
    save(twin, path)
    assert len(twin.digests) == (3 if name in ISOLATED and options.get("masks") != "soft" else 0)


def test_frozen_parts_stay_frozen(path):
    tasks, trunk = toy_tasks(3), normed()
    trunk[1].bias.requires_grad_(False)
    method = METHODS["hat"](Network(trunk, [3, 3], tasks[0].train.inputs(torch.arange(4)), freeze="2,4.*"))
    learn(method, tasks[:2], fit())
    save(method, path)
    twin = hatrack.load(path, normed())
    assert twin.net.frozen == method.net.frozen
    assert {n: p.requires_grad for n, p in twin.named_parameters()} == {
        n: p.requires_grad for n, p in method.named_parameters()
    }
    for one in (method, twin):
        one.net.add_task(3)
        one.learn(tasks[2], fit())
    assert all(torch.equal(logits(method, task), logits(twin, task)) for task in tasks)
    assert torch.equal(twin.net.trunk[2].running_mean, torch.zeros(12))


def test_what_depends_on_the_first_task_number_tasks_comes_back(path):
    tasks = toy_tasks(3)
    net = Network(fresh(), [3, 3], tasks[0].train.inputs(torch.arange(2)))
    method = METHODS["pnn"](net, columns="budget")
    learn(method, tasks[:2], fit())
    net.add_task(3)
    learn(method, [tasks[2], tasks[0]], fit())  # the first once more, in a column of its own
    save(method, path)
    twin = hatrack.load(path, fresh())
    assert list(twin.history) == [1, 2, 0]
    assert twin.widths == method.widths
    assert all(torch.equal(logits(method, task), logits(twin, task)) for task in tasks)


class Mine(Method):
    """Keeps how often it has learned."""

    def __init__(self, net: Network, *, strength: Annotated[float, Option("nothing", low=0)] = 0.5) -> None:
        super().__init__(net)
        self.options = check(Mine, locals())
        self.register_buffer("times", torch.zeros(()))

    def learn_task(self, task, fit):
        super().learn_task(task, fit)
        self.times += 1


def test_a_method_of_ones_own(path):
    tasks = toy_tasks(1)
    method = Mine(make("sgd", tasks).net, strength=2.0)
    method.learn(tasks[0], fit())
    save(method, path)
    with pytest.raises(ValueError, match=r"method=Mine"):
        hatrack.load(path, fresh())
    with pytest.raises(ValueError, match=r"holds 'tests.training.test_saving:Mine', not HAT"):
        hatrack.load(path, fresh(), method=hatrack.HAT)
    twin = hatrack.load(path, fresh(), method=Mine)
    assert twin.times == 1
    assert twin.options == {"strength": 2.0}
    assert torch.equal(logits(method, tasks[0]), logits(twin, tasks[0]))


def test_options_that_are_not_kept_are_an_error_at_once(path):
    class Careless(Method):
        def __init__(self, net, *, strength=1.0):
            super().__init__(net)

    with pytest.raises(ValueError, match=r"Careless does not keep its options \(strength\)"):
        save(Careless(make("sgd", toy_tasks(1)).net), path)
    assert not path.exists()


def test_joint_says_what_data_it_lacks(path):
    tasks = toy_tasks(3)
    saved("joint", path)
    twin = hatrack.load(path, fresh())
    twin.net.add_task(3)
    with pytest.raises(ValueError, match="joint has no data of 'toy 0', 'toy 1'"):
        twin.learn(tasks[2], fit())


# A change is noticed


@torch.no_grad()
def flip(tensor: torch.Tensor, place: int) -> None:
    """The last bit of one number, in place."""
    kind = {4: torch.int32, 2: torch.int16, 8: torch.int64}[tensor.element_size()]
    tensor.view(-1).view(kind)[place] ^= 1


def steep(method: Method, task: int) -> list[tuple[nn.Parameter, int]]:
    """Every parameter that the logits of a task depend on, and a place in it where they do."""
    method.zero_grad()
    method(method.net.example, task).square().sum().backward()
    found = [(p, p.grad) for p in method.parameters() if p.grad is not None and p.grad.any()]
    return [(p, int(grad.view(-1).nonzero()[0])) for p, grad in found]


@isolated
def test_one_bit_of_what_a_task_uses_is_noticed(name, path):
    saved(name, path)
    for task in (0, 1):
        method = hatrack.load(path, fresh())
        places = steep(method, task)
        assert len(places) >= 3
        for parameter, place in places:
            flip(parameter, place)
            with pytest.raises(ValueError, match=rf"task [0{task}] \('toy [0{task}]'\) is not what it was"):
                save(method, path.with_name("other"))
            flip(parameter, place)
        save(method, path.with_name("other"))  # as it was, all is well
        heads = method.heads if name in ("pnn", "pathnet") else method.net.heads
        flip(heads[task].bias, 0)  # nobody else's
        with pytest.raises(ValueError, match=rf"task {task} \('toy {task}'\)"):
            save(method, path.with_name("other"))
    assert not list(path.parent.glob(".*")), "nothing half written is left"


def free(method: Method) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """The weights of the trunk that no finished task uses, by each method's own account."""
    trunk = dict(method.net.trunk.named_parameters())
    if isinstance(method, METHODS["hat"]):
        spread = [method.units.weight_masks(gates.float()) for gates in method.gates]
        return [(p, torch.stack([masks[name] for masks in spread]).amax(0) == 0) for name, p in trunk.items()]
    pmask = isinstance(method, METHODS["pmask"])
    weights = method.weights() if pmask else [method.net.get_parameter(name) for name in method.packed]
    return list(zip(weights, pieces(~method.used() if pmask else method.owner == 0, weights), strict=True))


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_what_is_free_may_change_and_nothing_else(name, path):
    tasks = toy_tasks(3)
    method = saved(name, path)
    digests = dict(method.digests)
    changed = tried = told = 0
    for parameter, mask in free(method):
        for place in mask.view(-1).nonzero()[:, 0].tolist():
            flip(parameter, place)
            changed += 1
        for place in (~mask).view(-1).nonzero()[:3, 0].tolist():
            flip(parameter, place)
            tried += 1
            told += any(guarantees.digest(method, task) != kept for task, kept in digests.items())
            flip(parameter, place)
    assert changed > 50
    assert told == tried >= 6
    save(method, path)
    assert method.digests == digests
    twin = hatrack.load(path, fresh())
    assert all(torch.equal(logits(method, task), logits(twin, task)) for task in tasks[:2])


def test_a_task_that_moves_another_is_told_of_after_it_is_learned(path, monkeypatch):
    """A method that breaks its promise."""
    tasks = toy_tasks(3)
    saved("hat", path)
    twin = hatrack.load(path, fresh())
    twin.net.add_task(3)
    monkeypatch.setattr(type(twin), "_freeze_used_weights", lambda self: None)
    with pytest.raises(ValueError, match=r"task 0 \('toy 0'\) is not what it was"):
        twin.learn(tasks[2], fit())


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_a_task_may_be_given_up_or_learned_again(name, path):
    tasks, others = toy_tasks(2), toy_tasks(2, seed=5)
    saved(name, path)
    twin = hatrack.load(path, fresh())
    kept = logits(twin, tasks[0])
    twin.learn(others[1], fit())
    save(twin, path)
    twin = hatrack.load(path, fresh())
    assert list(twin.history) == [0, 1]
    twin.release(1)
    assert list(twin.history) == list(twin.digests) == [0]
    save(twin, path)
    twin = hatrack.load(path, fresh())
    assert list(twin.history) == [0]
    assert torch.equal(logits(twin, tasks[0]), kept)


def test_a_trunk_that_computes_something_else_is_told_by_the_answers(path):
    for name in ("sgd", "hat"):
        saved(name, path)
        other = fresh()
        for key, module in list(other.named_modules()):
            if isinstance(module, nn.ReLU):
                setattr(other.get_submodule(key.rpartition(".")[0]), key.rpartition(".")[2], nn.Tanh())
        with pytest.raises(ValueError, match=r"task 0 \('toy 0'\) answers differently"):
            hatrack.load(path, other)


def test_a_file_whose_task_was_changed_is_told_of(path):
    """By someone who knows the format and writes a right digest of the whole."""
    saved("hat", path)
    kept, words = tensors.load(path)
    flip(kept["state.net.heads.1.bias"], 0)
    tensors.save(path, kept, words)
    with pytest.raises(ValueError, match=r"model.safetensors: task 1 \('toy 1'\) is not what it was"):
        hatrack.load(path, fresh())


def test_saving_fails_whole(path):
    """An error leaves the file that was there."""
    method = saved("hat", path)
    before = path.read_bytes()
    flip(method.net.heads[0].bias, 0)
    with pytest.raises(ValueError, match="task 0"):
        save(method, path)
    assert path.read_bytes() == before


# Files and trunks that do not fit


def test_a_file_with_an_example_that_is_not_finite_is_still_read(path):
    """Earlier versions took such an example, on which all answers are NaN, so that another trunk answered the same."""
    tasks = toy_tasks(1)
    with pytest.raises(ValueError, match="NaN or infinite"):
        Network(fresh(), [2], torch.full((2, 1, 4, 4), torch.nan))
    method = make("hat", tasks)
    method.learn(tasks[0], fit())
    save(method, path)
    kept, words = tensors.load(path)
    tensors.save(path, {name: t * torch.nan if name in ("example", "logits.0") else t for name, t in kept.items()}, words)
    found = hatrack.load(path, fresh())
    assert found.net.example.isnan().all()
    x = tasks[0].test.inputs(torch.arange(9))
    assert torch.equal(found(x, 0), method.eval()(x, 0))
    found.net.replace_example(x[:2])


def test_a_method_that_was_loaded_without_a_trunk_is_saved_so_again(path):
    tasks, mlp = toy_tasks(1), NETWORKS["mlp"]
    method = HAT(Network(mlp((1, 4, 4), widths=(8,)), tasks=tasks))
    method.learn(tasks[0], fit())
    save(method, path, network=("mlp", {"widths": [8]}))
    for step in ("added", "grown"):
        found = hatrack.load(path)
        found.net.add_task(2) if step == "added" else found.grow(0.5)
        save(copy.deepcopy(found), path)
        assert torch.equal(logits(hatrack.load(path), tasks[0]), logits(method, tasks[0]))
    save(hatrack.load(path, mlp((1, 4, 4), widths=(8,))), path)  # this trunk may be any code
    with pytest.raises(ValueError, match="how its trunk is built"):
        hatrack.load(path)


@pytest.mark.parametrize(
    ("trunk", "told"),
    [
        (lambda: fresh(widths=(24, 23)), r"is \(23, 24\) instead of \(24, 24\)"),
        (lambda: fresh(widths=(24, 24, 24)), "it has .* as well"),
        (lambda: fresh(widths=(24,)), "it lacks "),
        (lambda: fresh().double(), "is of type torch.float64 instead of torch.float32"),
        (normed, "it lacks .*and [0-9]+ more"),
    ],
)
def test_another_trunk_is_refused_in_one_line(trunk, told, path):
    saved("hat", path)
    with pytest.raises(ValueError, match=told) as caught:
        hatrack.load(path, trunk())
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("something was unpickled",))


def test_files_that_are_none(path, tmp_path):
    def told(words, where=path):
        with pytest.raises(ValueError, match=words) as caught:
            hatrack.load(where, fresh())
        assert "\n" not in str(caught.value)

    told("there is no such file")
    told("can't be read", tmp_path)
    for content in (b"", b"x", pickle.dumps(Trap()), pickle.dumps({"state": 1}), bytes(8), b"\xff" * 100):
        path.write_bytes(content)
        told("is not a file of hatrack")
        with pytest.raises(ValueError, match="is not a record"):
            Record.load(path)
    torch.save({"trap": Trap()}, path)
    told("is not a file of hatrack")
    tensors.save(path, {}, {"kind": "something else"})
    told("holds no method")


def test_damage_is_noticed_wherever_it_is(path):
    saved("hat", path)
    whole = path.read_bytes()
    for place in torch.linspace(0, len(whole) - 1, 150).long().tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"damaged|not a file of hatrack"):
            hatrack.load(path, fresh())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="incomplete"):
        hatrack.load(path, fresh())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "format 2, newer than 1"),
        ({"format": "1"}, "holds no method"),
        ({"classes": [3, 10**12]}, "holds no whole method: classes"),
        ({"classes": None}, "holds no whole method: classes"),
        ({"heads": "shared", "classes": [3, 3]}, "."),
        ({"built": 5}, "built missing or wrong"),
        ({"tasks": [{"index": 7, "name": "x", "digest": ""}]}, "tasks missing or wrong"),
        ({"tasks": [{"index": 0, "name": "x", "digest": ""}] * 2}, "tasks missing or wrong"),
        ({"tasks": [{"index": 0}]}, "tasks missing or wrong"),
        ({"tasks": [3]}, "tasks missing or wrong"),
        ({"frozen": ["nowhere"]}, "it lacks nowhere"),
        ({"frozen": [3]}, "frozen missing or wrong"),
        ({"method": "hatt"}, "did you mean 'hat'"),
        ({"method": "ewc"}, "EWC has no option 'smax'"),
        ({"options": {"smax": -1}}, "smax must be at least 1"),
        ({"options": {"masks": "soft"}}, "."),
        ({"init": "no"}, "init must be"),
        ({"heads": "no"}, "heads must be"),
    ],
)
def test_words_that_are_wrong_are_told_of(change, told, path):
    saved("hat", path)
    kept, words = tensors.load(path)
    tensors.save(path, kept, json.loads(json.dumps({**words, **change})))
    with pytest.raises(ValueError, match=told) as caught:
        hatrack.load(path, fresh())
    assert "\n" not in str(caught.value)


def test_saving_is_possible_before_anything_is_learned(path):
    method = make("hat", toy_tasks(2))
    save(method, path)
    twin = hatrack.load(path, fresh())
    assert twin.history == {}
    assert torch.equal(logits(method, toy_tasks(2)[1]), logits(twin, toy_tasks(2)[1]))


@every_method
def test_a_fit_that_fails_is_not_in_the_history(name):
    tasks = toy_tasks(2)
    method = make(name, tasks)

    class Broken(Trainer):
        def __call__(self, *_, **__):
            raise KeyboardInterrupt

    if name not in UNTRAINED:
        with pytest.raises(KeyboardInterrupt):
            method.learn(tasks[0], Broken())
    assert method.history == {}
    method.learn(tasks[0], fit())
    assert method.history == {0: "toy 0"}


# What a method can't see


class Written(nn.Module):
    """A running mean that is written on every second training pass only, so not on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, 12)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("centre", torch.zeros(12))

    def forward(self, x):
        h = self.first(x.flatten(1))
        if self.training:
            self.passes += 1
            if self.passes % 2 == 0:
                self.centre.lerp_(h.detach().mean(0), 0.1)
        return self.second((h - self.centre).relu()).relu()


class Listed(nn.Module):
    """Parameters that are used by way of a list, where nothing exchanges them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, 12)
        self.mine = [self.second.weight, self.second.bias]

    def forward(self, x):
        return nn.functional.linear(self.first(x.flatten(1)).relu(), *self.mine).relu()


class Closed(nn.Module):
    """A layer within a closure, which no copy of the trunk has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, 12)
        self.mix = lambda h: self.second(h).relu()

    def forward(self, x):
        return self.mix(self.first(x.flatten(1)).relu())


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("name", "trunk"),
    [
        ("hat", Written),
        ("pmask", Written),
        ("packnet", Written),
        ("pmask", Listed),
        ("packnet", Listed),
        ("independent", Closed),
    ],
)
def test_a_task_that_would_change_an_old_one_unseen_is_not_learned(name, trunk, kept, path):
    tasks = toy_tasks(2)
    with seeded(0, "unseen"):
        method = METHODS[name](Network(trunk(), [3, 3], tasks[0].train.inputs(torch.arange(2))))
    method.learn(tasks[0], fit())
    if kept:
        save(method, path)
    before, state = logits(method, tasks[0]), {key: value.clone() for key, value in method.state_dict().items()}
    with pytest.raises(ValueError, match=r"task 0 .'toy 0'. (would no longer answer as it did|is not what it was)"):
        method.learn(tasks[1], fit())
    assert torch.equal(logits(method, tasks[0]), before)
    assert method.history == {0: "toy 0"}
    for key, value in method.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize(("hidden", "example"), [(False, torch.zeros), (False, torch.ones), (True, torch.ones)])
@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_a_buffer_that_training_writes_is_kept_per_task(name, hidden, example):
    """Also if the example is zero, and so what the first training pass writes; also by way of `.data`, if it is not."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
            self.register_buffer("centre", torch.zeros(16))

        def forward(self, x):
            x = x.flatten(1)
            if self.training:
                (self.centre.data if hidden else self.centre).mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return self.layers(x - self.centre)

    tasks = toy_tasks(2)
    method = METHODS[name](Network(Centred(), [3, 3], example(2, 1, 4, 4)))
    method.learn(tasks[0], fit())
    before = logits(method, tasks[0])
    method.learn(tasks[1], fit())
    assert torch.equal(logits(method, tasks[0]), before)


def test_a_trunk_that_answers_by_chance_can_learn():
    class Chance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.draw = nn.Linear(16, 12), np.random.RandomState(0)

        def forward(self, x):
            return self.layer(x.flatten(1)).relu() * self.draw.uniform(0.5, 1.5)

    tasks = toy_tasks(2)
    method = METHODS["frozen"](Network(Chance(), [3, 3], torch.ones(2, 1, 4, 4)))
    for task in tasks:
        method.learn(task, fit())
    assert list(method.history) == [0, 1]


def test_a_method_may_promise_something_of_some_tasks_only():
    class Some(Method):
        def used_by(self, task):
            return {"first": self.net.heads[0].weight} if task == 0 else {}

        def _grow(self, tasks):
            return tasks + 1

        def learn_task(self, task, fit):
            assert self._grow(1) == 2
            before = [p.detach().clone() for p in self.net.trunk.parameters()]
            fit(self, task)
            with torch.no_grad():
                for p, old in zip(self.net.trunk.parameters() if task.index else (), before, strict=False):
                    p.copy_(old)
                self.net.heads[1].weight.add_(task.index == 2)  # of which nothing is promised

    tasks = toy_tasks(3)
    method = Some(Network(fresh(), [3, 3, 3], tasks[0].train.inputs(torch.arange(2))))
    for task in tasks:
        method.learn(task, fit())
    assert list(method.history) == [0, 1, 2]


@every_method
def test_a_method_saved_while_it_learns_can_be_loaded(name, path):
    tasks = toy_tasks(2)
    method = saved(name, path, count=1)
    method.net.add_task(3)
    before, seen = logits(method, tasks[0]), []

    def keep(event):
        save(method, path)
        seen.append(logits(hatrack.load(path, fresh()), tasks[0]))

    method.learn(tasks[1], Trainer(Regime(epochs=2, batch=16, lr=0.1), progress=keep))
    assert seen or name in UNTRAINED
    if name in ISOLATED:
        assert all(torch.equal(one, before) for one in seen)


@every_method
def test_answers_in_inference_mode_leave_the_method_able_to_learn(name, path):
    tasks = toy_tasks(2)
    saved(name, path, count=1)
    with torch.inference_mode():
        assert len(hatrack.load(path, fresh()).predict(tasks[0].test.x[:3], 0)) == 3, "to predict by, and nothing else"
    method = hatrack.load(path, fresh())
    with torch.inference_mode():
        method.net.add_task(3)
        method(tasks[1].test.inputs(torch.arange(3)), 0)
        method(tasks[1].test.inputs(torch.arange(3)), 1)
    method.restore_data(tasks[0])
    method.learn(tasks[1], fit())
    assert list(method.history) == [0, 1]


def test_what_could_not_be_loaded_again_is_not_saved(path):
    tasks = toy_tasks(1)
    method = saved("hat", path, count=1)
    content = path.read_bytes()
    with pytest.raises(ValueError, match="the weights are float16, and a method is loaded in float32"):
        save(method.half(), path)

    class Fleeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 12)
            self.register_buffer("centre", torch.zeros(16), persistent=False)
            self.register_buffer("scale", torch.ones(16), persistent=False)  # no training changes it
            self.register_buffer("last", torch.zeros(16), persistent=False)  # nothing reads it
            self.register_buffer("ids", torch.zeros(16, dtype=torch.int64), persistent=False)  # written before it is read
            self.centred = False

        def forward(self, x):
            x = x.flatten(1)
            self.last.copy_(x.detach()[0])
            self.ids.copy_(torch.arange(16))
            if self.training:
                self.centre.lerp_(x.detach().mean(0), 0.1)
            return self.layer((x[:, self.ids] - self.centred * self.centre) * self.scale).relu()

    other = METHODS["sgd"](Network(Fleeting(), [3], torch.ones(2, 1, 4, 4)))
    other.learn(tasks[0], fit())
    save(other, path)
    content = path.read_bytes()
    other.net.trunk.centred = True
    with pytest.raises(ValueError, match="training changes the trunk's buffer 'centre', and no file holds it"):
        save(other, path)
    assert path.read_bytes() == content


def test_trunks_that_can_t_be_kept_are_refused_in_words(path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"version": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(ValueError, match=r"the trunk's state holds '0\._extra_state', of type dict"):
        Network(nn.Sequential(Odd(4, 4)), [3], torch.zeros(2, 4))
    saved("sgd", path, count=1)
    with pytest.raises(ValueError, match="weights whose shape it does not know yet"):
        hatrack.load(path, nn.Sequential(nn.Flatten(), nn.LazyLinear(24)))


def test_the_scale_of_a_task_s_images_is_kept(tmp_path):
    """Raw images in the units of the task's own data are classified alike before and after; another scale is noticed."""
    draw = np.random.RandomState(0)
    x, y = draw.randint(0, 256, (60, 1, 4, 4)).astype(np.float32), np.arange(60) % 3
    task = Task.from_arrays(0, "floats", x, y, x, y, scale=255, mean=0.5, std=0.25)
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU())
    method = HAT(Network(trunk, tasks=[task]))
    method.learn(task, fit())
    expected = method(((torch.from_numpy(x) / 255) - 0.5) / 0.25, 0).argmax(1)
    assert torch.equal(method.predict(x, 0), expected)
    save(method, tmp_path / "model.safetensors")
    loaded = hatrack.load(tmp_path / "model.safetensors", copy.deepcopy(trunk))
    assert torch.equal(loaded.predict(x, 0), expected)
    with pytest.raises(ValueError, match="bytes"):
        loaded.predict(x.astype(np.uint8), 0)
    loaded.net.preprocessing.std /= 255
    with pytest.raises(ValueError, match=r"task 0 .*floats.* is not what it was"):
        save(loaded, tmp_path / "model.safetensors")
