"""The scripts of docs/loops: loading them, what they must show, and the warnings of the libraries that they use."""

import importlib.util
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

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
    "ignore:The `srun` command is available",  # a machine with Slurm
]


def needs(*packages):
    lacking = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"not installed: {lacking}; pip install 'hatrack[loops]'")


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
