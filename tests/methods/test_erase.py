"""Erasing a task: the network from before, bit for bit, and nothing of the task is left."""

import copy
import random
import warnings

import pytest
import torch

from hatrack import METHODS, Diverged, Network, load, save
from hatrack.methods.parts.releasing import drawn
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from tests.helpers.erasing import OPTIMIZERS, SHAPES, Scaled, build, different, small_tasks, snapshot, trainer
from tests.helpers.learning import logits
from tests.helpers.tiers import cases, quick_and_slow
from tests.helpers.toys import toy_tasks

MASKED = ("hat", "pmask", "packnet")
pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")  # networks so small are soon full

EXACT = [
    (name, network, optimizer)
    for name in ("hat", "pmask")
    for network in SHAPES
    for optimizer in OPTIMIZERS
]  # fmt: skip
QUICK = [
    *((name, "mlp", optimizer) for name in ("hat", "pmask") for optimizer in OPTIMIZERS),
    ("hat", "vit", "adamw with decay"),
    ("hat", "gru", "adam"),
]


@pytest.mark.parametrize("case", quick_and_slow(EXACT, QUICK), ids=" ".join)
def test_erasing_the_last_task_gives_the_network_from_before_it(case):
    name, network, optimizer = case
    tasks = small_tasks(network)
    method, fit = build(name, tasks, network, free="initial"), trainer(optimizer)
    states = [snapshot(method)]
    for task in tasks:
        method.learn(task, fit)
        states.append(snapshot(method))
        assert any(not torch.equal(states[-2][f"net.trunk.{key}"], p) for key, p in method.net.trunk.named_parameters())
    for task in reversed(tasks):
        method.release(task.index, erase=True)
        assert not different(snapshot(method), states[task.index])


@pytest.mark.parametrize("options", [{}, pytest.param({"biases": "task"}, marks=pytest.mark.slow), {"retrain": 0}])
def test_packnet_has_the_network_from_before_as_long_as_a_task_remains(options):
    tasks = small_tasks("resnet18")
    method, states = build("packnet", tasks, "resnet18", **options), []
    for task in tasks:
        method.learn(task, trainer())
        states.append(snapshot(method))
    for task in (2, 1):
        method.release(task, erase=True)
        assert not different(snapshot(method), states[task - 1])
    weights = {name: method.net.get_parameter(name).detach().clone() for name in method.packed}
    method.release(0, erase=True)
    for name, old in weights.items():
        assert (method.net.get_parameter(name) != old).all()


