"""Writes docs/results/tuning.md from the outcomes of searches and the records in docs/results/tuning.

python -m dev.tuning            # write it
python -m dev.tuning --check    # exit code 1 if the page is not up to date
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats

from hatrack.experiments.record import Record
from hatrack.experiments.records import records
from hatrack.experiments.tuned import Tuned
from hatrack.files.atomic import write
from hatrack.methods import METHODS
from hatrack.options import parameters
from hatrack.regime import Regime
from hatrack.reporting.tables import option_text

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results" / "tuning"
PAGE = FOLDER.with_suffix(".md")
METHOD_NAMES = ("ewc", "si", "mas", "lwf", "hat", "packnet")
MORE = {"digits-and-clothes": "", "smnist": " --tasks 5"}  # options that a benchmark's runs have beside SETTING
SETTING = "--data sample --epochs 4 --optimizer momentum --widths 200,200 --dropout 0 --input-dropout 0"
INTRO = """# What tuning changed

@@
"""
HEADS = ["method", "chosen", "validation: default", "chosen", "n", "test: default, %", "tuned, %", "difference", "p",
         "forgetting: default", "tuned"]  # fmt: skip


def page() -> str:
    """Return the whole page."""
    found = records(FOLDER / "records")
    parts = [_part(benchmark, [r for r in found if r.spec.benchmark == benchmark]) for benchmark in MORE]
    return f"{INTRO}\n" + "\n\n".join(parts) + "\n"


def _part(benchmark: str, found: Sequence[Record]) -> str:
    """Return the table of one benchmark with its commands."""
    rows = [_row(benchmark, name, found) for name in METHOD_NAMES]
    plain = [r.summary["accuracy"] for r in found if r.spec.method == "sgd"]
    lines = [f"## {benchmark}", "", _piped(HEADS), _piped(["---"] * len(HEADS)), *map(_piped, rows), ""]
    lines += [f"Plain `sgd` in the same setting: {_mean_std(plain)} % (n = {len(plain)}).", ""]
    return "\n".join([*lines, *_commands(benchmark, found)])


def _row(benchmark: str, method: str, found: Sequence[Record]) -> list[str]:
    tuned = Tuned.load(FOLDER / f"{benchmark}-{method}-first-tasks.json")
    own = [record for record in found if record.spec.method == method]
    after = {record.spec.seed: record for record in own if record.tuned}
    before = {record.spec.seed: record for record in own if not record.tuned} | (after if _is_default(tuned) else {})
    seeds = sorted(after.keys() & before.keys())
    pairs = [(before[s].summary, after[s].summary) for s in seeds]
    one, two = ([pair[k]["accuracy"] for pair in pairs] for k in (0, 1))
    differences = [b - a for a, b in zip(one, two, strict=True)]
    same = not any(differences)
    p = "1" if same else f"{stats.ttest_rel(two, one).pvalue:.3f}"
    forgetting = [f"{fmean(pair[k]['forgetting'] for pair in pairs):.3f}" for k in (0, 1)]
    values = {**tuned.method_options, **tuned.regime}
    chosen = "the defaults" if _is_default(tuned) else ", ".join(f"{k}={option_text(v)}" for k, v in values.items())
    valid = [f"{100 * value:.1f}" for value in (tuned.trials[0]["value"], tuned.value)]
    change = "0" if same else f"{100 * fmean(differences):+.1f}"
    return [method, chosen, *valid, str(len(seeds)), _mean_std(one), _mean_std(two), change, p, *forgetting]


def _is_default(tuned: Tuned) -> bool:
    """Return whether the first trial, that of the defaults, was the best."""
    known = {**parameters(Regime), **parameters(METHODS[tuned.search["method"]])}
    values: Mapping[str, object] = {**tuned.method_options, **tuned.regime}
    return all(known[name].default == value for name, value in values.items())


def _mean_std(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):.1f} ± {100 * stdev(values):.1f}"


def _commands(benchmark: str, found: Sequence[Record]) -> list[str]:
    seeds = sorted({record.spec.seed for record in found})
    names, setting = ",".join(METHOD_NAMES), f"{SETTING}{MORE[benchmark]}"
    files = " ".join(f"--tuned tuned/{benchmark}-{name}-first-tasks.json" for name in METHOD_NAMES)
    run = f"hatrack run {benchmark} {names} {setting} --seeds {seeds[0]}-{seeds[-1]}"
    return ["```sh", f"hatrack tune {benchmark} {names} {setting} --trials 20", f"{run} {files}", run, "```"]


def _piped(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text else f"{PAGE} is not up to date: python -m dev.tuning")
    write(PAGE, text)
