"""The outcome of a search: a JSON file with the chosen options, the protocol and all trials, for `run --tuned`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hatrack.experiments.record import sign
from hatrack.experiments.tuning_protocols import PROTOCOLS
from hatrack.files import schema
from hatrack.files.atomic import read_bytes, write
from hatrack.methods import METHODS
from hatrack.options import check, complete
from hatrack.regime import Regime
from hatrack.text import is_percent

SCHEMA = 1
OPTIONS = schema.table(schema.plain)
WHOLE = schema.number(0, 2**31, whole=True)
SEARCH = schema.fields({
    "benchmark": schema.line,
    "method": schema.line,
    "protocol": schema.line,
    "on": schema.line,
    "tasks_used": WHOLE,
    "seeds": schema.items(WHOLE, least=1),
    "network": schema.line,
    "space": OPTIONS,
    "given": schema.table(OPTIONS),
    "sampler": schema.line,
    "pruner": schema.line,
})  # fmt: skip


def _file(share: bool) -> schema.Check:
    """Return the check of a file whose values are shares of right answers, or any numbers."""
    low, high = (0.0, 1.0) if share else (-math.inf, math.inf)
    value = schema.number(low, high, null=True)
    trial = schema.fields({"number": WHOLE, "state": schema.line, "value": value, "options": OPTIONS})
    return schema.fields({
        "search": SEARCH,
        "method_options": OPTIONS,
        "regime": OPTIONS,
        "value": schema.number(low, high),
        "budget": WHOLE,
        "trials": schema.items(trial, least=1),
        "versions": OPTIONS,
    }, {"score": schema.line})  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search.

    Attributes:
        search: what was searched and how, as `Search.spec` gives it.
        method_options: the chosen options of the method.
        regime: the chosen options of the regime.
        value: the mean validation accuracy that they reached, or another score.
        budget: the number of trials that was asked for.
        trials: every trial, with its number, state, value and options.
        versions: the versions of the libraries.
        score: the name of what the values are.
    """

    search: Mapping[str, Any]
    method_options: Mapping[str, Any]
    regime: Mapping[str, Any]
    value: float
    budget: int
    trials: list[dict[str, Any]]
    versions: Mapping[str, Any]
    score: str = "accuracy"

    def save(self, path: Path) -> None:
        """Write the file, completely or not at all."""
        data = {name: value for name, value in vars(self).items() if name != "score" or value != "accuracy"}
        write(path, json.dumps(sign({"tuned": SCHEMA, **data}), indent=1, allow_nan=False) + "\n", follow=False)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file of an outcome; raise a ValueError of one line if it is none, or was changed by hand."""
        try:
            data = json.loads(read_bytes(path).decode())
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not the outcome of a search: not JSON ({error})") from None
        if not isinstance(data, dict) or type(data.get("tuned")) is not int:
            raise ValueError(f"{path} is not the outcome of a search; hatrack tune BENCHMARK METHOD writes one")
        if data["tuned"] > SCHEMA:
            raise ValueError(f"{path} is of a newer version of hatrack")
        try:
            score = data.get("score", "accuracy")
            _file(not isinstance(score, str) or is_percent(score))("", data)
            if data.get("digest") != sign(data)["digest"]:
                raise ValueError("its digest differs: it was changed after it was written")
            if data["search"]["protocol"] not in PROTOCOLS:
                raise ValueError(f"this version knows no protocol {data['search']['protocol']!r}")
        except ValueError as error:
            raise ValueError(f"{path} is not the outcome of a search: {error}") from None
        for key in ("method_options", "regime"):
            data[key] = {k: tuple(v) if isinstance(v, list) else v for k, v in data[key].items()}
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})

    def check_fits(self, path: Path, benchmark: str) -> None:
        """Raise a ValueError if the outcome must not be used for a benchmark, or its options are not allowed.

        Outcomes of "first-tasks" may be used on another benchmark: that is a transfer, and the record says so.
        """
        search = self.search
        if search["protocol"] == "transfer" and benchmark == search["on"]:
            raise ValueError(f"{path} was chosen on {benchmark} itself; the protocol transfer is for other benchmarks")
        if search["protocol"] in ("one-seed", "whole-stream") and benchmark != search["benchmark"]:
            raise ValueError(f"{path} is for {search['benchmark']}, not for {benchmark} (protocol {search['protocol']})")
        try:
            complete(search["method"], METHODS.find(search["method"]), self.method_options)
            check(Regime, self.regime)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def note(self, benchmark: str, taken: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a record tells of the search.

        Args:
            benchmark: the benchmark of the run.
            taken: the options that the run took from the outcome.
            instead: of those that belong to the regime, the values that the run would have had otherwise.
        """
        search = self.search
        elsewhere = search["on"] or (search["benchmark"] if search["benchmark"] != benchmark else "")
        note = {
            "protocol": "transfer" if elsewhere else search["protocol"],
            "trials": len(self.trials),
            "options": sorted(taken),
            "regime": sorted(instead),
            "regime_without": [instead[name] for name in sorted(instead)],
            "seeds": list(search["seeds"]),
            "value": self.value,
        }
        extra = {"on": elsewhere, "tasks_used": search["tasks_used"]}
        return {**note, **{name: value for name, value in extra.items() if value}}