@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_free_weights_are_at_their_initial_values_after_every_task(name):
    tasks = small_tasks()
    method = build(name, tasks, free="initial")
    initial = {key: p.detach().clone() for key, p in method.net.trunk.named_parameters()}
    for task in tasks:
        method.learn(task, trainer())
        masks = [method.weight_masks(t) for t in method.history]
        for key, p in method.net.trunk.named_parameters():
            used = torch.stack([mask[key] for mask in masks]).any(0)
            assert torch.equal(p[~used], initial[key][~used])
            assert not torch.equal(p, initial[key])
    plain = build(name, tasks)
    plain.learn(tasks[0], trainer())
    assert "initial.n0" not in plain.state_dict()
    assert method.kept_bytes()["buffers"] - plain.kept_bytes()["buffers"] == 4 * sum(p.numel() for p in initial.values())
    used = plain.weight_masks(0)["2.weight"]
    assert (plain.net.trunk[2].weight != initial["2.weight"])[~used].any(), "kept: as training left them"


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("erased", [0, 1, 2])
def test_every_weight_that_the_task_alone_used_is_new_and_no_other(name, erased):
    tasks = small_tasks()
    method = build(name, tasks)
    for task in tasks:
        method.learn(task, trainer())
    others = [task for task in tasks if task.index != erased]
    answers = [logits(method, task) for task in others]
    masks = {task.index: method.weight_masks(task.index) for task in tasks}
    before = {key: p.detach().clone() for key, p in method.net.trunk.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method.release(erased, erase=True)
    count = 0
    for key in masks[0]:
        kept = torch.stack([masks[task.index][key] for task in others]).any(0)
        alone, p = masks[erased][key] & ~kept, method.net.trunk.get_parameter(key)
        assert (p[alone] != before[key][alone]).all()
        assert torch.equal(p[kept], before[key][kept])
        count += int(alone.sum())
    assert count > 0 or (name == "packnet" and erased < 2), "later tasks of packnet read all weights of the earlier ones"
    assert all(torch.equal(logits(method, task), old) for task, old in zip(others, answers, strict=True))
    method.learn(tasks[erased], trainer())
    assert all(torch.equal(logits(method, task), old) for task, old in zip(others, answers, strict=True))


def test_new_values_by_hand():
    weights = {"a.weight": torch.zeros(50, 8, 2), "a.bias": torch.zeros(50), "scale": torch.zeros(9)}
    for name, bound in (("a.weight", 0.25), ("a.bias", 0.25), ("scale", 1 / 3)):
        found = drawn(name, weights, seed=3)
        assert found.shape == weights[name].shape
        assert bound / 2 < found.abs().max() <= bound
        assert found.min() < 0 < found.max()
        assert torch.equal(found, drawn(name, weights, seed=3))
        assert not torch.equal(found, drawn(name, weights, seed=4))


@pytest.mark.parametrize("name", MASKED)
def test_nothing_of_the_task_is_left_beside_the_weights(name):
    tasks = small_tasks()
    method = build(name, tasks, probes=3)
    for task in tasks:
        method.learn(task, trainer())
        method.fit_router(task)
    fresh = build(name, tasks, probes=3)
    certificate, rows = method.certificate()["tasks"], {k: v.clone() for k, v in method.net.preprocessing.rows(2).items()}
    method.release(2, erase=True)
    assert method.router.tasks() == [0, 1]
    assert sorted(key for key in method.state_dict() if "task_2" in key) == []
    assert len(method.stored_images.of(2)) == 0
    assert 2 not in method.history
    assert 2 not in method.digests
    now = method.certificate()["tasks"]
    assert now == [one for one in certificate if one["name"] != "toy 2"]
    for key, row in method.net.preprocessing.rows(2).items():
        assert torch.equal(row, fresh.net.preprocessing.rows(2)[key])
        assert key == "raw" or not torch.equal(row, rows[key])
    assert torch.equal(method.net.heads[2].weight, fresh.net.heads[2].weight)


@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_saving_and_loading_in_between(name, tmp_path):
    tasks = small_tasks()
    method = build(name, tasks, free="initial")
    method.learn(tasks[0], trainer())
    before = snapshot(method)
    save(method, tmp_path / "a.safetensors")
    method = load(tmp_path / "a.safetensors", mlp(tasks[0].shape, widths=(24, 24), dropout=0.2, input_dropout=0.1))
    method.learn(tasks[1], trainer())
    save(method, tmp_path / "b.safetensors")
    method = load(tmp_path / "b.safetensors", mlp(tasks[0].shape, widths=(24, 24), dropout=0.2, input_dropout=0.1))
    method.release(1, erase=True)
    assert not different(snapshot(method), before)


@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_a_shared_head_too(name):
    tasks = toy_tasks(3)
    with seeded(0, "weights"):
        net = Network(mlp(tasks[0].shape, widths=(24, 24)), tasks=tasks, heads="shared")
    net.replace_example(torch.randn(2, *tasks[0].shape))
    method, states = METHODS[name](net, free="initial"), []
    states.append(snapshot(method))
    for task in tasks:
        method.learn(task, trainer())
        states.append(snapshot(method))
    for task in (2, 1, 0):
        method.release(task, erase=True)
        assert not different(snapshot(method), states[task])


@pytest.mark.parametrize("name", ["hat", "pmask"])
@pytest.mark.parametrize("options", [{"free": "initial"}, {"reuse": "never"}])
def test_a_task_that_fails_is_rolled_back(name, options):
    tasks = small_tasks()
    method = build(name, tasks, **options)
    method.learn(tasks[0], trainer())
    before = snapshot(method)
    with pytest.raises(Diverged):
        method.learn(tasks[1], trainer("sgd with decay", lr=1e30))
    assert not different(snapshot(method), before)


@pytest.mark.parametrize("name", ["hat", "pmask"])
@pytest.mark.parametrize("number", range(cases(3, 30)))
def test_random_sequences_with_free_weights_at_their_initial_values(name, number):
    """Whatever was learned, released and learned again before: erasing the last task undoes it alone."""
    draw, tasks = random.Random(number), small_tasks(count=4)
    method = build(name, tasks, seed=number, free="initial", **draw.choice([{}, {"c": 0.1}]))
    for _ in range(8):
        task, erase = draw.choice(tasks), draw.random() < 0.5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if task.index in method.history:
                method.release(task.index, erase=erase)
            if draw.random() < 0.8:
                before, others = snapshot(method), list(method.history)
                answers = {t: logits(method, tasks[t]) for t in others}
                method.learn(task, trainer(draw.choice(list(OPTIMIZERS)), epochs=draw.choice([1, 3])))
                assert all(torch.equal(logits(method, tasks[t]), old) for t, old in answers.items())
                if draw.random() < 0.5:
                    rows = method.net.preprocessing.rows(task.index)
                    method.release(task.index, erase=True)
                    for key in rows if not erase else ():  # a plain release leaves how images were transformed
                        before.pop(f"net.preprocessing.{key}")
                    now = snapshot(method)
                    assert not different({key: now[key] for key in before}, before)


def test_dependencies_by_a_loop():
    tasks = small_tasks()
    for name in MASKED:
        method = build(name, tasks)
        assert method.dependencies() == {}
        for t in (1, 0, 2):
            method.learn(tasks[t], trainer())
        found = method.dependencies()
        assert list(found) == [1, 0, 2]
        assert found[1] == {}
        flat = {t: torch.cat([m.reshape(-1) for m in method.weight_masks(t).values()]).tolist() for t in found}
        for task, earlier in ((0, (1,)), (2, (1, 0))):
            own = [i for i, used in enumerate(flat[task]) if used]
            shares = {t: sum(flat[t][i] for i in own) / len(own) for t in earlier}
            assert found[task] == pytest.approx({t: share for t, share in shares.items() if share})
            assert set(found[task]) == set(earlier)
    assert build("sgd", tasks).dependencies() == {}


def test_what_may_remain_is_named_in_one_line():
    tasks = small_tasks()
    for name in MASKED:
        method = build(name, tasks)
        for task in tasks:
            method.learn(task, trainer())
        share = f"{method.dependencies()[1][0]:.0%}"
        with pytest.warns(UserWarning, match="traces of task 0") as caught:
            method.release(0, erase=True)
        (said,) = [str(one.message) for one in caught]
        assert "\n" not in said
        assert f"'toy 1' ({share} of its weights)" in said
        assert "'toy 2'" in said
        assert ("trunk.2.bias" in said) == (name == "packnet")
        method.release(2, erase=True)  # the last one: no warning
    with seeded(0, "weights"), pytest.warns(UserWarning, match="held whole"):
        method = build("hat", tasks, Scaled())
    method.learn(tasks[0], trainer())
    matrix = method.net.trunk.matrix.detach().clone()
    method.learn(tasks[1], trainer())
    with pytest.warns(UserWarning, match=r"matrix is held whole"):
        method.release(0, erase=True)
    assert torch.equal(method.net.trunk.matrix, matrix)
    method.release(1, erase=True)
    assert (method.net.trunk.matrix != matrix).all()


@pytest.mark.parametrize("name", MASKED)
def test_only_a_learned_task_is_released_and_only_true_erases(name):
    tasks = small_tasks()
    method = build(name, tasks)
    with pytest.raises(ValueError, match=r"task 1 is not learned.*none is"):
        method.release(1)
    for task in (0, 1, 1):  # the last one again
        method.learn(tasks[task], trainer())
    before = snapshot(method)
    with pytest.raises(ValueError, match=r"task 2 is not learned.*learned are 0, 1"):
        method.release(2, erase=True)
    for wrong in ("yes", "no", 1, None):
        with pytest.raises(ValueError, match="erase must be True or False"):
            method.release(1, erase=wrong)
    with pytest.raises(IndexError, match="no task 9"):
        method.release(9)
    assert not different(snapshot(method), before)
    method.release(1)
    with pytest.raises(ValueError, match="task 1 is not learned"):
        method.release(1, erase=True)
    method.learn(tasks[1], trainer())
    method.release(1)
    assert list(method.history) == [0]


@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_soft_gates(name):
    tasks = small_tasks()
    with pytest.raises(ValueError, match="masks='binary'"):
        build(name, tasks, free="initial", masks="soft")
    method = build(name, tasks, masks="soft")
    method.learn(tasks[0], trainer())
    with pytest.warns(UserWarning, match="gates are soft"):
        method.release(0, erase=True)


def erased_with(method, task):
    """What is said while a task is erased."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method.release(task, erase=True)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("released", [False, True])
def test_what_was_learned_after_an_earlier_version_is_named(name, released, tmp_path):
    tasks = small_tasks()
    method = build(name, tasks)
    method.learn(tasks[0], trainer())
    method.learn(tasks[1], trainer())
    if released:
        method.release(0)
    method.learn(tasks[0], trainer())
    assert method.learned_after == {0: [1]}
    save(method, tmp_path / "a.safetensors")
    trunk = mlp(tasks[0].shape, widths=(24, 24), dropout=0.2, input_dropout=0.1)
    other = build(name, tasks)
    other.load_state_dict(method.state_dict())
    for one in (load(tmp_path / "a.safetensors", trunk), copy.deepcopy(method), other):
        (said,) = erased_with(one, 0)
        assert "'toy 1' was learned after an earlier version of it" in said
    method.learn(tasks[2], trainer())
    (said,) = erased_with(method, 0)
    assert "'toy 2'" in said
    assert "'toy 1' was learned after an earlier version" in said
    assert set(method.learned_after[0]) == {1, 2}, "they keep what they took over, also when task 0 is learned again"
    erased_with(method, 1)
    assert erased_with(method, 2) == []
    assert method.learned_after == {}


@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_nothing_is_noted_where_erasing_is_exact(name, tmp_path):
    tasks = small_tasks()
    method = build(name, tasks, reuse="never")
    for task in (0, 1, 0):
        method.learn(tasks[task], trainer())
    assert erased_with(method, 0) == []
    assert method.learned_after == {}
    method = build(name, tasks, free="initial")
    for task in (0, 1):
        method.learn(tasks[task], trainer())
        method.release(task)
    assert method.learned_after == {}, "a plain release gives free weights their initial values as well"


@pytest.mark.parametrize("options", [{}, {"reuse": "never"}])
def test_images_in_the_example_are_told(options, tmp_path):
    tasks = small_tasks()
    with seeded(0, "weights"):
        trunks = [mlp(tasks[0].shape, widths=(24, 24)) for _ in range(2)]
    method = METHODS["hat"](Network(trunks[0], tasks=tasks), **options)
    for task in tasks:
        method.learn(task, trainer())
    assert method.net.example_task == 0
    save(method, tmp_path / "a.safetensors")
    loaded = load(tmp_path / "a.safetensors", trunks[1])
    (said,) = erased_with(loaded, 0)
    assert "images of it are the network's example" in said
    answers = [logits(method, task) for task in tasks]
    noise = torch.randn(2, *tasks[0].shape)
    method.net.replace_example(noise)
    assert all(torch.equal(logits(method, task), old) for task, old in zip(tasks, answers, strict=True))
    assert not any("example" in said for said in erased_with(method, 0))
    save(method, tmp_path / "a.safetensors")
    assert torch.equal(load(tmp_path / "a.safetensors", trunks[1]).net.example, noise)
    for wrong, text in ((noise[:1], "shape"), (noise * float("nan"), "NaN")):
        with pytest.raises(ValueError, match=text):
            method.net.replace_example(wrong)
