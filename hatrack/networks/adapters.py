"""Low-rank adapters (Hu et al., 2021), https://arxiv.org/abs/2106.09685, beside the layers of a frozen trunk

A layer that computes W x computes W x + scale B A x with an adapter, where A is (rank, inputs) and B (outputs, rank). W is
frozen. B is 0 at the start, so that the trunk first computes what it did without adapters. For HAT the outputs of A are
units: with gates g a task computes W x + scale B (g * A x), and uses the row of A and the column of B of every open gate.
"""

import copy
import math
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hatrack.networks.freezing import has_buffers, matches, patterns_of
from hatrack.options import Option, check, expect, nearest
from hatrack.seeds import seeded

Rank = Annotated[int, Option("rank of an adapter: rows of A, columns of B", low=1)]
Scale = Annotated[float, Option("factor of what an adapter adds to its layer", above=0)]
LAYERS = (nn.Linear, nn.Conv2d)  # those that `lora` gives a path
WEIGHTS = (nn.Linear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)  # those whose weights `LoRA` adapts


class Adapter(nn.Module):
    """A frozen layer and the two layers of its adapter.

    Args:
        layer: the layer, an nn.Linear or an nn.Conv2d without groups.
        rank: the rank; the adapter of a layer with fewer inputs or outputs has so many.
        scale: the factor of what the adapter adds.
    """

    ungated: ClassVar = ("up.weight",)  # a column of B is used if the unit that it reads is: see tracing/parameters.py

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        outputs, inputs = layer.weight.shape[:2]
        rank = min(rank, outputs, layer.weight[0].numel())
        self.down: nn.Module
        self.up: nn.Module
        if isinstance(layer, nn.Linear):
            self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        else:
            how: dict[str, Any] = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "padding_mode")}
            self.down = nn.Conv2d(inputs, rank, cast("tuple[int, int]", layer.kernel_size), bias=False, **how)
            self.up = nn.Conv2d(rank, outputs, 1, bias=False)
        nn.init.zeros_(self.up.get_parameter("weight"))
        self.to(layer.weight)  # its device and data type

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for code that asks a layer for its data type."""
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(x))
        result: Tensor = self.layer(x)
        return result + self.scale * added


class AdaptedTrunk(nn.Module):
    """A frozen trunk with adapters. Its modules with buffers, such as norms, stay in evaluation mode; dropout does not."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def train(self, mode: bool = True) -> "AdaptedTrunk":
        """Set the mode of everything but the modules with buffers."""
        super().train(mode)
        for name in frozen_norms(self):
            self.get_submodule(name).training = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.trunk(x)
        return features


def frozen_norms(trunk: nn.Module) -> list[str]:
    """Return the names of the modules with buffers that a trunk with adapters has; of other trunks, none."""
    parts = [f"{name}." if name else "" for name, module in trunk.named_modules() if isinstance(module, AdaptedTrunk)]
    return [name for name, module in trunk.named_modules() if name.startswith(tuple(parts)) and has_buffers(module)]


def lora(trunk: nn.Module, rank: Rank, layers: str = "*", *, scale: Scale = 1.0, seed: int = 0) -> AdaptedTrunk:
    """Freeze a trunk and put low-rank adapters beside its layers. Methods then train the adapters as other weights.

    Args:
        trunk: the trunk, pretrained perhaps. It is copied and not changed itself.
        rank: the rank of the adapters.
        layers: which linear layers and 2d convolutions get one: patterns of names such as "blocks.*.mlp", by commas.
        scale: the factor of what an adapter adds to its layer.
        seed: decides the initial weights A.

    Returns:
        A trunk that first computes the same as the given one.

    Example:
        >>> adapted = hr.lora(trunk, rank=4)
        >>> hr.Network(adapted, tasks=tasks)
        Network(AdaptedTrunk, 43,249 parameters, images 1x28x28, 2 tasks: 10, 3 classes, 39,250 of them frozen)
    """
    expect("the trunk", trunk, nn.Module, "a module such as nn.Sequential(...)")
    expect("layers", layers, str, "patterns of names, separated by commas")
    check(lora, locals())
    if any(isinstance(module, Adapter) for module in trunk.modules()):
        raise ValueError("the trunk has adapters already: lora takes a trunk without them")
    whole = AdaptedTrunk(copy.deepcopy(trunk)).requires_grad_(False)
    names = [name for name, module in whole.trunk.named_modules() if _takes_adapter(module)]
    chosen = _select("layers", names, layers)
    with seeded(seed, "adapters"):
        made = {
            id(layer): Adapter(cast("nn.Linear", layer), rank, scale) for layer in map(whole.trunk.get_submodule, chosen)
        }
    for module in list(whole.modules()):
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fused kernel for evaluation would pass the adapters by
        for key, child in list(module._modules.items()):  # a layer may be registered twice
            if id(child) in made and not isinstance(module, Adapter):
                setattr(module, key, made[id(child)])
    return whole


def _takes_adapter(module: nn.Module) -> bool:
    """Return whether a layer is called as a module with a weight of its own. The projection of nn.MultiheadAttention, whose
    class is derived from nn.Linear, is not called."""
    plain = type(module) in LAYERS and isinstance(module.weight, nn.Parameter)
    return plain and getattr(module, "groups", 1) == 1


def adaptable_weights(trunk: nn.Module, patterns: str) -> list[str]:
    """Return the names of the weights of a trunk that can be adapted: matrices and kernels of linear, convolutional and
    recurrent layers and of attention.

    Args:
        trunk: the trunk.
        patterns: patterns of names, separated by commas.
    """
    names: dict[int, str] = {}  # by the `id` of the parameter: two layers may share one
    for name, module in trunk.named_modules():
        for key, p in module.named_parameters(recurse=False) if isinstance(module, WEIGHTS) else ():
            if p.dim() > 1 and p.is_floating_point() and p.numel():
                names.setdefault(id(p), f"{name}.{key}".lstrip("."))
    return _select("adapt", list(names.values()), patterns)


def _select(option: str, names: list[str], patterns: str) -> list[str]:
    """Return the names that a pattern matches; raise an error for a pattern that matches none."""
    if not names:
        raise ValueError("the trunk has no layer that can have an adapter: a linear or convolutional one is needed")
    for pattern in patterns_of(patterns) or [patterns]:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(f"{option}={pattern!r} matches no layer that can have an adapter; {nearest(pattern, names)}")
    return [name for name in names if any(matches(name, pattern) for pattern in patterns_of(patterns))]


def low_rank_pair(weight: Tensor, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Make the adapter of one weight: A, drawn as PyTorch draws the weights of a linear layer, and B, all 0.

    Args:
        weight: the weight (outputs, ...).
        rank: the rank; at most the outputs, and the weights of one output.

    Returns:
        A (rank, weights of one output) and B (outputs, rank), whose product has the shape of the flattened weight.
    """
    outputs, inputs = len(weight), weight[0].numel()
    rank, bound = min(rank, outputs, inputs), 1 / math.sqrt(inputs)
    a = torch.empty(rank, inputs).uniform_(-bound, bound).to(weight)
    return nn.Parameter(a), nn.Parameter(weight.new_zeros(outputs, rank))
