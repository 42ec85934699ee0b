"""The pages of docs/loops: each has its whole script, and the scripts run, learn, and change no finished task by a bit."""

import importlib.util
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import distributed

from hatrack.files import tensors

ROOT = Path(__file__).parent.parent.parent
PAGES, SCRIPTS = ROOT / "docs" / "loops", ROOT / "docs" / "examples" / "loops"
SHOWN = {
    "pytorch": "pytorch",
    "lightning": "lightning_fit",
    "accelerate": "accelerate_loop",
    "transformers": "hf_trainer",
    "detector": "detector",
    "ddp": "ddp",
}
NEEDED = {"lightning_fit": ["lightning"], "accelerate_loop": ["accelerate"], "hf_trainer": ["transformers", "accelerate"]}
THEIRS = [  # warnings of the libraries themselves
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:The number of training batches",
    "ignore:.*litlogger",
    "ignore:.*pin_memory",
]


def load(name: str):
    """Return a script as a module; the test is skipped if a package that it needs is not installed."""
    for package in NEEDED.get(name, []):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'hatrack[loops]'")
    spec = importlib.util.spec_from_file_location(f"loop_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps one state per process, and refuses another precision."""
    yield
    if find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)


def test_every_page_has_its_whole_script():
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == SHOWN.keys()
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(SHOWN.values())
    overview = (PAGES / "README.md").read_text()
    for page, script in SHOWN.items():
        assert f"```python\n{(SCRIPTS / f'{script}.py').read_text()}```" in (PAGES / f"{page}.md").read_text(), page
        assert f"({page}.md)" in overview


def check(before: dict, after: dict, said: str, folder: Path) -> None:
    """The answers of two tasks are the same bits, not all alike, and right; the file that was saved is whole."""
    assert len(before) >= 2
    assert before.keys() == after.keys()
    for name, logits in before.items():
        assert torch.equal(logits, after[name]), name
        assert logits.isfinite().all()
        assert logits.float().std(0).min() > 1e-3
    assert said.count("the same bits") == len(before)
    assert all(int(share) >= 85 for share in re.findall(r"(\d+)% ", said))
    _, metadata = tensors.load(folder / "v1.safetensors")
    assert [task["name"] for task in metadata["tasks"]] == list(before)


@pytest.mark.filterwarnings(*THEIRS)
@pytest.mark.parametrize("name", ["pytorch", "lightning_fit", "accelerate_loop", "hf_trainer", "detector"])
def test_a_script_runs_and_forgets_nothing(name, tmp_path, capsys):
    module = load(name)
    before, after = module.main(tmp_path)
    check(before, after, capsys.readouterr().out, tmp_path)


@pytest.mark.slow  # test_parallel.py has a quick one
@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="needs gloo")
def test_the_script_of_several_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(SCRIPTS))  # the processes import the script by its name
    module = importlib.import_module("ddp")
    (one, after, digests), (other, _, same) = module.main(str(tmp_path))
    check(one, after, capsys.readouterr().out, tmp_path)
    assert digests == same
    assert all(torch.equal(one[name], other[name]) for name in one)
