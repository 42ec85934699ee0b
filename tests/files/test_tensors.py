"""Files of tensors, function by function: what comes back, what the digest sees, and how differences are told."""

import json
import math
import stat
import struct

import pytest
import torch
from safetensors.torch import save as safetensors_of

from hatrack.files import tensors
from hatrack.files.limits import TEXT

GIVEN = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1.5, -0.0, math.inf], dtype=torch.bfloat16),
    "c": torch.tensor(True),
    "d": torch.empty(0, 3),
}


def test_what_is_saved_comes_back(tmp_path):
    tensors.save(tmp_path / "a", GIVEN, {"x": [1, math.nan], "é": None})
    found, metadata = tensors.load(tmp_path / "a")
    assert found.keys() == GIVEN.keys()
    for name, value in GIVEN.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    assert metadata["x"][0] == 1
    assert math.isnan(metadata["x"][1])
    assert metadata["é"] is None


def test_copies_share_no_memory_and_are_contiguous():
    given = {"a": torch.zeros(2, 3, requires_grad=True), "b": torch.arange(6).reshape(2, 3).t()}
    copies = tensors.host_copies(given)
    with torch.no_grad():
        given["a"].add_(1)
        given["b"].add_(1)
    assert copies["a"].tolist() == [[0.0] * 3] * 2
    assert copies["b"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copies["b"].is_contiguous()
    assert not copies["a"].requires_grad


@pytest.mark.parametrize("state", [None, False, True])
def test_only_states_are_private_and_replace_a_link(state, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    how = {} if state is None else {"state": state}
    tensors.save(tmp_path / "link", GIVEN, {}, **how)
    tensors.write_copies(tmp_path / "other", GIVEN, "{}", **how)
    assert (tmp_path / "link").is_symlink() is not bool(state)
    assert (stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o600) is bool(state)


def test_files_that_are_not_ours(tmp_path):
    def told(data: bytes) -> str:
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(ValueError, match="a is") as caught:
            tensors.load(tmp_path / "a")
        return str(caught.value)

    assert "SafetensorError" in told(b"")
    assert "ValueError" in told(b"no file of tensors"), "its first bytes are the size of a header"
    assert "KeyError" in told(safetensors_of(GIVEN))
    assert "JSONDecodeError" in told(safetensors_of(GIVEN, metadata={"hatrack": "{"}))
    assert "is damaged" in told(safetensors_of(GIVEN, metadata={"hatrack": "{}"}))
    right = tensors.digest(GIVEN, "[]")
    assert told(safetensors_of(GIVEN, metadata={"hatrack": "[]", "digest": right})).endswith("is not a file of hatrack")
    assert "ValueError" in told(struct.pack("<Q", TEXT + 1) + b"{}")
    assert "SafetensorError" in told(struct.pack("<Q", TEXT) + b"{}"), "the largest header is read, and is not there"


def test_every_bit_of_a_file_counts(tmp_path):
    tensors.save(tmp_path / "a", {"x": torch.arange(3.0)}, {"y": 1})
    data = (tmp_path / "a").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"]["hatrack"] == '{"y": 1}'
    for place in (len(data) - 1, len(data) - 12, data.index(b"y")):
        (tmp_path / "a").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"digest differs|not a file of hatrack"):
            tensors.load(tmp_path / "a")


def test_the_digest_sees_names_types_shapes_bits_and_the_text():
    one = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2)}
    others = [
        {"a": one["a"], "c": one["b"]},
        {"a": one["a"].reshape(3, 2), "b": one["b"]},
        {"a": one["a"].double(), "b": one["b"]},
        {"a": one["a"], "b": torch.zeros(2, dtype=torch.int32)},
        {"a": one["a"], "b": -torch.zeros(2)},
        {"a": one["a"], "b": torch.tensor([0.0, 1e-45])},
        {"a": one["a"]},
        {"a": one["a"], "b": torch.empty(0)},
    ]
    found = {tensors.digest(one), tensors.digest(one, "text"), *map(tensors.digest, others)}
    assert len(found) == 2 + len(others)
    same = {"b": one["b"].clone().requires_grad_(), "a": one["a"].t().contiguous().t()}
    assert tensors.digest(same) == tensors.digest(one)


def test_differences_are_told_by_name():
    two, three = torch.zeros(2), torch.zeros(3)
    assert tensors.differences({"a": two}, {"a": two + 1}) == ""
    assert tensors.differences({"a": two}, {}) == "it lacks a"
    assert tensors.differences({}, {"a": two}) == "it has a as well"
    assert tensors.differences({"a": two}, {"a": three}) == "a is (3,) instead of (2,)"
    assert tensors.differences({"a": two}, {"a": two.int()}) == "a is of type torch.int32 instead of torch.float32"
    names = dict.fromkeys("abcd", two)
    assert tensors.differences(names, {"d": two}) == "it lacks a, it lacks b, it lacks c"
    assert tensors.differences({**names, "e": two}, {}) == "it lacks a, it lacks b, it lacks c, and 2 more"
    there = {"c": three, "a": three, "b": three}
    told = "c is (3,) instead of (2,), a is (3,) instead of (2,), b is (3,) instead of (2,)"
    assert tensors.differences(dict.fromkeys("bac", two), there) == told, "in the order of what is there"


def test_equal_content_gives_equal_files(tmp_path):
    """safetensors alone writes metadata in another order every time."""
    for number in range(20):
        tensors.save(tmp_path / str(number), {**GIVEN, "é": torch.ones(3)}, {"x": 'a "text" \\ with é'})
    assert len({(tmp_path / str(number)).read_bytes() for number in range(20)}) == 1
    found, metadata = tensors.load(tmp_path / "0")
    assert torch.equal(found["é"], torch.ones(3))
    assert metadata == {"x": 'a "text" \\ with é'}
    data = (tmp_path / "0").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    assert size % 8 == 0
    assert tensors.written_digest(tmp_path / "0") == json.loads(data[8 : 8 + size])["__metadata__"]["digest"]
    for content in (b"", b"{}", b"\xff" * 20, struct.pack("<Q", 2) + b"{}"):
        (tmp_path / "other").write_bytes(content)
        assert tensors.written_digest(tmp_path / "other") == ""
    assert tensors.written_digest(tmp_path / "none") == ""
