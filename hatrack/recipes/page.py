"""The page of a recipe, as HTML to look at and as Markdown for a site, and its numbers as CSV."""

import csv
import io
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hatrack.experiments.record import Record
from hatrack.experiments.record_parts import Spec
from hatrack.files.atomic import writable, write
from hatrack.recipes.grids import cell
from hatrack.recipes.plots import draw, row_looks
from hatrack.recipes.quantities import Quantity
from hatrack.recipes.recipe import Grid, Part, Recipe, Row
from hatrack.recipes.results import Records, Results
from hatrack.recipes.verdicts import NOT_PUBLISHED, NOT_RUN, RULES, SUPPORTED, Sureness, order, sureness, verdict
from hatrack.reporting.drawing import Drawing
from hatrack.reporting.looks import Look
from hatrack.reporting.measures import MISSING, MeanStd, format_number, mean_std
from hatrack.reporting.templating import plain_page, templates
from hatrack.reporting.words import run_command

TEMPLATES = Path(__file__).with_name("templates")
CLASSES = {
    "agrees": "agrees",
    "close": "agrees",
    "higher": "differs",
    "lower": "differs",
    NOT_RUN: "open",
}  # of cells, by what stands in them
DEFAULT, PUBLISHED_IN = "reproduce", "docs/results"  # folders of pages: that of the command, and that of this project
PUBLISHED, VERDICT = ": published", "verdict"  # the first column of those about one quantity ends so, the last is so
ENGINES = {"auto": "engine not recorded", "none": "nothing trained"}  # older records have the choice, not the engine
HOLDS = {True: "holds", False: "does not hold"}


@dataclass(frozen=True)
class Section:
    """What the page shows of a part."""

    part: Part
    table: Grid | None
    grids: list[Grid]
    unrun: list[str]  # the labels of rows that are not in the table: no record, nothing published
    claims: list[tuple[str, bool, Sureness]]  # the claim, whether it holds, how sure that is
    waiting: list[str]  # claims that hang on a missing row
    order: str
    tolerance: str
    drawings: list[tuple[str, Drawing]]  # with their titles
    notes: list[tuple[str, str]]  # the labels of rows with records that a note is about, and the note
    commands: list[str]
    done: int  # rows whose seeds all have records
    conditions: str  # devices, engines and precisions of the records
    looks: dict[str, Look]  # of the rows by their labels, as in the figures


def write_page(recipe: Recipe, records: Records, out: Path, notice: str = "", folder: str = PUBLISHED_IN) -> Path:
    """Write NAME.html, NAME.md, NAME.csv and their figures.

    Args:
        recipe: the recipe.
        records: all records that there are.
        out: the folder of the pages.
        notice: a caution for the top of the page of the quick version.
        folder: what the commands on the page give as `--out`.

    Returns:
        The path of the HTML page.
    """
    sections = [_section(recipe, part, records) for part in recipe.parts]
    figures = writable(out / "figures")
    for _, drawing in (pair for section in sections for pair in section.drawings):
        write(figures / f"{drawing.name}.png", drawing.png)
    values = _values(recipe, sections, notice, folder)
    more = {"classes": CLASSES, "count": count_verdicts(sections), "groups": head_groups}
    write(out / f"{recipe.name}.html", plain_page("recipe.html", TEMPLATES, **values, **more))
    for name, text in _texts(recipe, records, sections, notice, folder).items():
        write(out / name, text)
    return out / f"{recipe.name}.html"


def page_texts(recipe: Recipe, records: Records) -> dict[str, str]:
    """Return NAME.md and NAME.csv by the names of the files, without rendering their figures."""
    sections = [_section(recipe, part, records, rendered=False) for part in recipe.parts]
    return _texts(recipe, records, sections, "", PUBLISHED_IN)


