"""PathNet: the modules, the tournament, what is frozen and what starts anew."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from hatrack import NETWORKS, Diverged, Network, Regime, Trainer, evaluate
from hatrack.methods.fit import EpochResult, FitResult
from hatrack.methods.pathnet import PathNet, mutated, random_path
from tests.helpers.counting import MIXTURE, count
from tests.helpers.learning import OPTIMIZERS, learn, logits
from tests.helpers.toys import toy_tasks
from tests.helpers.trunks import small_conv, small_mlp


def make(trunk=None, classes=(3, 3, 3), **options):
    options = {"modules": 6, "active": 2, "expand": 0.5, "generations": 3, **options}
    return PathNet(Network(trunk or small_mlp(), list(classes), torch.zeros(2, 1, 4, 4)), **options)


def trainer(**changes):
    return Trainer(Regime(**{"epochs": 3, "batch": 16, "lr": 0.1, **changes}))


def places(path):
    return {(layer, gene) for layer, genes in enumerate(path) for gene in genes}


def state(method):
    return {key: value.clone() for key, value in method.state_dict().items()}


# Sizes and the forward pass


@pytest.mark.parametrize(
    ("modules", "active", "expand", "expected"),
    [(16, 3, 0.258, 7_092_261), (20, 5, 0.231, 7_090_382), (10, 3, 0.325, 7_059_448)],
)
def test_alexnet_on_the_mixture(modules, active, expand, expected):
    net = Network(NETWORKS["alexnet"]((3, 32, 32)), MIXTURE, torch.zeros(1, 3, 32, 32))
    method = PathNet(net, modules=modules, active=active, expand=expand)
    assert count(method) - count(net) == expected == method.num_parameters()
    if modules == 16:
        assert [method.part(layer, 0).width for layer in range(5)] == [16, 33, 66, 528, 528]


@torch.no_grad()
def test_the_forward_pass_against_a_plain_loop():
    method = make(small_conv()).double().eval()
    method.paths[1] = torch.tensor([[4, 1], [0, 5], [3, 3]])
    x = torch.randn(4, 1, 4, 4, dtype=torch.float64)
    values = {key: value for key, value in method.state_dict().items() if key.startswith("choices.")}

    def one(layer, number, what):
        return values[f"choices.{layer}.parts.{number}.layer.{what}"]

    h = sum(torch.relu(F.conv2d(x, one(0, m, "weight"), one(0, m, "bias"), padding=1)) for m in (4, 1))
    h = sum(F.max_pool2d(torch.tanh(F.conv2d(h, one(1, m, "weight"), one(1, m, "bias"))), 2) for m in (0, 5)).flatten(1)
    h = torch.relu(h @ one(2, 3, "weight").T + one(2, 3, "bias"))  # named twice, used once
    torch.testing.assert_close(method(x, 1), h @ method.heads[1].weight.T + method.heads[1].bias)


def test_modules_differ_and_depend_on_the_seed_alone():
    one, two, other = make(), make(generations=9), make(classes=(3,))
    weights = [one.part(0, m).layer.weight for m in range(6)]
    assert not any(torch.equal(a, b) for k, a in enumerate(weights) for b in weights[:k])
    for twin in (two, other):
        assert all(torch.equal(p, q) for p, q in zip(one.choices.parameters(), twin.choices.parameters(), strict=True))


# Paths


def test_a_path_has_different_modules_in_a_layer():
    source = torch.Generator().manual_seed(0)
    paths = torch.stack([random_path(5, 3, 16, source) for _ in range(400)])
    assert paths.shape == (400, 5, 3)
    assert all(len(set(genes)) == 3 for path in paths.tolist() for genes in path)
    shares = torch.bincount(paths.flatten(), minlength=16) / paths.numel()
    assert len(shares) == 16
    assert (shares - 1 / 16).abs().max() < 0.02


def test_mutation():
    source = torch.Generator().manual_seed(0)
    path = torch.arange(15).view(5, 3)
    assert torch.equal(mutated(path, 0.0, 16, source), path)
    many = torch.stack([mutated(path, 1.0, 16, source) for _ in range(2000)])
    assert many.min() == 0
    assert many.max() == 15  # 14 may become 15, and then 0
    moves = (many - path + 8) % 16 - 8
    assert sorted(set(moves.flatten().tolist())) == [-2, -1, 0, 1, 2]
    shares = [(moves == k).float().mean().item() for k in range(-2, 3)]
    assert shares == pytest.approx([0.2] * 5, abs=0.01)
    some = torch.stack([mutated(path, 1 / 15, 16, source) for _ in range(2000)])
    assert (some != path).float().sum((1, 2)).mean().item() == pytest.approx(0.8, abs=0.06)  # one in five moves by 0


# The tournament, with a fit that follows a script


class Scripted:
    """A fit that returns given validation losses, writes its number into the weights, and records its calls."""

    def __init__(self, losses, **regime):
        self.losses, self.regime, self.calls = losses, Regime(**regime), []

    def __call__(self, method, task, *, plain=None, epochs, lr, schedule, keep_state):
        number = len(self.calls)
        trained = {name for name, p in method.named_parameters() if p.requires_grad}
        self.calls.append({"path": copy.deepcopy(method.path), "lr": lr, "epochs": epochs, "trained": trained})
        assert schedule == "constant"
        assert plain is None
        assert not keep_state, "a candidate would continue with the other's momentum"
        with torch.no_grad():
            method.heads[task.index].bias.fill_(number)
        losses = self.losses(number)
        best = min(range(epochs), key=lambda k: losses[k])
        return FitResult(task.index, [EpochResult(lr, 9.0, loss, 0.5) for loss in losses], best)


def play(losses, method=None, **regime):
    method = method or make(generations=20)
    fit = Scripted(losses, **regime)
    method.learn(toy_tasks(1)[0], fit)
    return method, fit.calls


def test_the_best_path_ever_wins_with_the_weights_it_had_then():
    # losses of the two paths of each generation: the second wins at first, then the first by its mutated copy
    script = [0.9, 0.8, 0.7, 0.85, 0.75, 0.95]
    method, calls = play(lambda number: [script[number]], epochs=3)
    assert len(calls) == 6
    assert method.paths[0].tolist() == calls[2]["path"]
    assert method.heads[0].bias.tolist() == [2.0] * 3, "the weights are those of the best fit"
    assert calls[3]["path"] == calls[1]["path"], "a winner stays while its copy is tried"
    assert calls[4]["path"] == calls[2]["path"]
    assert method.paths[1:].unique().tolist() == [-1]


@pytest.mark.parametrize("seed", range(4))
def test_after_every_generation_all_weights_are_those_of_the_best_fit(seed):
    """Compared with copies of the whole state, kept by a fit that changes all that it may."""
    draw = torch.Generator().manual_seed(seed)
    losses, starts, ends = torch.rand(40, generator=draw).tolist(), [], []

    def loss(number):
        starts.append(state(method))
        with torch.no_grad():
            for parameter in method.parameters():
                if parameter.requires_grad:
                    parameter.normal_(generator=draw)
        ends.append(state(method))
        return [losses[number]]

    method = make(generations=20, mutations=3.0)
    play(loss, method, epochs=20)
    assert len({str(kept["choices.0.parts.0.layer.weight"].tolist()) for kept in ends}) > 2
    for number in range(2, 41, 2):
        best = ends[min(range(number), key=lambda k: losses[k])]
        now = starts[number] if number < 40 else state(method)
        keys = [key for key in now if key.startswith("choices." if number < 40 else ("choices.", "heads."))]
        assert all(torch.equal(now[key], best[key]) for key in keys)


def test_a_forward_pass_reads_the_paths_once(monkeypatch):
    """A forward pass that reads from the device can't be recorded; a changed path is read again."""
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or tolist(tensor))
    method = make().eval()
    x = torch.rand(2, 1, 4, 4)
    with torch.no_grad():
        first = [method(x, 0) for _ in range(3)]
        assert len(reads) == 1
        method.paths[0] = 1
        other = method(x, 0)
        assert len(reads) == 2
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[0], other)


