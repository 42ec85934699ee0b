"""The command line as a user meets it: what it prints, and its exit code."""

import os
import re

import numpy as np
import pytest

from hatrack.__main__ import main
from hatrack.benchmarks import BENCHMARKS
from hatrack.cli.values import parse_seeds
from hatrack.experiments.record import Record
from hatrack.experiments.run import Run, run
from hatrack.methods import METHODS
from hatrack.networks import NETWORKS
from hatrack.options import offered
from hatrack.regime import Regime
from tests.helpers.commands import SHORT


def test_list_shows_every_name(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in (*METHODS, *BENCHMARKS, *NETWORKS):
        assert re.search(rf"^{name} ", shown, re.MULTILINE), name


@pytest.mark.parametrize("name", ["hat", "pmnist", "mlp"])
def test_list_shows_the_options_of_one(name, capsys):
    assert main(["list", name]) == 0
    shown = capsys.readouterr().out
    entry = {**METHODS, **BENCHMARKS, **NETWORKS}[name]
    for option in offered(entry):
        assert f"--{option.replace('_', '-')}" in shown


def test_list_shows_the_tasks_that_are_asked_for(capsys, tmp_path):
    x, y = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (tmp_path / "tasks.toml").write_text('[[task]]\nname = "pets"\ndata = "a.npz"\n')
    assert main(["list", "own", "--tasks", str(tmp_path / "tasks.toml")]) == 0
    assert re.search(r"^ *0 +pets +2 +6 +0 +6 +1x4x4", capsys.readouterr().out, re.MULTILINE)
    assert main(["list", "smnist", "--data", "sample", "--tasks", "5"]) == 0
    assert "digits 8-9" in capsys.readouterr().out
    (tmp_path / "bad.toml").write_text('[[task]]\nname = "pets"\n')
    assert main(["list", "own", "--tasks", str(tmp_path / "bad.toml")]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1), "the error alone"


def test_every_option_of_a_run_has_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["run", "pmnist", "hat", "--help"]) == 0
    shown = capsys.readouterr().out
    for source in (Run, Regime, METHODS["hat"], BENCHMARKS["pmnist"], NETWORKS["mlp"]):
        for option in offered(source):
            assert f"--{option.replace('_', '-')}" in shown


def test_options_of_different_kinds_never_share_a_name():
    """Or the command line could not tell them apart."""
    common = [*offered(Run), *offered(Regime), "network", "seed", "seeds", "out", "again", "device"]
    for kinds in ((METHODS, BENCHMARKS), (METHODS, NETWORKS), (BENCHMARKS, NETWORKS)):
        for one in kinds[0].values():
            for other in kinds[1].values():
                names = [*common, *offered(one), *offered(other)]
                assert len(names) == len(set(names)), (one, other)


def test_run_writes_records_and_prints_a_table(tmp_path, capsys):
    words = ["run", "smnist", "hat", *SHORT, "--seeds", "0-1", "--out", str(tmp_path), "--c", "0.5", "--optimizer", "adam"]
    assert main([*words, "--lr", "0.001"]) == 0
    records = [Record.load(path) for path in sorted(tmp_path.glob("*.json"))]
    assert [r.spec.seed for r in records] == [0, 1]
    assert records[0].spec.method_options["c"] == 0.5
    assert records[0].spec.regime["optimizer"] == "adam"
    assert records[0].spec.regime["epochs"] == 1
    assert records[0].spec.network_options["widths"] == [10]
    shown = capsys.readouterr()
    mean = np.mean([r.summary["accuracy"] for r in records])
    assert f"{100 * mean:.1f}" in shown.out
    assert "hat" in shown.out
    assert shown.err == "", "quiet when it is not a terminal"


def test_run_again(tmp_path):
    words = ["run", "smnist", "random", *SHORT, "--out", str(tmp_path)]
    times = []
    for more in ([], [], ["--again"]):
        assert main([*words, *more]) == 0
        (path,) = tmp_path.glob("*.json")
        times.append(path.stat().st_mtime_ns)
    assert times[0] == times[1] < times[2]


