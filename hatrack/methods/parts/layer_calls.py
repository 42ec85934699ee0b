"""Record the calls of layers in a forward pass, from which the gradients of single examples follow."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
NORMS = {F.batch_norm, F.group_norm, F.layer_norm, F.instance_norm}
LAYERS = {F.linear, F.embedding} | CONVOLUTIONS | NORMS  # functions of (input, parameters, ...) that treat rows separately
READS = {  # functions by which Python sees the values of a tensor
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist,
    torch.equal, torch.allclose,
}  # fmt: skip
CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")  # the arguments of F.conv2d in order


class Unfolding(NamedTuple):
    """A convolution as a matrix product: the arguments of `F.unfold`, and its number of groups."""

    shape: tuple[int, ...]  # of the weight: (filters, channels, *kernel)
    how: dict[str, Any]
    groups: int

    def gradients(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return the gradients of the weight (groups, *shape) from inputs and gradients of outputs (groups, examples, ...).

        With the patches of the input as columns u (numbers of a patch, positions), an example's gradient is delta u^T. The
        positions of all examples of a group stand side by side, so the same product adds them up.
        """
        groups, examples = x.shape[:2]

        def side_by_side(rows: Tensor) -> Tensor:  # to (groups of examples * groups of channels, channels, positions)
            parts = rows.reshape(groups, examples, self.groups, rows.shape[1] // self.groups, -1).permute(0, 2, 3, 1, 4)
            return parts.reshape(groups * self.groups, parts.shape[2], -1)

        x, delta = x.flatten(0, 1), delta.flatten(0, 1)
        columns = side_by_side(F.unfold(x[:, :, None] if x.dim() == 3 else x, **self.how))
        return (side_by_side(delta) @ columns.transpose(1, 2)).view(groups, *self.shape)


class LayerCall(NamedTuple):
    """One call of a layer, seen from one of its parameters."""

    function: Callable[..., Tensor]
    given: dict[int | str, Any]  # the arguments by position or name, the input at position 0, parameters as constants
    key: int | str  # the position or name of this parameter
    probe: Tensor  # zeros that are added to the output: their gradient is the gradient of the output

    @property
    def linear_rows(self) -> bool:
        """Whether this is a linear layer with one row per example."""
        return self.function is F.linear and self.given[0].dim() == 2 and self.probe.dim() == 2

    @property
    def rows(self) -> set[int]:
        """The number of rows of the input, and of the output."""
        return {len(self.given[0]), len(self.probe)}

    @property
    def unfolding(self) -> Unfolding | None:
        """The convolution as a matrix product, if this is one in one or two dimensions and the parameter is its weight."""
        if self.function not in (F.conv1d, F.conv2d) or self.key not in (1, "weight"):
            return None
        how: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        how |= {CONVOLUTION[key] if isinstance(key, int) else key: value for key, value in self.given.items()}
        weight = how["weight"]
        if self.given[0].dim() != weight.dim() or isinstance(how["padding"], str):
            return None
        line = weight.dim() == 3
        sizes: dict[str, Any] = {
            "kernel_size": weight.shape[2:],
            **{key: how[key] for key in ("stride", "padding", "dilation")},
        }
        unit = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}  # of the height that a line is given
        for key, value in sizes.items():
            pair = (value,) * (weight.dim() - 2) if isinstance(value, int) else tuple(value)
            sizes[key] = (unit[key], *pair) if line else pair
        return Unfolding(tuple(weight.shape), sizes, how["groups"])

    def numbers(self, size: int) -> int:
        """How many numbers the gradient of a group of examples takes, or its patches if these are more; at least 1."""
        own: Tensor = self.given[self.key]
        unfolding = self.unfolding
        patches = unfolding.groups * own[0].numel() * self.probe[0, 0].numel() if unfolding else 0
        return max(1, own.numel(), size * patches)

    def per_group(self, delta: Tensor, part: slice, size: int) -> Tensor:
        """Compute the parameter's gradients (groups, *shape) from those of the output; that of a group is summed over it.

        Args:
            delta: the gradients of the output, for all examples.
            part: which examples.
            size: how many examples, one after the other, are a group.
        """
        x, delta = in_groups(self.given[0][part], size), in_groups(delta[part], size)
        if unfolding := self.unfolding:
            return unfolding.gradients(x, delta)
        if self.linear_rows:
            return delta.transpose(1, 2) @ x if self.key in (1, "weight") else delta.sum(1)
        if self.function in CONVOLUTIONS and self.key in (2, "bias"):
            return delta.flatten(3).sum((1, 3))

        def single(rows: Tensor, delta: Tensor) -> Any:
            def layer(own: Tensor) -> Tensor:
                return _call(self.function, {**self.given, 0: rows, self.key: own})

            return vjp(layer, self.given[self.key])[1](delta)[0]

        return vmap(single)(x, delta)  # type: ignore[no-any-return]


def in_groups(rows: Tensor, size: int) -> Tensor:
    """Return rows one after the other in groups: (groups, size, ...)."""
    return rows.reshape(len(rows) // size, size, *rows.shape[1:])


def _call(function: Callable[..., Tensor], given: dict[int | str, Any]) -> Tensor:
    """Call a function with arguments by position or name."""
    named = {key: value for key, value in given.items() if isinstance(key, str)}
    return function(*(given[position] for position in range(len(given) - len(named))), **named)


class RecordLayerCalls(TorchFunctionMode):
    """Within it, layers take these parameters as constants, and every call that uses one of them is recorded.

    Attributes:
        calls: the calls of layers by parameter.
        reads: whether Python has read a value of a tensor, so that it may run other operations on other images.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: dict[Tensor, list[LayerCall]] = {p: [] for p in parameters}
        self.reads = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads |= func in READS
        given: dict[int | str, Any] = {**dict(enumerate(args)), **(kwargs or {})}
        own = {key: value for key, value in given.items() if isinstance(value, nn.Parameter) and value in self.calls}
        if func not in LAYERS or not own or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        given.update({key: parameter.detach() for key, parameter in own.items()})
        given = {0: given.pop("input"), **given} if "input" in given else given
        output = _call(func, given)
        probe = torch.zeros_like(output, requires_grad=True)
        for key, parameter in own.items():
            self.calls[parameter].append(LayerCall(func, given, key, probe))
        return output + probe
