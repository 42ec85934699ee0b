"""Decompositions of torch operations for the compiler.

A decomposition replaces one call to torch by plain arithmetic, which the compiler fuses with the operations around it, or by
a matrix product that is faster on a GPU. The compiled engine uses all of DECOMPOSITIONS. An eager step uses an update of the
weights from here only if torch has no fused one for these weights; its `norm` is torch's own.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from hatrack.methods.parts.capturing import is_capturing

aten = torch.ops.aten
NARROW = 2**24  # multiplications in a matrix product with few columns: up to here plain sums are faster
SMALL = 2**17  # elements of a gradient: up to here launching a kernel on a GPU takes longer than reading the gradient
FEW = 4  # channels of an image: up to here convolutions have no good kernels
PATCHES = 2**25  # elements in all patches of a batch of images: above it they would take too much memory
patch_cache: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # images and their patches, while a step is captured


# Optimizers: in torch, one call updates all weights


def sgd(weights: list[Tensor], grads: list[Tensor], velocities: list[Tensor], *, lr: Tensor, **settings: Any) -> Any:
    """Update weights by SGD, with momentum if that is not 0; the velocities must exist already."""
    if unsupported(settings):
        return NotImplemented
    for number, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        step = grad + settings["weight_decay"] * weight if settings["weight_decay"] else grad
        if settings["momentum"]:
            step = velocities[number].mul_(settings["momentum"]).add_(step)
        weight.sub_(lr * step)
    return None


def unsupported(settings: dict[str, Any]) -> bool:
    """Return whether an update has settings that the decompositions here do not support."""
    return any(settings.get(name) for name in ("dampening", "nesterov", "maximize", "amsgrad", "is_first_step")) or any(
        settings.get(name) is not None for name in ("grad_scale", "found_inf")
    )


def adam(
    weights: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    _: list[Tensor],
    steps: list[Tensor],
    *,
    lr: Tensor,
    decoupled: bool = False,
    **settings: Any,
) -> Any:
    """Update weights by Adam, or with `decoupled` weight decay by AdamW."""
    if unsupported(settings):
        return NotImplemented
    beta1, beta2, decay = settings["beta1"], settings["beta2"], settings["weight_decay"]
    for weight, grad, mean, square, step in zip(weights, grads, means, squares, steps, strict=True):
        if decay and decoupled:
            weight.mul_(1 - lr * decay)
        grad = grad + decay * weight if decay and not decoupled else grad
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        spread = (square / (1 - beta2**step)).sqrt() + settings["eps"]
        weight.sub_(lr / (1 - beta1**step) * mean / spread)
    return None


def adamw(*args: Any, **settings: Any) -> Any:
    """Update weights by AdamW."""
    return adam(*args, decoupled=True, **settings)


def norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all tensors taken together.

    For the compiler it is written as plain sums. Then masks on gradients are applied while the gradients are read for the
    norm, and a GPU reads all small gradients in one kernel.
    """
    if not is_capturing() or any(t.dtype not in (torch.float32, torch.float64) for t in tensors):
        return cast(Tensor, torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))))
    small = [t.flatten() for t in tensors if on_gpu(t) and t.numel() <= SMALL]
    parts = [t for t in tensors if not on_gpu(t) or t.numel() > SMALL] + ([torch.cat(small)] if small else [])
    return torch.stack([t.square().sum() for t in parts]).sum().sqrt()


