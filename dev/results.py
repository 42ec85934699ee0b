"""Writes the pages of results from the records: docs/results/NAME.md of every recipe, and the tables of the README.

python -m dev.results            # write them
python -m dev.results --check    # exit code 1 if a text is not up to date
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

from hatrack.recipes import RECIPES
from hatrack.recipes.page import main_table, page_texts, write_page
from hatrack.recipes.recipe import Grid
from hatrack.recipes.reproduce import read_records
from hatrack.recipes.results import Records, Results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
HEADLINE = ("HAT", "HAT, xavier", "PNN", "PathNet", "EWC", "SGD", "SGD, xavier", "LwF", "joint")


def headline(records: Records) -> str:
    """Return the table of the README: ten tasks of CIFAR, the approaches that have records."""
    (part,) = RECIPES["hat-2018"].only(("cifar",))
    results = Results(part, records)
    table = main_table(results)
    rows = [row for row in table.rows if row[0] in HEADLINE and row[1] != "0"]
    rows.sort(key=lambda row: (row[0] == "joint", -(results.mean(row[0], part.columns[0]) or 0)))
    chosen = [0, 1, 2, 3, 5, 6, 8]
    text = _markdown(Grid("", [table.head[k] for k in chosen], [[row[k] for k in chosen] for row in rows]))
    return f"{text}\n\n{_progress(records)}"


def _progress(records: Records) -> str:
    """Return how many rows of all recipes have their records."""
    parts = [Results(part, records) for name in RECIPES for part in RECIPES[name].parts]
    done = [not results.missing(row) for results in parts for row in results.part.rows]
    return f"So far {sum(done)} of {len(done)} rows of all papers have all their records; the pages say which."


def _markdown(grid: Grid) -> str:
    lines = [grid.head, ["---"] * len(grid.head), *grid.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_headline(text: str, records: Records) -> str:
    """Return the README with the table of today's records between its marks."""
    table = headline(records)
    return re.sub(r"(<!-- headline[^>]*-->\n).*?(\n<!-- end -->)", lambda m: m[1] + table + m[2], text, flags=re.DOTALL)


def main(check: bool) -> int:
    """Write the pages; or only tell which of their texts would change."""
    records, readme = read_records(RESULTS), ROOT / "README.md"
    texts = {readme: with_headline(readme.read_text(encoding="utf-8"), records)}
    for recipe in RECIPES.values():
        texts |= {RESULTS / name: text for name, text in page_texts(recipe, records).items()}
    old = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check:
        for path in old:
            print(f"{path.relative_to(ROOT)} is not what the records say: python -m dev.results", file=sys.stderr)
        return int(bool(old))
    for path in old:
        path.write_text(texts[path], encoding="utf-8")
    write_figures(records, RESULTS / "figures")
    return 0


def write_figures(records: Records, out: Path) -> None:
    """Write the figures of all pages into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        for name in RECIPES:
            write_page(RECIPES[name], records, Path(folder))
        shutil.copytree(Path(folder) / "figures", out, dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
