"""Record the calls of layers in a forward pass, from which the gradients of single examples follow."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LAYERS = {  # functions of (input, parameters, ...) that treat every row of the input separately
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    F.batch_norm, F.group_norm, F.layer_norm, F.instance_norm, F.embedding,
}  # fmt: skip


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

    def per_example(self, delta: Tensor) -> Tensor:
        """Compute the parameter's gradients (examples, *shape) from those of the output."""

        def single(row: Tensor, delta: Tensor) -> Any:
            def layer(own: Tensor) -> Tensor:
                return _call(self.function, {**self.given, 0: row[None], self.key: own})

            return vjp(layer, self.given[self.key])[1](delta[None])[0]

        gradients: Tensor = vmap(single)(self.given[0], delta)
        return gradients


def _call(function: Callable[..., Tensor], given: dict[int | str, Any]) -> Tensor:
    """Call a function with arguments by position or name."""
    named = {key: value for key, value in given.items() if isinstance(key, str)}
    return function(*(given[position] for position in range(len(given) - len(named))), **named)


class RecordLayerCalls(TorchFunctionMode):
    """Within it, layers take these parameters as constants, and every call that uses one of them is recorded."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: dict[Tensor, list[LayerCall]] = {p: [] for p in parameters}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
