"""The papers' benchmarks on random data of the right shapes: orders, groups of labels, inputs of the network."""

import json
import re
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hatrack import Record, Regime, Run, run
from hatrack.__main__ import main
from hatrack.benchmarks import BENCHMARKS
from hatrack.benchmarks.cifar import cifar, cifar10_5, cifar100_5, cifar100_20
from hatrack.benchmarks.mixture import Norm, colour_transform, measure_norm, mixture, mixture_open
from hatrack.benchmarks.mnist import pmnist
from hatrack.datasets import sources
from hatrack.datasets.sources import Source
from hatrack.experiments.build import build
from hatrack.networks import NETWORKS
from hatrack.tasks.split import Split
from tests.helpers.missing_sets import missing

GRAY, COLOUR = (1, 28, 28), (3, 32, 32)
KINDS = {  # classes, raw shape, training and test images per class
    "cifar10": (10, COLOUR, 20, 4),
    "cifar100": (100, COLOUR, 20, 4),
    "mnist": (10, GRAY, 21, 3),
    "svhn": (10, COLOUR, 15, 3),
    "fashion-mnist": (10, GRAY, 13, 3),
    "gtsrb": (43, COLOUR, 5, 2),
    "facescrub": (100, COLOUR, 3, 1),
    "notmnist": (10, GRAY, 11, 2),
    "emnist-letters": (26, GRAY, 7, 2),
    "caltech101": (101, COLOUR, 3, 2),
}
CIFAR = ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255))
NORMS = {  # mean and standard deviation in the code of 001; those of the last two were measured
    "cifar10": CIFAR,
    "cifar100": CIFAR,
    "mnist": (0.1, 0.2752),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "fashion-mnist": (0.2190, 0.3318),
    "gtsrb": ((0.3398, 0.3117, 0.3210), (0.2755, 0.2647, 0.2712)),
    "facescrub": ((0.5163, 0.5569, 0.4695), (0.2307, 0.2272, 0.2479)),
    "notmnist": (0.4254, 0.4501),
    "emnist-letters": (0.1319, 0.2986),
    "caltech101": ((0.5472, 0.5299, 0.5026), (0.2929, 0.2867, 0.3012)),
}
ORDERS = """
0 facescrub mnist cifar100 notmnist svhn cifar10 gtsrb fashion-mnist
1 notmnist mnist cifar100 facescrub cifar10 fashion-mnist svhn gtsrb
2 fashion-mnist cifar100 facescrub mnist svhn notmnist gtsrb cifar10
3 gtsrb notmnist fashion-mnist facescrub svhn cifar100 cifar10 mnist
4 fashion-mnist notmnist svhn cifar10 cifar100 gtsrb facescrub mnist
5 notmnist mnist fashion-mnist cifar100 cifar10 gtsrb facescrub svhn
6 cifar10 gtsrb facescrub notmnist fashion-mnist svhn cifar100 mnist
7 mnist gtsrb cifar10 facescrub svhn cifar100 fashion-mnist notmnist
8 notmnist cifar10 mnist facescrub gtsrb cifar100 fashion-mnist svhn
9 notmnist cifar100 mnist svhn cifar10 gtsrb fashion-mnist facescrub
"""  # seed 0 is in Fig. 6 of 001
FIRST = {  # the first task in 001's experiments on compression, by seed
    0: "facescrub",
    1: "notmnist",
    2: "fashion-mnist",
    3: "gtsrb",
    6: "cifar10",
    10: "mnist",
    13: "cifar100",
    25: "svhn",
}
COLOURED = ["cifar", "cifar10-5", "cifar100-5", "cifar100-20", "mixture", "mixture-open"]


def random_set(name: str) -> Source:
    """Return random images with the classes and the shape of a set."""
    classes, shape, *counts = KINDS[name]
    draw = np.random.RandomState(len(name) + classes)
    parts = []
    for count in counts:
        y = draw.permutation(np.repeat(np.arange(classes), count))
        x = draw.randint(0, 256, (len(y), *shape)).astype(np.uint8)
        parts.append((torch.from_numpy(x), torch.from_numpy(y).long()))
    return Source(classes, *parts)


