"""Sentences for the page, computed from the records of a setting."""

import math
import shlex
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from hatrack.benchmarks import BENCHMARKS
from hatrack.experiments.record import clean
from hatrack.experiments.record_parts import Spec
from hatrack.experiments.statistics import FEWEST, leaders
from hatrack.methods import METHODS
from hatrack.networks import NETWORKS
from hatrack.options import parameters
from hatrack.regime import Regime
from hatrack.reporting.measures import format_number, measure_of
from hatrack.reporting.references import REFERENCES
from hatrack.reporting.tables import Row, Setting, accuracies, missing_references, option_text, ranking
from hatrack.text import printable

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
RUN_OPTIONS = (  # beside those of regime, benchmark and network
    "heads",
    "init",
    "freeze",
    "train_examples",
    "watch_tasks",
    "pretrain",
    "pretrain_epochs",
    "scenario",
    "first_tasks",
    "only_task",
    "router",
    "weights",
    "trunk",
    "adapters",
    "adapter_layers",
)
HAT_EPOCHS = 200  # of a task at most, in the HAT paper
REFERENCE_NAMES = {"joint": "joint training, which keeps the data of all tasks,", "random": "guessing"}


def count_text(count: int, noun: str) -> str:
    """Return a number and a noun: six tasks, 20 tasks, one task."""
    return f"{NUMBERS[count] if count < len(NUMBERS) else count} {noun}{'' if count == 1 else 's'}"


