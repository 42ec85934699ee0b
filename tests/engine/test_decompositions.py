"""Decompositions against torch's own operations, in float64."""

import pytest
import torch
from torch.nn import functional as F

from hatrack.engine import decompositions
from hatrack.engine.graph import capture

WIDE = torch.float64


@pytest.mark.parametrize(("stride", "padding"), [([1, 1], [0, 0]), ([1, 1], [1, 2]), ([2, 1], [1, 2]), ([3, 2], [0, 1])])
@pytest.mark.parametrize("last", [False, True])
def test_a_convolution_is_a_product_with_patches(stride, padding, last, monkeypatch):
    monkeypatch.setattr(decompositions, "is_few_channels", lambda *_: True)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, 12, 11, dtype=WIDE, generator=draw)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    weight = torch.randn(7, 5, 4, 3, dtype=WIDE, generator=draw, requires_grad=True)
    bias = torch.randn(7, dtype=WIDE, generator=draw, requires_grad=True)
    expected = F.conv2d(x, weight, bias, stride, padding)
    settings = ([1, 1], False, [0, 0], 1)
    mine = [t.detach() for t in (x, weight, bias)]
    found = decompositions.convolution(*mine, stride, padding, *settings)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    assert found.is_contiguous(memory_format=torch.channels_last)
    grad = torch.randn(expected.shape, dtype=WIDE, generator=draw)
    wanted = torch.autograd.grad(expected, (weight, bias), grad)
    nothing, *given = decompositions.convolution_backward(
        grad, *mine[:2], [7], stride, padding, *settings, [False, True, True]
    )
    assert nothing is None
    for one, two in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    assert (
        decompositions.convolution_backward(grad, *mine[:2], None, stride, padding, *settings, [False, True, False])[2]
        is None
    )
    decompositions.patch_cache.clear()


def test_patches_are_cached_by_images_and_settings():
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    one = decompositions.patches(x, weight, [1, 1], [0, 0])
    assert decompositions.patches(x, weight, [1, 1], [0, 0]) is one
    assert decompositions.patches(x, weight, [2, 2], [0, 0]).shape == (2 * 9, 27)
    assert decompositions.patches(x.clone(), weight, [1, 1], [0, 0]) is not one
    decompositions.patch_cache.clear()


def test_a_narrow_product():
    x, weight = torch.randn(6, 50), torch.randn(50, 3)
    torch.testing.assert_close(
        decompositions.product_as_sums(x, weight), (x.double() @ weight.double()).float(), rtol=1e-6, atol=1e-5
    )


def test_on_a_cpu_nothing_is_decomposed():
    x, weight = torch.randn(6, 3, 8, 8), torch.randn(4, 3, 3, 3)
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert decompositions.convolution(x, weight, None, *settings) is NotImplemented
    assert decompositions.convolution_backward(x, x, weight, [4], *settings, [False, True, True]) is NotImplemented
    assert decompositions.narrow_product(torch.zeros(2), x.flatten(1), torch.randn(192, 2)) is NotImplemented
    assert decompositions.dropout(x.contiguous(memory_format=torch.channels_last), 0.2, True) is NotImplemented
    assert decompositions.max_pool_backward(x, x, [1, 1], [1, 1], [0, 0], [1, 1], False, x) is NotImplemented


def test_lists_of_tensors():
    draws = [torch.randn(4, 5), torch.randn(7), torch.zeros(3)]
    one, two = ([t.clone() for t in draws] for _ in range(2))
    torch._foreach_mul_(one, torch.tensor(0.3))
    torch._foreach_add_(one, 2)
    decompositions.foreach_mul(two, torch.tensor(0.3))
    decompositions.foreach_add(two, 2)
    assert all(map(torch.equal, one, two))


def test_rows_are_added_by_a_product():
    rows, added, index = torch.randn(5, 3, 2), torch.randn(7, 3, 2), torch.tensor([0, 4, 4, 1, 0, 4, 2])
    expected = rows.double()
    for row, number in zip(added.double(), index.tolist(), strict=True):
        expected[number] += row
    found = decompositions.index_add(given := rows.clone(), 0, index, added)
    assert found is given
    torch.testing.assert_close(found.double(), expected)
    assert decompositions.index_add(torch.zeros(5, 3).long(), 0, index, torch.ones(7, 3).long()) is NotImplemented


