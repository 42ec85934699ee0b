"""Checks of the trunk that a network is built of: its tensors, their precision, and its features on the example."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from hatrack.text import shorten
from hatrack.tracing.units import last_layer


def check_tensors(trunk: nn.Module) -> None:
    """Raise an error in one line if a trunk holds something else than dense tensors."""
    state = trunk.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"the trunk's state holds {name!r}, of type {type(value).__name__}: only tensors can be kept")
    for name, value in {**state, **dict(trunk.named_buffers())}.items():  # also buffers that no file holds
        if value.layout != torch.strided:
            raise ValueError(f"the trunk's {name!r} is sparse: only dense tensors can be kept; .to_dense() makes one")


def warn_of_unregistered(trunk: nn.Module) -> None:
    """Warn of layers and parameters that PyTorch does not know, since an attribute holds them in a list, say. It may be
    meant so: a layer that is built with the same values every time."""
    known = {id(t) for t in (*trunk.parameters(), *trunk.buffers())}
    held = {
        f"{name}.{attribute}".removeprefix("."): _parameters_and_buffers(value)
        for name, module in trunk.named_modules()
        for attribute, value in vars(module).items()
    }
    if unknown := [name for name, tensors in held.items() if any(id(t) not in known for t in tensors)]:
        warnings.warn(
            f"the trunk keeps layers or parameters in {shorten(', '.join(map(repr, unknown)), 200)} that PyTorch does not "
            "register: no method trains them and no file holds them, so that a saved method loads only into a trunk with "
            "the same values; nn.ModuleList, nn.ModuleDict or nn.ParameterList in place of a list or dict registers them",
            stacklevel=3,
        )


def _parameters_and_buffers(value: Any) -> list[Tensor]:
    """Return the parameters and buffers in an attribute: in modules and parameters, also within lists and dictionaries."""
    leaves = tree_leaves(value)
    inner = [t for leaf in leaves if isinstance(leaf, nn.Module) for t in (*leaf.parameters(), *leaf.buffers())]
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)] + inner


def check_gradients(trunk: nn.Module) -> None:
    """Raise an error in one line if a layer that is trained gives sparse gradients, which can't be masked or clipped."""
    for name, module in trunk.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"the trunk's {name!r} has sparse gradients, which can't be masked: {type(module).__name__}(sparse=False)"
            )


def check_precision(trunk: nn.Module, images: Tensor, what: str, *, tokens: bool = True) -> None:
    """Raise an error in one line if a trunk computes in another precision than that of images.

    Args:
        trunk: the trunk.
        images: the images.
        what: what they are, for the error.
        tokens: whole numbers (int64) are token ids, which have no precision.
    """
    kinds = {p.dtype for p in trunk.parameters() if p.is_floating_point()}
    if kinds and images.dtype not in kinds and not (tokens and images.dtype == torch.int64):
        seen, own = (str(kind).removeprefix("torch.") for kind in (images.dtype, min(kinds, key=str)))
        wrong = "images" if torch.float32 in kinds else "trunk"
        raise ValueError(f"{what}: images are {seen}, but the trunk's weights {own}; {wrong}.float() makes them float32")


def count_features(trunk: nn.Module, example: Tensor) -> int:
    """Run a trunk on the example and return the width of the feature vector."""
    mode, versions = trunk.training, _versions(trunk)
    with torch.no_grad():
        try:
            out = trunk.eval()(example)
        except (RuntimeError, ValueError) as error:
            check_precision(trunk, example, "the example", tokens=False)
            raise cannot_run(error, example) from error
    trunk.train(mode)
    if not isinstance(out, Tensor) or out.dim() != 2 or len(out) != len(example):
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"the trunk must turn a batch of images into (batch, features), not {got}")
    if changed := _changing(trunk, example, versions):
        warnings.warn(
            f"the trunk changes {shorten(', '.join(map(repr, changed)), 200)} also in evaluation mode: answers of finished "
            "tasks can change with every forward pass, and then learning and saving are refused; a trunk should change its "
            "tensors in training mode only",
            stacklevel=4,
        )
    return out.shape[1]


def _tensors(trunk: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, but for those of lazy layers that have no shape yet."""
    found = {**dict(trunk.named_parameters()), **dict(trunk.named_buffers())}
    return {name: tensor for name, tensor in found.items() if not is_lazy(tensor)}


def _versions(trunk: nn.Module) -> dict[str, int]:
    """Return how often each tensor was written in place."""
    return {name: 0 if tensor.is_inference() else tensor._version for name, tensor in _tensors(trunk).items()}


def _changing(trunk: nn.Module, example: Tensor, before: dict[str, int]) -> list[str]:
    """Return what a forward pass in evaluation mode has written: parameters, and buffers that another pass changes again. A
    buffer that every pass writes before it is read, such as a cache, does no harm.

    Args:
        trunk: the trunk, after a pass.
        example: its input.
        before: how often each tensor was written before that pass.
    """
    tensors = _tensors(trunk)
    written = [name for name, version in _versions(trunk).items() if before.get(name, version) != version]
    then = {name: tensors[name].clone() for name in written}
    if written:
        mode = trunk.training
        with torch.no_grad():
            trunk.eval()(example)
        trunk.train(mode)
    now = _tensors(trunk)
    return [name for name in written if isinstance(now[name], nn.Parameter) or not torch.equal(then[name], now[name])]


def cannot_run(error: Exception, example: Tensor) -> Exception:
    """Return the error to raise if a trunk fails on the example: what torch says in one line, or that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error):
        return error
    said = " ".join(str(error).split())[:200]
    return ValueError(f"the trunk can't be run on an example of shape {tuple(example.shape)}: {said}")


def without_last_layer(model: nn.Module, example: Tensor) -> nn.Module:
    """Return a copy of a classifier without its last layer: the one whose units are the outputs, in order."""
    trunk = copy.deepcopy(model)
    parent, _, own = last_layer(trunk, example).rpartition(".")
    setattr(trunk.get_submodule(parent), own, nn.Identity())
    return trunk
