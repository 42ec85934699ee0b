"""Commands that must not keep one waiting: they import no torch, and take little time of the processor."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hatrack.benchmarks import BENCHMARKS
from hatrack.cli.group import COMMANDS
from hatrack.methods import METHODS
from hatrack.networks import NETWORKS
from hatrack.options import parameters
from hatrack.regime import Regime
from tests.helpers.tiers import quick_and_slow

HEAVY = ("torch", "matplotlib", "numpy", "PIL")
MOST = 0.6  # seconds of the processor; a quiet machine takes a fifth of it
ROOT = Path(sys.modules["hatrack"].__file__).parent.parent
CHILD = """
import atexit, sys
atexit.register(lambda: print("loaded:", *(name for name in sys.argv[1].split(",") if name in sys.modules), file=sys.stderr))
from hatrack.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


def command(*words, **env):
    """Run the program in a process of its own; return what it prints, what it loaded, and its seconds of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, ",".join(HEAVY), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    said, _, loaded = done.stderr.rpartition("loaded:")
    assert said == ""
    return done.stdout, loaded.split(), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


QUICK = [["--help"], ["--version"], ["list"], ["data", "list"], ["data", "--help"], ["data"], []]
QUICK += [["completion", shell] for shell in ("bash", "zsh", "fish")]


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_it_is_quick_and_needs_no_torch(words):
    shown, loaded, seconds = command(*words)
    assert shown
    assert loaded == []
    assert seconds < MOST


def test_a_command_that_loads_torch_is_seen():
    """The check can fail."""
    assert "torch" in command("list", "mlp")[1]


def test_the_help_of_commands_needs_no_torch():
    for name in ("run", "resume", "report", "table", "reproduce", "demo", "list", "completion"):
        shown, loaded, _ = command(name, "--help")
        assert f"hatrack {name}" in shown
        assert not {"torch", "matplotlib"} & set(loaded)


# Completion


def completed(*words, shell="bash"):
    """Return what a shell is offered for the last of these words."""
    place = words[-1] if shell == "fish" else str(len(words) - 1)
    env = {"_HATRACK_COMPLETE": f"{shell}_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": place}
    shown, loaded, _ = command(**env)
    assert not {"torch", "matplotlib"} & set(loaded)
    if shell == "zsh":  # three lines for each: its type, the word, a text
        return shown.splitlines()[1::3]
    return [line.split("\t")[0].partition(",")[2] for line in shown.splitlines() if line]


@pytest.mark.parametrize("shell", quick_and_slow(["bash", "zsh", "fish"], ["bash"]))
def test_commands_and_names_are_completed(shell):
    assert completed("hatrack", "re", shell=shell) == ["resume", "report", "reproduce"]
    assert completed("hatrack", "run", "pm", shell=shell) == ["pmnist", "pmnist-blocks"]
    assert completed("hatrack", "run", "pmnist", "p", shell=shell) == [n for n in METHODS if n.startswith("p")]


def test_all_names_are_offered():
    assert completed("hatrack", "") == list(COMMANDS)
    assert {"run", "tune", "inspect", "verify", "report"} < set(COMMANDS)
    assert completed("hatrack", "data", "") == ["list", "get", "verify", "import"]
    assert completed("hatrack", "run", "") == list(BENCHMARKS)
    assert completed("hatrack", "run", "pmnist", "") == list(METHODS)
    assert completed("hatrack", "run", "pmnist", "hat", "--network", "") == list(NETWORKS)
    assert set(completed("hatrack", "list", "")) == {*METHODS, *BENCHMARKS, *NETWORKS}
    assert completed("hatrack", "data", "verify", "cifar") == ["cifar10", "cifar100"]
    assert completed("hatrack", "completion", "") == ["bash", "zsh", "fish"]


def test_options_and_their_values_are_completed():
    offered = completed("hatrack", "run", "pmnist", "hat", "--")
    assert {f"--{name.replace('_', '-')}" for name in parameters(Regime)} <= set(offered)
    assert {"--heads", "--init", "--freeze", "--train-examples", "--seeds", "--device", "--no-restore"} <= set(offered)
    assert completed("hatrack", "run", "pmnist", "hat", "--lr", "1", "--l") == ["--log"]  # the other is given already
    assert completed("hatrack", "run", "pmnist", "hat", "--smax", "3", "--optimizer", "a") == ["adam", "adamw"]
    assert completed("hatrack", "run", "pmnist", "hat", "--smax", "") == [], "a value that nothing is known of"
    assert completed("hatrack", "resume", "--engine", "c") == ["compiled"]


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_the_script_works_in_bash(tmp_path):
    program = tmp_path / "hatrack"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hatrack "$@"\n')
    program.chmod(0o755)
    script = 'eval "$(hatrack completion bash)"\nCOMP_WORDS=(hatrack run smnist pa)\nCOMP_CWORD=3\n'
    script += '_hatrack_completion hatrack\necho "${COMPREPLY[@]}"; complete -p hatrack'
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, env=env)
    names, registered = done.stdout.splitlines()
    assert names == "packnet pathnet"
    assert registered.endswith("hatrack")