@pytest.fixture(scope="module")
def sets():
    return {name: random_set(name) for name in KINDS}


@pytest.fixture
def random_sets(sets, monkeypatch):
    """Replace all data sets by random ones."""
    monkeypatch.setattr(sources, "load", lambda name, data="full": sets[name])
    monkeypatch.setattr(sources, "require", lambda *names, data="full": None)
    return sets


def everything(split):
    """Return all inputs of a split."""
    return split.inputs(torch.arange(len(split)))


def expected_inputs(name, images):
    """Return the network's inputs as in 001's code, computed with other functions."""
    mean, std = (torch.as_tensor(v, dtype=torch.float32).reshape(1, -1, 1, 1) for v in NORMS[name])
    if images.shape[1:] == GRAY:
        images = F.pad(images, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    return (images / 255 - mean) / std


# The mixture of eight data sets


@pytest.mark.parametrize("line", ORDERS.split("\n")[1:-1])
def test_the_published_orders(random_sets, line):
    seed, *names = line.split()
    assert [task.name for task in mixture(int(seed))] == names
    open_names = [{"svhn": "emnist-letters", "facescrub": "caltech101"}.get(name, name) for name in names]
    assert [task.name for task in mixture_open(int(seed))] == open_names


def test_the_first_tasks_of_the_compression_experiments(random_sets):
    assert {seed: mixture(seed)[0].name for seed in FIRST} == FIRST


@pytest.mark.parametrize("sequence", [mixture, mixture_open])
def test_every_set_is_a_task(random_sets, sequence):
    tasks = sequence(4)
    assert sum(task.classes for task in tasks) == {mixture: 293, mixture_open: 310}[sequence]
    for k, task in enumerate(tasks):
        classes, _, train, test = KINDS[task.name]
        assert (task.index, task.classes, task.shape) == (k, classes, COLOUR)
        assert len(task.test) == classes * test
        order = np.arange(classes * train)
        np.random.RandomState(4).shuffle(order)
        held = int(0.15 * len(order))
        assert task.valid.rows.tolist() == order[:held].tolist(), "as in 001's code"
        assert task.train.rows.tolist() == order[held:].tolist()


@pytest.mark.parametrize("sequence", [mixture, mixture_open])
def test_the_inputs_of_every_set(random_sets, sequence):
    for task in sequence(0):
        source = random_sets[task.name]
        torch.testing.assert_close(everything(task.test), expected_inputs(task.name, source.test[0]), atol=1e-5, rtol=0)
        assert torch.equal(task.test.y, source.test[1])
        images = source.train[0][task.train.rows]
        torch.testing.assert_close(everything(task.train), expected_inputs(task.name, images), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", COLOURED)
def test_no_image_is_copied(random_sets, name):
    places = {part[0].data_ptr() for source in random_sets.values() for part in (source.train, source.test)}
    for task in BENCHMARKS[name](0):
        for split in (task.train, task.valid, task.test):
            assert split.x.data_ptr() in places


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 28, 28), (1, 32, 32), (1, 20, 30), COLOUR])
def test_small_and_gray_images_get_a_border(shape):
    x = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    high, wide = (32 - shape[1]) // 2, (32 - shape[2]) // 2
    expected = F.pad(x, (wide, wide, high, high)).expand(-1, 3, -1, -1) / 255
    torch.testing.assert_close(colour_transform(shape, Norm(0.0, 1.0))(x), expected)


def test_tasks_of_all_kinds_joined(random_sets):
    tasks = mixture_open(0)
    whole, first = Split.join([task.train for task in tasks]), 0
    for task in tasks:
        index = torch.arange(min(9, len(task.train)))
        torch.testing.assert_close(whole.inputs(first + index), task.train.inputs(index))
        first += len(task.train)


