"""The page docs/own_loop.md: its snippet runs as written, and its program is the file of the examples."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hatrack as hr
from tests.helpers.guarded import BACKBONES, WIDTH, data

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "own_loop.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_snippet_runs_as_written(tmp_path, monkeypatch, device):
    """Its first line makes the guard; the task "digits", which it uses later, is learned by the same lines."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    heads = {name: nn.Linear(WIDTH, 3).to(device) for name in ("digits", "flowers")}
    backbone = BACKBONES["residual"]().to(device)
    held = [*backbone.parameters(), *(p for head in heads.values() for p in head.parameters())]
    batches = [tuple(t.to(device) for t in data(number)) for number in range(2)]
    names = {"hr": hr, "backbone": backbone, "heads": heads, "my_loss": F.cross_entropy, "epochs": 30}
    names |= {"optimizer": torch.optim.AdamW(held, lr=0.01, weight_decay=0.1), "x": batches[0][0]}
    first, block, use, rest = re.split(r"(?=^with )|(?=^guard\.verify)", BLOCKS[0], flags=re.MULTILINE)
    exec(first, names)
    answers = []
    for name, (x, y) in zip(heads, batches, strict=True):
        names |= {"loader": list(zip(x.split(12), y.split(12), strict=True)), "head": heads[name]}
        exec(block.replace("flowers", name), names)
        names["x"] = batches[0][0]
        exec(use, names)
        answers.append(names["logits"])
    assert torch.equal(*answers)
    assert (answers[0].argmax(1) == batches[0][1]).float().mean() > 0.9
    exec(rest, names)
    assert repr(names["guard"]) == "Guard(hat on Residual; learned: 'flowers')"
    exec(BLOCKS[2], names | {"head": heads["flowers"]})
    assert names["guard"].tasks["flowers"].sealed.modules == [heads["flowers"]]


def test_the_program_is_the_file_and_runs(capsys):
    path = ROOT / "docs" / "examples" / "own_loop.py"
    assert f"```python\n{path.read_text()}```" in PAGE
    spec = importlib.util.spec_from_file_location("own_loop", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    said = capsys.readouterr().out
    assert said.count("the same bits") == 3
    assert "changed" not in said
