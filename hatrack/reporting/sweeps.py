"""Responses to options: groups of records that differ in a few options only, found among any records."""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from hatrack.experiments.record import Record
from hatrack.methods import METHODS
from hatrack.reporting.measures import MISSING, format_number, format_std, mean_std
from hatrack.reporting.response import Response
from hatrack.reporting.tables import option_text
from hatrack.reporting.words import defaults_of
from hatrack.text import printable

KINDS = ("method_options", "regime", "benchmark_options", "network_options")
MOST_AXES = 3  # options that vary at once; more are no sweep
MOST_POINTS = 200


def responses(records: Iterable[Record]) -> list[Response]:
    """Return the sweeps among records: runs of one method on one benchmark that differ in at most three options and seeds.

    Options that a record does not name have their defaults, so that all values are written out.
    """
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        spec = record.spec
        if spec.method not in ("joint", "random"):
            groups.setdefault((spec.method, spec.benchmark, spec.network, spec.scenario, str(len(record.tasks))), []).append(
                record
            )
    found = [_response(group) for group in groups.values()]
    return [response for response in found if response]


def _response(records: list[Record]) -> Response | None:
    first = records[0].spec
    given = [_options(record) for record in records]
    names = list(dict.fromkeys(name for options in given for name in options))
    if len({id(record) for record in records}) < 2:
        return None
    defaults = defaults_of(METHODS.get(first.method)) if any("." not in name for name in names) else {}
    full = [{name: options.get(name, option_text(defaults.get(name))) for name in names} for options in given]
    axes = {name: _sorted({options[name] for options in full}) for name in names}
    axes = {name: values for name, values in axes.items() if len(values) > 1}
    if not 1 <= len(axes) <= MOST_AXES:
        return None
    points: dict[tuple[str, ...], list[Record]] = {}
    for record, options in zip(records, full, strict=True):
        points.setdefault(tuple(options[name] for name in axes), []).append(record)
    if len(points) < 2 or len(points) > MOST_POINTS:
        return None
    return Response(f"{printable(first.method)} on {printable(first.benchmark)}", axes, points)


def _options(record: Record) -> dict[str, str]:
    """Return all options of a record as texts: those of the method by their names, others as regime.lr."""
    found: dict[str, str] = {}
    for kind in KINDS:
        table: Mapping[str, Any] = getattr(record.spec, kind)
        prefix = "" if kind == "method_options" else kind.removesuffix("_options") + "."
        found |= {printable(f"{prefix}{name}"): option_text(value) for name, value in table.items()}
    return found


def _sorted(values: set[str]) -> list[str]:
    """Return texts in the order of their numbers, if they are numbers."""

    def key(text: str) -> tuple[float, str]:
        try:
            return float(text), ""
        except ValueError:
            return float("inf"), text

    return sorted(values, key=key)


def sweep_data(response: Response) -> dict[str, Any]:
    """Return a response as plain values: its axes, and a row per combination of values that was run."""
    rows = []
    for point in product(*response.axes.values()):
        records = response.records.get(point, [])
        found = [(m, mean_std(response.values(m, point))) for m in response.measures]
        if records:
            rows.append({
                "point": list(point),
                "seeds": len(records),
                "values": [[s.mean, s.std] if s else [None, None] for _, s in found],
                "texts": [f"{format_number(m, s.mean)} {format_std(m, s)}".strip() if s else MISSING for m, s in found],
            })  # fmt: skip
    titles = [{"title": m.title, "percent": m.unit == "%"} for m in response.measures]
    return {"title": response.title, "axes": response.axes, "measures": titles, "rows": rows}
