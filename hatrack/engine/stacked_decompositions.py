"""Decompositions of operations for a stacked step: a step of several runs at once, with a leading dimension of runs.

Torch would compute the convolutions of several runs, each with weights of its own, as one convolution with groups, which is
slow on a GPU. As products of patches they become batched matrix products. The other operations here are those for which
`torch.vmap` has no rule, or a slow one.
"""

from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.nn import functional as F

from hatrack.engine import decompositions
from hatrack.engine.decompositions import DECOMPOSITIONS, PATCHES, patch_cache, to_channels_last

aten = torch.ops.aten
LONG = 4096  # products that are added up by one block of threads of a GPU


def is_plain(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], *settings: Any) -> bool:
    """Return whether this is a convolution of images without dilation and groups, whose patches fit into memory."""
    dilation, transposed, _, groups = settings
    plain = len(stride) == len(padding) == 2 and set(dilation) == {1} and not transposed and groups == 1
    return plain and x.dim() == 4 and _positions(x, weight, stride, padding)[2] * weight[0].numel() <= PATCHES


def _positions(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> tuple[int, int, int]:
    """Return how many rows and columns of results there are, and how many results of one filter in all."""
    rows, columns = ((x.shape[k] + 2 * padding[k - 2] - weight.shape[k]) // stride[k - 2] + 1 for k in (2, 3))
    return rows, columns, len(x) * rows * columns


def patches(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """Return the patches of images that a filter is applied to, (images * positions, kernel * channels). The forward pass
    and the backward pass share them. Channels are last, as they lie in memory between two convolutions."""
    # The version and the address: images may be changed in place between two convolutions, or get other memory.
    key = "stacked", id(x), x._version, x.data_ptr(), *weight.shape, *stride, *padding
    if key not in patch_cache:
        last = x.permute(0, 2, 3, 1)
        padded = F.pad(last, (0, 0, padding[1], padding[1], padding[0], padding[0])) if any(padding) else last
        windows = padded.unfold(1, weight.shape[2], stride[0]).unfold(2, weight.shape[3], stride[1])
        rows = windows.permute(0, 1, 2, 4, 5, 3).clone(memory_format=torch.contiguous_format)
        patch_cache[key] = x, rows.view(-1, weight[0].numel())
    return patch_cache[key][1]


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], *settings: Any
) -> Any:
    """Compute a convolution as a matrix product of patches. On a GPU the result has its channels last in memory; on a CPU
    first, as torch's own, so that a dropout draws the same numbers for the same units."""
    if not is_plain(x, weight, stride, padding, *settings):
        return NotImplemented
    rows, columns, _ = _positions(x, weight, stride, padding)
    filters = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
    out = torch.mm(patches(x, weight, stride, padding), filters.t())
    images = (out if bias is None else out + bias).view(len(x), rows, columns, len(weight)).permute(0, 3, 1, 2)
    return images if decompositions.on_gpu(x) else images.contiguous()


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: list[int], stride: list[int], padding: list[int], *settings: Any
) -> Any:
    """Compute the gradients of such a convolution: of the images, the weight and the bias, as far as they are needed."""
    *rest, needed = settings
    if not is_plain(x, weight, stride, padding, *rest):
        return NotImplemented
    rows = to_channels_last(grad).flatten(0, 2)  # (images * positions, filters)
    of_weight = None
    if needed[1]:
        found = sum_of_products(rows, patches(x, weight, stride, padding), len(x))
        of_weight = found.view(len(weight), *weight.shape[2:], weight.shape[1]).permute(0, 3, 1, 2).contiguous()
    of_images = _sum_of_patches(rows, x, weight, stride, padding) if needed[0] else None
    return of_images, of_weight, rows.sum(0) if needed[2] else None


def sum_of_products(left: Tensor, right: Tensor, images: int) -> Tensor:
    """Compute left.t() @ right, for the positions of so many images. The result is small and its sums are long, so that a
    GPU would compute it with few threads: the sums are divided into those of some images each."""
    enough = (count for count in range(1, images) if images % count == 0 and len(left) <= LONG * count)
    parts = next(enough, images)
    if parts == 1:
        return torch.mm(left.t(), right)
    left, right = (t.view(parts, -1, t.shape[1]) for t in (left, right))
    return torch.bmm(left.transpose(1, 2), right).sum(0)


def _sum_of_patches(grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """Return the gradient of images: every pixel gets the sum of what it gave to the patches that it is in."""
    rows, columns, _ = _positions(x, weight, stride, padding)
    high, wide = weight.shape[2:]
    filters = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
    found = torch.mm(grad, filters).view(len(x), rows, columns, high, wide, x.shape[1])
    total, size = None, (x.shape[2] + 2 * padding[0], x.shape[3] + 2 * padding[1])
    for down in range(high):
        for right in range(wide):
            part = found[:, :, :, down, right]  # (images, rows, columns, channels)
            if max(stride) > 1:
                part = _spread(part, stride)
            around = (0, 0, right, size[1] - right - part.shape[2], down, size[0] - down - part.shape[1])
            total = F.pad(part, around) if total is None else total + F.pad(part, around)
    assert total is not None
    inner = total[:, padding[0] : size[0] - padding[0], padding[1] : size[1] - padding[1]]
    images = inner.permute(0, 3, 1, 2)
    return images if decompositions.on_gpu(x) else images.contiguous()


def _spread(part: Tensor, stride: list[int]) -> Tensor:
    """Put zeros between rows and columns, so that neighbours are a stride apart."""
    images, rows, columns, channels = part.shape
    wide = F.pad(part[:, :, None, :, None], (0, 0, 0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
    wide = wide.reshape(images, rows * stride[0], columns * stride[1], channels)
    return wide[:, : (rows - 1) * stride[0] + 1, : (columns - 1) * stride[1] + 1]


def index_copy(target: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Write one number into a vector at a place; the losses of an epoch are written so."""
    if target.dim() != 1 or index.numel() != 1 or source.numel() != 1:
        return NotImplemented
    here = torch.arange(len(target), device=target.device) == index.reshape(())
    return target.copy_(torch.where(here, source.reshape(()), target))


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Compute the product of two vectors as a sum. A GPU would compute it with few threads if it were a batched product of a
    row and a column: with all weights of AlexNet a step took five times as long."""
    return (x * y).sum()


BY_TORCH = (  # torch's own decompositions
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._batch_norm_with_update.default,
    aten.native_batch_norm_backward.default,
    aten.cudnn_batch_norm.default,
    aten.cudnn_batch_norm_backward.default,
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
)
LEFT_OUT = (
    aten.addmm.default,  # a head of many runs is a batched product of a good size
    aten.max_pool2d_with_indices_backward.default,  # see windows.py
)
STACKED: dict[Any, Any] = {
    **{op: function for op, function in DECOMPOSITIONS.items() if op not in LEFT_OUT},
    **{op: decomposition_table[op] for op in BY_TORCH if op in decomposition_table},
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.index_copy_.default: index_copy,
    aten.dot.default: dot,
}
