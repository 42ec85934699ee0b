"""Tasks that never reuse weights (reuse="never"): erasing any of them gives the run that never learned it, bit for bit."""

import random

import pytest
import torch
from torch import nn

from hatrack import HAT, METHODS, Network, Regime, Run, Trainer, load, run, save
from hatrack.__main__ import main
from hatrack.methods.parts.candidates import owners, unit_candidates
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from hatrack.tracing.units import Units
from tests.helpers.commands import SHORT
from tests.helpers.erasing import OPTIMIZERS, SHAPES, Scaled, build, different, small_tasks, snapshot, trainer
from tests.helpers.killing import OFTEN, assert_same, here, killed_at, start, to_the_end, wait_for
from tests.helpers.learning import logits
from tests.helpers.tiers import cases, quick_and_slow
from tests.helpers.toys import toy_tasks

BOTH = ("hat", "pmask")
HELD = pytest.warns(UserWarning, match="held whole")
EXACT = [(name, network, optimizer) for name in BOTH for network in SHAPES for optimizer in OPTIMIZERS]
QUICK = [
    *(("hat", "mlp", optimizer) for optimizer in OPTIMIZERS),
    ("pmask", "mlp", "momentum with decay"),
    ("hat", "gru", "adam"),
    ("pmask", "vit", "adam"),
]


def learned(name, tasks, network, optimizer, turns, **options):
    """A method that has learned these tasks in this order, with one trainer."""
    method, fit = build(name, tasks, network, reuse="never", **options), trainer(optimizer)
    for turn in turns:
        method.learn(tasks[turn], fit)
    return method


@pytest.mark.parametrize("case", quick_and_slow(EXACT, QUICK), ids=" ".join)
def test_erasing_any_task_gives_the_run_that_left_it_out(case):
    name, network, optimizer = case
    tasks = small_tasks(network)
    whole = learned(name, tasks, network, optimizer, (0, 1, 2))
    assert whole.dependencies() == {0: {}, 1: {}, 2: {}}
    saved = whole.state_dict()
    for erased, rest in ((0, (1, 2)), (1, (0, 2)), (2, (0, 1))) if network == "mlp" else ((1, (0, 2)),):
        method = build(name, tasks, network, reuse="never")
        method.load_state_dict(saved)
        answers = {turn: logits(method, tasks[turn]) for turn in rest}
        method.release(erased, erase=True)
        other = learned(name, tasks, network, optimizer, rest)
        assert not different(snapshot(method), snapshot(other))
        for turn, old in answers.items():
            assert torch.equal(logits(method, tasks[turn]), old)
            assert torch.equal(logits(other, tasks[turn]), old)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("number", range(cases(3, 40)))
def test_random_sequences_end_as_if_only_what_is_left_had_been_learned(name, number, tmp_path):
    """Tasks are learned, erased and learned again in any order, with saving and loading in between."""
    draw, tasks = random.Random(number), small_tasks(count=4)
    regimes = [(draw.choice(list(OPTIMIZERS)), draw.choice([1, 3])) for _ in tasks]
    trunk = {"widths": (24, 24), "dropout": 0.2, "input_dropout": 0.1}
    method = build(name, tasks, seed=number, reuse="never", room=draw.choice([4, 5]))
    for step in range(9):
        task = draw.choice(tasks)
        if task.index in method.history:
            method.release(task.index, erase=True)
        else:
            method.learn(task, trainer(*regimes[task.index]))
        if draw.random() < 0.3:
            save(method, tmp_path / f"{step}.safetensors")
            method = load(tmp_path / f"{step}.safetensors", mlp(tasks[0].shape, **trunk))
    other = build(name, tasks, seed=number, reuse="never", room=method.options["room"])
    for turn in sorted(method.history, key=lambda _: draw.random()):  # the order does not matter either
        other.learn(tasks[turn], trainer(*regimes[turn]))
    assert set(other.history) == set(method.history)
    assert not different(snapshot(method), snapshot(other))


@pytest.mark.parametrize("name", BOTH)
def test_a_task_trains_its_candidates_only_and_uses_no_other_weight(name):
    tasks = small_tasks()
    method = build(name, tasks, reuse="never")
    initial = {key: p.detach().clone() for key, p in method.net.trunk.named_parameters()}
    for task in tasks:
        before = {key: p.detach().clone() for key, p in method.net.trunk.named_parameters()}
        method.learn(task, trainer())
        for key, mask in method.weight_masks(task.index).items():
            p = method.net.trunk.get_parameter(key)
            assert torch.equal(p[~mask], before[key][~mask])
            assert torch.equal(before[key][mask], initial[key][mask])
            assert mask.float().mean() < 0.5
        assert any((method.net.trunk.get_parameter(key) != p).any() for key, p in before.items())
    owned = torch.stack([torch.cat([m.reshape(-1) for m in method.weight_masks(t).values()]) for t in range(3)])
    assert owned.sum(0).max() == 1


