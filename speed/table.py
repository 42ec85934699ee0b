"""This library, plain PyTorch loops and Avalanche, measured in one run on one device: python -m speed.table

It prints a table and writes it to docs/results/speed.md, into the section of this device. `--quick` is for trying it out: a
few short epochs, nothing compiled, and nothing is written unless `--out` says where.
"""

import argparse
import platform
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import hatrack
from hatrack.engine.choice import ENGINES
from hatrack.options import choose
from speed.clock import Contest, Row
from speed.contest import AUTHORS, AVALANCHE, GATED, PLAIN, SMALL, fleets, large, small

OUT = Path(__file__).parent.parent / "docs" / "results" / "speed.md"
# What is asked of this library: (words of a title, compared with, at most so many times as long; or by engine).
WANTED: list[tuple[str, str, float | dict[str, float]]] = [
    (", sgd,", AVALANCHE, 0.6),
    (", ewc,", AVALANCHE, 0.4),
    (", sgd,", PLAIN, 1.0),
    (", ewc,", PLAIN, 1.0),
    (", si,", PLAIN, 1.0),
    (", hat,", PLAIN, {"eager": 1.1, "compiled": 0.6}),  # plain SGD
    ("GPU: a whole epoch", AUTHORS, 1 / 15),
]
STEPS = [  # steps per second that are asked for on an H200: (words of a title, row, at least so many)
    ("GPU: training", "hatrack, compiled", 2000),
    ("GPU: seeds", "hatrack, compiled, 10 seeds side by side", 3400),
    ("GPU: seeds", "hatrack, compiled, bfloat16, 10 seeds side by side", 4500),
]
INTRODUCTION = """# Speed

Every row of a group is the same network, data (random images), batch and method. The contestants take turns within one run;
a time is the median over the turns, a ratio the median of the ratios of single turns (so the two may differ a little).

- `hatrack` is timed by whole epochs, with all that training does besides the step.
- The plain loops are `speed/loops.py` and `speed/authors.py`: tensors on the device, a batch by an index. With AlexNet HAT
  is trained as the authors of the paper do: every head computed, masks parameter by parameter, the training set evaluated
  each epoch. On the perceptron HAT is compared with plain SGD, which shows what its gates cost. Beside it is an eager HAT as
  short as it can be written by hand for this one network, which shows how much of that cost no library can save.
- Avalanche runs in its own environment (`make peers`), by whole epochs, from a tensor data set, without metrics or log.
- Mammoth and the code of van de Ven are not compared: no package of theirs was found on PyPI (`mammoth` there converts
  documents, `continual-learning` is by others), and their repositories could not be reached from where this was measured.
- On the perceptron all train on the same floats, and nobody clips gradients. With AlexNet both clip them, and `hatrack`
  keeps the images as bytes, as in use.
- On a CPU the times are processor time of one thread: what one waits for if the machine has nothing else to do.
"""


def by_commas(text: str) -> list[str]:
    try:
        return [choose("engine", word, ENGINES) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="of AlexNet; the rest is on the CPU"
    )
    parser.add_argument("--engines", type=by_commas, help="of this library; by default eager, compiled and recorded")
    parser.add_argument("--fleet", type=by_commas, help="engines of a fleet on one GPU; by default compiled and recorded")
    parser.add_argument("--seeds", type=int, default=10, help="of a fleet")
    parser.add_argument("--only", choices=["small", "hat", "large"], help="the perceptron, HAT on it, or AlexNet")
    parser.add_argument("--quick", action="store_true", help="a few short epochs, nothing compiled")
    parser.add_argument("--out", type=Path, help=f"by default docs/results/{OUT.name}")
    words = parser.parse_args()
    words.device = ("cuda" if torch.cuda.is_available() else "cpu") if words.device == "auto" else words.device
    compiled = [] if words.quick else ["compiled"]
    words.engines = words.engines or ["eager", *compiled, "recorded"]
    words.fleet = words.fleet or [*compiled, "recorded"]
    words.out = words.out or (None if words.quick else OUT)
    return words


Done = Callable[[Contest, dict[str, str]], None]  # is told of every contest, with the versions of the peers


def measure(words: argparse.Namespace, done: Done) -> None:
    """All contests, one after the other."""
    device, threads = torch.device(words.device), torch.get_num_threads()
    torch.set_num_threads(1)
    for pair in {"large": [], "hat": [GATED]}.get(words.only, [*SMALL, GATED]):
        done(*small(pair, words.engines, *((50, 5) if words.quick else (200, 11))))
    if words.only not in ("small", "hat"):
        if device.type == "cuda":
            torch.set_num_threads(threads)
        count, rounds = (300, 2) if words.quick else (10_000, 3) if device.type == "cuda" else (600, 4)
        large(words.engines, device, count, rounds, lambda contest: done(contest, {}))
        fleets(words.fleet, device, words.seeds, lambda contest: done(contest, {}))