def test_a_path_counts_by_the_epoch_whose_weights_it_keeps():
    script = [[0.3, 0.9], [0.5, 0.4]]
    method, calls = play(lambda number: script[number], make(generations=1), epochs=2)
    assert method.paths[0].tolist() == calls[0]["path"]
    assert method.heads[0].bias.tolist() == [0.0] * 3


def test_losers_become_mutated_copies_of_the_winner():
    method, calls = play(lambda number: [1.0 - number % 2 / 2 - number / 100], epochs=30)  # the second wins every time
    assert len(calls) == 40
    paths = [torch.tensor(call["path"]) for call in calls]
    assert not torch.equal(paths[0], paths[1])
    assert all(torch.equal(path, paths[1]) for path in paths[3::2])
    copies = torch.stack(paths[2::2])
    moves = (copies - paths[1] + 3) % 6 - 3
    assert moves.abs().max() <= 2
    changed = (moves != 0).sum((1, 2)).float()
    assert 0.3 < changed.mean() < 1.5  # 0.8 are expected
    assert torch.equal(method.paths[0], paths[1])


@pytest.mark.parametrize(
    ("epochs", "generations", "each", "rounds"), [(200, 20, 10, 20), (50, 20, 2, 20), (4, 20, 1, 4), (7, 1, 7, 1)]
)
def test_generations_share_the_epochs(epochs, generations, each, rounds):
    method = make(generations=generations)
    _, calls = play(lambda number: [1 / (100 * number + k + 1) for k in range(each)], method, epochs=epochs)
    assert [call["epochs"] for call in calls] == [each] * (2 * rounds)