@pytest.mark.parametrize("name", ["emnist-letters", "caltech101"])
def test_measured_normalisation(random_sets, name):
    x = random_sets[name].train[0].double() / 255
    x = F.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
    mean, std = measure_norm(name)
    np.testing.assert_allclose(mean, x.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(std, x.std((0, 2, 3), correction=0), rtol=1e-6)


# CIFAR


def groups(tasks):
    """Return the data set and labels in the names of tasks."""
    return [(t.name.split()[0], *map(int, t.name.split()[1].split("-"))) for t in tasks]


def assert_label_group(source, task, labels, mean, std):
    """Check that a task has the images of these classes, in their order in the set, with labels from 0."""
    assert task.classes == len(labels)
    x, y = source.test
    keep = [n for n, label in enumerate(y.tolist()) if label in labels]
    assert task.test.y.tolist() == [labels.index(y[n].item()) for n in keep]
    mean, std = (torch.as_tensor(v, dtype=torch.float32).reshape(1, -1, 1, 1) for v in (mean, std))
    torch.testing.assert_close(everything(task.test), (x[keep] / 255 - mean) / std, atol=1e-5, rtol=0)
    for split in (task.train, task.valid):
        old = source.train[1][split.rows].tolist()
        assert split.y.tolist() == [labels.index(label) for label in old]
    assert len(task.train) + len(task.valid) == 20 * len(labels)


def test_cifar_order_and_groups(random_sets):
    parts = [("cifar10", 2 * k, 2 * k + 1) for k in range(5)] + [("cifar100", 20 * k, 20 * k + 19) for k in range(5)]
    tasks = cifar(0)
    assert groups(tasks) == [parts[k] for k in [2, 8, 4, 9, 1, 6, 7, 3, 0, 5]]
    assert {tuple(groups(cifar(seed))) for seed in range(5)} != {tuple(groups(tasks))}
    for task, (name, low, high) in zip(tasks, groups(tasks), strict=True):
        assert_label_group(random_sets[name], task, list(range(low, high + 1)), *CIFAR)
        assert len(task.valid) == int(0.15 * 20 * task.classes)
    assert [len(t.valid) for t in cifar(0, valid=0.1)] == [2 * t.classes for t in tasks]


@pytest.mark.parametrize("seed", [0, 3])
def test_a_shorter_cifar_is_the_beginning_of_the_whole(random_sets, seed):
    whole = cifar(seed)
    for count in (1, 2, 8, 10):
        tasks = cifar(seed, tasks=count)
        assert groups(tasks) == groups(whole)[:count]
        for task, same in zip(tasks, whole, strict=False):
            assert task.index == same.index
            assert torch.equal(task.train.rows, same.train.rows)
    for count in (0, 11):
        with pytest.raises(ValueError, match="tasks must be at"):
            cifar(seed, tasks=count)
    assert Run("cifar", "sgd", benchmark_options={"tasks": 10}).name == Run("cifar", "sgd").name
    assert Run("cifar", "sgd", benchmark_options={"tasks": 2}).name != Run("cifar", "sgd").name


@pytest.mark.parametrize(("count", "widths"), [(8, [8, 17, 35, 285, 285]), (10, [7, 14, 28, 228, 228])])
def test_the_budget_of_pnn_is_made_for_the_tasks_of_a_shorter_cifar(random_sets, count, widths):
    spec = Run("cifar", "pnn", benchmark_options={"tasks": count}, method_options={"columns": "budget"})
    assert build(spec)[1].widths == widths


@pytest.mark.parametrize(("sequence", "name", "each"), [(cifar10_5, "cifar10", 2), (cifar100_5, "cifar100", 20)])
def test_cifar_in_five_tasks(random_sets, sequence, name, each):
    for seed in (0, 1):
        tasks = sequence(seed)
        assert groups(tasks) == [(name, each * k, each * k + each - 1) for k in range(5)]
        for k, task in enumerate(tasks):
            assert_label_group(random_sets[name], task, list(range(each * k, each * k + each)), *CIFAR)
            assert len(task.valid) == int(0.15 * 20 * each)


def test_cifar100_in_twenty_tasks(random_sets):
    tasks = cifar100_20(3)
    assert groups(tasks) == [("cifar100", 5 * k, 5 * k + 4) for k in range(20)]
    for k, task in enumerate(tasks):
        assert_label_group(random_sets["cifar100"], task, list(range(5 * k, 5 * k + 5)), 0.0, 1.0)
        assert len(task.valid) == 0


def test_cifar100_in_twenty_tasks_of_random_classes(random_sets):
    tasks = cifar100_20(3, labels="random")
    drawn = [list(map(int, task.name.split()[1].split(","))) for task in tasks]
    assert sorted(label for labels in drawn for label in labels) == list(range(100))
    for task, labels in zip(tasks, drawn, strict=True):
        assert_label_group(random_sets["cifar100"], task, labels, 0.0, 1.0)
    assert [t.name for t in cifar100_20(3, labels="random")] == [t.name for t in tasks]
    assert [t.name for t in cifar100_20(4, labels="random")] != [t.name for t in tasks]


@pytest.mark.parametrize("name", COLOURED)
def test_every_sequence_in_colour(random_sets, name):
    tasks, again = BENCHMARKS[name](3), BENCHMARKS[name](3)
    assert [t.index for t in tasks] == list(range(len(tasks)))
    for task, same in zip(tasks, again, strict=True):
        assert task.shape == COLOUR
        assert torch.equal(task.train.rows, same.train.rows)
        assert not set(task.train.rows.tolist()) & set(task.valid.rows.tolist())
        assert {*task.train.y.tolist(), *task.valid.y.tolist()} == set(range(task.classes))
        assert not task.train.augment
    for task in BENCHMARKS[name](3, augment=True, valid=0.2):
        assert (task.train.augment, task.valid.augment, task.test.augment) == (True, False, False)


# Missing data, memory and time


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("cifar", {"cifar10", "cifar100"}),
        ("cifar10-5", {"cifar10"}),
        ("cifar100-5", {"cifar100"}),
        ("cifar100-20", {"cifar100"}),
        ("digits-and-clothes", {"mnist", "fashion-mnist"}),
        ("mixture", KINDS.keys() - {"emnist-letters", "caltech101"}),
        ("mixture-open", KINDS.keys() - {"svhn", "facescrub"}),
        ("pmnist", {"mnist"}),
        ("pmnist-blocks", {"mnist"}),
        ("rmnist", {"mnist"}),
        ("smnist", {"mnist"}),
    ],
)
def test_without_data_the_error_names_what_is_needed(name, needs, tmp_path, monkeypatch):
    monkeypatch.setenv("HATRACK_DATA", str(tmp_path))
    assert missing(BENCHMARKS[name]) == needs


