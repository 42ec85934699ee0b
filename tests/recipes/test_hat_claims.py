"""What 001 says of its Table 1, judged by the paper's own numbers: they bear it out, and changed ones contradict it."""

import math

import numpy as np
import pytest

from hatrack import Regime, Trainer, capacity
from hatrack.experiments.record import Record
from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.networks.alexnet import alexnet
from hatrack.networks.network import Network
from hatrack.recipes import RECIPES
from hatrack.recipes.hat_cifar import SMAX, C
from hatrack.recipes.hat_monitoring import ALEXNET, frozen_shares, reuse
from hatrack.recipes.recipe import Part, Row
from hatrack.recipes.results import Records, Results, index
from hatrack.reporting.measures import MeanStd
from tests.helpers.records import make
from tests.helpers.toys import toy_tasks
from tests.recipes.toys import TABLE_1


class Told(Results):
    """Results with given numbers: mean and standard deviation by label and key, of ten seeds."""

    def __init__(self, part, numbers):
        super().__init__(part, Records())
        self.numbers = numbers

    def summary(self, label, quantity):
        found = self.numbers(label, quantity.key)
        return found and MeanStd(*found, 10)


def published(label, key, table=TABLE_1):
    """Return the paper's numbers; between two and eight tasks on a line, after one near those of two."""
    if label not in table:
        return None
    first, first_std, last, last_std = table[label]
    t = int(key.removeprefix("ratio_"))
    if t == 1:
        return {"PathNet": -0.02, "PNN": -0.2}.get(label, first), first_std
    share = (t - 2) / 6
    return first + share * (last - first), first_std + share * (last_std - first_std)


def judged(table):
    (part,) = RECIPES["hat-2018"].only(("mixture-open",))
    results = Told(part, lambda label, key: published(label, key, table))
    return {claim.text: claim.holds(results) for claim in part.claims}


def test_the_papers_numbers_bear_out_its_sentences():
    found = judged(TABLE_1)
    assert len(found) == 14
    assert set(found.values()) == {True}, {text for text, holds in found.items() if not holds}


CHANGES = {  # what contradicts a sentence, by words of it
    "after two tasks.": {"HAT": (-0.09, 0.03, -0.06, 0.01)},
    "after eight tasks.": {"HAT": (-0.02, 0.03, -0.12, 0.01)},
    "for all t": {"PNN": (-0.11, 0.1, 0.2, 0.01)},
    "two tasks is EWC": {"IMM-mean": (-0.05, 0.1, -0.42, 0.04)},
    "eight tasks is PNN": {"EWC": (-0.08, 0.06, -0.1, 0.03)},
    "EWC, PathNet and PNN": {"SGD-F": (-0.2, 0.15, -0.2, 0.06)},
    "LwF does not perform": {"LwF": (-0.14, 0.13, -0.6, 0.06)},
    "LFL does not perform": {"LFL": (-0.73, 0.29, -0.6, 0.08)},
    "LwF is still": {"LwF": (-0.21, 0.13, -0.8, 0.06)},
    "similarly to SGD-F": {"IMM-mode": (-0.11, 0.08, -0.6, 0.05)},
    "difficulties that grow": {"PathNet": (-0.09, 0.16, -0.01, 0.23)},
    "PNN becomes better": {"PNN": (-0.11, 0.1, -0.3, 0.01)},
    "highest standard": {"SGD": (-0.2, 0.5, -0.66, 0.03)},
    "standard deviation of HAT": {"HAT": (-0.02, 0.09, -0.06, 0.05)},
}


@pytest.mark.parametrize("words", CHANGES)
def test_other_numbers_contradict_them(words):
    (text,) = [text for text in judged(TABLE_1) if words in text]
    assert judged({**TABLE_1, **CHANGES[words]})[text] is False


def test_a_sentence_about_rows_that_are_not_run_is_open():
    missing = {label: row for label, row in TABLE_1.items() if label not in ("PNN", "SGD-F", "PathNet")}
    found = judged(missing)
    assert found["HAT performs better than all baselines for all t ≥ 2."] is None
    assert set(found.values()) == {None, True}


