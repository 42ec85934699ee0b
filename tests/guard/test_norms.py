"""Norms of a protected backbone, whose gates are part of their scale and shift while a task is learned, in users' hands."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import hatrack as hr

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU()]
    return nn.Sequential(*parts)


class Droppable(nn.Module):
    """A block with a norm, which is left out in training mode at every second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 16), nn.LayerNorm(16)
        self.second, self.inner, self.passes = nn.Linear(16, 16), nn.LayerNorm(16), 0

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        self.passes += self.training
        return x if self.training and self.passes % 2 == 0 else x + self.inner(self.second(x)).relu()


def learn(backbone, forward=lambda backbone, x: backbone(x), steps=4):
    """Learn a task and return the gradients of every step, by the name of the parameter."""
    optimizer, grads = torch.optim.SGD(backbone.parameters(), lr=0.1), []
    guard = hr.protect(backbone, optimizer, example=X[:2])
    with guard.learn("a", steps=steps):
        backbone.train()
        for _ in range(steps):
            optimizer.zero_grad()
            forward(backbone, X).pow(2).mean().backward()
            grads.append({name: p.grad.clone() for name, p in backbone.named_parameters() if p.grad is not None})
            optimizer.step()
    return grads


def assert_same(one, two):
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name])


def test_a_backbone_that_is_checkpointed_as_a_whole():
    assert_same(learn(normed()), learn(normed(), lambda backbone, x: checkpoint(backbone, x, use_reentrant=False)))


def test_a_norm_with_a_computed_scale():
    backbone = normed()
    parametrize.register_parametrization(backbone[1], "weight", nn.Softplus())
    grads = learn(backbone)
    assert all(grad["1.parametrizations.weight.original"].abs().max() > 0 for grad in grads)


def test_a_hook_of_the_user_on_a_norm_that_is_left_out():
    backbone, seen = Droppable(), []
    backbone.inner.weight.register_hook(lambda grad: seen.append(grad * 1.0))
    grads = learn(backbone)
    assert len(seen) == sum("inner.weight" in grad for grad in grads) == 2


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transforms_of_torch_func(transform):
    found = []

    def forward(backbone, x):
        found.append(transform(lambda z: backbone(z).sum())(x))
        return backbone(x)

    assert_same(learn(normed()), learn(normed(), forward))
    assert all(grad.shape == X.shape and grad.abs().max() > 0 for grad in found)


def test_a_checkpointed_norm_within_the_backbone_is_refused():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(64, 16), nn.LayerNorm(16)

        def forward(self, x):
            return checkpoint(lambda z: self.norm(z).relu(), self.layer(x), use_reentrant=False)

    backbone = Inner()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        hr.protect(backbone, torch.optim.SGD(backbone.parameters(), lr=0.1), example=X[:2])


class Token(nn.Module):
    """A learned token that is added to every row, and gets gates of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.token, self.norm = nn.Linear(8, 16), nn.Parameter(torch.ones(1, 1, 16)), nn.LayerNorm(16)

    def forward(self, x):
        rows = self.layer(x.view(len(x), 8, 8))
        return self.norm(torch.cat([self.token.expand(len(x), 1, 16), rows], 1)).mean(1)


def test_a_parameter_that_is_replaced_within_a_block_has_its_gates():
    torch.manual_seed(0)
    backbone = Token()
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1)
    guard = hr.protect(backbone, optimizer, example=X[:2])
    with guard.learn("a", steps=1):
        backbone.train()
        backbone(X).pow(2).mean().backward()
        optimizer.step()
        with torch.no_grad():
            before = backbone(X)
            backbone.token = nn.Parameter(backbone.token.detach().clone())
            assert torch.equal(backbone(X), before)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("own", [False, True])
def test_a_cast_within_a_block_is_refused_and_rolled_back(kind, own):
    backbone = normed()
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1)
    guard = hr.protect(backbone, optimizer, example=X[:2])
    for name in "ab":
        with guard.learn(name, steps=1):
            backbone.train()
            backbone(X).pow(2).mean().backward()
            optimizer.step()
    with guard.use("a"), torch.no_grad():
        before = backbone(X)

    def learn_in_other_precision():
        with guard.learn("c", steps=1):
            backbone.to(kind)
            if own:
                raise KeyError("mine")
            backbone(X.to(kind))

    with pytest.raises(KeyError if own else ValueError, match="mine" if own else "was cast to"):
        learn_in_other_precision()
    assert {p.dtype for p in backbone.parameters()} == {torch.float32}
    guard.verify()
    with guard.use("a"), torch.no_grad():
        assert torch.equal(backbone(X), before)
