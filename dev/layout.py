"""Writes docs/layout.md, the tree of files: every line is the first sentence of a file's docstring, or its title.

python dev/layout.py            # write it
python dev/layout.py --check    # exit code 1 if it is not up to date
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = ("hatrack", "speed", "dev", "docs", "tests")
PAGE = ROOT / "docs" / "layout.md"
CLOSED = {  # folders that get one line
    "hatrack/datasets/samples": "real images that ship with the package, with their licences",
    "docs/results/figures": "figures of some runs",
    "docs/results/records": "the records behind the pages of results",
    "docs/results/timings": "times behind the page of ewc-cnn, by `python -m speed.penalty`",
    "docs/results/tuning": "the outcomes of searches and the records behind the page of tuning",
    "docs/results/precision": "records of the same runs in tf32 and in bfloat16",
    "docs/results/stacking": "records of the same runs stacked and alone",
    "tests/data": "files of earlier versions, which later ones must read",
}
OTHER = {
    "py.typed": "tells type checkers that the package has types",
    "style.css": "the style of the page",
    "recipe.html": "the page of a recipe",
    "recipe.md": "the same as Markdown",
}
INTRO = """# Layout

A line about every file, made from their docstrings by `python dev/layout.py`. A room of `hatrack/` imports only rooms above
it in this list; `tests/test_rooms.py` checks it.
"""


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, without a full stop."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].rstrip(".")


def about(path: Path) -> str:
    if path.name in OTHER:
        return OTHER[path.name]
    text = path.read_text()
    if path.suffix == ".py":
        return first_sentence(ast.get_docstring(ast.parse(text)) or "")
    return first_sentence(text.splitlines()[0].lstrip("# "))


def entries(folder: Path, depth: int) -> list[tuple[str, str]]:
    """The lines of a folder: what stands before the text, and the text."""
    found = []
    for path in sorted(folder.iterdir(), key=lambda p: (p.is_dir(), order(p), p.name)):
        name = path.relative_to(ROOT).as_posix()
        indent = "  " * depth
        if path.name.startswith((".", "__pycache__")) or path == PAGE or path.suffix in (".png", ".ipynb"):
            continue
        if name in CLOSED:
            found.append((f"{indent}{path.name}/", CLOSED[name]))
        elif path.is_dir():
            start = path / "__init__.py"
            found.append((f"{indent}{path.name}/", about(start) if start.exists() else ""))
            found += entries(path, depth + 1)
        elif path.name != "__init__.py" or path == ROOT / "hatrack" / "__init__.py":
            found.append((f"{indent}{path.name}", about(path)))
    return found


def order(path: Path) -> int:
    """The rooms of the package in the order of their imports."""
    rooms = [
        "files",
        "tasks",
        "tracing",
        "networks",
        "datasets",
        "benchmarks",
        "methods",
        "engine",
        "training",
        "experiments",
        "reporting",
        "recipes",
        "cli",
    ]
    return rooms.index(path.name) if path.parent == ROOT / "hatrack" and path.name in rooms else -1


def page() -> str:
    lines = []
    for tree in TREES:
        lines += [(f"{tree}/", ""), *entries(ROOT / tree, 1)]
    return f"{INTRO}\n```text\n" + "".join(f"{name:<30} {said}".rstrip() + "\n" for name, said in lines) + "```\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text() != page() and f"{PAGE.relative_to(ROOT)} is not up to date: python dev/layout.py")
    PAGE.write_text(page())
