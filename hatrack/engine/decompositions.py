"""Operations spelled out for the compiler: one call to torch becomes plain arithmetic, which it joins with what stands
around it, or products that a GPU is quicker at. `Compiled` takes those in FORMULAS; a step that is not compiled takes an
update from here only where torch has none for the weights it is given, and its `norm` is torch's.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
NARROW = 2**24  # products of numbers in a matrix product: up to here a narrow one is quicker as plain sums
SMALL = 2**17  # numbers in a gradient: up to here a GPU takes longer to begin with it than to read it
FEW = 4  # channels of an image, for which convolutions have no good kernels
PATCHES = 2**25  # numbers in all patches of a batch of images: above it they would take too much memory
seen: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # images and their patches, while a step is noted down


# Optimizers: in torch each is one call for all weights


def sgd(weights: list[Tensor], grads: list[Tensor], velocities: list[Tensor], *, lr: Tensor, **how: Any) -> Any:
    """SGD, with momentum perhaps, whose velocities exist from the beginning."""
    if unusual(how):
        return NotImplemented
    for number, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        step = grad + how["weight_decay"] * weight if how["weight_decay"] else grad
        if how["momentum"]:
            step = velocities[number].mul_(how["momentum"]).add_(step)
        weight.sub_(lr * step)
    return None


def unusual(how: dict[str, Any]) -> bool:
    """Ways that an update may take and that are not spelled out here."""
    return any(how.get(name) for name in ("dampening", "nesterov", "maximize", "amsgrad", "is_first_step")) or any(
        how.get(name) is not None for name in ("grad_scale", "found_inf")
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
    **how: Any,
) -> Any:
    """Adam; with decoupled decay AdamW."""
    if unusual(how):
        return NotImplemented
    one, two, decay = how["beta1"], how["beta2"], how["weight_decay"]
    for weight, grad, mean, square, step in zip(weights, grads, means, squares, steps, strict=True):
        if decay and decoupled:
            weight.mul_(1 - lr * decay)
        grad = grad + decay * weight if decay and not decoupled else grad
        mean.lerp_(grad, 1 - one)
        square.mul_(two).addcmul_(grad, grad, value=1 - two)
        spread = (square / (1 - two**step)).sqrt() + how["eps"]
        weight.sub_(lr / (1 - one**step) * mean / spread)
    return None


def adamw(*args: Any, **how: Any) -> Any:
    return adam(*args, decoupled=True, **how)


def noting() -> bool:
    """Is what happens now noted down, to be compiled?"""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all of them taken together. Compiled by plain sums: masks on gradients are applied while they are read for
    it, and a GPU reads all small ones in one go."""
    if not noting() or any(t.dtype not in (torch.float32, torch.float64) for t in tensors):
        return cast(Tensor, torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))))
    small = [t.flatten() for t in tensors if on_gpu(t) and t.numel() <= SMALL]
    parts = [t for t in tensors if not on_gpu(t) or t.numel() > SMALL] + ([torch.cat(small)] if small else [])
    return torch.stack([t.square().sum() for t in parts]).sum().sqrt()


def scaled(tensors: list[Tensor], by: Tensor) -> None:
    """Clipping; and below, Adam's counts of steps."""
    for tensor in tensors:
        tensor.mul_(by)


def counted(tensors: list[Tensor], by: float) -> None:
    for tensor in tensors:
        tensor.add_(by)


# Products


def on_gpu(x: Tensor) -> bool:
    """These formulas are for GPUs. (Tests pretend.)"""
    return x.is_cuda


