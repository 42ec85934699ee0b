"""Weights move as with `torch.optim`, by the fused operations and by their decompositions for the compiler."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hatrack import Regime
from hatrack.engine.decompositions import DECOMPOSITIONS
from hatrack.engine.optimizers import Optimizer, can_fuse, clip

TORCH = {
    "sgd": torch.optim.SGD,
    "momentum": lambda weights, **how: torch.optim.SGD(weights, momentum=0.8, **how),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


class Decomposed(TorchDispatchMode):
    """Replaces torch's operations by their decompositions."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in DECOMPOSITIONS:
            self.count += 1
            return DECOMPOSITIONS[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", TORCH)
def test_weights_move_as_torch_moves_them(kind, decay):
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 4, generator=draw), torch.randn(4, generator=draw), torch.randn(3, generator=draw)]
    expected, direct, decomposed = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(3))
    regime, lr = Regime(optimizer=kind, lr=0.02, weight_decay=decay, momentum=0.8), torch.full((), 0.02)
    theirs = TORCH[kind](expected, lr=0.02, weight_decay=decay)
    mine, other = Optimizer(regime, direct, lr), Optimizer(regime, decomposed, lr)
    for _ in range(5):
        for k, shape in enumerate([(5, 4), (4,)]):  # the third has no gradient
            grad = torch.randn(shape, generator=draw)
            for weights in (expected, direct, decomposed):
                weights[k].grad = grad.clone()
        theirs.step()
        with torch.no_grad():
            mine.step()
            with Decomposed() as used:
                other.step()
        assert used.count == (2 if kind in ("adam", "adamw") else 1), "the count of steps, and the update"
    for one, two, three, old in zip(expected, direct, decomposed, start, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(three, one, rtol=1e-6, atol=1e-6)
        assert torch.equal(one, old) == (len(old) == 3), "the others have moved"


def test_nothing_to_move():
    weight = torch.nn.Parameter(torch.ones(2))
    Optimizer(Regime(), [weight], torch.full((), 0.1)).step()
    clip([weight], 1.0)
    assert weight.tolist() == [1, 1]


@pytest.mark.parametrize(("kind", "names"), [("sgd", 0), ("momentum", 1), ("adam", 3), ("adamw", 3)])
def test_the_state_is_there_from_the_beginning(kind, names):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Optimizer(Regime(optimizer=kind), [weight], torch.full((), 0.1))
    places = {name: t.data_ptr() for name, t in optimizer.state[weight].items()}
    assert len(places) == names
    weight.grad = torch.ones(2)
    with torch.no_grad():
        optimizer.step()
    assert {name: t.data_ptr() for name, t in optimizer.state[weight].items()} == places
    assert all(t.abs().sum() > 0 for t in optimizer.state[weight].values())


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_gradients_are_clipped_as_torch_clips_them(limit):
    draw = torch.Generator().manual_seed(0)
    mine, theirs = ([torch.nn.Parameter(torch.zeros(shape)) for shape in ((5, 4), (4,), (3,))] for _ in range(2))
    for one, two in zip(mine[:2], theirs[:2], strict=True):  # the third has none
        one.grad = torch.randn(one.shape, generator=draw)
        two.grad = one.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(theirs, limit)
    assert (norm > limit) == (limit == 0.5)
    with torch.no_grad():
        clip(mine, limit)
    for one, two in zip(mine[:2], theirs[:2], strict=True):
        assert torch.equal(one.grad, two.grad)
    assert mine[2].grad is None


@pytest.mark.parametrize("kind", TORCH)
def test_a_weight_that_is_a_part_of_something_larger(kind):
    """Torch's fused updates would write beside it."""
    memory = torch.ones(8, 32)
    mine, theirs = torch.nn.Parameter(memory[:, :16]), torch.nn.Parameter(torch.ones(8, 16))
    assert not can_fuse(mine)
    regime = Regime(optimizer=kind, lr=0.02, weight_decay=0.1, momentum=0.8)
    optimizer, expected = Optimizer(regime, [mine], torch.full((), 0.02)), TORCH[kind]([theirs], lr=0.02, weight_decay=0.1)
    for step in range(3):
        mine.grad = torch.full((8, 16), step + 1.0)
        theirs.grad = mine.grad.clone()
        expected.step()
        with torch.no_grad():
            optimizer.step()
    torch.testing.assert_close(mine, theirs)
    assert (memory[:, 16:] == 1).all()


def test_which_updates_are_fused():
    weight = torch.zeros(2, 3, 4, 4)
    assert can_fuse(weight)
    assert can_fuse(weight.contiguous(memory_format=torch.channels_last))
    assert not can_fuse(weight.bfloat16())
    assert not can_fuse(weight[:, :, ::2])


def test_complex_weights():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    Optimizer(Regime(optimizer="momentum"), [weight], torch.tensor(0.1))
    with pytest.raises(ValueError, match="adam takes no complex weights"):
        Optimizer(Regime(optimizer="adam"), [weight], torch.tensor(0.1))
