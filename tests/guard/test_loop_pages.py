"""The pages of docs/loops: each has its whole script, and the scripts run, learn, and change no finished task by a bit."""

import importlib

import pytest
import torch
from torch import distributed

from tests.helpers.loop_scripts import PAGES, SCRIPTS, SHOWN, THEIRS, check, fresh_accelerator, load  # noqa: F401
from tests.helpers.tiers import quick_and_slow


def test_every_page_has_its_whole_script():
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == SHOWN.keys()
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(SHOWN.values())
    overview = (PAGES / "README.md").read_text()
    for page, script in SHOWN.items():
        assert f"```python\n{(SCRIPTS / f'{script}.py').read_text()}```" in (PAGES / f"{page}.md").read_text(), page
        assert f"({page}.md)" in overview


@pytest.mark.filterwarnings(*THEIRS)
@pytest.mark.parametrize(
    "name",
    quick_and_slow(["pytorch", "lightning_fit", "accelerate_loop", "hf_trainer", "detector"], ["pytorch"]),
)
def test_a_script_runs_and_forgets_nothing(name, tmp_path, capsys):
    module = load(name)
    before, after = module.main(tmp_path)
    check(before, after, capsys.readouterr().out, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="needs gloo")
def test_the_script_of_several_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(SCRIPTS))  # the processes import the script by its name
    module = importlib.import_module("ddp")
    (one, after, digests), (other, _, same) = module.main(str(tmp_path))
    check(one, after, capsys.readouterr().out, tmp_path)
    assert digests == same
    assert all(torch.equal(one[name], other[name]) for name in one)