# What is shown


def span(seconds: float) -> str:
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if seconds * s >= 1 or u == "µs")
    return f"{seconds * scale:.3g} {unit}"


def ratio(row: Row, other: Row | None) -> str:
    times = 0.0 if other is None or row is other else row.times(other)[0]
    return f"{times:.{2 if times > 0.1 else 3}f}" if times else ""


def lines(contest: Contest) -> list[tuple[str, str, str, str]]:
    """The loop; seconds per step or epoch; times those of the plain loop; times those of Avalanche."""
    plain = contest.row(PLAIN) or contest.row(AUTHORS)
    peer = contest.row(AVALANCHE)
    found = []
    for row in contest.rows:
        if row.skipped:
            found.append((row.name, row.skipped.replace("|", "/"), "", ""))
        else:
            found.append((row.name, f"{span(row.median)} per {contest.unit}", ratio(row, plain), ratio(row, peer)))
    return found


def verdicts(contests: list[Contest]) -> list[str]:
    """What was asked for, and what the usual engines reach."""
    found = []
    for words, name, asked in WANTED:
        for contest in [contest for contest in contests if words in contest.title]:
            other = contest.row(name)
            for mine in filter(None, map(contest.row, contest.usual if other else ())):
                limit = asked if isinstance(asked, float) else asked[mine.name.rpartition(" ")[2]]
                times, low, high = mine.times(other)
                reached = "reached" if high <= limit else "MISSED" if low > limit else "within the noise"
                found.append(
                    f"{contest.title}: {mine.name} takes {times:.3f} times as long as {name} (quartiles {low:.3f} to "
                    f"{high:.3f}); at most {limit:.3g} is asked for: {reached}"
                )
    for words, name, least in STEPS:
        for row in [contest.row(name) for contest in contests if words in contest.title]:
            if row:
                reached = "reached" if 1 / row.median >= least else "MISSED"
                found.append(f"{row.name}: {1 / row.median:,.0f} steps per second; {least:,} are asked for: {reached}")
    return found


COLUMNS = ("", "time", "of the plain loop", "of Avalanche")


def show(contests: list[Contest], console: Console) -> None:
    for contest in contests:
        table = Table(*COLUMNS, title=contest.title, box=box.SIMPLE, title_justify="left")
        for line in lines(contest):
            table.add_row(*line)
        console.print(table)
    for verdict in verdicts(contests):
        console.print(verdict, highlight=False, soft_wrap=True)


def section(contests: list[Contest], title: str, facts: str, command: str) -> str:
    parts = [f"## {title}\n\n{facts}\n\n```sh\n{command}\n```\n"]
    for contest in contests:
        rows = ["| " + " | ".join(line) + " |" for line in (COLUMNS, ("---",) * 4, *lines(contest))]
        parts.append(f"### {contest.title}\n\n" + "\n".join(rows) + "\n")
    parts.append("### What is asked for\n\n" + "\n".join(f"- {verdict}" for verdict in verdicts(contests)) + "\n")
    return "\n".join(parts)


def put(text: str, new: str) -> str:
    """The page with this section in it, instead of an earlier one of the same title."""
    others = [f"## {part}" for part in text.split("\n## ")[1:]]
    kept = [part.rstrip() + "\n" for part in others if part.splitlines()[0] != new.splitlines()[0]]
    return "\n".join([INTRODUCTION, *sorted([*kept, new])])


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"CPU: {names[0]}" if names else f"CPU: {platform.machine()}"


def main() -> None:
    """Every contest is shown and written as soon as it is over."""
    words, console = arguments(), Console()
    known = {"hatrack": hatrack.__version__, "torch": torch.__version__, "Python": platform.python_version()}
    contests: dict[str, Contest] = {}

    def done(contest: Contest, versions: dict[str, str]) -> None:
        contests[contest.title] = contest
        known.update(versions)
        show([contest], console)
        if words.out:
            facts = f"{date.today()}; " + ", ".join(f"{name} {version}" for name, version in known.items()) + "."
            command = " ".join(["python -m speed.table", *sys.argv[1:]])
            old = words.out.read_text() if words.out.exists() else ""
            words.out.parent.mkdir(parents=True, exist_ok=True)
            words.out.write_text(put(old, section(list(contests.values()), machine(words.device), facts, command)))

    measure(words, done)
    if words.out:
        console.print(f"written to {words.out}")


if __name__ == "__main__":
    main()
