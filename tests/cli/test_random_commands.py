"""Random command lines: each ends in exit code 0, or in one line and exit code 2; nothing outside its folder changes."""

import random
import re
from pathlib import Path

import pytest

from hatrack import BENCHMARKS, METHODS, NETWORKS, Regime, Run
from hatrack.cli.options import flag
from hatrack.options import parameters
from tests.helpers.fuzzing import Hang, contents, program
from tests.helpers.tiers import cases

WORDS = ["", "-", "--", "-h", "--help", "-1", "0", "1e39", "nan", "all", "x" * 3000, "é", "\x1b[2J", "a\nb", "../..",
         "~nobody", "/dev/null", ".", "*", "$HOME", "%s", "{}", "0-", "1,2", "--no-", "--data", "sample", "full",
         "\udcff", "0x10"]  # fmt: skip
# not `demo`, which takes a minute
COMMANDS = ["list", "run", "resume", "report", "reproduce", "data", "completion", "nonsense"]
SAFE = [
    "--data",
    "sample",
    "--network",
    "mlp",
    "--widths",
    "8",
    "--epochs",
    "1",
    "--batch",
    "900",
    "--device",
    "cpu",
    "--train-examples",
    "10",
    "--out",
    "out",
]


def options() -> list[str]:
    entries = [table.find(name) for table in (METHODS, BENCHMARKS, NETWORKS) for name in table]
    names = {flag(name) for entry in (*entries, Regime, Run) for name in parameters(entry)}
    return sorted({*names, "--seed", "--seeds", "--out", "--again", "--engine", "--precision", "--save-every", "--parallel"})


OPTIONS = options()
NAMES = [*METHODS, *BENCHMARKS, *NETWORKS, "mnist", "hat2018"]


def line(draw: random.Random) -> list[str]:
    """A command with names and options, some right and some wrong; what would train for long is left out."""
    words = [draw.choice(COMMANDS)]
    if words == ["run"]:
        words += [draw.choice([*BENCHMARKS, *WORDS]), draw.choice([*METHODS, *WORDS])]
        words += SAFE if draw.random() < 0.5 else ["--epochs", "1", "--out", "out"]
    if words == ["data"]:
        words += [draw.choice(["list", "verify", "import", "get", "x"])]
    for _ in range(draw.randint(0, 4)):
        words.append(draw.choice([*OPTIONS, *WORDS, *NAMES]))
        if draw.random() < 0.6:
            words.append(draw.choice([*WORDS, *NAMES, str(draw.randint(-2, 3)), str(draw.random())]))
    if words[0] == "reproduce" and "--missing" not in words:
        words.append("--missing")
    return words


def judge(words: list[str], root: Path, before: dict[str, str]) -> str:
    """Return what is wrong with the outcome; empty if nothing is."""
    try:
        outcome = program(*words)
    except SystemExit as error:
        return f"SystemExit {error}"
    except Hang:
        return "it hangs"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    wrong = "" if outcome.code in (0, 2) else f"exit code {outcome.code}: {outcome.error[:300]}"
    if outcome.code == 2 and not re.search(r"hatrack: [^\x00-\x1f\x7f]+\n$", outcome.error):
        wrong = wrong or f"no line: {outcome.error[:300]!r}"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", outcome.said + outcome.error):
        wrong = wrong or "control characters"
    changed = {name for name, digest in before.items() if contents(root).get(name) != digest}
    return wrong or (f"changed {changed}" if changed else "")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_random_command_lines(part, tmp_path, monkeypatch):
    monkeypatch.setenv("HATRACK_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HATRACK_MIRROR", "http://127.0.0.1:9/")
    monkeypatch.setattr("hatrack.datasets.download.PAUSE", 0.0)
    (tmp_path / "work").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.chdir(tmp_path / "work")
    found = []
    for number in range(cases(5, 100)):
        words = line(random.Random(f"{part} {number}"))
        if wrong := judge(words, tmp_path, {"mine.txt": contents(tmp_path)["mine.txt"]}):
            found.append(f"{part} {number}: {[word[:40] for word in words]}: {wrong}")
    assert not found, "\n".join(found)