def test_gates_of_other_units_are_exactly_0_in_every_step(monkeypatch):
    tasks, seen = small_tasks(), []
    method = build("hat", tasks, reuse="never")
    run = method.units.run

    def watched(x, gates, tensors=None):
        seen.append(gates.detach().clone())
        return run(x, gates, tensors)

    monkeypatch.setattr(method.units, "run", watched)
    method.learn(tasks[1], trainer())
    mine = method.candidates.of(1)
    assert mine.sum() == 16
    assert all((gates[~mine] == 0).all() for gates in seen)
    soft = [gates for gates in seen if gates.dtype != torch.bool]
    assert len(soft) == 4
    assert all((gates[mine] > 0).all() for gates in soft)


def test_the_capacity_term_counts_candidates_only():
    tasks = small_tasks()
    hat, pmask = build("hat", tasks, reuse="never"), build("pmask", tasks, reuse="never")
    hat.learn(tasks[0], trainer())
    hat.learning = 1
    hat._freeze_used_weights()
    gates = torch.rand(hat.units.count)
    mine = hat.candidates.of(1)
    torch.testing.assert_close(hat.capacity(gates), gates[mine].mean())
    pmask._freeze_used_weights(1)
    mine = pmask.candidates.of(1)
    assert torch.equal(pmask.price, mine / mine.sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_a_run_that_is_killed_goes_on_to_the_same_bits(name, tmp_path, monkeypatch):
    spec = Run(
        "smnist", name, benchmark_options={"data": "sample"}, train_examples=100,
        network_options={"widths": (12, 12), "input_dropout": 0.0},
        method_options={"reuse": "never", "room": 5}, regime=Regime(epochs=2, batch=50, optimizer="adam", lr=0.003),
    )  # fmt: skip
    whole = run(spec, tmp_path / "whole", keep_model=True)
    kills = killed_at(monkeypatch, 0.2, seed=0, most=4)
    again = to_the_end(spec, tmp_path / "again", save_every=OFTEN, keep_model=True)
    assert len(kills) == 4
    assert_same(whole, again)
    models = [load(next((tmp_path / folder).glob("*.safetensors"))) for folder in ("whole", "again")]
    assert not different(snapshot(models[0]), snapshot(models[1]))


@pytest.mark.slow
def test_a_command_that_is_killed_goes_on_to_the_same_bits(tmp_path):
    words = ("--reuse", "never", "--room", "5", "--keep-model")
    process = start(tmp_path / "killed", *words, "--save-every", "0")
    wait_for(tmp_path / "killed", "fit")
    process.kill()
    process.communicate()
    assert not list((tmp_path / "killed").glob("*.json"))
    (one,), (two,) = here(tmp_path / "killed", *words), here(tmp_path / "whole", *words)
    assert_same(one, two)
    models = [load(next((tmp_path / folder).glob("*.safetensors"))) for folder in ("whole", "killed")]
    assert not different(snapshot(models[0]), snapshot(models[1]))


def test_a_kept_state_is_refused_on_the_command_line(tmp_path, capsys):
    words = ["run", "smnist", "hat", *SHORT, "--widths", "12", "--out", str(tmp_path), "--reuse", "never", "--keep-state"]
    assert main(words) == 2
    assert "keep_state" in capsys.readouterr().err


def test_slices_are_of_equal_size_and_depend_on_seed_and_name():
    for count, room in ((24, 3), (25, 4), (7, 7), (100, 1)):
        found = owners(0, "layer", count, room)
        sizes = torch.bincount(found.long(), minlength=room)
        assert sizes.max() - sizes.min() <= 1
        assert sizes.sum() == count
        assert len(sizes) == room
    assert torch.equal(owners(0, "a", 100, 5), owners(0, "a", 100, 5))
    assert not torch.equal(owners(0, "a", 100, 5), owners(1, "a", 100, 5))
    assert not torch.equal(owners(0, "a", 100, 5), owners(0, "b", 100, 5))


@pytest.mark.parametrize("name", quick_and_slow(BOTH, ["hat"]))
def test_steps_obey_the_rule_and_tasks_are_learned(name):
    tasks = toy_tasks(3, train=120)
    watched = build(name, tasks, reuse="never")
    watched.learn(tasks[0], Trainer(trainer().regime, watch=True))
    method = build(name, tasks, reuse="never", c=0.1)
    for task in tasks:
        result = method.learn(task, trainer("adam", epochs=20))
        assert result.valid_accuracy > 0.6  # 0.33 by chance


class Twice(nn.Module):
    """A layer that is called twice has units of both calls."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(16, 12), nn.Linear(12, 12)

    def forward(self, x):
        return torch.relu(self.again(torch.relu(self.again(torch.relu(self.first(x.flatten(1)))))))


def test_a_layer_that_is_called_twice():
    tasks = small_tasks()
    with seeded(0, "weights"):
        trunks = [Twice(), Twice()]
    trunks[1].load_state_dict(trunks[0].state_dict())
    whole, other = (build("hat", tasks, trunk, reuse="never") for trunk in trunks)
    for turn in (0, 1, 2):
        whole.learn(tasks[turn], trainer())
        if turn != 1:
            other.learn(tasks[turn], trainer())
    whole.release(1, erase=True)
    assert not different(snapshot(whole), snapshot(other))


def test_parts_that_the_user_froze_stay_open_to_all():
    tasks = small_tasks()
    methods = []
    for turns in ((0, 1, 2), (1, 2)):
        with seeded(0, "weights"):
            net = Network(mlp(tasks[0].shape, widths=(24, 24)), tasks=tasks, freeze="2")
        net.replace_example(torch.randn(2, *tasks[0].shape))
        methods.append(HAT(net, reuse="never"))
        for turn in turns:
            methods[-1].learn(tasks[turn], trainer())
    assert methods[0].gates[:, :24].all()
    methods[0].release(0, erase=True)
    assert not different(snapshot(methods[0]), snapshot(methods[1]))


def test_more_tasks_than_there_is_room_for():
    for name in BOTH:
        tasks = small_tasks(count=4)
        method = build(name, tasks[:2], reuse="never", room=3)
        for count in (3, 3):
            method.net.add_task(count)
        method.learn(tasks[2], trainer())
        before = snapshot(method)
        with pytest.raises(ValueError, match=r"task 3 \('toy 3'\) finds no room.*0 to 2"):
            method.learn(tasks[3], trainer())
        assert not different(snapshot(method), before)
        assert build(name, tasks, reuse="never").candidates.room == 4


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("hat", {"reuse": "never", "norms": "shared"}, "norms='task', not 'shared'"),
        ("pmask", {"reuse": "never", "norms": "shared"}, "norms='task', not 'shared'"),
        ("hat", {"reuse": "never", "masks": "soft"}, "masks='binary', not 'soft'"),
        ("pmask", {"reuse": "never", "masks": "soft"}, "masks='binary', not 'soft'"),
        ("hat", {"reuse": "never", "room": 25}, "layer '2' has 24 units, too few for room=25"),
        ("pmask", {"reuse": "never", "room": 25}, "trunk.2.bias has 24 weights, too few for room=25"),
        ("hat", {"room": 5}, "room=5 does nothing with reuse='allowed'"),
        ("hat", {"reuse": "sometimes"}, "reuse must be one of 'allowed', 'never'"),
        ("hat", {"free": "zero"}, "free must be one of 'kept', 'initial'"),
        ("hat", {"reuse": "never", "leave": "2"}, "2.weight, 2.bias can't be divided among tasks"),
    ],
)
def test_what_is_refused_when_a_method_is_made(name, options, said):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        build(name, small_tasks(), **options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_else_is_refused():
    tasks = small_tasks()
    for name in BOTH:
        net = Network(mlp(tasks[0].shape, widths=(24,)), tasks=tasks, heads="shared")
        with pytest.raises(ValueError, match="needs a head per task"):
            METHODS[name](net, reuse="never")
        net = Network(mlp(tasks[0].shape, widths=(24,)), [], tasks[0].train.inputs(torch.arange(2)))
        with pytest.raises(ValueError, match="it knows none: room=10"):
            METHODS[name](net, reuse="never")
        method = build(name, tasks, reuse="never")
        before = snapshot(method)
        with pytest.raises(ValueError, match="keep_state=True"):
            method.learn(tasks[0], trainer(keep_state=True))
        assert not different(snapshot(method), before)
    with seeded(0, "weights"), pytest.raises(ValueError, match="matrix can't be divided"), HELD:
        build("hat", tasks, Scaled(), reuse="never")


class Tied(nn.Module):
    """A matrix that is used twice, in two directions, by units of its own each."""

    def __init__(self):
        super().__init__()
        self.matrix, self.between = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 16)

    def forward(self, x):
        return torch.relu(torch.relu(self.between(torch.relu(x.flatten(1) @ self.matrix))) @ self.matrix.t())


def test_a_weight_between_units_of_two_tasks_is_refused(monkeypatch):
    units, numbers = Units(Tied(), torch.randn(2, 1, 4, 4)), iter(range(100))
    assert unit_candidates(units, 0, 3).of(1).sum() > 0, "layers of one width are divided in the same way"

    def other(seed, name, count, room):
        return owners(seed, next(numbers), count, room)

    monkeypatch.setattr("hatrack.methods.parts.candidates.owners", other)
    with pytest.raises(ValueError, match=r"weights of matrix lie between units of two tasks"):
        unit_candidates(units, 0, 3)