def summary(setting: Setting) -> str:
    """Return the first paragraph: what was run, how much was forgotten, and which method was the most accurate."""
    rows = ranking(setting)
    ranked = [row for row in rows if not row.reference]
    several = len(setting.tasks) > 1
    sentences = [
        _what_was_run(setting, rows, ranked),
        _forgetting(setting, ranked) if several else "With a single task, nothing can be forgotten.",
        _accuracy(setting, rows, f"average {setting.score}" if several else setting.score),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _what_was_run(setting: Setting, rows: list[Row], ranked: list[Row]) -> str:
    """Return, for example: A network (mlp) was trained on six tasks in sequence with three methods, two seeds each."""
    methods = {setting.methods[row.label][0].spec.method for row in ranked}
    with_what = count_text(len(methods), "method")
    with_what += f" in {count_text(len(ranked), 'variant')}" if len(ranked) > len(methods) else ""
    with_what += f" and {count_text(len(rows) - len(ranked), 'reference')}" if len(rows) > len(ranked) else ""
    seeds = sorted({len(row.seeds) for row in rows})
    seeds_text = count_text(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    tasks = count_text(len(setting.tasks), "task") + (" in sequence" if len(setting.tasks) > 1 else "")
    each = " each" if len(rows) > 1 else ""
    return f"A network ({printable(setting.spec.network)}) was trained on {tasks} with {with_what}, {seeds_text}{each}."


def _forgetting(setting: Setting, ranked: list[Row]) -> str:
    """Return, for example: After six tasks, the average forgetting is 16.3 percentage points for sgd; 0.0 for hat."""
    found = [(row.label, value.mean) for row in ranked if (value := row.measures["forgetting"])]
    found.sort(key=lambda pair: (-pair[1], pair[0]))
    if not found:
        return ""
    first, *others = found
    measure = measure_of(setting.score, "accuracy")
    lowest = format_number(measure, found[-1][1])
    extremes = [pair for pair in others if format_number(measure, pair[1]) == lowest]  # also those with the same number
    listed = [first, *(others if len(others) < 4 else extremes)]  # of many methods, the two extremes
    same = groupby(listed, key=lambda pair: format_number(measure, pair[1]))
    values = [(value, join_names([name for name, _ in group])) for value, group in same]
    unit = " percentage points" if measure.unit == "%" else ""
    parts = [f"{value}{'' if k else unit} for {names}" for k, (value, names) in enumerate(values)]
    return f"After {count_text(len(setting.tasks), 'task')}, the average forgetting is {'; '.join(parts)}."


def _accuracy(setting: Setting, rows: list[Row], measure: str) -> str:
    """Return, for example: At the end, hat had the highest accuracy of all methods, 96.6 %; guessing had 33.7 %."""
    means = {row.label: value.mean for row in rows if (value := row.measures["accuracy"])}
    ranked = [row.label for row in rows if row.label in means and not row.reference]
    if not ranked:
        return ""
    values = accuracies(setting)
    best = leaders(values)
    few = [name for name in ranked if len(values[name]) < FEWEST]
    shown = {name: with_unit(setting.score, mean) for name, mean in means.items()}
    article = "an" if measure[0] in "aR" else "a"
    if len(best) == 1:
        first = f"{best[0]} is ahead of {all_others(values)}, with {article} {measure} of {shown[best[0]]}"
        first += "" if best[0] == ranked[0] else " (methods are compared at the seeds that they share)"
    elif len(best) > 1:
        more = f" and {count_text(len(best) - 4, 'other')}" if len(best) > 4 else ""
        first = f"{join_names([f'{name} ({shown[name]})' for name in best[:4]])}{more} are tied for the highest {measure}"
    else:
        first = f"{ranked[0]} had {article} {measure} of {shown[ranked[0]]}"
        first += f", {ranked[1]} of {shown[ranked[1]]}; too few seeds to name a winner" if len(ranked) > 1 else ""
    if few and best:
        first += f"; {join_names(few)} {'has' if len(few) == 1 else 'have'} too few seeds to be compared"
    references = [REFERENCE_NAMES.get(row.label, row.label) + f" had {shown[row.label]}"
                  for row in rows if row.reference and row.label in means]  # fmt: skip
    return f"At the end, {'; '.join([first, *references])}."


def all_others(values: Mapping[str, Mapping[int, float]]) -> str:
    """Return whom a method that is ahead is ahead of: methods with too few seeds are compared with nobody."""
    few = any(len(found) < FEWEST for found in values.values())
    return "all other methods" + (f" with {NUMBERS[FEWEST]} seeds or more" if few else "")


def with_unit(score: str, value: float) -> str:
    """Return a value of the accuracy, or of another score: 96.6 %, or 0.913 for R²."""
    measure = measure_of(score, "accuracy")
    return format_number(measure, value) + (" %" if measure.unit == "%" else "")


def join_names(names: list[str]) -> str:
    """Return names as in a sentence: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def allowed_epochs(setting: Setting) -> float:
    """Return how many epochs a task may be trained at most; if the regime counts steps, those of the largest task."""
    regime = setting.spec.regime
    if not regime.get("steps"):
        return float(regime.get("epochs", HAT_EPOCHS))
    largest = max((task.train or 0 for record in setting.records for task in record.tasks), default=0)
    batches: int = max(1, math.ceil(largest / regime.get("batch", 64)))
    return float(regime["steps"]) / batches


def length_text(setting: Setting) -> str:
    """Return how long a task may be trained at most, in the words of its regime: 20 epochs, or 500 steps."""
    unit = "step" if setting.spec.regime.get("steps") else "epoch"
    return count_text(setting.spec.regime.get(f"{unit}s", HAT_EPOCHS), unit)


def caution(setting: Setting) -> str:
    """Return why these numbers cannot be compared with the HAT paper's; empty if nothing prevents it."""
    regime, data = setting.spec.regime, setting.spec.benchmark_options.get("data")
    reasons = []
    if regime.get("schedule") == "plateau" and allowed_epochs(setting) < HAT_EPOCHS:
        of_hat = f"{HAT_EPOCHS}{' epochs' if regime.get('steps') else ''}"
        reasons.append(f"every task was trained for at most {length_text(setting)}, while the HAT paper allows {of_hat}")
    if data == "sample":
        reasons.append("only a small sample of the data was used")
    what = "Short training" if len(reasons) == 1 and data != "sample" else "A small experiment"
    return f"{what}: {', and '.join(reasons)}. Do not compare these numbers with the paper's." if reasons else ""


def reference_commands(setting: Setting) -> tuple[str, list[str]]:
    """Return what the forgetting ratio still needs, and the commands that make it; both are empty if nothing is missing."""
    absent = missing_references(setting)
    if not absent:
        return "", []
    why = f"The forgetting ratio needs records of {join_names(list(REFERENCES))} at the same seeds. To make them, run the "
    why += "following, with the folder of these records as --out:"
    return why, [command(setting, method, seeds) for method, seeds in absent.items()]


def command(setting: Setting, method: str, seeds: list[int]) -> str:
    """Return the command that runs a method, with its default options, in this setting."""
    return run_command(setting.spec.replace(method=method, method_options={}), seeds)


def run_command(spec: Spec, seeds: list[int]) -> str:
    """Return the command that carries out the run of a spec at these seeds."""
    words = ["hatrack", "run", spec.benchmark, spec.method]
    default = BENCHMARKS.entries[spec.benchmark].network if spec.benchmark in BENCHMARKS else None
    words += ["--network", spec.network] if spec.network != default else []
    sources = [
        (spec.method_options, defaults_of(METHODS.get(spec.method)) if spec.method_options else {}),
        (spec.written, {name: getattr(Spec, name) for name in RUN_OPTIONS}),
        (spec.regime, defaults_of(Regime)),
        (spec.benchmark_options, defaults_of(BENCHMARKS.get(spec.benchmark))),
        (spec.network_options, defaults_of(network_function(spec.network))),
    ]
    for values, defaults in sources:
        words += _flags(values, defaults)
    return shlex.join([*words, *_seeds(seeds)])


def network_function(name: str) -> Callable[..., Any] | None:
    """Return the function that builds a network; None if this version does not know it."""
    return NETWORKS.find(name) if NETWORKS.in_family(name) else NETWORKS.get(name)


def defaults_of(entry: Callable[..., Any] | None) -> dict[str, Any]:
    """Return the defaults of the options of a benchmark, network or regime; empty if this version does not know it."""
    return {name: clean(parameter.default) for name, parameter in parameters(entry).items()} if entry else {}


def _flags(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the options that differ from their defaults, as on the command line."""
    words = []
    for name, default in defaults.items():
        flag, value = name.replace("_", "-"), values.get(name, default)
        if value != default and not isinstance(value, dict):
            words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", option_text(value)]
    return words


def _seeds(seeds: list[int]) -> list[str]:
    """Return the option that names these seeds: --seed 3, --seeds 0-4 or --seeds 0,2,5."""
    return ["--seed" if len(seeds) == 1 else "--seeds", seeds_text(seeds)]


def seeds_text(seeds: list[int]) -> str:
    """Return seeds, which are sorted, in few letters: 3, 0-4 or 0,2,5."""
    no_gap = 1 < len(seeds) == seeds[-1] - seeds[0] + 1
    return f"{seeds[0]}-{seeds[-1]}" if no_gap else ",".join(map(str, seeds))
