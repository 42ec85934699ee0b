"""Random sequences of tasks, backbones, optimizers, losses and options under a guard: nothing changes by a bit."""

import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from hatrack.guard import frozen
from tests.helpers.guarded import BACKBONES, LOSSES, Loop, make_loop
from tests.helpers.tiers import cases

FEW = 12
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.005, "momentum": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


def epoch(loop: Loop, name: str, batches: list[Any], kind: str, plan: dict[str, Any]) -> None:
    """One epoch of a loop that accumulates gradients over batches, clips them, and clears them in either way."""
    loop.backbone.train()
    for start in range(0, len(batches), plan["accumulate"]):
        loop.optimizer.zero_grad(set_to_none=plan["set_to_none"])
        for x, y in batches[start : start + plan["accumulate"]]:
            (LOSSES[kind](loop.heads[name](loop.backbone(x)), y) / plan["accumulate"]).backward()
        if plan["clip"]:
            nn.utils.clip_grad_norm_([*loop.backbone.parameters(), *loop.heads[name].parameters()], plan["clip"])
        loop.optimizer.step()


def draw_plan(draw: random.Random) -> dict[str, Any]:
    return {
        "backbone": draw.choice(list(BACKBONES)),
        "method": draw.choice(["hat", "hat", "pmask"]),
        "optimizer": draw.choice(list(OPTIMIZERS)),
        "weight_decay": draw.choice([0.0, 0.1]),
        "kinds": [draw.choice(list(LOSSES)) for _ in range(draw.choice([2, 3, 4]))],
        "clip": draw.choice([0.0, 0.5]),
        "accumulate": draw.choice([1, 1, 2]),
        "set_to_none": draw.choice([True, False]),
        "options": {"c": draw.choice([0.1, 0.75, 2.0]), "smax": draw.choice([50.0, 400.0])},
        "release": draw.random() < 0.2,
        "epochs": draw.choice([1, 2]),
        "together": draw.random() < 0.5,  # all weights restored by one operation, as on a GPU
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, cases(10 * FEW, 1000)))
def test_many_random_sequences(seed, monkeypatch):
    test_a_random_sequence(seed, monkeypatch)


@pytest.mark.parametrize("seed", range(FEW))
def test_a_random_sequence(seed, monkeypatch):
    plan = draw_plan(random.Random(seed))
    monkeypatch.setattr(frozen, "TOGETHER", ("cpu",) if plan["together"] else ())
    kind, settings = OPTIMIZERS[plan["optimizer"]]
    loop = make_loop(
        plan["backbone"], kind, method=plan["method"], options=plan["options"], seed=seed, names="abcd",
        weight_decay=plan["weight_decay"], **settings,
    )  # fmt: skip
    for number, target in enumerate(plan["kinds"]):
        name = "abcd"[number]
        batches = loop.batches(1000 * seed + number, target)
        steps = len(batches) // plan["accumulate"]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "task .* finds under")
            with loop.guard.learn(name, steps=steps, own=[loop.heads[name]], settle=batches):
                for _ in range(plan["epochs"]):
                    epoch(loop, name, batches, target, plan)
        loop.answers[name] = loop.answer(name)
        assert loop.changed() == [], plan
        if plan["release"] and number == 1:
            loop.guard.release("a")
            del loop.answers["a"]
    assert loop.answers
    assert all(answer.isfinite().all() for answer in loop.answers.values())