def test_the_learning_rate_of_a_path_falls_on_plateaus_and_its_copy_inherits_it():
    # The first epoch of all is the best. Patience 5: the winner's rate falls in its epochs 6, 11, 16, ... (counted from 1),
    # 10 to a generation: 1, 3, 5, 7 times by the end of each, and 0.05 / 3^6 is under the floor of 1e-4.
    _, calls = play(lambda number: [0.5 if (number, k) == (0, 0) else 0.6 for k in range(10)], epochs=200)
    assert len(calls) == 8
    falls = [round(math.log(0.05 / call["lr"], 3), 6) for call in calls]
    assert falls == [0, 0, 1, 1, 3, 3, 5, 5]


def test_other_schedules_go_on_from_generation_to_generation():
    def losses(number):
        return [1 / (number + 1)] * 2

    method = make(generations=5)
    _, calls = play(losses, method, epochs=10, lr=0.1, schedule="exponential", gamma=0.5)
    assert [call["lr"] for call in calls] == pytest.approx([0.1 * 0.25**g for g in range(5) for _ in range(2)])
    _, calls = play(losses, method, epochs=10, lr=0.1, schedule="cosine")
    cosine = [0.05 * (1 + math.cos(math.pi * 2 * g / 10)) for g in range(5) for _ in range(2)]
    assert [call["lr"] for call in calls] == pytest.approx(cosine)


def test_the_decay_of_the_learning_rate_from_task_to_task_is_kept():
    method, fit = make(), Scripted(lambda number: [1.0], epochs=1, lr=0.1, task_lr_decay=0.5)
    method.learn(toy_tasks(3)[2], fit)
    assert {call["lr"] for call in fit.calls} == {0.025}


# What is trained


def test_only_free_modules_on_the_path_and_the_head_are_trained():
    tasks, method = toy_tasks(3), make(modules=4)
    used = set()
    for task in tasks:
        fit = Scripted(lambda number: [1 / (number + 1)], epochs=3)
        method.learn(task, fit)
        for call in fit.calls:
            wanted = {
                f"choices.{layer}.parts.{gene}.layer.{what}"
                for layer, gene in places(call["path"]) - used
                for what in ("weight", "bias")
            }
            assert call["trained"] == wanted | {f"heads.{task.index}.{what}" for what in ("weight", "bias")}
        used |= places(method.paths[task.index].tolist())
        assert method.used() == used
    assert all(p.requires_grad for p in method.parameters())


def test_modules_that_no_task_uses_start_anew_with_every_task():
    tasks, method = toy_tasks(3), make()
    initial = state(method)

    class Looking(Scripted):
        def __call__(self, method, task, **how):
            if not self.calls:
                now = method.state_dict()
                same = {key for key in now if key.startswith("choices.") and torch.equal(now[key], initial[key])}
                moved.append({tuple(map(int, key.split(".")[1:4:2])) for key in now if "choices" in key and key not in same})
            with torch.no_grad():
                for parameter in method.choices.parameters():
                    if parameter.requires_grad:
                        parameter.add_(1)
            return super().__call__(method, task, **how)

    moved, used = [], [set()]
    for task in tasks:
        method.learn(task, Looking(lambda number: [1 / (number + 1)], epochs=3))
        used.append(used[-1] | places(method.paths[task.index].tolist()))
    assert moved == used[:-1]
    assert len(used[1]) < len(used[2])


