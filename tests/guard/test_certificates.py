"""Certificates of guards, in Python and on the command line: what a later file must keep of an earlier one."""

import json
import sys
from pathlib import Path

import pytest
import torch

import hatrack as hr
from hatrack.__main__ import main
from hatrack.methods.certificate import load_certificate
from tests.helpers.guarded import make_loop


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of a guard after two tasks, after three, and after the first one was released."""
    folder = tmp_path_factory.mktemp("guards")
    loop = make_loop("cnn", weight_decay=0.1)
    loop.learn("a", 0)
    loop.learn("b", 1)
    loop.guard.save(folder / "v1.safetensors")
    loop.learn("c", 2)
    loop.guard.save(folder / "v2.safetensors")
    loop.guard.release("a")
    loop.guard.save(folder / "v3.safetensors")
    other = make_loop("cnn", seed=5)
    other.learn("a", 0)
    other.learn("b", 1)
    other.guard.save(folder / "other.safetensors")
    (folder / "backbone_of_tests.py").write_text(
        "from tests.helpers.guarded import BACKBONES\n\n\nmake = BACKBONES['cnn']\n"
    )
    return folder


@pytest.fixture
def command(files, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(files))
    monkeypatch.delitem(sys.modules, "backbone_of_tests", raising=False)

    def run(*words):
        code = main([*words, "--trunk", "backbone_of_tests:make"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_what_later_tasks_change_and_what_not():
    loop = make_loop("mlp", method="pmask")
    with pytest.raises(ValueError, match="nothing has been learned"):
        loop.guard.certificate()
    loop.learn("a", 0)
    before = loop.guard.certificate()
    loop.learn("b", 1)
    after = loop.guard.certificate()
    assert hr.compare_certificates(after, before) == hr.methods.certificate.Comparison(same=["a"], added=["b"])
    assert after["tasks"][0]["digest"] == loop.guard.verify()["a"]
    assert after["tasks"][0] == before["tasks"][0], "its answers, too"
    assert json.loads(json.dumps(after)) == after
    weight = next(p for p in loop.guard.backbone.parameters() if p.dim() > 1)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(ValueError, match="is not what it was"):
        loop.guard.certificate()


def test_a_release_with_every_old_task(files, command):
    code, said = command("verify", str(files / "v2.safetensors"), "--against", str(files / "v1.safetensors"))
    assert code == 0
    assert said.splitlines() == [
        "unchanged: task 'a'",
        "unchanged: task 'b'",
        "added since: task 'c'",
    ]


@pytest.mark.parametrize(
    ("new", "expected"), [("v3", "missing: task 'a'"), ("other", "changed: task 'a'")], ids=["released", "learned anew"]
)
def test_a_release_without_one(new, expected, files, command):
    code, said = command("verify", str(files / f"{new}.safetensors"), "--against", str(files / "v1.safetensors"))
    assert code == 1
    assert expected in said


def test_a_certificate_in_a_file(files, command, tmp_path):
    out = tmp_path / "v1.certificate"
    code, said = command("certify", str(files / "v1.safetensors"), "--out", str(out))
    assert code == 0
    assert "2 tasks certified" in said
    assert [task["name"] for task in load_certificate(out)["tasks"]] == ["a", "b"]
    assert command("verify", str(files / "v2.safetensors"), "--against", str(out))[0] == 0
    assert command("verify", str(files / "other.safetensors"), "--against", str(out))[0] == 1


def test_what_can_not_be_certified_is_one_line(files, capsys, tmp_path, monkeypatch):
    guard = files / "v1.safetensors"
    assert main(["certify", str(guard), "--out", str(tmp_path / "c")]) == 2
    assert "--trunk MODULE:FUNCTION makes its backbone" in capsys.readouterr().err
    damaged = Path(tmp_path / "damaged.safetensors")
    content = bytearray(guard.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(bytes(content))
    monkeypatch.syspath_prepend(str(files))
    words = ["verify", str(damaged), "--against", str(guard), "--trunk", "backbone_of_tests:make"]
    assert main(words) == 2
    assert "damaged" in capsys.readouterr().err
    others = "from torch import nn\n\n\nflat = nn.Flatten\n\n\ndef small():\n    return nn.Linear(2, 2)\n"
    (tmp_path / "others_of_tests.py").write_text(others)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, expected in {"flat": "has no parameter", "small": "the backbone is not like the one that was saved"}.items():
        assert main([*words[:1], str(guard), *words[2:4], "--trunk", f"others_of_tests:{name}"]) == 2
        said = capsys.readouterr().err.strip()
        assert expected in said
        assert "\n" not in said