def sentences(part, told) -> list[bool | None]:
    return [claim.holds(Told(part, told)) for claim in part.claims]


def test_sentences_about_smax():
    """Reasonable; a low one forgets; a high one is slow to adapt."""

    def told(ratio_at_50, forgetting_at_25, learning_at_800):
        values = {("smax = 50", "ratio_10"): ratio_at_50, ("EWC", "ratio_10"): -0.25,
                  ("smax = 25", "forgetting"): forgetting_at_25, ("smax = 800", "learning"): learning_at_800}  # fmt: skip
        others = {"ratio_10": -0.1, "forgetting": 0.01, "learning": 0.8}
        return lambda label, key: (values.get((label, key), others[key]), None)

    assert sentences(SMAX, told(-0.24, 0.02, 0.7)) == [True, True, True]
    assert sentences(SMAX, told(-0.26, 0.00, 0.9)) == [False, False, False]
    assert sentences(SMAX, lambda label, key: None) == [None, None, None]


def test_sentences_about_c():
    def told(ratio_at_1, learning_at_2_5):
        values = {("c = 1", "ratio_10"): ratio_at_1, ("EWC", "ratio_10"): -0.25, ("c = 2.5", "learning"): learning_at_2_5}
        return lambda label, key: (values.get((label, key), {"ratio_10": -0.1, "learning": 0.8}[key]), None)

    assert sentences(C, told(-0.24, 0.7)) == [True, True]
    assert sentences(C, told(-0.26, 0.9)) == [False, False]


def record_with(usage, weights_used=None) -> Record:
    record = make("hat", 0, np.eye(len(usage)), names=("a", "b", "c"), network="alexnet")
    record.usage, record.weights_used = usage, weights_used or {}
    return record


def test_capacity_in_use_by_hand_from_the_units_of_old_records():
    shares = {"0": 0.5, "4": 0.25, "8": 1.0, "13": 0.5, "16": 0.1}
    products = {"0": 0.5, "4": 0.125, "8": 0.25, "13": 0.5, "16": 0.05}
    expected = sum(products[name] * count for name, count in ALEXNET.items()) / sum(ALEXNET.values())
    assert frozen_shares(record_with([shares])) == pytest.approx([expected])
    assert sum(ALEXNET.values()) + 64 + 128 + 256 + 2048 + 2048 == 6_503_872  # with biases: the trunk of 001's network
    assert frozen_shares(record_with([shares], {"tasks": ["a"], "layers": [], "frozen": [0.3]})) == pytest.approx([0.3])
    perceptron = make("hat", 0)
    perceptron.usage = [{"1": 0.5}, {"1": 0.6}]
    assert np.isnan(frozen_shares(perceptron)).all()


@pytest.mark.slow
def test_units_of_old_records_tell_what_the_method_freezes():
    tasks = toy_tasks(2, shape=(3, 32, 32))
    method = METHODS["hat"](Network(alexnet((3, 32, 32)), tasks=tasks))
    usage = []
    for task in tasks:
        method.learn(task, Trainer(Regime(epochs=1, batch=40)))
        usage.append(method.usage())
    assert frozen_shares(record_with(usage)) == pytest.approx(capacity(method).frozen)
    assert 0 < capacity(method).frozen[-1] < 1


def test_the_table_of_reuse():
    used = {
        "tasks": ["a", "b", "c"],
        "layers": [],
        "reuse": [[1.0, 0.25, 0.5], [0.3, 1.0, 0.75], [0.1, 0.2, 1.0]],
    }
    record = record_with([{}, {}, {}], used)
    part = Part("p", "", "", (Row("HAT", Run("digits-and-clothes", "hat", network="alexnet"), (0,)),))
    grid = reuse(Results(part, index([record])))
    assert grid.head == ["task", "task 2", "task 3"]
    assert grid.rows == [["1 a", "25.0", "50.0"], ["2 b", "", "75.0"]]
    assert reuse(Results(part, Records())) is None
    assert math.isclose(float(grid.rows[0][1]), 25)