def foreach_mul(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a factor; clipping of gradients needs it."""
    for tensor in tensors:
        tensor.mul_(factor)


def foreach_add(tensors: list[Tensor], number: float) -> None:
    """Add a number to tensors; Adam counts its steps by it."""
    for tensor in tensors:
        tensor.add_(number)


def index_add(rows: Tensor, dim: int, index: Tensor, added: Tensor, *, alpha: float = 1) -> Any:
    """Add rows of floats to those of a table by a matrix product. The compiler's own code adds them from several threads at
    once, whose order, and so the rounding, would change from run to run."""
    if dim != 0 or alpha != 1 or rows.dim() < 2 or not rows.is_floating_point():
        return NotImplemented
    own = (torch.arange(len(rows), device=index.device)[:, None] == index).to(rows.dtype)  # (rows, rows added)
    return rows.add_((own @ added.flatten(1)).view_as(rows))


# Matrix products and convolutions, on a GPU


def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU, for which these decompositions are. (Tests replace this function.)"""
    return x.is_cuda


def narrow_product(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """Compute bias + x @ weight for a head: few outputs of many features. A matrix product of that shape would leave most
    processors of the GPU idle."""
    plain = beta == 1 and alpha == 1 and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not on_gpu(x) or not plain or weight.shape[1] > 128 or x.numel() * weight.shape[1] > NARROW:
        return NotImplemented
    return product_as_sums(x, weight).to(bias.dtype) + bias


def product_as_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weight in float32 as elementwise products and sums."""
    return (x.float()[:, None, :] * weight.float().t()).sum(2)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], *settings: Any
) -> Any:
    """Compute the convolution of images with few channels as a matrix product. Its result has its channels last in memory,
    with which later layers are faster; for them the weights get the same layout."""
    if is_few_channels(x, weight, stride, padding, *settings):
        return by_patches(x, weight, bias, stride, padding)
    if layouts_differ(x, weight):
        weight = weight.contiguous(memory_format=torch.channels_last)
        return aten.convolution.default(x, weight, bias, stride, padding, *settings)
    return NotImplemented


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: list[int], stride: list[int], padding: list[int], *settings: Any
) -> Any:
    """Compute the gradients of such a convolution; that of the images themselves is not needed."""
    *rest, needed = settings  # of the images, the weight, the bias
    if not needed[0] and is_few_channels(x, weight, stride, padding, *rest):
        rows = to_channels_last(grad).flatten(0, 2)
        return None, by_patches_backward(rows, x, weight, stride, padding), rows.sum(0) if needed[2] else None
    if layouts_differ(x, weight):
        weight = weight.contiguous(memory_format=torch.channels_last)
        return aten.convolution_backward.default(grad, x, weight, bias, stride, padding, *settings)
    return NotImplemented


def is_few_channels(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], transposed: bool, *more: Any
) -> bool:
    """Return whether this is a plain convolution of images with few channels, whose patches fit into memory."""
    plain = len(stride) == len(padding) == 2 and set(dilation) == {1} and not transposed and more[-1] == 1  # groups
    size = x.numel() // x.shape[1] * weight[0].numel()
    return on_gpu(x) and x.dim() == 4 and plain and x.shape[1] <= FEW and size <= PATCHES


def layouts_differ(x: Tensor, weight: Tensor) -> bool:
    """Return whether the channels of the images are last in memory, but not those of the weights."""
    return on_gpu(x) and is_channels_last(x) and not weight.is_contiguous(memory_format=torch.channels_last)


def is_channels_last(x: Tensor) -> bool:
    """Return whether the channels of images are last in memory."""
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def patches(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """Return the patches that a filter is applied to: (images * positions, channels * kernel). The forward pass and the
    backward pass share them."""
    # The version and the address: images may be changed in place between two convolutions, or get other memory.
    key = id(x), x._version, x.data_ptr(), *weight.shape, *stride, *padding
    if key not in patch_cache:
        padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
        windows = padded.unfold(2, weight.shape[2], stride[0]).unfold(3, weight.shape[3], stride[1])
        patch_cache[key] = x, windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, weight[0].numel())
    return patch_cache[key][1]


def by_patches(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]) -> Tensor:
    """Compute a convolution as the matrix product of all patches with the filters."""
    height = (x.shape[2] + 2 * padding[0] - weight.shape[2]) // stride[0] + 1
    out = torch.mm(patches(x, weight, stride, padding), weight.flatten(1).t())
    return (out if bias is None else out + bias).view(len(x), height, -1, len(weight)).permute(0, 3, 1, 2)


def to_channels_last(x: Tensor) -> Tensor:
    """Return (images, filters, rows, columns) as (images, rows, columns, filters), in this order in memory. It is captured
    as a copy, which the compiler fuses with the operation before it; for a view it could choose another layout."""
    return x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)


def by_patches_backward(grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """Compute the gradient of the weight from that of the output (images * positions, filters): one matrix product for each
    image, then their sum."""
    both = grad, patches(x, weight, stride, padding)
    output_grads, inputs = (rows.view(len(x), len(rows) // len(x), -1) for rows in both)
    return torch.bmm(output_grads.transpose(1, 2), inputs).sum(0).view_as(weight)


# Dropout and pooling of images


def dropout(x: Tensor, share: float, train: bool | None) -> Any:
    """Apply dropout without changing the layout of images whose channels are last. Otherwise the compiler would copy them to
    the other layout and back."""
    if not on_gpu(x) or not is_channels_last(x):
        return NotImplemented
    return tuple(t.permute(0, 3, 1, 2) for t in aten.native_dropout.default(to_channels_last(x), share, train))


def max_pool_backward(
    grad: Tensor, x: Tensor, size: list[int], stride: list[int], padding: list[int], dilation: list[int], *more: Any
) -> Any:
    """Compute the gradient of max pooling with windows that do not overlap: a pixel gets the gradient of its window if it is
    the largest there, else 0. This needs no scattered additions."""
    ceil, largest = more
    disjoint = stride in ([], size) and not any(padding) and set(dilation) == {1} and not ceil
    if not on_gpu(x) or x.dim() != 4 or len(size) != 2 or not disjoint:
        return NotImplemented
    height, width = x.shape[2:]

    def spread(t: Tensor) -> Tensor:
        """Give every pixel the value of its window, and 0 to pixels beyond the last window."""
        wide = t[:, :, :, None, :, None].expand(-1, -1, -1, size[0], -1, size[1]).flatten(4).flatten(2, 3)
        return F.pad(wide, (0, width - wide.shape[3], 0, height - wide.shape[2]))

    pixels = torch.arange(height * width, device=x.device).view(height, width)
    out = torch.where(spread(largest) == pixels, spread(grad), 0)
    return out.contiguous(memory_format=torch.channels_last) if is_channels_last(x) else out


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._fused_sgd_.tensor_lr: sgd,
    aten._fused_adam_.tensor_lr: adam,
    aten._fused_adamw_.tensor_lr: adamw,
    aten._foreach_mul_.Tensor: foreach_mul,
    aten._foreach_add_.Scalar: foreach_add,
    aten.index_add_.default: index_add,
    aten.addmm.default: narrow_product,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.native_dropout.default: dropout,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
CHANGE_LAYOUT = (aten.convolution.default, aten.convolution_backward.default)  # their results have the channels last
