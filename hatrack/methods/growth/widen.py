"""A wider copy of a trunk: its tensors in their new shapes with fresh values, and modules that know their new widths."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hatrack.methods.growth.attributes import set_attention, set_users_widths, set_widths
from hatrack.seeds import generator

ONES = ("weight", "running_var")  # tensors of norms that begin with 1
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
Sizes = Mapping[str, tuple[int, ...]]


def widened(trunk: nn.Module, sizes: Sizes, level: int, seed: int, number: int) -> nn.Module:
    """Return a wider copy of a trunk. Tensors that grow have fresh values everywhere.

    Args:
        trunk: the trunk.
        sizes: the new shapes of the parameters and buffers that grow, by name.
        level: which attributes of modules are brought up to date, see `set_users_widths`.
        seed: decides the fresh values.
        number: how often the trunk has grown before.
    """
    wide = copy.deepcopy(trunk)
    before = {name: p.shape for name, p in wide.named_parameters()}
    names = {id(t): name for name, t in [*wide.named_parameters(), *wide.named_buffers()]}  # one name if it is shared
    new: dict[int, Tensor] = {}
    for module in wide.modules():
        tensors = {key: t for key, t in [*module._parameters.items(), *module._buffers.items()] if t is not None}
        shapes = {key: t.shape for key, t in tensors.items()}
        for key, t in tensors.items():
            name = names[id(t)]
            if name in sizes:
                if id(t) not in new:
                    draw = generator(seed, "growth", number, name)
                    new[id(t)] = _like(t, fresh(module, key, t, sizes[name], draw))
                setattr(module, key, new[id(t)])
        if any(names[id(t)] in sizes for t in tensors.values()):
            set_widths(module, shapes)
    for module in wide.modules():
        if isinstance(module, nn.MultiheadAttention):  # its output layer is a module of its own
            set_attention(module)
    set_users_widths(wide, before, level)
    return wide


def _like(old: Tensor, values: Tensor) -> Tensor:
    """Return values as a parameter or buffer like an old one, with the same order of dimensions in memory."""
    values = values.to(old.device, old.dtype)
    if old.dim() in (4, 5) and not old.is_contiguous():
        values = values.contiguous(memory_format=torch.channels_last if old.dim() == 4 else torch.channels_last_3d)
    return nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values


def fresh(module: nn.Module, key: str, old: Tensor, size: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Return initial values as torch's modules have them: uniform within 1 / sqrt(inputs), norms 1 and 0, tables N(0, 1).

    A parameter of the user's own that is no matrix gets normal values as large as those that it has.

    Args:
        module: the module that has the tensor.
        key: the name of the tensor within the module.
        old: the tensor.
        size: the new shape.
        draw: gives the random numbers.
    """
    if isinstance(module, NORMS):
        return torch.ones(size) if key in ONES else torch.zeros(size)
    if not isinstance(old, nn.Parameter):
        return torch.zeros(size)
    if isinstance(module, nn.PReLU):
        return torch.full(size, 0.25)
    values = torch.empty(size)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return values.normal_(generator=draw)
    inputs = _inputs(module, size)
    if inputs is None:
        spread = old.detach().float().std(correction=0).item() if old.numel() else 0.0
        return values.normal_(0, spread if math.isfinite(spread) else 0.0, generator=draw)
    bound = 1 / math.sqrt(max(1, inputs))
    return values.uniform_(-bound, bound, generator=draw)


def _inputs(module: nn.Module, size: tuple[int, ...]) -> int | None:
    """Return how many values a unit sums up, by which the initial values are scaled; None if the module is not known."""
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return int(module.hidden_size)
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and weight is not None:
        shape = size if len(size) > 1 else weight.shape
        return math.prod(shape[1:])
    return math.prod(size[1:]) if len(size) > 1 and isinstance(module, nn.MultiheadAttention) else None
