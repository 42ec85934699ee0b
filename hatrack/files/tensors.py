"""Files of tensors and metadata: safetensors with a digest, written atomically and without pickle."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as safetensors_of
from torch import Tensor

from hatrack.files.atomic import is_plain, read_bytes, write
from hatrack.files.limits import TEXT

SHOWN = 3  # differences that an error message names


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], *, state: bool = False) -> None:
    """Write a file atomically: an existing one is replaced when the new one is complete.

    Args:
        path: the file.
        tensors: tensors by name; they may be on any device.
        metadata: anything that JSON can represent; nan and infinities are allowed.
        state: the file is a state of a run, which only the user may read; a link of its name is replaced, not followed.
    """
    write_copies(path, host_copies(tensors), json.dumps(metadata, allow_nan=True), state=state)


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors in the host's memory, contiguous and none sharing memory with another."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def write_copies(path: Path, copies: dict[str, Tensor], text: str, *, state: bool = False) -> None:
    """Write a file as `save` does, of what `host_copies` returned and of metadata as JSON. It may run in any thread."""
    data = _in_order(safetensors_of(copies, metadata={"hatrack": text, "digest": digest(copies, text)}))
    write(path, data, follow=not state, private=state)


def _in_order(data: bytes) -> bytes:
    """Return the bytes of a safetensors file with its metadata sorted by name: safetensors writes them in any order, and
    equal content shall give equal files."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(data)[8 + size :]))


def written_digest(path: Path) -> str:
    """Return the digest that a file of `save` gives of its content, of which only the header is read; "" if it gives none.

    `load` compares the digest with the content.
    """
    return str(_header(path).get("digest", ""))


def written_kind(path: Path) -> str:
    """Return what a file of `save` says it holds, "method" or "guard"; only its header is read. "" if it says nothing."""
    try:
        return str(json.loads(_header(path)["hatrack"])["kind"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _header(path: Path) -> dict[str, Any]:
    """Return the metadata in the header of a file of safetensors; empty if there are none."""
    if not is_plain(path):
        return {}
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            found = json.loads(file.read(size))["__metadata__"] if size <= TEXT else {}
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that `save` wrote; raise a ValueError if it is damaged or something else.

    Returns:
        The tensors by name, on the CPU, and the metadata.
    """
    data = read_bytes(path, most=None)  # nothing in it is compressed
    try:
        size = int.from_bytes(data[:8], "little")
        if size > TEXT:
            raise ValueError(f"a header of {size:,} bytes")
        tensors = read_safetensors(data)
        header = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        text = header["hatrack"]
        metadata = json.loads(text)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of hatrack, or it is incomplete ({type(error).__name__})") from None
    if header.get("digest") != digest(tensors, text):
        raise ValueError(f"{path} is damaged: its digest differs")
    if not isinstance(metadata, dict):
        raise ValueError(f"{path} is not a file of hatrack")
    return tensors, metadata


def load_kind(
    path: Path, kind: str, newest: int, fields: Mapping[str, type], writer: str
) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Read a file of one kind. Raise a ValueError if it holds another one, or a format that this version does not know.

    Args:
        path: the file.
        kind: what it must hold, as its metadata says: "method" or "guard".
        newest: the newest format that can be read.
        fields: the types of the metadata that every such file has.
        writer: the function that writes such files, for the error message.

    Returns:
        The tensors, the metadata, and the names of fields that are missing or have another type.
    """
    tensors, metadata = load(path)
    number = metadata.get("format")
    if metadata.get("kind") != kind or type(number) is not int:
        raise ValueError(f"{path} holds no {kind}: it was not written by {writer}")
    if number > newest:
        raise ValueError(f"{path} has format {number}, newer than {newest}, the newest this version can read")
    return tensors, metadata, [name for name, wanted in fields.items() if type(metadata.get(name)) is not wanted]


def digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return the SHA-256 of a text and of the names, types, shapes and bits of tensors."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        found.update(t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b"")
    return found.hexdigest()


def differences(wanted: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> str:
    """Describe how tensors differ from those wanted in names, shapes and types; "" if they do not."""
    found = [f"it lacks {name}" for name in sorted(wanted) if name not in there]
    found += [f"it has {name} as well" for name in there if name not in wanted]
    for name, have in there.items():  # in the order of the trunk: that of a file says nothing
        value = wanted.get(name, have)
        if have.shape != value.shape:
            found.append(f"{name} is {tuple(have.shape)} instead of {tuple(value.shape)}")
        elif have.dtype != value.dtype:
            found.append(f"{name} is of type {have.dtype} instead of {value.dtype}")
    return ", ".join(found[:SHOWN]) + (f", and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