def test_the_mixture_names_exactly_the_sets_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("HATRACK_DATA", str(tmp_path))
    for name in KINDS.keys() - {"svhn", "facescrub"}:
        (tmp_path / f"{name}.npz").touch()
    assert missing(mixture) == {"svhn", "facescrub"}
    assert missing(partial(mixture, only="svhn")) == {"svhn"}


def test_one_set_of_the_mixture_alone_is_the_same_task(random_sets):
    whole = mixture_open(0)
    for wanted in ("mnist", str([task.name for task in whole].index("mnist"))):
        (alone,) = mixture_open(0, only=wanted)
        (expected,) = [task for task in whole if task.name == "mnist"]
        assert (alone.name, alone.index) == (expected.name, expected.index)
        assert alone.train.rows.equal(expected.train.rows)


def test_ten_tasks_need_the_memory_of_one(monkeypatch):
    parts = [(torch.zeros(n, 1, 28, 28, dtype=torch.uint8), torch.arange(n) % 10) for n in (60_000, 10_000)]
    monkeypatch.setattr(sources, "load", lambda name, data: Source(10, *parts))
    began = time.perf_counter()
    tasks = pmnist(0)
    assert time.perf_counter() - began < 5
    splits = [split for task in tasks for split in (task.train, task.valid, task.test)]
    stores = {t.data_ptr(): t.untyped_storage().nbytes() for s in splits for t in (s.x, s.y, s.rows, s.transform.pixels)}
    assert 54e6 < sum(stores.values()) < 80e6


# The network of a benchmark


def test_every_benchmark_names_a_network(random_sets):
    networks = {name: entry.network for name, entry in BENCHMARKS.entries.items()}
    assert set(networks.values()) <= NETWORKS.keys()
    assert {name for name, network in networks.items() if network == "alexnet"} == set(COLOURED)


