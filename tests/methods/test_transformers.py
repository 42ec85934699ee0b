"""Random transformers under HAT: nothing is forgotten, not a bit, hardly anything is held whole, and tasks are learned."""

import random

import pytest
import torch

from hatrack import METHODS, Network, Regime, Task, Trainer, evaluate
from tests.helpers.learning import logits
from tests.helpers.nets import check_units
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks
from tests.helpers.transformers import TOKENS, TransformerPlan, random_transformer

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")  # networks so small are soon full
OPTIMIZERS = (
    {"optimizer": "sgd", "lr": 0.1, "epochs": 30},
    {"optimizer": "momentum", "lr": 0.03},
    {"optimizer": "adam", "lr": 0.003},
    {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.1},
)


def token_tasks(count: int = 3) -> list[Task]:
    """Every class of every task is a sequence of 12 token ids, a tenth of which are drawn at random."""
    tasks = []
    for index in range(count):
        draw = torch.Generator().manual_seed(index)
        centres, parts = torch.randint(0, TOKENS, (3, 12), generator=draw), []
        for size in (90, 30):
            y = torch.arange(size) % 3
            noise = torch.randint(0, TOKENS, (size, 12), generator=draw)
            parts += [torch.where(torch.rand(size, 12, generator=draw) < 0.9, centres[y], noise), y]
        tasks.append(Task.from_arrays(index, f"toy {index}", *parts, tokens=True, valid=0.2))
    return tasks


def tasks_for(plan: TransformerPlan) -> list[Task]:
    return token_tasks() if plan.tokens else toy_tasks(3, shape=(1, 8, 8), train=90)


def learned(name: str, plan: TransformerPlan, epochs: int | None = None, **options):
    """Learn three tasks; check that old logits stay the same bits. Returns the method, and every task's accuracy."""
    tasks, optimizer = tasks_for(plan), random.Random(plan.seed).choice(OPTIMIZERS)
    method = METHODS[name](Network(plan.build(), tasks=tasks), **options)
    how = {"epochs": 18, "batch": 8, "schedule": "constant", **optimizer}
    fit, then = Trainer(Regime(**how if epochs is None else how | {"epochs": epochs})), []
    for task in tasks:
        method.learn(task, fit)
        then.append(logits(method, task))
        assert all(torch.equal(logits(method, old), before) for old, before in zip(tasks, then, strict=False))
        assert (then[-1].std(0) > 0).any(), "constant logits would prove nothing"
    return method, [evaluate(method, task.test).accuracy for task in tasks]


def learned_by_hat(plan: TransformerPlan, epochs: int | None = None) -> list[float]:
    """Learn three tasks with HAT; check that at most 5 % of the weights are held whole. Returns every task's accuracy."""
    hat, accuracy = learned("hat", plan, epochs, c=0.1)
    sizes = {name: p.numel() for name, p in hat.net.trunk.named_parameters()}
    assert sum(sizes[name] for name in hat.held) <= 0.05 * sum(sizes.values())
    return accuracy


@pytest.mark.parametrize("seed", quick_and_slow([2, 9], [2]))
def test_random_transformers_forget_nothing(seed):
    learned_by_hat(random_transformer(seed), epochs=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_many_random_transformers_learn_and_forget_nothing(seed):
    plan = random_transformer(seed)
    accuracy, (_, reached) = learned_by_hat(plan), learned("independent", plan)
    assert all(a >= 0.9 * b for a, b in zip(accuracy, reached, strict=True)), (accuracy, reached)


def test_a_transformer_under_pmask():
    learned("pmask", random_transformer(2), epochs=3, c=0.1)


def units_of(seed: int) -> None:
    plan = random_transformer(seed)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, TOKENS, (5, 12), generator=draw)
    units = check_units(plan.build(), tokens if plan.tokens else torch.randn(5, 1, 8, 8, generator=draw), on_unknown="error")
    assert units.held_whole() == {}
    assert not units.reads


@pytest.fixture
def _slow_path(monkeypatch):
    """Keep torch from the fused kernels outside of modes, where they would round otherwise."""
    monkeypatch.setattr("torch.backends.mha._is_fastpath_enabled", False)


@pytest.mark.usefixtures("_slow_path")
@pytest.mark.parametrize("seed", quick_and_slow(range(8), range(3)))
def test_units_of_random_transformers(seed):
    units_of(seed)


@pytest.mark.slow
@pytest.mark.usefixtures("_slow_path")
@pytest.mark.parametrize("seed", range(8, 60))
def test_units_of_many_random_transformers(seed):
    units_of(seed)
