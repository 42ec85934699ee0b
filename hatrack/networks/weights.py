"""Weights of a trunk from a file: one of `hatrack.save` or --keep-model, safetensors of others, or a state_dict of torch."""

import io
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_safetensors
from torch import Tensor, nn

from hatrack.files import tensors as tensor_files
from hatrack.files.atomic import read_bytes
from hatrack.networks.foreign import ForeignTrunk

SAVED = "state.net.trunk."  # the prefix of the trunk's tensors in a file of `hatrack.save`
WRAPPED = ("state_dict", "model", "model_state_dict")  # keys under which training scripts keep a state_dict
WRITTEN = (b"PK", b"\x80")  # how files of torch.save begin, and those of its form before torch 1.6
INNER = "model."  # the prefix of a trunk's tensors in `foreign.ForeignTrunk`


def load_weights(trunk: nn.Module, path: Path) -> None:
    """Give a trunk the weights in a file.

    A prefix that all names in the file have, such as "module." or "vit.", is left out. Tensors that the trunk does not have,
    such as those of a classifier, are not used, which a warning says.

    Args:
        trunk: the trunk; its values are overwritten.
        path: the file.

    Raises:
        ValueError: if the file can't be read, or the trunk has a tensor that the file lacks or has in another shape.
    """
    wanted = trunk.state_dict()
    tensors = read_weights(path)
    found = _best_fit(tensors, wanted)
    if isinstance(trunk, ForeignTrunk) and wanted.keys() - found.keys():
        found = _best_fit(trunk.renamed(tensors), wanted)
    same = {name: t.to(wanted[name].dtype) for name, t in found.items() if name in wanted}
    if wrong := tensor_files.differences(wanted, same):
        raise ValueError(f"{path} does not fit the trunk: {wrong}")
    trunk.load_state_dict(same)
    if left := [name for name in found if name not in wanted]:
        more = f", ... ({len(left)} in all)" if len(left) > 3 else ""
        warnings.warn(f"{path.name}: the trunk has no {', '.join(left[:3])}{more}: not used", stacklevel=2)


def _best_fit(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names that fit the trunk best: as they are, without the first part, or with INNER."""
    prefixes = dict.fromkeys(["", *(f"{name.partition('.')[0]}." for name in tensors if "." in name)])
    forms = [
        {added + name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        for prefix in prefixes
        for added in ("", INNER)
    ]
    return max(forms, key=lambda form: sum(name in wanted and t.shape == wanted[name].shape for name, t in form.items()))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a file by name; of a file of `hatrack.save`, those of the trunk by their names in it."""
    data = read_bytes(path, most=None)
    if path.suffix != ".safetensors":
        return _from_torch(path, data)
    try:
        size = int.from_bytes(data[:8], "little")
        ours = "hatrack" in (json.loads(data[8 : 8 + size]).get("__metadata__") or {})
        tensors = tensor_files.load(path)[0] if ours else read_safetensors(data)
    except (SafetensorError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{path} holds no safetensors ({type(error).__name__})") from None
    trunk = {name.removeprefix(SAVED): t for name, t in tensors.items() if name.startswith(SAVED)}
    return trunk or tensors


def _from_torch(path: Path, data: bytes) -> dict[str, Tensor]:
    """Read a state_dict that torch.save wrote. Nothing but tensors and plain values is loaded, never code."""
    try:
        state: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no pickle may raise anything
        if not data.startswith(WRITTEN):
            said = "torch.save did not write it, and its name does not end in .safetensors"
            raise ValueError(f"{path} holds no state_dict: {said}") from None
        said = f"{type(error).__name__}: {error}".split("\n")[0][:120]
        raise ValueError(f"{path} holds no state_dict of plain tensors ({said})") from None
    for key in WRAPPED:
        state = state[key] if isinstance(state, dict) and isinstance(state.get(key), dict) else state
    if not isinstance(state, dict) or not state or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError(f"{path} holds no state_dict: names and their tensors are expected")
    return {str(name): tensor for name, tensor in state.items()}
