"""What the numbers of a setting say, in sentences that are computed from them."""

import shlex
from collections.abc import Callable
from itertools import groupby
from typing import Any

from hatrack.benchmarks import BENCHMARKS
from hatrack.experiments.record import clean
from hatrack.experiments.spec import Run
from hatrack.networks import NETWORKS
from hatrack.options import parameters
from hatrack.regime import Regime
from hatrack.reporting.measures import MEASURES, number
from hatrack.reporting.tables import REFERENCES, Row, Setting, missing, option_text, ranking
from hatrack.text import printable

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
ACCURACY = next(m for m in MEASURES if m.key == "accuracy")


def counted(count: int, noun: str) -> str:
    """six tasks, 20 tasks, one task."""
    return f"{NUMBERS[count] if count < len(NUMBERS) else count} {noun}{'' if count == 1 else 's'}"


def story(setting: Setting) -> str:
    """The first paragraph: what was done, what was forgotten, and who knew most at the end."""
    rows = ranking(setting)
    ranked = [row for row in rows if not row.reference]
    seeds = sorted({len(row.seeds) for row in rows})
    times = counted(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    tasks = counted(len(setting.tasks), "task")
    sentences = [
        f"A network ({printable(setting.spec['network'])}) learned {tasks}"
        + (" one after the other" if len(setting.tasks) > 1 else "")
        + f", by {_by(setting, ranked)}"
        + (f" and {counted(len(rows) - len(ranked), 'reference')}" if len(rows) > len(ranked) else "")
        + f", with {times}{' each' if len(rows) > 1 else ''}.",
        _lost(ranked, tasks) if len(setting.tasks) > 1 else "With a single task there is nothing to forget yet.",
        _best(rows, ", averaged over all tasks" if len(setting.tasks) > 1 else ""),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _by(setting: Setting, ranked: list[Row]) -> str:
    """three methods; or one method in two variants."""
    methods = {setting.methods[row.label][0].spec["method"] for row in ranked}
    variants = f" in {counted(len(ranked), 'variant')}" if len(ranked) > len(methods) else ""
    return counted(len(methods), "method") + variants


def _lost(ranked: list[Row], tasks: str) -> str:
    """After six tasks, sgd had lost 16.3 points on average of what it once knew; hat 0.0."""
    found = [(row.label, spread.mean) for row in ranked if (spread := row.measures["forgetting"])]
    found.sort(key=lambda pair: (-pair[1], pair[0]))
    if not found:
        return ""
    (first, most), *others = found
    others = others if len(others) < 4 else others[-1:]  # of many, the one that lost least
    same = groupby(others, key=lambda pair: number(ACCURACY, pair[1]))
    rest = [f"{_and([name for name, _ in group])} {value}" for value, group in same]
    what = f"{number(ACCURACY, most)} points on average of what it once knew"
    return f"After {tasks}, {first} had lost {'; '.join([what, *rest])}."


def _best(rows: list[Row], averaged: str) -> str:
    """Who knew most at the end, and how far that is from the two references."""
    means = [(row, spread.mean) for row in rows if (spread := row.measures["accuracy"])]
    ranked = [(row.label, mean) for row, mean in means if not row.reference]
    parts = []
    if ranked:
        share = f"{number(ACCURACY, ranked[0][1])} % of the test examples{averaged}"
        more = ", more than any other" if len(ranked) > 1 and ranked[0][1] > ranked[1][1] else ""
        parts.append(f"At the end {ranked[0][0]} was right on {share}{more}")
    said = {"joint": "joint training, which may keep all data,", "random": "guessing"}
    parts += [f"{said.get(row.label, row.label)} on {number(ACCURACY, mean)} %" for row, mean in means if row.reference]
    return f"{'; '.join(parts)}." if ranked else ""


def _and(names: list[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def caution(setting: Setting) -> str:
    """Why these numbers are not the paper's, if they can't be."""
    regime, data = setting.spec["regime"], setting.spec["benchmark_options"].get("data")
    reasons = []
    if regime.get("schedule") == "plateau" and regime.get("epochs", 200) < 200:
        epochs = counted(regime["epochs"], "epoch")
        reasons.append(f"every task was trained for at most {epochs}, where the HAT paper allows 200")
    if data == "sample":
        reasons.append("only a small sample of the data was used")
    what = "A short regime" if len(reasons) == 1 and data != "sample" else "A short run"
    return f"{what}: {', and '.join(reasons)}. These numbers are not the paper's." if reasons else ""


def supply(setting: Setting) -> tuple[str, list[str]]:
    """What the forgetting ratio lacks, and the commands that would supply it; empty if nothing."""
    absent = missing(setting)
    if not absent:
        return "", []
    why = f"The forgetting ratio needs records of {_and(list(REFERENCES))} at the same seeds. To supply them, run this with "
    why += "the folder of these records as --out:"
    return why, [command(setting, method, seeds) for method, seeds in absent.items()]


def command(setting: Setting, method: str, seeds: list[int]) -> str:
    """What to type to run a method in this setting."""
    spec = setting.spec
    words = ["hatrack", "run", str(spec["benchmark"]), method]
    own = BENCHMARKS.entries[spec["benchmark"]].network if spec["benchmark"] in BENCHMARKS else None
    words += ["--network", str(spec["network"])] if spec["network"] != own else []
    sources: list[tuple[Callable[..., Any] | None, dict[str, Any]]] = [
        (Run, spec),
        (Regime, spec["regime"]),
        (BENCHMARKS.get(spec["benchmark"]), spec["benchmark_options"]),
        (NETWORKS.get(spec["network"]), spec["network_options"]),
    ]
    for entry, values in sources:
        words += _changed(entry, values) if entry else []
    return shlex.join([*words, *_seeds(seeds)])


def _changed(entry: Callable[..., Any], values: dict[str, Any]) -> list[str]:
    """The options that differ from their defaults, as on the command line."""
    words = []
    for name, parameter in parameters(entry).items():
        flag, value = name.replace("_", "-"), values.get(name, clean(parameter.default))
        if value != clean(parameter.default) and not isinstance(value, dict):
            words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", option_text(value)]
    return words


def _seeds(seeds: list[int]) -> list[str]:
    if len(seeds) == 1:
        return ["--seed", str(seeds[0])]
    whole = seeds[-1] - seeds[0] == len(seeds) - 1  # they rise
    return ["--seeds", f"{seeds[0]}-{seeds[-1]}" if whole else ",".join(map(str, seeds))]
