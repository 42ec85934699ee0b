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

Six methods were tuned by the protocol [`first-tasks`](../tuning.md) with the same budget, 20 trials each, in their
default search spaces: chosen on the validation data of the first three tasks of seed 0. Then they ran on whole
sequences of other seeds, tuned and with their defaults. `python -m dev.tuning` writes this page from the outcomes and
records in `tuning/`.

How it was measured: sample data, a network of two layers of 200 units, SGD with momentum. To keep the time short on a
CPU, every task had four epochs in the searches and in both kinds of runs. The numbers are the average accuracy on test
data after the last task, mean and standard deviation over n seeds. The difference is tuned minus default in percentage
points, and p is that of the paired t-test over seeds, for each row by itself: with twelve rows, one p below 0.05 is no
surprise, and after Holm's correction none is left.

What tuning changed:

- `ewc`, `si` and `mas`, the methods with a penalty, have a higher mean on both sequences. The gain is largest for
  `mas`: at its defaults three of its five runs on `smnist` learn hardly anything after the first task, probably because
  its penalty is too strong for SGD with momentum; tuned, all learn every task.
- `lwf` keeps its defaults on one sequence and has a slightly higher mean on the other.
- `packnet` stays where it was: its defaults were good.
- `hat` has a lower mean on both. On `digits-and-clothes` the first three tasks do not show that six have to share the
  network, so a small `c` looks good; every task then takes more units, and the network is nearly full before the last
  one. On `smnist` the chosen learning rate is probably too large: at one seed the last two tasks are not learned. What
  `hat` has learned it keeps.
- So a choice on the first tasks is fair, but not free of risk: it can't see what only later tasks show, and the best of
  20 trials on a few hundred images of one seed may be luck. The rank of the methods changes with it: with defaults
  `mas` is last on `smnist`, behind plain SGD, and tuned it is not.
"""
HEADS = ["method", "chosen", "validation: default, %", "chosen, %", "n", "test: default, %", "tuned, %", "difference", "p",
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
    return [
        "```sh",
        f"hatrack tune {benchmark} {names} {setting} --trials 20",
        f"{run} {files}",
        run,
        run.replace(names, "sgd"),
        "```",
    ]


def _piped(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text else f"{PAGE} is not up to date: python -m dev.tuning")
    write(PAGE, text)