def _values(recipe: Recipe, sections: Sequence[Section], notice: str, folder: str) -> dict[str, Any]:
    """Return what the templates of a page have in common."""
    command = f"hatrack reproduce {recipe.name}" + (" --quick" if notice else "")
    place = f" --out {shlex.quote(folder)}"
    renew, command = f"{command} --page{place}", command + ("" if folder in (DEFAULT, PUBLISHED_IN) else place)
    paper = re.sub(r"(https?://\S*\w)", r"<\1>", recipe.paper)  # a link in Markdown
    given = {"recipe": recipe, "paper": paper, "sections": sections, "holds": HOLDS}
    return given | {"notice": notice, "rules": RULES, "command": command, "renew": renew}


def _texts(recipe: Recipe, records: Records, sections: Sequence[Section], notice: str, folder: str) -> dict[str, str]:
    markdown = templates(TEMPLATES).get_template("recipe.md").render(_values(recipe, sections, notice, folder))
    return {f"{recipe.name}.md": markdown, f"{recipe.name}.csv": csv_text(recipe, records)}


def _section(recipe: Recipe, part: Part, records: Records, *, rendered: bool = True) -> Section:
    results = Results(part, records)
    drawings = [
        (plot.title, drawing)
        for plot in part.plots
        if (drawing := draw(plot, results, f"{recipe.name}-{part.name}-{plot.name}", rendered=rendered))
    ]
    answers = [(claim, claim.holds(results)) for claim in part.claims]
    shown = _shown(results)
    return Section(
        part,
        main_table(results) if shown and part.columns else None,
        [grid for make in part.grids if (grid := make(results))],
        [row.label for row in part.rows if row not in shown],
        [(claim.text, answer, sureness(results, claim)) for claim, answer in answers if answer is not None],
        [claim.text for claim, answer in answers if answer is None],
        order(results),
        _tolerance(part),
        drawings,
        _notes([row for row in part.rows if results.records(row.label)]),
        [run_command(Spec.from_dict(row.run.spec), list(row.seeds)) for row in part.rows],
        sum(not results.missing(row) for row in part.rows),
        _conditions([r for row in part.rows for r in results.records(row.label)]),
        row_looks(part),
    )


class Count(NamedTuple):
    """What a page comes to: its rows and those with all records, published numbers by their verdicts, and claims."""

    rows: int
    done: int
    verdicts: dict[str, int]
    hold: int
    surely_hold: int
    fail: int
    surely_fail: int
    waiting: int


def count_verdicts(sections: Sequence[Section]) -> Count:
    """Count what the sections of a page say."""
    cells = [cell for section in sections if section.table for row in section.table.rows for cell in row[1:]]
    answers = [answer for section in sections for _, answer, _ in section.claims]
    sure = [answer for section in sections for _, answer, sureness in section.claims if sureness.words == SUPPORTED]
    return Count(
        sum(len(section.part.rows) for section in sections),
        sum(section.done for section in sections),
        {verdict: cells.count(verdict) for verdict in ("agrees", "close", "higher", "lower")},
        answers.count(True),
        sure.count(True),
        answers.count(False),
        sure.count(False),
        sum(len(section.waiting) for section in sections),
    )