def test_report_of_a_folder(tmp_path, capsys):
    assert main(["run", "smnist", "sgd", *SHORT, "--out", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "pmnist", "hta"], "no method 'hta'; did you mean 'hat'?"),
        (["run", "pmnits", "hat"], "no benchmark 'pmnits'; did you mean 'pmnist'?"),
        (["run", "pmnist", "hat", "--network", "alexnt"], "no network 'alexnt'; did you mean 'alexnet'?"),
        (["run", "pmnist", "hat", "--smx", "3"], "--smax"),
        (["run", "pmnist", "sgd", "--smax", "3"], "No such option: --smax in this run; these have it: hat"),
        (["run", "pmnist", "hat", "--smax", "0.5"], "--smax must be at least 1, not 0.5"),
        (["run", "pmnist", "hat", "--smax", "big"], "--smax must be a number, not 'big'"),
        (["run", "pmnist", "hat", "--c", "x"], "--c must be a number, not 'x'"),
        (["sweep", "pmnist", "hat", "--c", "0.1,x"], "--c must be a number, not 'x'"),
        (["tune", "pmnist", "hat", "--over", "c=0.1:x"], "--c must be a number, not 'x'"),
        (["run", "pmnist", "hat", "--smax", "nan"], "--smax must be a finite number, not nan"),
        (["run", "pmnist", "hat", "--c=-1"], "--c must be at least 0, not -1"),
        (["run", "pmnist", "hat", "--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["run", "pmnist", "hat", "--weight-decay", "-2"], "--weight-decay must be at least 0, not -2"),
        (["run", "pmnist", "hat", "--optimizer", "sdg"], "--optimizer must be one of 'sgd'"),
        (["run", "pmnist", "hat", "--widths", "3,x"], "--widths must be whole numbers, not '3,x'"),
        (["run", "pmnist", "hat", "--seeds", "a-b"], "--seeds must be a range such as 0-4"),
        (["run", "pmnist", "hat", "--seeds", "4-1"], "--seeds must be a range such as 0-4"),
        (["run", "pmnist", "hat", "--seeds", "0-1000000000"], "--seeds must be a range such as 0-4 (of 10,000 at most)"),
        (["run", "pmnist", "hat", "--seeds", f"0-{10**30}"], "--seeds must be a range such as 0-4 (of 10,000 at most)"),
        (["list", "smnist", "--widths", "5"], "No such option: --widths"),
        (["list", "smnist", "--tasks", "x"], "--tasks must be one of 2, 5, not 'x'"),
        (["list", "mixture-open", "--tasks", "5"], "no option 'tasks'"),
        (["list", "hat", "--tasks", "5"], "--tasks need the name of a benchmark"),
        (["run", "pmnist", "hat", "--seed", "1", "--seeds", "1-2"], "exclude each other"),
        (["run", "pmnist", "sgd", "--momentum", "0.8"], "does nothing with --optimizer sgd; it is for --optimizer momentum"),
        (["run", "pmnist", "stable-sgd", "--task-lr-decay", "0.5"], "stable-sgd, which has --lr-decay instead"),
        (["run", "pmnist", "sgd", "--gamma", "0.5"], "with --schedule plateau; it is for --schedule step or exp"),
        (["run", "pmnist", "hat", "--seed", "-1"], "seed must be a whole number from 0 to 2147483647, not -1"),
        (["run", "pmnist", "hat", "--device", "tpu"], "--device must be auto, cpu or cuda, not 'tpu'"),
        (["run", "pmnist", "hat", "--engine", "fast"], "no engine 'fast'"),
        (["run", "pmnist", "hat", "--data", "sample", "--device", "cpu", "--engine", "recorded"], "recorded needs a GPU"),
        (["run", "pmnist", "hat", "--data", "sample", "--device", "cpu", "--precision", "bfloat16"], "needs a GPU"),
        (["run", "pmnist", "hat", "--precision", "bf16"], "did you mean 'bfloat16'?"),
        (["run", "pmnist", "hat"], "--data sample"),
        (["run", "pmnist", "sgd", "--data", "sample", "--freeze", "x*"], "freeze='x*' matches no part"),
        (["run", "--data", "sample", "pmnist", "hat"], "the names come first"),
        (["run", "pmnist"], "Missing argument 'METHOD'; hatrack run --help tells"),
        (["figure", "runs"], "Missing argument 'KIND'; hatrack figure --help tells"),
        (["list", "hta"], "did you mean 'hat'?"),
        (["report", "no-such-folder"], "no folder 'no-such-folder'"),
        (["report", __file__], f"is a file, no folder; it is in the folder {os.path.dirname(__file__)!r}"),
        (["frobnicate"], "No such command"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("hatrack: ")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("content", ["{", "[1, 2]", '{"schema": 99}', '{"schema": 1}', ""])
def test_a_broken_record_in_a_report(content, capsys, tmp_path):
    (tmp_path / "bad.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "bad.json" in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == "", "nothing was read that could be told"
    assert [p.name for p in tmp_path.iterdir()] == ["bad.json"]


def test_an_out_folder_that_is_a_file(capsys, tmp_path):
    (tmp_path / "out").write_text("mine")
    assert main(["run", "smnist", "sgd", *SHORT, "--out", str(tmp_path / "out")]) == 2
    assert "can't write to the folder" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


def test_a_diverged_run_says_so(capsys, tmp_path):
    words = ["run", "smnist", "sgd", *SHORT, "--out", str(tmp_path), "--lr", "1e30", "--clip", "0"]
    assert main(words) == 2
    assert re.search(r"task 'digits 0-4', epoch 1, step 2 of 17: the loss is (nan|inf)", capsys.readouterr().err)
    assert not list(tmp_path.glob("*.json"))


def test_seeds():
    assert parse_seeds("0-3") == [0, 1, 2, 3]
    assert parse_seeds("5") == [5]
    assert parse_seeds("1,4-5,9") == [1, 4, 5, 9]
    assert parse_seeds("0,0,2-4,3") == [0, 2, 3, 4]


def test_version(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_nothing_to_go_on_with(tmp_path, capsys):
    assert main(["resume", str(tmp_path / "nowhere")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_a_record_says_how_its_steps_ran(tmp_path):
    spec = Run(
        "smnist",
        "sgd",
        benchmark_options={"data": "sample"},
        network_options={"widths": (20,)},
        regime=Regime(epochs=1),
        train_examples=200,
    )
    assert run(spec, tmp_path).versions["engine"] == "eager"
    assert Record.load(tmp_path / f"{spec.name}.json").versions["precision"] == "float32"
