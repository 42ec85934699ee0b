"""Carrying out `hatrack reproduce`. Imported when it begins: it needs torch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hatrack.cli.errors import Interrupted
from hatrack.cli.execute import chosen_device
from hatrack.cli.values import parse_seeds
from hatrack.experiments.costs import time_on
from hatrack.files.atomic import writable
from hatrack.methods import METHODS
from hatrack.options import nearest
from hatrack.recipes import RECIPES
from hatrack.recipes import quick as quick_version
from hatrack.recipes.page import main_table, write_page
from hatrack.recipes.recipe import Part, Recipe
from hatrack.recipes.reproduce import Missing, carry_out, missing_rows, read_records
from hatrack.recipes.results import Records, Results
from hatrack.reporting.words import seeds_text
from hatrack.text import duration, say
from hatrack.training.checkpoint import Stopped


def reproduce(
    names: Sequence[str],
    *,
    only: str,
    methods: str,
    seeds: str | None,
    quick: bool,
    missing: bool,
    page: bool,
    out: Path,
    gpus: int | None = None,
    **how: Any,
) -> None:
    """Reproduce papers, or tell what is missing.

    Args:
        names: the recipes.
        only: the parts, by commas; empty for all.
        methods: the methods whose rows are run, by commas; empty for all. The page has all rows.
        seeds: the seeds of every row, as a text; None for each row's own.
        quick: the small and short version.
        missing: run nothing and tell what is missing.
        page: run nothing and write the page.
        gpus: tell how long what is missing would take on so many GPUs, with `parallel` runs on each.
        out: the folder of pages and records.
        how: device, engine, precision, save_every, parallel.
    """
    if gpus and not missing:
        raise ValueError(f"--gpus {gpus} goes with --missing, which tells what runs would cost; --ask gpus= asks for GPUs")
    if missing and page:
        raise ValueError("--missing and --page exclude each other")
    given, out = str(out), out / "quick" if quick else out
    recipes = [_chosen(name, quick) for name in names]
    chosen = _names(methods)
    parts = {recipe.name: _of_methods(_with_seeds(parts, seeds), chosen) for recipe, parts in _named(recipes, _names(only))}
    if chosen and not any(parts.values()):
        raise ValueError(f"no row of these parts is a run of {' or '.join(chosen)}")
    recipes = [recipe for recipe in recipes if parts.get(recipe.name)]
    if missing:
        for recipe in recipes:
            _tell_missing(recipe, parts[recipe.name], out, (gpus or 0, how["parallel"]))
        return
    if quick:
        say(quick_version.NOTICE)
    problems: list[str] = []
    if not page:
        everything = [part for recipe in recipes for part in parts[recipe.name]]
        how["device"], precision = chosen_device(how["device"], how), how.pop("precision") or None
        if quick and how["device"] == "cpu" and not how["on"] and how["ranks"] == 1:
            how["parallel"] = max(how["parallel"], min(2, os.cpu_count() or 1))  # its runs are too small for several threads
        try:
            problems = carry_out(everything, out, precision, **how)
        except Stopped as error:
            _write_pages(recipes, out, given, quick)
            raise Interrupted(str(error)) from error
    writable(out)  # an error now if nothing can be written there
    records = read_records(out)
    for part in (part for recipe in recipes for part in parts[recipe.name] if not page and not chosen):
        _show(part, records)
    _write_pages(recipes, out, given, quick)
    if problems:
        raise ValueError("\n".join(problems))


def _chosen(name: str, small: bool) -> Recipe:
    recipe = RECIPES.find(name)
    return quick_version.quick(recipe) if small else recipe


def _named(recipes: Sequence[Recipe], wanted: tuple[str, ...]) -> list[tuple[Recipe, list[Part]]]:
    """Return the parts of these names in every recipe; each name must be a part of one of them."""
    if len(recipes) == 1:
        return [(recipes[0], recipes[0].only(wanted))]
    known = {part.name for recipe in recipes for part in recipe.parts}
    for name in wanted:
        if name not in known:
            raise ValueError(f"no recipe has a part {name!r}; {nearest(name, known)}")
    return [(recipe, [part for part in recipe.parts if not wanted or part.name in wanted]) for recipe in recipes]


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _of_methods(parts: list[Part], names: tuple[str, ...]) -> list[Part]:
    """Return the parts with the rows of these methods alone, without parts that have none; all if no method is named."""
    for name in names:
        METHODS.about(name)
    return [left for part in parts if (left := part.of_methods(names)).rows] if names else parts


def _with_seeds(parts: list[Part], seeds: str | None) -> list[Part]:
    return [part.with_seeds(tuple(parse_seeds(seeds))) for part in parts] if seeds is not None else parts


def _write_pages(recipes: Sequence[Recipe], out: Path, given: str, small: bool) -> None:
    records, notice = read_records(out), quick_version.NOTICE if small else ""
    for recipe in recipes:
        say(f"{recipe.name}: the page is {write_page(recipe, records, out, notice, given)}")


def _show(part: Part, records: Records) -> None:
    """Print the table of a part."""
    if part.rows and part.columns:
        found = main_table(Results(part, records))
        table = Table(title=Text(f"{part.name}: {part.title}"), title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
        for k, head in enumerate(found.head):
            table.add_column(head, justify="right" if k else "left", overflow="fold")
        for row in found.rows:
            table.add_row(*map(Text, row))
        Console().print(table)


def _tell_missing(recipe: Recipe, parts: list[Part], out: Path, places: tuple[int, int]) -> None:
    """Print the rows that have no records, the cheapest first, with their cost; `places` are GPUs and runs on each."""
    found = missing_rows(parts, read_records(out))
    rows = sum(len(part.rows) for part in parts)
    there = "" if out.exists() else ", a folder that is not there yet"
    say(f"{recipe.name}: {rows - len(found)} of {rows} rows are complete in {out}{there}")
    if not found:
        return
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for head in ("part", "row", "seeds", "seconds each", "by the times of"):
        table.add_column(head, justify="right" if head == "seconds each" else "left", overflow="fold")
    for item in found:
        seconds = f"{item.seconds:,.0f}" if item.seconds is not None else "?"
        seeds = seeds_text(item.seeds)
        table.add_row(Text(item.part.name), Text(item.row.label), seeds, seconds, item.similar)
    Console().print(table)
    say(_total(found, *places))


def _total(found: Sequence[Missing], gpus: int = 0, each: int = 1) -> str:
    """Return what all of it would cost, so far as it is known."""
    costs = {item.row.at(seed).name: item.seconds for item in found for seed in item.seeds}  # a run of several parts once
    known = [seconds for seconds in costs.values() if seconds is not None]
    hours, runs, unknown = sum(known) / 3600, len(known), len(costs) - len(known)
    more = f", and {unknown} runs of unknown cost" if unknown else ""
    said = f"{runs} runs of about {hours:.1f} hours one after the other, on the machines of the records{more}"
    if gpus and known:
        there = f"{gpus} GPU{'s' * (gpus > 1)}" + f" with {each} runs on each" * (each > 1)
        said += f"; on {there} about {duration(time_on(known, gpus * each))}, the longest run {duration(max(known))}"
    return said