def head_groups(head: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the columns of a table with what they are about: those of one quantity have a common head."""
    found: list[tuple[str, list[str]]] = []
    place = 0
    while place < len(head):
        title, published, _ = head[place].partition(PUBLISHED)
        own = ["published", *head[place + 1 : head.index(VERDICT, place) + 1]] if published else [title]
        found.append((title if published else "", own))
        place += len(own)
    return found


def _tolerance(part: Part) -> str:
    """Return up to which differences numbers of a part agree."""
    shown = [q for q in part.columns if q.key in part.tolerance and _is_published(part, q)]
    return ", ".join(f"{q.measure.title} {format_number(q.measure, part.tolerance[q.key])}" for q in shown)


def _shown(results: Results) -> list[Row]:
    """Return the rows that have something to show: a record, or a published number."""
    return [row for row in results.part.rows if row.published or results.records(row.label)]


def _notes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the notes of rows, each once, with the labels of the rows that have it."""
    labels: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            labels.setdefault(row.note, []).append(row.label)
    return [("; ".join(names), note) for note, names in labels.items()]


def _conditions(records: Sequence[Record]) -> str:
    """Return on what the records were made: device, precision, engine; older records do not tell all of it."""
    known = [[r.versions.get(key, "") for key in ("device", "precision", "engine")] for r in records]
    return "; ".join(sorted({", ".join(ENGINES.get(word, word) for word in words if word) for words in known} - {""}))


def main_table(results: Results) -> Grid:
    """Return the table of a part: for every quantity the published number, ours, the difference and the verdict. Rows that
    have neither are left out."""
    part = results.part
    head = ["approach", "n"]
    for quantity in part.columns:
        title = quantity.measure.title + (", %" if quantity.measure.unit == "%" else "")
        head += (
            [title + PUBLISHED, *_compared(part, "ours", "difference", VERDICT)]
            if _is_published(part, quantity)
            else [title]
        )
    rows = []
    for row in _shown(results):
        cells = [c for quantity in part.columns for c in _cells(results, row, quantity)]
        rows.append([row.label, str(len(results.records(row.label))), *cells])
    return Grid("", head, rows)


def _compared(part: Part, ours: str, difference: str, words: str) -> list[str]:
    """Return cells beside a published number. Where only the order can be compared, a difference would mean nothing."""
    return [ours, words] if part.order_by else [ours, difference, words]


def _is_published(part: Part, quantity: Quantity) -> bool:
    return any(quantity.key in row.published for row in part.rows)


def _cells(results: Results, row: Row, quantity: Quantity) -> list[str]:
    ours, published, measure = results.summary(row.label, quantity), row.published.get(quantity.key), quantity.measure
    count = len(results.records(row.label))
    if any(map(math.isinf, results.values(row.label, quantity))):
        rest = [MISSING, *_compared(results.part, "not finite", MISSING, MISSING)]
        return rest if _is_published(results.part, quantity) else ["not finite"]
    if not _is_published(results.part, quantity):
        return [cell(measure, ours, count)]
    given = cell(measure, MeanStd(published.mean, published.std, 0)) if published else MISSING
    difference = format_number(measure, ours.mean - published.mean) if ours and published else MISSING
    if ours is None and count:
        words = "not known: a reference is missing" if published and not row.reference else NOT_PUBLISHED
    elif results.part.order_by:
        words = "order only" if published and ours else verdict(ours, published)
    else:
        words = verdict(ours, published, results.part.tolerance.get(quantity.key, 0.0))
    return [given, *_compared(results.part, cell(measure, ours, count), difference, words)]


def csv_text(recipe: Recipe, records: Records) -> str:
    """Return every number of the tables with all digits, a line each, also the forgetting ratio after every task."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["part", "approach", "quantity", "tasks", "n", "mean", "std", "published", "published_std"])
    for part in recipe.parts:
        results = Results(part, records)
        for row in part.rows:
            for quantity in part.columns:
                found, published = results.summary(row.label, quantity), row.published.get(quantity.key)
                ours = (found.seeds, found.mean, found.std) if found else (0, None, None)
                writer.writerow(
                    [part.name, row.label, quantity.key, "", *ours, *(published[:2] if published else (None, None))]
                )
            lines = results.ratios(row.label)
            for t in range(len(lines[0]) if lines and not row.reference else 0):
                writer.writerow(
                    [part.name, row.label, "ratio", t + 1, *_summary([float(line[t]) for line in lines]), "", ""]
                )
    return out.getvalue()


def _summary(values: list[float]) -> tuple[int, float | None, float | None]:
    found = mean_std(values)
    return (found.seeds, found.mean, found.std) if found else (0, None, None)
