"""Max-pooling by windows gives what torch gives, and no result before it is kept for the backward pass."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from hatrack.engine.windows import pool_by_windows
from tests.helpers.tiers import every_value

aten = torch.ops.aten


def graph_of(function, *inputs):
    plain = make_fx(function)(*inputs)
    return make_fx(torch.func.functionalize(lambda *given: plain(*given)))(*inputs)


def block(size, shape, *, dropout=True, gated=True, relu=True):
    """The loss and gradients of a block before a pooling: bias, gates, relu and dropout, in this order."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7

    def function(x, bias, gates):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (x, bias, gates)]
            y = leaves[0] + leaves[1][:, None, None]
            y = y * leaves[2][:, None, None] if gated else y
            y = torch.relu(y) if relu else y
            y = y * mask / 0.7 if dropout else y
            loss = (nn.functional.max_pool2d(y, size) ** 2).sum()
            return loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    return function


def inputs(shape, dtype=torch.float64):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=source, dtype=dtype)
    return x, torch.randn(shape[1], generator=source, dtype=dtype), torch.rand(shape[1], generator=source, dtype=dtype)


@pytest.mark.parametrize(
    ("parts", "size", "shape"),
    every_value(
        [{}, {"dropout": False}, {"gated": False}, {"relu": False}],
        [2, 3, (2, 3)],
        [(3, 4, 6, 6), (2, 3, 7, 5), (2, 1, 9, 8)],
    ),
)
def test_the_same_values_and_gradients(shape, size, parts):
    function, given = block(size, shape, **parts), inputs(shape)
    module = graph_of(function, *given)
    before = sum(node.target is aten.max_pool2d_with_indices.default for node in module.graph.nodes)
    pool_by_windows(module.graph)
    module.recompile()
    after = {node.target for node in module.graph.nodes}
    assert before == 1
    assert not after & {aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default}
    for mine, torchs in zip(module(*given), function(*given), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-12)


def test_of_equal_pixels_the_first_gets_the_gradient():
    x = torch.zeros(1, 1, 4, 4, dtype=torch.float64)  # all pixels of a window are equal
    function = block(2, x.shape, dropout=False, relu=False)
    given = x, torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    module = graph_of(function, *given)
    pool_by_windows(module.graph)
    module.recompile()
    found = module(*given)[1]
    assert torch.equal(found, function(*given)[1])
    assert found[0, 0, ::2, ::2].all()
    assert found.count_nonzero() == 4


def test_not_a_number_is_the_largest():
    x = inputs((1, 2, 4, 4))[0]
    x[0, 0, 1, 1] = torch.nan
    module = graph_of(lambda x: nn.functional.max_pool2d(x, 2), x)
    pool_by_windows(module.graph)
    module.recompile()
    torch.testing.assert_close(module(x), nn.functional.max_pool2d(x, 2), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("how", [{"stride": 1}, {"padding": 1}, {"dilation": 2}, {"ceil_mode": True}])
def test_windows_that_overlap_stay_as_they_are(how):
    x = inputs((2, 3, 7, 7))[0]
    module = graph_of(lambda x: nn.functional.max_pool2d(x, 2, **how), x)
    pool_by_windows(module.graph)
    module.recompile()
    assert aten.max_pool2d_with_indices.default in {node.target for node in module.graph.nodes}
    assert torch.equal(module(x), nn.functional.max_pool2d(x, 2, **how))


WITH_NEIGHBOURS = {  # what stands beside a pooling, as a function of images, of a number per channel and of one per pixel
    "two in a row": lambda x, c, p: pool(pool(x)),
    "two with a relu between": lambda x, c, p: pool(torch.relu(pool(x))),
    "a sum of two branches, each pooled": lambda x, c, p: pool(pool(x) + torch.tanh(pool(x).mean(1, keepdim=True))),
    "a sum with what was pooled before": lambda x, c, p: pool((y := pool(x)) + torch.roll(y, 1, 2) * p[:, :6, :6]),
    "the same input elsewhere": lambda x, c, p: pool(x * x).sum() + (x * x * x).sum(),
    "numbers per pixel": lambda x, c, p: pool(torch.relu(x * p)),
    "numbers per row": lambda x, c, p: pool(torch.relu(x * p[0, :, :1])),
    "numbers per column, of four dimensions": lambda x, c, p: pool(x * p[None, :1, :1]),
    "numbers per pixel, turned": lambda x, c, p: pool(x * p.permute(1, 2, 0).contiguous().permute(2, 0, 1)),
    "a layer norm": lambda x, c, p: pool(nn.functional.layer_norm(x, [12, 12]) * c[:, None, None]),
    "a half": lambda x, c, p: pool(x.chunk(2, 2)[1] * c[:, None, None]),
    "a window of more pixels than a small number holds": lambda x, c, p: pool(x * c[:, None, None], 12),
}  # fmt: skip


def pool(x, size=2):
    return nn.functional.max_pool2d(x, size)


@pytest.mark.parametrize("name", WITH_NEIGHBOURS)
def test_neighbours(name):
    def function(*given):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in given]
            loss = WITH_NEIGHBOURS[name](*leaves).square().sum()
            return loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    source = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in ((2, 3, 12, 12), (3,), (3, 12, 12))]
    module = graph_of(function, *given)
    pool_by_windows(module.graph)
    module.graph.lint()
    module.recompile()
    for mine, torchs in zip(module(*given), function(*given), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-11, atol=1e-11)


def test_sums_and_products_need_one_value_per_window():
    """In the backward pass nothing has the size of the images but what is returned, and what shows where it is 0."""
    shape = (2, 3, 8, 8)
    function, given = block(2, shape), inputs(shape)
    module = graph_of(function, *given)
    pool_by_windows(module.graph)
    module.recompile()
    pooled = make_fx(lambda *t: module(*t))(*given)
    nodes = list(pooled.graph.nodes)
    last = max(place for place, node in enumerate(nodes) if node.target is aten.gt.Tensor)
    whole = [n for n in nodes[last:] if getattr(n.meta.get("val"), "shape", ()) == shape and n.target is aten.mul.Tensor]
    assert not whole, whole
