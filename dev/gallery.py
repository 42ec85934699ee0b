"""Makes the gallery of the documentation site: the page of the demonstration, and the pages of the papers.

python -m dev.gallery FOLDER             # all of it; the demonstration runs for about a minute
python -m dev.gallery FOLDER --no-demo   # from the records of docs/results alone
"""

import os
import sys
import tempfile
from pathlib import Path

from hatrack.experiments import demo
from hatrack.experiments.parallel import run_all
from hatrack.experiments.record import Record
from hatrack.experiments.records import records
from hatrack.files.atomic import writable, write
from hatrack.recipes import RECIPES
from hatrack.recipes.page import write_page
from hatrack.recipes.recipe import Recipe
from hatrack.recipes.reproduce import read_records
from hatrack.recipes.results import Records, Results
from hatrack.reporting.page import collect, render_page
from hatrack.reporting.paper_figures import paper_figures

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
SHOWN = {"hat-2018": "cifar-ratio", "hat-resnet": "figure-4-ratio", "pmask": "cifar10-tasks", "regimes": "rotated-accuracy"}
HEAD = """# Gallery

Pages as `hatrack report` and `hatrack reproduce` leave them. Each is one file that loads nothing else: point at lines, sort
tables, choose methods, and send the address of what you see. [The page of a report](report.md) explains the parts.
"""


def main(folder: Path, run_demo: bool) -> None:
    """Write the pages into a folder `gallery`, and the page gallery.md that leads to them."""
    pages = writable(folder / "gallery")
    lines = [HEAD]
    if run_demo:
        print("Running the demonstration for its page; this takes one or two minutes.", flush=True)
        with tempfile.TemporaryDirectory() as out:
            run_all(demo.runs(), Path(out), device="cpu", engine="eager", parallel=min(2, os.cpu_count() or 1))
            write(pages / "demo.html", render_page(collect(records(out), link=None)))
            (figure,) = paper_figures(out, "accuracy", "png", pages / "figures")
        text = "[The page](gallery/demo.html): six small tasks, five methods, five seeds; `hatrack demo`"
        lines.append(_entry("The demonstration", text, "demo.html", figure))
    there = read_records(RESULTS)
    for name in RECIPES:
        recipe = RECIPES[name]
        write_page(recipe, there, pages)
        links = f"[With the published numbers](gallery/{name}.html)"
        if of_recipe := _records(recipe, there):
            write(pages / f"{name}-report.html", render_page(collect(of_recipe, link=None)))
            links += f", or [as a report](gallery/{name}-report.html)"
        drawn = pages / "figures" / f"{name}-{SHOWN.get(name)}.png"
        text = f"{links}; `hatrack reproduce {name}`"
        lines.append(_entry(recipe.title, text, f"{name}.html", drawn if drawn.exists() else None))
    for extra in (*pages.glob("*.md"), *pages.glob("*.csv")):
        extra.unlink()  # the site has them under results/
    write(folder / "gallery.md", "\n".join(lines) + "\n")


def _entry(title: str, text: str, page: str, figure: Path | None) -> str:
    """Return what the gallery says of a page, with a figure that leads to it."""
    picture = f"\n\n[![A figure of the page](gallery/figures/{figure.name})](gallery/{page})" if figure else ""
    return f"## {title}\n\n{text}{picture}\n"


def _records(recipe: Recipe, there: Records) -> list[Record]:
    """Return the records of a recipe's rows, each once."""
    found = {}
    for part in recipe.parts:
        results = Results(part, there)
        found |= {record.name: record for row in part.rows for record in results.records(row.label)}
    return list(found.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--no-demo" not in sys.argv[2:])
