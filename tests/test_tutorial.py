"""The tutorial runs, shows what its text says, and becomes a page and a notebook; the site needs no network."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dev import tutorial

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The tutorial as a page, run in a process of its own, and the folder with its figures."""
    folder = tmp_path_factory.mktemp("tutorial")
    subprocess.run([sys.executable, "-m", "dev.tutorial", str(folder)], cwd=ROOT, check=True)
    return (folder / "what_is_forgetting.md").read_text(), folder


@pytest.mark.slow
def test_the_tutorial_shows_forgetting_and_its_cure(page):
    text, _ = page
    plain, hat = (float(found) for found in re.findall(r"^forgetting: (-?[\d.]+)$", text, re.MULTILINE))
    assert plain > 0.1
    assert hat == 0
    assert "bit for bit: True" in text
    assert "same logits: False" in text
    assert "head of task 0 is unchanged: True" in text


@pytest.mark.slow
def test_the_page_has_its_figures(page):
    text, folder = page
    figures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(figures) == 4
    assert all((folder / name).stat().st_size > 1000 for name in figures)


@pytest.mark.slow
def test_the_script_becomes_a_notebook(tmp_path):
    path = tmp_path / "tutorial.ipynb"
    subprocess.run(
        [sys.executable, "-m", "dev.tutorial", "--notebook", str(path)], cwd=ROOT, check=True, capture_output=True
    )
    cells = json.loads(path.read_text())["cells"]
    assert "".join(cells[0]["source"]).startswith("# What is forgetting?")
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    compile(code, "tutorial", "exec")
    assert "hr.HAT(" in code


@pytest.mark.slow
def test_no_cell_is_left_out():
    text = tutorial.SCRIPT.read_text()
    assert len(tutorial.notebook().cells) == len(re.findall(r"^# %%", text, re.MULTILINE))


@pytest.mark.slow
def test_the_site_builds_and_needs_no_network():
    subprocess.run([sys.executable, "-m", "dev.site", "--no-tutorial"], cwd=ROOT, check=True)
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([str(zensical), "build", "--clean", "--strict"], cwd=ROOT, check=True)
    built = sorted((ROOT / "site").rglob("*.html"))
    assert len(built) > 40
    for path in built:
        fetched = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)", path.read_text()
        )
        assert fetched == [], path
    assert "hard attention" in (ROOT / "site" / "search.json").read_text()
