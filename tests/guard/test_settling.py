"""Mistakes in `settle` are told when a block begins, and looking for them changes nothing in the user's loop."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.helpers.guarded import PROBE, data, make_loop


class Examples(Dataset):
    """Examples that draw random numbers of all kinds, as augmentations do."""

    def __init__(self, kind=tuple):
        self.kind, self.x, self.y = kind, *data(0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = 1e-3 * (torch.rand(()) + random.random() + float(np.random.rand()))
        pair = (self.x[index] + noise, self.y[index])
        return dict(zip("xy", pair, strict=True)) if self.kind is dict else pair


class Stream(IterableDataset):
    def __iter__(self):
        return iter([{"x": PROBE}])


def exhausted():
    """A generator that has given all its batches."""
    used = (batch for batch in [PROBE])
    list(used)
    return used


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [{"x": PROBE}], "first part is a tensor.*not dict"),
        (lambda: [PROBE.numpy()], "first part is a tensor.*not ndarray"),
        (lambda: [PROBE, [PROBE.numpy()]], "first part is a tensor.*not ndarray"),
        (lambda: PROBE.numpy(), "such as a loader"),
        (lambda: {"x": PROBE}, "such as a loader"),
        (lambda: (PROBE, torch.arange(8)), r"shape \(8,\), not of 4 dimensions"),
        (lambda: [PROBE[:1], PROBE[1:2]], "no batch of two or more"),
        (list, "no batch of two or more"),
        (lambda: iter([]), "list_iterator.* is exhausted"),
        (exhausted, "generator.* is exhausted"),
        (lambda: DataLoader(Examples(dict), batch_size=8), r"first part is a tensor.*batch\[key\].*not dict"),
        (lambda: DataLoader(Examples(dict), batch_size=8, num_workers=2), "first part is a tensor.*not dict"),
        (lambda: DataLoader(Examples(), batch_size=1), "batch_size=1"),
        (lambda: DataLoader(TensorDataset(PROBE[:3]), batch_size=8, drop_last=True), "no batch of two or more"),
        (lambda: DataLoader(TensorDataset(PROBE.flatten(1)), batch_size=8), r"shape \(2, 16\), not of 4 dimensions"),
    ],
)
def test_mistakes_are_told_when_the_block_begins(make, message):
    loop, begun, settle = make_loop("cnn"), [], make()
    with pytest.raises(ValueError, match=message) as error, loop.guard.learn("a", steps=4, settle=settle):
        begun.append(True)
    assert not begun
    assert "\n" not in str(error.value)
    assert loop.guard.lesson is None
    loop.learn("a")


@pytest.mark.parametrize("workers", [0, 1])
def test_looking_at_a_loader_draws_no_random_numbers(workers):
    """With a generator of its own the loader gives the batches that it would have given."""
    given = {}
    for settled in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        loop, own = make_loop("mlp"), torch.Generator().manual_seed(3)
        loader = DataLoader(Examples(), batch_size=12, shuffle=True, generator=own, num_workers=workers)
        with loop.guard.learn("a", steps=4, own=[loop.heads["a"]], settle=loader if settled else None):
            batches = list(loader)
            drawn = [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.rand())]
            loop.train("a", batches)
        given[settled] = [x for x, _ in batches] + drawn
    assert all(torch.equal(one, two) for one, two in zip(given[False], given[True], strict=True))


def test_a_stream_is_not_touched_before_the_end():
    loop = make_loop("cnn")

    def learn():
        with loop.guard.learn("a", steps=4, own=[loop.heads["a"]], settle=DataLoader(Stream(), batch_size=None)):
            loop.train("a", loop.batches(0))
            assert loop.guard.lesson.done == 4

    with pytest.raises(ValueError, match=r"first part is a tensor.*not dict"):
        learn()
    assert not loop.guard.tasks


def test_an_iterator_is_used_as_it_is():
    """Nothing is taken from it before the end of the block."""
    loop, taken = make_loop("cnn"), []

    def batches():
        for x, _ in loop.batches(0):
            taken.append(x)
            yield x

    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]], settle=batches()):
        loop.train("a", loop.batches(0))
        assert not taken
    assert len(taken) == 4
    expected = torch.nn.functional.conv2d(torch.cat(taken), loop.backbone[0].weight, loop.backbone[0].bias, padding=1)
    found = loop.guard.method.norms.of(1)["1.running_mean"]
    torch.testing.assert_close(found, expected.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