def test_a_run_records_the_network_of_its_benchmark():
    assert Run("cifar", "sgd").network == Run("cifar", "sgd").spec["network"] == "alexnet"
    assert Run("pmnist", "sgd").network == "mlp"
    assert Run("cifar", "sgd").name == Run("cifar", "sgd", network="alexnet").name
    assert Run("cifar", "sgd").name != Run("cifar", "sgd", network="mlp").name
    with pytest.raises(ValueError, match="no benchmark 'cifr'; did you mean 'cifar'"):
        Run("cifr", "sgd")


def test_the_command_line_shows_the_options_of_that_network(capsys):
    for words, shown, hidden in ((["cifar"], "--early-dropout", "--widths"), (["smnist"], "--widths", "--early-dropout")):
        assert main(["run", *words, "sgd", "--help"]) == 0
        output = capsys.readouterr().out
        assert shown in output
        assert hidden not in output


def test_a_run_of_a_mixture(random_sets, tmp_path):
    spec = Run("mixture", "sgd", network="mlp", network_options={"widths": (8,)}, regime=Regime(epochs=1))
    record = run(spec, tmp_path)
    assert [task.name for task in record.tasks] == ORDERS.split("\n")[1].split()[1:]
    assert record.parameters == 3072 * 8 + 8 + 293 * 9
    saved = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert saved["spec"]["network"] == "mlp"
    assert Record.load(tmp_path / f"{spec.name}.json") == record


# hatrack list BENCHMARK


def test_list_shows_the_tasks(random_sets, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["list", "cifar", "--seed", "0"]) == 0
    shown = capsys.readouterr().out
    assert "--valid" in shown
    assert "10 tasks at seed 0, 110 classes; network alexnet" in shown
    rows = [line.split() for line in shown.splitlines() if "3x32x32" in line]
    assert rows[0] == ["0", "cifar10", "4-5", "2", "34", "6", "8", "3x32x32"]
    assert rows[1] == ["1", "cifar100", "60-79", "20", "340", "60", "80", "3x32x32"]
    assert len(rows) == 10


def test_list_says_one_task(tmp_path, capsys):
    arrays = {
        f"{what}_{part}": np.zeros((20, 4), np.uint8) if what == "x" else np.arange(20) % 2
        for what in "xy"
        for part in ("train", "test")
    }
    np.savez(tmp_path / "mine.npz", **arrays)
    (tmp_path / "mine.toml").write_text("[[task]]\nname = 'a'\ndata = 'mine.npz'\n")
    assert main(["list", "own", "--tasks", str(tmp_path / "mine.toml")]) == 0
    assert "1 task at seed 0, 2 classes" in capsys.readouterr().out


def test_list_takes_a_seed_and_the_samples(capsys):
    assert main(["list", "rmnist", "--seed", "5", "--data", "sample"]) == 0
    shown = capsys.readouterr().out
    assert "20 tasks at seed 5, 200 classes; network mlp" in shown
    assert re.search(r"^ +19 +turned by 1\d\d\.\d +10 +4,000 +0 +1,000 +1x28x28", shown, re.MULTILINE)


def test_list_without_data_still_shows_the_options(capsys):
    assert main(["list", "mixture"]) == 0
    shown = capsys.readouterr()
    assert "--valid" in shown.out
    assert re.search("^.*svhn.*facescrub", shown.out, re.MULTILINE)
    assert shown.err == ""
    assert main(["list", "mixture", "--seed", "0"]) == 2
    shown = capsys.readouterr()
    assert "--valid" in shown.out
    assert re.fullmatch("hatrack: .*svhn.*facescrub.*\n", shown.err)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hat", "--seed", "0"], "--seed, --data and --tasks need the name of a benchmark, not 'hat'"),
        (["--data", "sample"], "--seed, --data and --tasks need the name of a benchmark, not ''"),
        (["pmnst", "--seed", "0"], "did you mean 'pmnist'?"),
        (["pmnist", "--data", "smaple"], "data must be one of 'full', 'sample', not 'smaple'"),
        (["cifar", "--data", "sample"], "cifar has no option 'data'"),
        (["pmnist", "--seed", "-1"], "--seed"),
    ],
)
def test_invalid_arguments_of_list(words, expected, capsys):
    assert main(["list", *words]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.err.count("\n") == 1
