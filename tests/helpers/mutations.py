"""Ways to damage a file. All choices come from a seeded generator, so that a case can be repeated from its number."""

import io
import json
import math
import pickle
import random
import re
import struct
import zipfile
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy

from hatrack.files import tensors

HUGE = (2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
DTYPES = ("F64", "F16", "BF16", "BOOL", "U8", "I8", "U16", "U64", "F4", "F6_E2M3", "F8_E4M3", "F8_E8M0", "C64", "X", 3)


class Unpickled(BaseException):
    """Raised when something is unpickled; a BaseException, so that no `except Exception` hides it."""


def fail() -> None:
    raise Unpickled


class Trap:
    """An object whose pickle raises Unpickled when it is read."""

    def __reduce__(self) -> Any:
        return (fail, ())


def pickles() -> dict[str, bytes]:
    """Return a pickle of `Trap` in every format that a careless program would read."""
    object_array = np.array([Trap()] * 4, dtype=object)
    kinds: dict[str, io.BytesIO] = {name: io.BytesIO() for name in ("torch", "npy", "npz", "old torch")}
    torch.save({"state": Trap()}, kinds["torch"])
    torch.save({"state": Trap()}, kinds["old torch"], _use_new_zipfile_serialization=False)
    np.save(kinds["npy"], object_array, allow_pickle=True)
    np.savez(kinds["npz"], x_train=object_array, y_train=object_array, x_test=object_array, y_test=object_array)
    plain = {f"protocol {number}": pickle.dumps(Trap(), protocol=number) for number in (0, 2, 5)}
    return {**plain, **{name: file.getvalue() for name, file in kinds.items()}}


# Bytes


def truncate(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))] if draw.random() < 0.7 else data[: -draw.randint(1, min(16, len(data)))]


def flip(draw: random.Random, data: bytes) -> bytes:
    result = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 8, 64))):
        result[draw.randrange(len(result))] ^= 1 << draw.randrange(8)
    return bytes(result)


def flip_early(draw: random.Random, data: bytes) -> bytes:
    """Flip bits in the first 256 bytes, where headers with sizes are."""
    return flip(draw, data[:256]) + data[256:]


def insert(draw: random.Random, data: bytes) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.randbytes(draw.choice((1, 2, 8, 1000))) + data[place:]


def delete(draw: random.Random, data: bytes) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + data[place + draw.choice((1, 2, 8, 1000)) :]


def zero(draw: random.Random, data: bytes) -> bytes:
    place, count = draw.randrange(len(data)), draw.choice((1, 4, 64, 4096))
    return data[:place] + bytes(min(count, len(data) - place)) + data[place + count :]


def repeat(draw: random.Random, data: bytes) -> bytes:
    first, last = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:last] + data[first:]


def claim(draw: random.Random, data: bytes) -> bytes:
    """Overwrite some bytes near the beginning, where headers are, with a huge size in some byte order."""
    form = draw.choice(("<I", ">I", "<Q", ">Q", "<H"))
    size = struct.calcsize(form)
    place = draw.randrange(max(1, min(200, len(data) - size)))
    value = draw.choice(HUGE) % 2 ** (8 * size)
    return data[:place] + struct.pack(form, value) + data[place + size :]


def replace(draw: random.Random, data: bytes) -> bytes:
    kinds = pickles()
    others = [b"", b"\0" * 100, b"\xff" * 1000, draw.randbytes(500), b"{}", b"[]", b"[" * 100_000, b"null", *kinds.values()]
    return draw.choice(others)


BYTES = {f.__name__: f for f in (truncate, flip, flip_early, insert, delete, zero, repeat, claim, replace)}


def damage(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Return the name of one of the ways in BYTES, and the bytes damaged this way."""
    name = draw.choice(list(BYTES))
    return name, BYTES[name](draw, data)


# Values


def odd(draw: random.Random, old: Any) -> Any:
    """Return a value that is probably wrong in place of `old`."""
    return draw.choice((
        None, True, False, 0, -1, 1, 7, 10**6, 2**31, 2**63, 10**30, 10**400, -(10**18), 0.5, -0.5, 1e308, -1e308, 5e-324,
        math.nan, math.inf, -math.inf, "", "text", "1", "a\nb\r\x1b[2J", "<script>&\"'", "\ud800", "\0", "x" * 100_000,
        "../../x", "/", ".", "[/b]", "{0}", "%s", [], {}, [None], [[[]]], {"a": {"b": None}}, ["x"] * 1000, deep(100), [old],
        {"value": old}, [old, old], str(old), old if isinstance(old, str) else -1.5,
    ))  # fmt: skip


def deep(count: int) -> Any:
    value: Any = []
    for _ in range(count):
        value = [value]
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values within nested lists and dicts."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, v in inside for place in places(v, (*path, key)))]


def change(draw: random.Random, value: Any) -> tuple[str, Any]:
    """Return a description of a change, and a copy of nested lists and dicts with this change."""
    value = json.loads(json.dumps(value))
    shallow = [place for place in places(value) if place and (len(place) < 3 or draw.random() < 0.3)]
    path = draw.choice(shallow)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    how = draw.choice(("odd", "odd", "odd", "remove", "add", "twice"))
    if how == "odd":
        holder[key] = odd(draw, holder[key])
        how = f"odd {type(holder[key]).__name__} {str(holder[key])[:20]!r}"
    elif how == "remove":
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, holder[key] if how == "twice" else odd(draw, holder[key]))
    else:
        holder["extra" if how == "add" else f"{key} "] = holder[key]
    return f"{how} at {'/'.join(map(str, path))[:60]}", value


def change_json(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Return a JSON file with one change; sometimes also with NaN, numbers too large for a float, or a duplicate key."""
    how, value = change(draw, json.loads(data))
    text = json.dumps(value, indent=draw.choice((None, 1)))
    if draw.random() < 0.05:
        text = re.sub(r"\d\.\d+", lambda found: draw.choice((found[0], "1e999", "-1e999", "NaN", "1" * 5000)), text, count=5)
        how += ", numbers"
    if draw.random() < 0.05:
        text, how = (
            text[:1] + draw.choice(('"schema": 1,', '"accuracy": null,', '"name": 3,')) + text[1:],
            how + ", doubled key",
        )
    return how, text.encode("utf-8", "surrogatepass")


def change_toml(draw: random.Random, value: dict[str, Any]) -> tuple[str, bytes]:
    """Return the TOML file of a benchmark `own` with one change."""
    how, value = change(draw, value)
    return how, toml(value).encode("utf-8", "surrogatepass")


def toml(value: dict[str, Any]) -> str:
    """Return a value as TOML, as far as TOML can represent it."""
    lines = [f"{_key(key)} = {_toml(v)}" for key, v in value.items() if key != "task" or not _tables(v)]
    for entry in value["task"] if "task" in value and _tables(value["task"]) else ():
        lines += ["[[task]]", *(f"{_key(key)} = {_toml(v)}" for key, v in entry.items())]
    return "\n".join([*lines, ""])


def _tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"\w+", key) else json.dumps(key)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)  # null is not valid TOML; this is one more case


