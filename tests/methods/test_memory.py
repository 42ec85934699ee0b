"""Memories against plain Python that takes one example after the other."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hatrack import Network
from hatrack.engine.rules import watch_step
from hatrack.methods.parts.memory import Memory, Reservoir, Ring, head_sizes, unused_heads
from hatrack.networks.mlp import mlp
from tests.helpers.learning import learn, make
from tests.helpers.toys import toy_tasks

EXAMPLE = torch.zeros(2, 1)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def offer(memory: Memory, sizes: list[int], tasks: int = 1, classes: int = 1) -> list[tuple[float, int, int]]:
    """Batches of these sizes of examples 1, 2, 3, ...; returns all that was offered."""
    everything = []
    memory.grow([classes] * tasks)
    memory.expect(sum(sizes))
    for size in sizes:
        number = len(everything) + 1 + torch.arange(size)
        y, task = number * 7 % 5 % classes, number * 3 % 7 % tasks
        memory.add(number[:, None].float(), y, task if tasks > 1 else 0)
        everything += zip(number.tolist(), y.tolist(), task.tolist(), strict=True)
    return everything


def kept(memory: Memory) -> list[tuple[float, int, int]]:
    """What a memory holds, row by row."""
    rows = memory.used.nonzero().flatten()
    return [(memory.x[k].item(), memory.y[k].item(), memory.task[k].item()) for k in rows]


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, slots=st.integers(1, 12), seed=st.integers(0, 99))
def test_the_reservoir_is_the_sequential_one(sizes, slots, seed):
    memory = Reservoir(slots, EXAMPLE)
    torch.manual_seed(seed)
    everything = offer(memory, sizes, tasks=3, classes=4)
    torch.manual_seed(seed)
    draws = torch.cat([torch.rand(size, dtype=torch.float64) for size in sizes]).tolist()
    slot = {}
    for number, (example, draw) in enumerate(zip(everything, draws, strict=True)):
        place = number if number < slots else int(draw * (number + 1))
        if place < slots:
            slot[place] = example
    assert kept(memory) == [slot[k] for k in sorted(slot)]
    assert memory.seen.item() == sum(sizes)


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, per_class=st.integers(1, 4))
def test_the_ring_keeps_the_last_of_every_class(sizes, per_class):
    memory = Ring(per_class, EXAMPLE)
    everything = offer(memory, sizes, tasks=2, classes=3)
    expected = []
    for task in range(2):
        for label in range(3):
            expected += [e for e in everything if e[1:] == (label, task)][-per_class:]
    assert sorted(kept(memory)) == sorted(expected)
    assert memory.written.sum().item() == sum(sizes)


def spread(reservoir, repetitions: int = 700, slots: int = 2, offered: int = 14) -> float:
    """Chi-square, with 13 degrees of freedom, of how often each example is kept."""
    counts = torch.zeros(offered)
    for _ in range(repetitions):
        memory = reservoir(slots, EXAMPLE)
        offer(memory, [5, 5, 4])
        counts[torch.tensor([x for x, _, _ in kept(memory)]).long() - 1] += 1
    share = slots / offered
    wanted = repetitions * share
    return ((counts - wanted).square().sum() / (wanted * (1 - share)) * (offered - 1) / offered).item()


class Biased(Reservoir):
    """The slip of a released code: j from 0..N-1 instead of 0..N."""

    def _rows(self, y, task, new):
        number = self.seen + torch.arange(len(y))
        slot = torch.where(number < self.slots, number, (torch.rand(len(y)) * number).long())
        self.seen.add_(new.sum())
        return torch.where(slot < self.slots, slot + 1, 0)


def test_the_reservoir_is_uniform():
    torch.manual_seed(0)
    assert spread(Reservoir) < 34.5, "exceeded by chance once in a thousand times"


def test_the_test_of_uniformity_sees_a_reservoir_that_is_off_by_one():
    torch.manual_seed(0)
    assert spread(Biased) > 50


def test_a_later_epoch_is_passed_over():
    for memory in (Reservoir(4, EXAMPLE), Ring(2, EXAMPLE)):
        offer(memory, [5, 5, 2])
        before = copy.deepcopy(memory.state_dict())
        memory.add(torch.full((7, 1), -1.0), torch.zeros(7, dtype=torch.int64), 0)
        for name, table in memory.state_dict().items():
            assert torch.equal(table[1:] if table.dim() else table, before[name][1:] if table.dim() else before[name])


def test_only_the_new_part_of_a_batch_is_offered():
    memory = Reservoir(10, EXAMPLE)
    memory.expect(3)
    memory.add(torch.arange(5.0)[:, None], torch.zeros(5, dtype=torch.int64), 0)
    assert [x for x, _, _ in kept(memory)] == [0, 1, 2]
    assert memory.seen.item() == 3


def test_a_sample_is_drawn_from_all_that_is_kept():
    torch.manual_seed(0)
    memory = Ring(2, EXAMPLE)
    everything = offer(memory, [3, 3, 1], tasks=3, classes=4)  # most classes have fewer than two
    x, y, task, _ = memory.sample(4000)
    assert {*zip(x[:, 0].tolist(), y.tolist(), task.tolist(), strict=True)} == {*kept(memory)} <= {*everything}
    counts = torch.bincount(x[:, 0].long())[1:]
    counts = counts[counts > 0]
    assert (counts / 4000 - 1 / len(counts)).abs().max() < 0.03, "each as likely as the other"


def test_a_sample_without_a_task():
    memory = Ring(2, EXAMPLE)
    offer(memory, [9, 9], tasks=3, classes=2)
    others = memory.without(1)
    assert set(memory.sample(200, others).task.tolist()) == {0, 2}
    assert others.total.item() == len([task for _, _, task in kept(memory) if task != 1])


def test_rows_that_are_named_give_the_same_draw():
    """As with all rows of the memory, to the bit, since records of earlier versions must come out again."""
    memory = Ring(3, EXAMPLE)
    offer(memory, [4, 2, 5], tasks=3, classes=4)
    torch.manual_seed(3)
    all_rows = memory.sample(500)
    torch.manual_seed(3)
    named = memory.sample(500, memory.without(99))
    assert torch.equal(all_rows.x, named.x)
    assert len(all_rows.x.unique()) == memory.used.sum()


def test_a_sample_of_nothing_is_defined():
    for memory in (Reservoir(4, EXAMPLE), Ring(2, EXAMPLE)):
        memory.grow([3])
        assert memory.sample(5).x.isfinite().all()
        assert memory.tasks() == set()
    offer(memory, [5])
    assert memory.sample(5, memory.without(0)).x.tolist() == [[0.0]] * 5


def test_a_task_is_forgotten():
    memory = Ring(2, EXAMPLE)
    offer(memory, [9, 9], tasks=3, classes=2)
    memory.forget(1)
    assert memory.tasks() == {0, 2}
    assert all(task != 1 for _, _, task in kept(memory))


def test_rows_that_are_added_later_are_the_same_rows():
    early, late = Ring(2, EXAMPLE), Ring(2, EXAMPLE)
    early.grow([2, 3])
    late.grow([2])
    x, y = torch.arange(6.0)[:, None], torch.tensor([0, 1, 0, 1, 0, 1])
    for memory in (early, late):
        memory.expect(12)
        memory.add(x, y, 0)
        memory.grow([2, 3])
        memory.add(-x, y, 1)
    assert all(torch.equal(late.state_dict()[name], table) for name, table in early.state_dict().items())


@pytest.mark.parametrize("memory", [Reservoir(3, EXAMPLE), Ring(2, EXAMPLE)])
def test_adding_and_drawing_obey_the_rule_of_the_step(memory):
    memory.grow([2, 2])
    memory.expect(20)
    others = memory.without(0)
    with watch_step(memory):
        for _ in range(4):
            memory.add(torch.rand(7, 1), torch.arange(7) % 2, 1)
            memory.sample(5)
            memory.sample(5, others)


def test_heads_that_no_task_uses():
    tasks = toy_tasks(3)
    example = tasks[0].train.inputs(torch.arange(2))
    for heads, expected in (("multi", 2), ("shared", 0)):
        net = Network(mlp(tasks[0].shape, widths=(4,)), [3, 2, 3], example, heads=heads)
        assert len(unused_heads(net, {0, 2})) == expected
        assert head_sizes(net) == ([3, 2, 3] if heads == "multi" else [3, 3, 3])
    net = Network(mlp(tasks[0].shape, widths=(4,)), [3, 2, 3], example)
    assert all(p is q for p, q in zip(unused_heads(net, {0, 2}), net.heads[1].parameters(), strict=True))


@pytest.mark.parametrize("name", ["er", "agem", "derpp"])
def test_nothing_is_kept_of_a_task_that_was_given_up(name):
    """Another task may take its number, and its labels would be wrong for that one."""
    tasks = toy_tasks(2)
    method = make(name, tasks)
    learn(method, tasks)
    assert method.memory.tasks() == {0, 1}
    method.forget_task(0)
    assert method.memory.tasks() == {1}