@pytest.mark.parametrize("gpu", [False, True])
def test_the_norm_of_all(gpu, monkeypatch):
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: gpu)
    monkeypatch.setattr(decompositions, "SMALL", 7)
    tensors = [torch.randn(4, 5), torch.randn(7), torch.zeros(3), torch.randn(2, 3, dtype=WIDE)]
    expected = sum(float(value) ** 2 for t in tensors for value in t.flatten()) ** 0.5
    torch.testing.assert_close(decompositions.norm(tensors).double(), torch.tensor(expected, dtype=WIDE))
    graph, _ = capture(lambda *given: decompositions.norm(list(given)), tuple(tensors))
    torch.testing.assert_close(graph(*tensors).double(), torch.tensor(expected, dtype=WIDE))
    assert ("cat" in graph.code) is gpu
    assert "foreach" not in graph.code


@pytest.mark.parametrize("kind", [torch.complex64, torch.float16])
def test_norms_whose_squares_would_be_wrong_or_too_large(kind):
    tensors = (torch.full((2,), 300, dtype=kind), torch.full((2,), 400, dtype=kind))
    graph, _ = capture(lambda *given: decompositions.norm(list(given)), tensors)
    assert graph(*tensors).isfinite()
    torch.testing.assert_close(graph(*tensors).real.float(), torch.tensor(500000.0).sqrt(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("size", "shape"), [([2, 2], (3, 4, 7, 6)), ([3, 2], (2, 5, 7, 9)), ([1, 1], (2, 3, 4, 4))])
def test_the_gradient_of_windows_that_do_not_overlap(size, shape, last, monkeypatch):
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: True)
    x = torch.randint(0, 4, shape).double()  # equal numbers in many windows
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
    out, found = F.max_pool2d(x, size, return_indices=True)
    grad = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, x, grad)
    settings = ([0, 0], [1, 1], False, found)
    given = decompositions.max_pool_backward(grad, x.detach(), size, size, *settings)
    assert torch.equal(given, expected)
    assert given.stride() == x.stride()
    assert torch.equal(decompositions.max_pool_backward(grad, x.detach(), size, [], *settings), expected)


def test_windows_that_overlap_or_leave_the_image_are_not_decomposed(monkeypatch):
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: True)
    x = torch.randn(2, 3, 8, 8)
    for stride, padding, dilation, ceil in (
        ([1, 1], [0, 0], [1, 1], False),
        ([2, 2], [1, 1], [1, 1], False),
        ([2, 2], [0, 0], [2, 1], False),
        ([2, 2], [0, 0], [1, 1], True),
    ):
        given = decompositions.max_pool_backward(x, x, [2, 2], stride, padding, dilation, ceil, x)
        assert given is NotImplemented
    assert decompositions.max_pool_backward(x[0], x[0], [2, 2], [2, 2], [0, 0], [1, 1], False, x[0]) is NotImplemented


def test_dropout_keeps_the_channels_last(monkeypatch):
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: True)
    x = torch.rand(8, 6, 9, 7).contiguous(memory_format=torch.channels_last) + 1
    torch.manual_seed(0)
    out, mask = decompositions.dropout(x, 0.2, True)
    torch.manual_seed(0)
    expected = torch.native_dropout(x.permute(0, 2, 3, 1).contiguous(), 0.2, True)  # drawn in the order of memory
    assert torch.equal(out.permute(0, 2, 3, 1), expected[0])
    assert torch.equal(mask.permute(0, 2, 3, 1), expected[1])
    assert out.stride() == mask.stride() == x.stride()
    torch.testing.assert_close(out, torch.where(mask, x / 0.8, 0))
    assert 0.7 < mask.float().mean() < 0.9
    assert decompositions.dropout(x.contiguous(), 0.2, True) is NotImplemented
    part = x[1:]  # it begins elsewhere in memory
    out, mask = decompositions.dropout(part, 0.2, True)
    torch.testing.assert_close(out, torch.where(mask, part / 0.8, 0))


def test_narrow_products_keep_the_precision(monkeypatch):
    monkeypatch.setattr(decompositions, "on_gpu", lambda x: True)
    for kind in (torch.float64, torch.complex64):
        x, weight, bias = (torch.ones(shape, dtype=kind) for shape in ((4, 5), (5, 3), (3,)))
        assert decompositions.narrow_product(bias, x, weight) is NotImplemented
    x, weight, bias = torch.randn(4, 5), torch.randn(5, 3), torch.randn(3)
    torch.testing.assert_close(decompositions.narrow_product(bias, x, weight), torch.addmm(bias, x, weight))
