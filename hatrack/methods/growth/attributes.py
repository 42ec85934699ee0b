"""The widths that modules keep as attributes: `in_features`, `num_heads`, `self.hidden`, and so on."""

from collections.abc import Mapping

import torch
from torch import nn

HEADS = ("head", "group")  # in the names of attributes that count parts of equal width
UNSEEN = (nn.Unflatten, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # they have widths, but perhaps no parameters
Shapes = Mapping[str, torch.Size]  # by the names of a module's own tensors, and by the names within its parts


def heads_of(module: nn.Module) -> dict[str, int]:
    """Return the attributes of a module that count heads or groups; those of torch's own modules are known by type."""
    if _of_torch(module) and not isinstance(module, nn.MultiheadAttention):
        return {}
    return {name: value for name, value in vars(module).items() if _counts(name, value)}


def _counts(name: str, value: object) -> bool:
    named = any(word in name for word in HEADS) and "dim" not in name and "size" not in name
    return named and isinstance(value, int) and not isinstance(value, bool) and value > 1


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def set_widths(module: nn.Module, old: Shapes) -> None:
    """Bring the attributes of one of torch's modules up to date with the shapes of its tensors.

    Args:
        module: the module, whose tensors have their new shapes.
        old: the shapes that they had.
    """
    new = {name: t.shape for name, t in [*module._parameters.items(), *module._buffers.items()] if t is not None}
    if isinstance(module, nn.modules.conv._ConvNd):
        if module.groups > 1:  # the channels of a group keep their number
            module.groups = module.groups * new["weight"][0] // old["weight"][0]
        ends = [new["weight"][0], new["weight"][1] * module.groups]
        module.in_channels, module.out_channels = ends if module.transposed else ends[::-1]
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = new["weight"]
    elif isinstance(module, nn.modules.batchnorm._NormBase) and new:
        module.num_features = next(shape[0] for name, shape in new.items() if name != "num_batches_tracked")
    elif isinstance(module, nn.GroupNorm) and module.affine:
        module.num_groups = round(module.num_groups * new["weight"][0] / old["weight"][0])
        module.num_channels = new["weight"][0]
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.elementwise_affine:
        module.normalized_shape = tuple(new["weight"])
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        module.embedding_dim = new["weight"][1]
    elif isinstance(module, nn.RNNBase):
        _set_recurrent(module, new)
    elif isinstance(module, nn.RNNCellBase):
        module.hidden_size, module.input_size = new["weight_hh"][1], new["weight_ih"][1]
    elif isinstance(module, nn.PReLU):
        module.num_parameters = new["weight"][0]


def _set_recurrent(module: nn.RNNBase, new: Shapes) -> None:
    module.input_size = new["weight_ih_l0"][1]
    module.hidden_size = new["weight_hr_l0"][1] if module.proj_size else new["weight_hh_l0"][1]
    module.proj_size = new["weight_hr_l0"][0] if module.proj_size else 0
    module._init_flat_weights()


def set_attention(module: nn.MultiheadAttention) -> None:
    """Bring the attributes of an attention module up to date, when its parts have their new shapes."""
    width = module.out_proj.weight.shape[0]
    module.num_heads, module.embed_dim = width // module.head_dim, width
    same = module.in_proj_weight is not None
    module.kdim = width if same else module.k_proj_weight.shape[1]
    module.vdim = width if same else module.v_proj_weight.shape[1]


def set_users_widths(trunk: nn.Module, old: Shapes, level: int) -> None:
    """Bring attributes that no tensor shows up to date.

    Args:
        trunk: the trunk, whose parameters have their new shapes.
        old: the shapes that they had.
        level: 0: numbers of heads and groups of the user's modules, 1: also the widths of torch's modules without
            parameters, 2: also whole numbers of the user's modules that equal an old width, and tuples of them, 3: none.
    """
    if level == 3:
        return
    new = {name: p.shape for name, p in trunk.named_parameters()}
    for path, module in trunk.named_modules():
        prefix = f"{path}." if path else ""
        pairs = _pairs(old, {name: shape for name, shape in new.items() if name.startswith(prefix)})
        if _of_torch(module):
            if level >= 1 and isinstance(module, UNSEEN) and not list(module.parameters()):
                _exchange(module, dict(reversed(_pairs(old, new))))
            continue
        for name, count in heads_of(module).items():
            grown = [count * b // a for a, b in pairs if a % count == 0 and count * b % a == 0]
            setattr(module, name, grown[0] if grown else count)
        if level >= 2:
            _exchange(module, dict(reversed(pairs)))


def _exchange(module: nn.Module, table: Mapping[int, int]) -> None:
    """Exchange the attributes of a module that equal an old width by the new one, but not numbers of heads."""
    for name, value in list(vars(module).items()):
        if not _counts(name, value):
            vars(module)[name] = _exchanged(value, table)


def _pairs(old: Shapes, new: Shapes) -> list[tuple[int, int]]:
    return [(a, b) for name in new for a, b in zip(old[name], new[name], strict=True) if a != b]


def _exchanged(value: object, table: Mapping[int, int]) -> object:
    """Return a whole number, or a tuple of them, with old widths exchanged by new ones."""
    if isinstance(value, tuple) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        sizes = [table.get(v, v) for v in value]
        return torch.Size(sizes) if isinstance(value, torch.Size) else tuple(sizes)
    return table.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value
