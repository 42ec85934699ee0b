"""Wrong calls of the Python API: each ends in an error of one line that names what was expected, and none is accepted."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hatrack as hr
from tests.helpers.learning import learn, make
from tests.helpers.toys import toy_tasks

NAN, INF, HUGE = float("nan"), float("inf"), 10**20
NOTHINGS = (None, "x", -1, 1.5, [], {}, object(), NAN)
TASKS = toy_tasks(2)
X, Y = np.random.RandomState(0).rand(20, 4, 4).astype("f"), np.arange(20) % 2
IMAGES = TASKS[0].test.x
PAIRS = [(X[0], 0), (X[1], 1)]


def trunk() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU())


def task(**wrong: Any) -> hr.Task:
    right = {"index": 0, "name": "a", "x_train": X, "y_train": Y, "x_test": X, "y_test": Y}
    return hr.Task.from_arrays(**{**right, **wrong})


def dataset(**wrong: Any) -> hr.Task:
    return hr.Task.from_dataset(**{"index": 0, "name": "a", "train": PAIRS, "test": PAIRS, **wrong})


def network(**wrong: Any) -> hr.Network:
    return hr.Network(**{"trunk": trunk(), "tasks": TASKS, **wrong})


def by_classes(**wrong: Any) -> hr.Network:
    return hr.Network(**{"trunk": trunk(), "classes": [2, 2], "example": torch.rand(2, 1, 4, 4), **wrong})


def run_spec(**wrong: Any) -> hr.Run:
    return hr.Run(**{"benchmark": "smnist", "method": "sgd", "benchmark_options": {"data": "sample"}, **wrong})


def run(**wrong: Any) -> hr.Record:
    return hr.run(**{"spec": run_spec(regime=hr.Regime(epochs=1, batch=900), train_examples=10), **wrong})


def classifier(**wrong: Any) -> hr.Network:
    return hr.Network.from_classifier(**{"model": nn.Sequential(trunk(), nn.Linear(8, 3)), "tasks": TASKS, **wrong})


@pytest.fixture(scope="module")
def learned():
    method = make("hat", TASKS)
    learn(method, TASKS)
    return method


def compared(own: hr.HAT, **wrong: Any) -> Any:
    return hr.compare_certificates(**{"old": own.certificate(), "new": own.certificate(), **wrong})


def odd_images() -> list[Any]:
    ragged, objects = [[1], [2, 3]], np.array([object()] * 20)
    return [None, "x", [], X[:3], X[0], np.zeros((20, 0)), X.astype("U"), X * NAN, X.astype(complex), ragged, objects]


Call = tuple[Callable[..., Any], dict[str, tuple[Any, ...]]]
CALLS: dict[str, Call] = {
    "Task": (task, {
        "index": (None, "x", -1, 1.5, [], True), "name": (None, "", " ", 3, b"a"), "x_train": tuple(odd_images()),
        "y_train": (None, "x", [], Y[:3], Y + 0.5, Y - 1, Y[:, None], np.array(["a"] * 20), np.full(20, 10**12)),
        "x_test": (None, X[:, :2]), "y_test": (None, Y + 5), "classes": (0, -1, "x", 1.5, HUGE, 1, True, [2]),
        "valid": (None, "x", -0.1, 1.0, 2, NAN, [0.1], True), "seed": (None, "x", 1.5, []),
        "mean": (None, "x", [0, 0], INF, [], {}, [None]), "std": (None, "x", 0, -1, INF, -INF, NAN, [], [0], {}),
        "scale": ("x", 0, -1, NAN, INF, [], [1], True),
    }),
    "Task.from_dataset": (dataset, {
        "train": (None, 3, [], [1], [(X[0],)], [(X[0], "a")], [("a", 0)], [(None, 0)], [(X[0], None)]), "test": (None, []),
        "workers": (None, "x", -1, 1.5, 2, True), "input": (0, "x"), "label": (1, "x"),
    }),
    "Network": (network, {
        "trunk": (None, "x", nn.Linear, print, nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(5, 3))),
        "tasks": ([], "x", 3, [1], TASKS[:1] * 2, TASKS[1:], TASKS[0], {"a": 1}), "heads": (None, "x", 3, []),
        "init": (None, "x", 3, []), "freeze": (None, 3, "nothing", "[", ["a"]), "seed": (None, "x", 1.5, [], True),
    }),
    "Network of classes": (by_classes, {
        "classes": ([0], [-1], ["x"], [1.5], 3, "x", [None], [HUGE]),
        "example": (None, "x", [], torch.zeros(0, 1, 4, 4), torch.rand(2, 1, 5, 5), 3, torch.tensor(1.0)),
    }),
    "Network.from_classifier": (classifier, {"model": (None, "x", nn.Identity(), nn.Flatten())}),
    "Network.add_task": (lambda classes: network().add_task(classes), {"classes": (None, "x", 0, -1, 1.5, HUGE, [])}),
    "Trainer": (hr.Trainer, {
        "regime": ("x", 3, {}), "seed": NOTHINGS, "progress": ("x", 3), "engine": NOTHINGS,
        "watch_tasks": (None, 3, ["x"], "ab", TASKS[0]), "precision": ("x", 3, []), "augment": ("x", 3, []),
    }),
    "Regime": (hr.Regime, {
        "epochs": NOTHINGS, "lr": (None, "x", -1, [], NAN), "optimizer": (None, "sdg", 3, []), "schedule": ("x",),
    }),
    "Run": (run_spec, {
        "benchmark": (None, "x", 3, [], ""), "method": (None, "x", 3, [], "", "a:b", "os:path"), "seed": NOTHINGS,
        "network": ("x", 3, None, []), "regime": (None, "x", 3, {}),
        "benchmark_options": (None, "x", 3, {"a": 1}, {1: 2}, []),
        "network_options": ({"widths": [5]}, {"widths": "x"}, None), "method_options": ({"c": 1}, None),
        "heads": ("x", None), "freeze": (None, 3), "train_examples": (-1, "x"), "pretrain": ("x", None, 3),
        "first_tasks": (-1, "x", None, 1.5),
    }),
    "run": (run, {
        "spec": (None, "x", 3, {}), "out": (3, []), "device": ("x", None, 3, "meta", "mps", []), "engine": NOTHINGS,
        "precision": NOTHINGS, "save_every": (None, "x", -1, NAN, [], True), "progress": ("x", 3), "after_task": ("x", 3),
    }),
    "learn": (lambda **wrong: make("sgd", TASKS).learn(**{"task": TASKS[0], "fit": hr.Trainer(), **wrong}), {
        "task": (None, "x", 0, TASKS), "fit": (None, "x", 3, hr.Regime()),
    }),
    "HAT": (lambda **wrong: hr.HAT(**{"net": network(), **wrong}), {
        "net": (None, "x", trunk(), TASKS), "smax": (None, "x", -1, NAN, [], 1e39), "c": ("x", None),
    }),
    "capacity": (hr.capacity, {"method": (None, "x", 3, trunk(), TASKS)}),
    "METHODS.find": (hr.METHODS.find, {"name": ("x", None, 3, "", [])}),
}  # fmt: skip
LEARNED: dict[str, Call] = {
    "predict": (lambda own, **wrong: own.predict(**{"images": IMAGES, "task": 0, **wrong}), {
        "images": (None, "x", [], IMAGES[:, :, :2], IMAGES * NAN, {}, object(), IMAGES.to(torch.complex64)),
        "task": (None, "x", -1, 5, 1.5, [0], True, torch.tensor([0]), TASKS[0], np.zeros(30, int)),
    }),
    "call": (lambda own, **wrong: own(**{"x": IMAGES, "task": 0, **wrong}), {
        "x": (None, "x", [], IMAGES.numpy(), IMAGES.double(), IMAGES.long()), "task": (None, "x", -1, 5, 1.5),
    }),
    "for_task": (lambda own, task: own.for_task(task), {"task": (None, "x", -1, 5, 1.5, TASKS[0])}),
    "extract": (lambda own, **wrong: own.extract(**{"task": 0, **wrong}), {
        "task": (None, "x", -1, 5, 1.5, TASKS[0]), "raw": ("x", [], IMAGES[:, :, :2], {}, object()),
    }),
    "release": (lambda own, **wrong: own.release(**{"task": 0, **wrong}), {
        "task": (None, "x", -1, 5, 1.5, True), "erase": (None, "yes", "no", 1, 0),
    }),
    "evaluate": (lambda own, **wrong: hr.evaluate(**{"method": own, "split": TASKS[0].test, **wrong}), {
        "method": (None, "x"), "split": (None, "x", TASKS[0], IMAGES),
    }),
    "save": (lambda own, **wrong: hr.save(**{"method": own, "path": "z", **wrong}), {"method": (None, "x", trunk())}),
    "compare_certificates": (compared, {
        "old": (None, "x", 3, {}, {"tasks": 3}, {"tasks": [3]}, {"tasks": [{"number": 0}]}), "new": (None, {}, []),
    }),
    "load": (lambda own, **wrong: (hr.save(own, "z"), hr.load(**{"path": "z", "trunk": trunk(), **wrong})), {
        "path": ("", "nope", ".", "/dev/null"), "trunk": (nn.Identity(),), "method": ("hat", 3, hr.EWC),
    }),
}  # fmt: skip


def check(call: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises((ValueError, IndexError)) as error:
        call(**{name: value})
    text = str(error.value)
    assert text
    assert "\n" not in text
    assert len(text) < 600


def cases(calls: dict[str, Call]) -> list[Any]:
    found = [
        (place, name, value) for place, (_, wrong) in calls.items() for name, values in wrong.items() for value in values
    ]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}-{number}") for number, case in enumerate(found)]


@pytest.mark.parametrize(("place", "name", "value"), cases(CALLS))
def test_a_wrong_argument_is_a_value_error_in_one_line(place, name, value):
    check(CALLS[place][0], name, value)


@pytest.mark.parametrize(("place", "name", "value"), cases(LEARNED))
def test_a_wrong_argument_of_a_learned_method(place, name, value, learned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(lambda **wrong: LEARNED[place][0](learned, **wrong), name, value)


def test_there_are_enough_wrong_calls():
    assert len(cases(CALLS)) + len(cases(LEARNED)) > 300