def narrow_product(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """A head: few outputs of many features. As a matrix product it would keep a few of the GPU's processors busy."""
    plain = beta == 1 and alpha == 1 and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not on_gpu(x) or not plain or weight.shape[1] > 128 or x.numel() * weight.shape[1] > NARROW:
        return NotImplemented
    return sums(x, weight).to(bias.dtype) + bias


def sums(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight in float32."""
    return (x.float()[:, None, :] * weight.float().t()).sum(2)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], *how: Any) -> Any:
    """Images have few channels; what comes out has its channels last in memory, as later layers like it."""
    if few(x, weight, stride, padding, *how):
        return by_patches(x, weight, bias, stride, padding)
    if mixed(x, weight):
        last = weight.contiguous(memory_format=torch.channels_last)
        return aten.convolution.default(x, last, bias, stride, padding, *how)
    return NotImplemented


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: list[int], stride: list[int], padding: list[int], *how: Any
) -> Any:
    """The same on the way back; the gradient of an image nobody needs."""
    *rest, wanted = how
    if not wanted[0] and few(x, weight, stride, padding, *rest):
        rows = rows_of(grad).flatten(0, 2)
        return None, by_patches_backward(rows, x, weight, stride, padding), rows.sum(0) if wanted[2] else None
    if mixed(x, weight):
        last = weight.contiguous(memory_format=torch.channels_last)
        return aten.convolution_backward.default(grad, x, last, bias, stride, padding, *how)
    return NotImplemented


def few(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], transposed: bool, *more: Any
) -> bool:
    """Is it the convolution of images with few channels?"""
    plain = len(stride) == len(padding) == 2 and set(dilation) == {1} and not transposed and more[-1] == 1  # groups
    size = x.numel() // x.shape[1] * weight[0].numel()
    return on_gpu(x) and x.dim() == 4 and plain and x.shape[1] <= FEW and size <= PATCHES


def mixed(x: Tensor, weight: Tensor) -> bool:
    """Are the channels of the images last in memory, but not those of the weights?"""
    return on_gpu(x) and channels_last(x) and not weight.is_contiguous(memory_format=torch.channels_last)


def channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def patches(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """The patches that a filter sees: (images * places, channels * kernel). Forward and backward pass share them."""
    # It may be changed in place between two convolutions, or given other memory.
    key = id(x), x._version, x.data_ptr(), *weight.shape, *stride, *padding
    if key not in seen:
        padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
        places = padded.unfold(2, weight.shape[2], stride[0]).unfold(3, weight.shape[3], stride[1])
        seen[key] = x, places.permute(0, 2, 3, 1, 4, 5).reshape(-1, weight[0].numel())
    return seen[key][1]


def by_patches(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]) -> Tensor:
    """A convolution as a matrix product."""
    height = (x.shape[2] + 2 * padding[0] - weight.shape[2]) // stride[0] + 1
    out = torch.mm(patches(x, weight, stride, padding), weight.flatten(1).t())
    return (out if bias is None else out + bias).view(len(x), height, -1, len(weight)).permute(0, 3, 1, 2)


def rows_of(x: Tensor) -> Tensor:
    """(images, filters, rows, columns) as (images, rows, columns, filters), in this order in memory. It is noted down as a
    copy, which the compiler joins with what makes x: of a mere view it might lay out the memory otherwise."""
    return x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)


def by_patches_backward(grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """The gradient of its weight, from the rows of its own: a product per image, then their sum."""
    mine, saw = (rows.view(len(x), len(rows) // len(x), -1) for rows in (grad, patches(x, weight, stride, padding)))
    return torch.bmm(mine.transpose(1, 2), saw).sum(0).view_as(weight)


# What images go through besides


def dropout(x: Tensor, share: float, train: bool | None) -> Any:
    """Images whose channels are last stay so: as seen by the compiler, they would be copied for it, and again after it."""
    if not on_gpu(x) or not channels_last(x):
        return NotImplemented
    return tuple(t.permute(0, 3, 1, 2) for t in aten.native_dropout.default(rows_of(x), share, train))


def max_pool_backward(
    grad: Tensor, x: Tensor, size: list[int], stride: list[int], padding: list[int], dilation: list[int], *more: Any
) -> Any:
    """Windows side by side: a place gets the gradient of its window or nothing, which needs no sums at scattered places."""
    ceil, found = more
    apart = stride in ([], size) and not any(padding) and set(dilation) == {1} and not ceil
    if not on_gpu(x) or x.dim() != 4 or len(size) != 2 or not apart:
        return NotImplemented
    height, width = x.shape[2:]

    def spread(t: Tensor) -> Tensor:
        """Of windows, to all their places; places beyond the last window get nothing."""
        wide = t[:, :, :, None, :, None].expand(-1, -1, -1, size[0], -1, size[1]).flatten(4).flatten(2, 3)
        return F.pad(wide, (0, width - wide.shape[3], 0, height - wide.shape[2]))

    places = torch.arange(height * width, device=x.device).view(height, width)
    out = torch.where(spread(found) == places, spread(grad), 0)
    return out.contiguous(memory_format=torch.channels_last) if channels_last(x) else out


FORMULAS: dict[Any, Callable[..., Any]] = {
    aten._fused_sgd_.tensor_lr: sgd,
    aten._fused_adam_.tensor_lr: adam,
    aten._fused_adamw_.tensor_lr: adamw,
    aten._foreach_mul_.Tensor: scaled,
    aten._foreach_add_.Scalar: counted,
    aten.addmm.default: narrow_product,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.native_dropout.default: dropout,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
CHANGE_LAYOUT = (aten.convolution.default, aten.convolution_backward.default)  # what comes out has its channels last