# Files of tensors


def change_contents(draw: random.Random, path: Any) -> str:
    """Change the metadata or one of the tensors of a file, and write it with a correct digest."""
    values, metadata = tensors.load(path)
    if draw.random() < 0.7:
        how, metadata = change(draw, metadata)
    else:
        name = draw.choice(sorted(values))
        how = draw.choice(("missing", "shape", "type", "values", "renamed", "empty"))
        old = values.pop(name)
        if how != "missing":
            new = {
                "shape": old.new_zeros(*old.shape, 2),
                "type": old.to(draw.choice((torch.int64, torch.float64, torch.bool))),
                "values": torch.full_like(old, draw.choice((0, 1, 200))),
                "empty": old.new_zeros(0),
            }
            values["other" if how == "renamed" else name] = new.get(how, old)
        how = f"{how} {name}"
    tensors.save(path, values, metadata)
    return how


def claim_tensors(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Return a safetensors file whose header has wrong shapes, offsets, types, a wrong length or too many tensors."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    how = draw.choice(("length", "shape", "offsets", "type", "many"))
    name = draw.choice([key for key in header if key != "__metadata__"])
    if how == "length":
        return how, draw.choice(HUGE).to_bytes(8, "little") + data[8:]
    if how == "many":
        header |= {f"more {k}": header[name] for k in range(10_000)}
    elif how == "shape":
        header[name]["shape"] = [draw.choice(HUGE) for _ in range(draw.randint(1, 3))]
    elif how == "offsets":
        header[name]["data_offsets"] = [draw.choice((0, 8)), draw.choice(HUGE)]
    else:
        header[name]["dtype"] = draw.choice(DTYPES)
    text = json.dumps(header).encode()
    return how, len(text).to_bytes(8, "little") + text + data[8 + size :]


# Zip files of arrays


def claim_npz(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Return an .npz file in which one array has another header: a huge, negative or strange shape, another type."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        inside = {name: file.read(name) for name in file.namelist()}
    name = draw.choice(sorted(inside))
    raw = io.BytesIO(inside[name])
    npy.read_magic(raw)
    shape, _, kind = npy.read_array_header_1_0(raw)
    rest = raw.read()
    head = {"descr": kind.str, "fortran_order": False, "shape": shape}
    how = draw.choice(("shape", "shape", "descr", "text", "version", "member", "packed"))
    if how == "shape":
        head["shape"] = draw.choice((
            (10**10, *shape[1:]), (2**62, 4), (0, 10**30), (-1, *shape[1:]), (-2, -5), (), (len(rest),), (1,) * 40,
            (1,) * 70, (True, len(rest)), shape[:1], (0, *shape[1:]), (*shape, 1), (shape[0], 0, 0), shape[::-1],
        ))  # fmt: skip
    elif how == "descr":
        head["descr"] = draw.choice(
            ("|O", "|V0", "<U0", "<M8[s]", "<c16", "|b1", "<f8", "|S1", "<u8", "|i1", "<f2", "x", [("a", "|u1")])
        )
    text = repr(head).ljust(117) + "\n"
    if how == "text":
        text = draw.choice(
            (text.replace(")", "L)"), "(" * 5000, "{" * 500 + "\n", "__import__('os')\n", text.replace("}", ""), "9" * 9000)
        )
    made = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + rest
    if how == "version":
        made = (
            b"\x93NUMPY"
            + draw.choice((b"\2\0", b"\3\0", b"\7\0"))
            + struct.pack("<I", draw.choice(HUGE) % 2**32)
            + made[10:]
        )
    inside = {key: made if key == name and how != "member" else value for key, value in inside.items()}
    if how == "member":
        inside[draw.choice(("../x.npy", "/x.npy", "y.npy"))] = inside.pop(name)
    out = io.BytesIO()
    method = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(out, "w", method if how == "packed" else zipfile.ZIP_STORED) as file:
        for key, value in inside.items():
            file.writestr(key, value)
    result = out.getvalue()
    return f"{how} {name}", damage(draw, result)[1] if how == "packed" else result
