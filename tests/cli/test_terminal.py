"""The terminal: encodings, names with control characters or not in UTF-8, Ctrl-C many times, a terminal that is closed."""

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hatrack import Record, run
from hatrack.__main__ import main
from hatrack.cli.values import parse_seeds
from hatrack.experiments.signals import stop_by_signal
from hatrack.experiments.spec import Run
from hatrack.text import one_line
from hatrack.training.checkpoint import stopping
from tests.helpers.killing import assert_same, here, start, wait_for

SHORT = ["run", "smnist", "sgd", "--data", "sample", "--widths", "5", "--epochs", "1", "--batch", "500", "--device", "cpu"]
ODD = os.fsdecode(b"odd\xff")


def hatrack(*words: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    where = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([sys.executable, "-m", "hatrack", *words], env=where, capture_output=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_that_is_not_utf_8(encoding, tmp_path):
    """The table has a ± and lines; the run is finished, whatever the terminal can show."""
    done = hatrack(*SHORT, "--out", str(tmp_path), PYTHONIOENCODING=f"{encoding}:strict")
    assert done.returncode == 0, done.stderr
    assert b"1 record in " in done.stdout
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_file_names_that_are_not_utf_8(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for label in ("cat", os.fsdecode(b"dog\xfe")):
        folder = Path(ODD) / "pets" / label
        folder.mkdir(parents=True)
        for number in range(4):
            image = Image.fromarray(np.full((8, 8), 40 * number, np.uint8))
            image.save(folder / os.fsdecode(b"x\xff%d.png" % number))
    (Path(ODD) / "tasks.toml").write_text('[[task]]\nname = "pets"\ndata = "pets"\n')
    words = ["--tasks", f"{ODD}/tasks.toml", "--widths", "5", "--epochs", "1", "--device", "cpu", "--out", f"{ODD}/runs"]
    assert main(["run", "own", "sgd", *words]) == 0
    assert main(["report", f"{ODD}/runs"]) == 0
    assert "odd?/runs" in capsys.readouterr().out
    assert (Path(ODD) / "runs" / "report.html").is_file()


def test_a_digest_of_data_does_not_change_for_other_names(tmp_path, monkeypatch):
    """A name in UTF-8 counts as it did, so that records keep their names."""
    (tmp_path / "a.npz").write_bytes(b"12")
    (tmp_path / "tasks.toml").write_text('[[task]]\nname = "ä"\ndata = "a.npz"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    spec = Run("own", "sgd", benchmark_options={"tasks": "tasks.toml"}).spec
    whole = (tmp_path / "tasks.toml").read_bytes() + b"a.npz . 2\n12"
    assert spec["data_digest"] == hashlib.sha256(whole).hexdigest()


ESCAPES = "a\x1b[31mb\nc\rd\x07"


def shown(capsys) -> str:
    out, err = capsys.readouterr()
    return out + err


@pytest.mark.parametrize(
    "words",
    [
        ["data", "list"],
        ["data", "verify"],
        ["resume", ESCAPES],
        ["report", ESCAPES],
        ["data", "import", ESCAPES],
        ["list", ESCAPES],
        ["run", ESCAPES, "sgd"],
        ["run", "smnist", "sgd", f"--{ESCAPES}"],
        ["run", "smnist", "sgd", "--seeds", ESCAPES],
        [*SHORT, "--out", ESCAPES],
    ],
)
def test_escapes_and_newlines_never_reach_the_terminal(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HATRACK_DATA", ESCAPES)
    (tmp_path / ESCAPES).mkdir()
    main(words)
    text = shown(capsys)
    assert "b" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert "b\nc" not in text


def test_a_warning_is_one_line():
    assert one_line(f"task {ESCAPES!s}", None, None, None) == "hatrack: task a [31mb c d\n"


def test_a_home_folder_that_does_not_exist(monkeypatch, capsys):
    monkeypatch.setenv("HATRACK_DATA", "~nosuchuser/x")
    for words in (["data", "list"], ["data", "get", "mnist"], ["list", "smnist", "--data", "full"]):
        main(words)
        text = shown(capsys)
        assert "HATRACK_DATA must be a folder, not '~nosuchuser/x'" in " ".join(text.split()), words


@pytest.mark.parametrize("text", ["0-", "-0", "-", "3-1", "0,1-", "0--2", "", ",", "0,", "1.5", "0-1-2", "0-99999", "٣-"])
def test_ranges_of_seeds_that_are_none(text):
    with pytest.raises(ValueError, match="--seeds must be a range such as 0-4"):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["99999999999999999999", "0,2147483648", "2147483640-2147483650"])
def test_seeds_have_a_limit(text):
    with pytest.raises(ValueError, match="--seeds must be at most 2147483647, not"):
        parse_seeds(text)
    assert parse_seeds("2147483647") == [2**31 - 1]


def test_ranges_of_seeds():
    assert parse_seeds("0-2,5,1") == [0, 1, 2, 5]
    assert parse_seeds("7") == [7]


def test_help_ends_without_an_empty_line(capsys):
    assert main(["data"]) == 0
    assert not capsys.readouterr().out.endswith("\n\n")


# Ctrl-C


def interrupted_often() -> None:
    with stop_by_signal():
        signal.raise_signal(signal.SIGINT)
        assert stopping.is_set()
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            for _ in range(5):
                signal.raise_signal(signal.SIGINT)


def test_the_second_interrupt_raises_and_later_ones_do_nothing():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted_often()
    assert signal.getsignal(signal.SIGINT) is before
    assert not stopping.is_set()


def test_an_interrupt_of_a_command_called_from_python(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("hatrack.cli.list.everything", lambda: signal.raise_signal(signal.SIGINT))
    assert main(["list"]) == 130
    assert capsys.readouterr().err.strip() == "hatrack: stopped"
    assert signal.getsignal(signal.SIGINT) is before


INTERRUPTED = """
import signal, sys
import hatrack.cli.list
from hatrack.cli.group import main

def interrupted():
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        print("an exception that somebody may catch")

hatrack.cli.list.everything = interrupted
sys.argv = ["hatrack", "list"]
sys.exit(main())
"""


def test_an_interrupt_outside_of_runs_ends_the_process():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert re.fullmatch(r"hatrack: stopped[^\n]*\n", done.stderr)


WHILE_IMPORTING = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == {moment!r}:
            sys.meta_path.remove(self)
            print(*[name for name in sys.modules if name.startswith("hatrack.")])
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv = ["hatrack", "list", "hat"]
{start}
"""
STARTS = {  # as Python does with `-m hatrack`, and as the script that pip writes
    "module": "import runpy; runpy.run_module('hatrack', run_name='__main__', alter_sys=True)",
    "script": "from hatrack.__main__ import main; sys.exit(main())",
}
FIRST = "hatrack.cli.group"


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("moment", [FIRST, "click", "multiprocessing", "hatrack.cli.list", "torch"])
def test_an_interrupt_while_modules_are_imported(start, moment):
    """When the first of ours besides the guard itself is looked for, when those of others are, and later."""
    code = WHILE_IMPORTING.format(moment=moment, start=STARTS[start])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr
    assert re.fullmatch(r"hatrack: stopped[^\n]*\n", done.stderr)
    before = {"hatrack._version", "hatrack.__main__", "hatrack.cli", "hatrack.cli.interrupts"}
    assert moment != FIRST or set(done.stdout.split()) <= before


def interrupt_twice(folder: Path, between: float, times: int = 2) -> None:
    """Start a run, interrupt it so often, and check that it ends with one line and goes on to the same record."""
    process = start(folder / "stopped", "--save-every", "0.001")
    wait_for(folder / "stopped", "fit")
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(between)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert re.fullmatch(r"hatrack: stopped[^\n]*\n", err), err
    assert "Traceback" not in out


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 5])
def test_many_interrupts_are_no_traceback(times, tmp_path):
    interrupt_twice(tmp_path, 0.01, times)
    assert_same(*here(tmp_path / "stopped"), *here(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120 if os.environ.get("HATRACK_TEST_LONG") else 12))
def test_two_interrupts_at_any_moment(seed, tmp_path):
    """An exception in the middle of torch's code, of a lock or of the end of the program was a traceback or an abort."""
    interrupt_twice(tmp_path, random.Random(seed).choice([0.001, 0.003, 0.01, 0.02, 0.05]))


@pytest.mark.slow
def test_a_closed_terminal_saves_and_the_run_goes_on_later(tmp_path):
    process = start(tmp_path / "closed", "--save-every", "5")
    wait_for(tmp_path / "closed", "task")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert list(tmp_path.glob("closed/*.part/fit-*")), "the state of the fit under way"
    assert_same(*here(tmp_path / "closed"), *here(tmp_path / "whole"))


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_by_signal():
            signal.raise_signal(signal.SIGHUP)
            assert not stopping.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_record_of_a_folder_with_an_odd_name(tmp_path):
    spec = Run("smnist", "random", benchmark_options={"data": "sample"}, train_examples=10)
    record = run(spec, tmp_path / ODD)
    assert Record.load(tmp_path / ODD / f"{record.name}.json") == record
