"""Collects the pages of the documentation site in build/docs, from which Zensical makes site/.

They are the pages of docs/, CONTRIBUTING.md, the API reference (from the docstrings), the tutorial (run here), the gallery.
Links to files that are no part of the site become plain text.

python -m dev.site                # all of it
python -m dev.site --no-tutorial  # the tutorial without outputs and figures, the gallery without the demonstration
"""

import os
import re
import shutil
import sys
from pathlib import Path

from dev import api_reference, formulas, gallery, tutorial

ROOT = Path(__file__).resolve().parent.parent
DOCS, OUT = ROOT / "docs", ROOT / "build" / "docs"
MOVED = {ROOT / "CONTRIBUTING.md": OUT / "contributing.md", ROOT / "README.md": OUT / "README.md"}
MOVED[tutorial.SCRIPT] = OUT / "tutorial" / f"{tutorial.SCRIPT.stem}.md"
PUBLISHED = (".md", ".png", ".py", ".css")
PLUS_MINUS = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"  # a mean and its deviation stand in one line of a cell
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def place(target: Path) -> Path | None:
    """Where a file of the repository is on the site; None if it is not there."""
    if target in MOVED:
        return MOVED[target]
    if target.is_dir():
        target = target / "README.md"
    published = target.suffix in PUBLISHED and target.is_relative_to(DOCS) and target.exists()
    return OUT / target.relative_to(DOCS) if published else None


def relink(text: str, source: Path, copy: Path) -> str:
    """The text of a page with links that fit its new place."""

    def link(found: re.Match[str]) -> str:
        mark, label, target, anchor = found[1], found[2], found[3], found[4] or ""
        if not target or target.startswith(("http:", "https:", "mailto:")):
            return found[0]
        new = place((source.parent / target).resolve())
        return label if new is None else f"{mark}[{label}]({os.path.relpath(new, copy.parent)}{anchor})"

    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)  # code stays as it is
    return "".join(part if part.startswith("```") else LINK.sub(link, part).replace(" ± ", PLUS_MINUS) for part in parts)


def main(run_tutorial: bool) -> None:
    """Write all pages into an empty folder."""
    shutil.rmtree(OUT, ignore_errors=True)
    pages = [path for path in DOCS.rglob("*") if path.suffix in PUBLISHED and path != tutorial.SCRIPT]
    for source in [*pages, ROOT / "CONTRIBUTING.md"]:
        copy = place(source)
        assert copy is not None
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            copy.write_text(formulas.set_formulas(relink(source.read_text(), source, copy)))
        else:
            shutil.copy(source, copy)
    api_reference.write(OUT / "api")
    if run_tutorial:
        print("Running the tutorial for its page; this takes one or two minutes.", flush=True)
    tutorial.write(OUT / "tutorial", run=run_tutorial)
    gallery.main(OUT, run_demo=run_tutorial)


if __name__ == "__main__":
    main("--no-tutorial" not in sys.argv[1:])
