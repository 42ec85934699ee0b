"""Carrying out a recipe: which of its runs have no record yet, what they would cost, and running them."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hatrack.clusters.dispatch import hold_cluster, run_anywhere
from hatrack.clusters.request import Submitted, parse_request
from hatrack.engine.choice import Precision
from hatrack.experiments.costs import expected_cost
from hatrack.experiments.flatness import OPTIONS, measure_run, read_flatness, write_flatness
from hatrack.experiments.progress import Display
from hatrack.experiments.record import Record
from hatrack.experiments.spec import Run
from hatrack.methods.divergence import Diverged
from hatrack.recipes.recipe import Part, Row
from hatrack.recipes.results import Records, Results, index
from hatrack.recipes.timings import read_timings

RECORDS = "records"  # the folder of the records within that of the pages


class Missing(NamedTuple):
    """A row of which seeds have no record yet.

    Attributes:
        part: the part.
        row: the row.
        seeds: the seeds without a record.
        seconds: what one of them would take, by the times in the records of similar runs; None if there are none.
        similar: whose times these are: the row's own at other seeds, or those of other rows of the same size.
    """

    part: Part
    row: Row
    seeds: list[int]
    seconds: float | None
    similar: str

    @property
    def cost(self) -> float:
        """The seconds of all its seeds one after the other; infinite if they are not known."""
        return float("inf") if self.seconds is None else self.seconds * len(self.seeds)


def read_records(folder: Path) -> Records:
    """Return the records in a folder, with the flatness and the times that were measured; none if it does not exist."""
    read = {path: Record.load(path) for path in sorted((folder / RECORDS).glob("*.json"))}
    flatness = {record.name: found for path, record in read.items() if (found := read_flatness(path))}
    return index(read.values(), flatness, read_timings(folder))


def missing_rows(parts: Iterable[Part], records: Records) -> list[Missing]:
    """Return the rows that are not complete, the cheapest first, those of unknown cost last."""
    everything = list({record.name: record for group in records.values() for record in group.values()}.values())
    found = [
        Missing(part, row, seeds, *expected_cost(row.run, everything))
        for part in parts
        for row in part.rows
        if (seeds := Results(part, records).missing(row))
    ]
    return sorted(found, key=lambda item: item.cost)


def wanted_runs(parts: Iterable[Part]) -> dict[tuple[Precision, str], list[Run]]:
    """Return the runs of parts by precision and benchmark, each once: the first part that has it decides."""
    found: dict[str, tuple[Precision, Run]] = {}
    for part in parts:
        for run in (row.at(seed) for row in part.rows for seed in row.seeds):
            found.setdefault(run.name, (part.precision, run))
    groups: dict[tuple[Precision, str], list[Run]] = {}
    for precision, run in found.values():
        groups.setdefault((precision, run.benchmark), []).append(run)
    return groups


def carry_out(parts: Sequence[Part], out: Path, precision: Precision | None, *, device: str, **how: Any) -> list[str]:
    """Carry out the runs of parts that have no record yet; a run that was stopped goes on.

    Args:
        parts: the parts.
        out: the folder of the pages; records go to its folder `records`.
        precision: of matrix products; None for what each part asks for, which holds on a GPU only.
        device: "cpu" or "cuda"; with a cluster also "auto".
        how: engine, save_every, parallel, and where to run: see `run_anywhere`.

    Returns:
        Why some runs have no record: they diverged, or the data of their benchmark are not there; a sentence each.
    """
    problems, submitted = list[str](), list[str]()
    request = parse_request(how.get("on", ""), how.get("ask", ""), device)
    fleet = bool(request.engine)
    expected = (Diverged, FileNotFoundError, ValueError) if fleet else (Diverged, FileNotFoundError)
    local = request.device if fleet else device
    with hold_cluster(request):
        for kept in (True, False):  # a run of two parts keeps its models if one of them needs them
            for wanted, runs in _groups([part for part in parts if part.flatness == kept], fleet):
                chosen = precision or (wanted if local == "cuda" else "tf32")
                todo = [run for run in runs if not kept or read_flatness(out / RECORDS / f"{run.name}.json") is None]
                try:
                    done = run_anywhere(todo, out / RECORDS, precision=chosen, device=device, keep_each=kept, **how)
                    for record in done if kept else ():
                        _measure_flatness(out / RECORDS / f"{record.name}.json", "cpu" if fleet else device)
                except expected as error:  # the other runs go on
                    problems += str(error).splitlines()
                except Submitted as error:
                    submitted.append(str(error))
    if submitted:
        raise Submitted("; ".join(submitted))
    return problems


def _groups(parts: Sequence[Part], fleet: bool) -> list[tuple[Precision, list[Run]]]:
    """Return the runs of parts with their precision, by benchmark: where its data are missing, the others go on. A fleet, in
    which every run fails alone, gets all at once."""
    found = wanted_runs(parts)
    if not fleet:
        return [(precision, runs) for (precision, _), runs in found.items()]
    merged: dict[Precision, list[Run]] = {}
    for (precision, _), runs in found.items():
        merged.setdefault(precision, []).extend(runs)
    return list(merged.items())


def _measure_flatness(path: Path, device: str) -> None:
    """Measure the flatness of a run and write it beside its record."""
    record = Record.load(path)
    with Display(1) as display:
        found = measure_run(path, record, device, partial(display.show, 0), (), **OPTIONS)
    write_flatness(path, record, record.spec.method, OPTIONS, found)