def test_when_all_modules_are_taken_the_head_still_learns():
    tasks = toy_tasks(2, noise=0.1)
    method = make(modules=2, expand=2.0)
    learn(method, tasks[:1], trainer(epochs=6))
    assert method.usage() == {"2": 1.0, "5": 1.0}
    first, before = logits(method, tasks[0]), state(method)
    method.learn(tasks[1], trainer(epochs=6))
    assert torch.equal(first, logits(method, tasks[0]))
    changed = {key for key, value in method.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"heads.1.weight", "heads.1.bias", "paths"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_is_forgotten_with_convolutions_in_any_order(optimizer):
    tasks = toy_tasks(4)
    method = make(small_conv(), [3] * 4, modules=4)
    fit = trainer(**OPTIMIZERS[optimizer])
    after = {}
    for k in (2, 0, 3, 1):
        method.learn(tasks[k], fit)
        after[k] = logits(method, tasks[k])
        assert all(torch.equal(logits(method, tasks[j]), kept) for j, kept in after.items())
    assert all(kept.std(0).min() > 0 for kept in after.values())
    layer, gene = next(iter(places(method.paths[2].tolist())))
    with torch.no_grad():
        method.part(layer, gene).layer.weight.mul_(2)
    assert not torch.equal(logits(method, tasks[2]), after[2])


def test_a_task_that_is_learned_again_frees_its_modules():
    tasks = toy_tasks(2)
    method = make(classes=(3, 3))
    learn(method, tasks, trainer())
    kept, own = places(method.paths[1].tolist()), places(method.paths[0].tolist())
    fit = Scripted(lambda number: [1 / (number + 1)], epochs=3)
    method.learn(tasks[0], fit)
    assert method.used() == kept | places(method.paths[0].tolist())
    assert method.used(without=0) == kept
    assert own - kept


def test_a_failure_in_the_middle_leaves_no_trace():
    tasks = toy_tasks(2)
    method = make(classes=(3, 3))
    learn(method, tasks[:1], trainer())
    before = state(method)

    class Failing(Trainer):
        def __call__(self, method, task, **how):
            if len(self.fits) == 3:
                raise Diverged("in the fourth fit")
            return super().__call__(method, task, **how)

    with pytest.raises(Diverged):
        method.learn(tasks[1], Failing(Regime(epochs=6)))
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())
    assert all(p.requires_grad for p in method.parameters())
    assert method.learning == -1


@pytest.mark.parametrize("valid", [0.0, 0.3])
def test_the_loss_on_validation_data_decides_or_without_it_that_of_training(valid):
    tasks, paths = toy_tasks(1, valid=valid, noise=1.0), []

    class Recording(Trainer):
        def __call__(self, method, task, **how):
            paths.append(copy.deepcopy(method.path))
            return super().__call__(method, task, **how)

    method, fit = make(classes=(3,)), Recording(Regime(epochs=6, batch=16, lr=0.1))
    method.learn(tasks[0], fit)
    losses = [f.epochs[f.best].valid_loss if valid else f.epochs[f.best].loss for f in fit.fits]
    assert len(losses) == 6
    lowest = losses.index(min(losses))
    assert method.paths[0].tolist() == paths[lowest]
    if valid:
        assert evaluate(method, tasks[0].valid).loss == losses[lowest]


@pytest.mark.parametrize("task", [3, -1])
def test_a_task_that_is_not_there(task):
    with pytest.raises(IndexError, match=f"no task {task}"):
        make()(torch.zeros(1, 1, 4, 4), task)


@pytest.mark.parametrize(
    ("option", "value"), [("modules", 0), ("active", 7), ("expand", 0.0), ("generations", 0), ("mutations", -1.0)]
)
def test_hyper_parameters_out_of_range(option, value):
    with pytest.raises(ValueError, match=f"{option} must be .* not {value!r}"):
        make(**{option: value})
