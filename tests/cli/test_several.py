"""Several methods in one command, what they would cost, a run repeated from its record, and sweeps."""

import csv
import json
import re
from dataclasses import replace

import pytest

from hatrack.__main__ import main
from hatrack.experiments.costs import expected_cost
from hatrack.experiments.record import Record, sign
from hatrack.experiments.sameness import differences
from hatrack.experiments.spec import Run
from hatrack.regime import Regime
from tests.helpers.commands import SHORT
from tests.helpers.records import make, with_spec


def records_in(folder):
    return [Record.load(path) for path in sorted(folder.glob("*.json"))]


def test_several_methods_with_their_references(tmp_path, capsys):
    words = ["run", "smnist", "hat,ewc,sgd", *SHORT, "--seeds", "0-1", "--with-references", "--c", "0.5", "--strength", "10"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    found = records_in(tmp_path)
    names = ["ewc", "hat", "independent", "joint", "random", "sgd"]
    assert sorted((r.spec.method, r.spec.seed) for r in found) == [(name, seed) for name in names for seed in (0, 1)]
    assert {r.spec.method: r.spec.method_options.get("c") for r in found}["hat"] == 0.5
    assert {r.spec.method: r.spec.method_options.get("strength") for r in found}["ewc"] == 10
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("sgd")]
    assert re.search(r"\d\.\d{3} ± \d\.\d{3} .*\d\.\d{3} ± \d\.\d{3}", line), "forgetting and its ratio are both there"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["smnist", "hat,hat"], "hat is named twice"),
        (["smnist", "hat,nothing"], "no method 'nothing'"),
        (["smnist", "hat,"], "no method ''"),
        (["smnist", "hat,sgd", "--strength", "1"], "these have it"),
        (["smnist", "hat,si", "--c", "1"], "--c is an option of hat and of si"),
    ],
)
def test_bad_names(words, said, tmp_path, capsys):
    assert main(["run", *words, "--out", str(tmp_path / "no")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_dry_run_runs_nothing_and_tells_the_cost(tmp_path, capsys):
    words = ["run", "smnist", "sgd,random", *SHORT, "--out", str(tmp_path)]
    assert main([*words, "--dry-run"]) == 0
    assert "2 of unknown cost" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--seeds", "0-2", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "4 to run" in shown
    assert "2 have a record" in shown
    assert "its other seeds" in shown
    assert len(records_in(tmp_path)) == 2


def test_what_a_run_would_cost():
    """Its own seeds first, then its method in other settings, then other methods; the mean of their times."""
    own = [make("sgd", 0), make("sgd", 1)]  # 10 and 12 seconds
    run = Run("digits-and-clothes", "sgd", 7)
    assert expected_cost(run, own) == (11.0, "its other seeds")
    other = with_spec(make("sgd", 0), heads="shared")
    assert expected_cost(run, [other, make("hat", 1)]) == (10.0, "its other settings")
    short = make("sgd", 0, regime=Regime(epochs=20))
    assert expected_cost(run, [short]) == (100.0, "its other settings"), "200 epochs in place of 20"
    assert expected_cost(run, [make("sgd", 0, benchmark_options={"data": "sample"})])[0] is None, "other data"
    assert expected_cost(run, [make("hat", 1)]) == (12.0, "other methods")
    assert expected_cost(run, [])[0] is None


def test_a_run_is_repeated_from_its_record(tmp_path, capsys):
    assert main(["run", "smnist", "hat", *SHORT, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    capsys.readouterr()
    assert main(["run", "--from", str(path)]) == 0
    assert "same, bit for bit" in capsys.readouterr().out
    data = json.loads(path.read_text())
    data["accuracy"][1][0] -= 0.25
    data["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(sign(data)))
    assert main(["run", f"--from={path}"]) == 1
    shown = capsys.readouterr().out
    assert "accuracy: not the same, by 0.25" in shown
    assert "torch 1.0 ->" in shown
    assert "loss: not" not in shown
    assert [item.name for item in tmp_path.iterdir()] == [path.name], "nothing is written"


def test_a_record_that_cannot_be_repeated(tmp_path, capsys):
    record = make("sgd")
    data = sign(record.to_dict())
    path = tmp_path / f"{record.name}.json"
    path.write_text(json.dumps(data))
    assert main(["run", "--from", str(tmp_path / "none.json")]) == 2
    capsys.readouterr()
    for words in (["smnist"], ["--out", str(tmp_path / "out")], ["--seeds", "0-3"]):
        assert main(["run", "--from", str(path), *words]) == 2
        said = capsys.readouterr().err
        assert f"{words[0]!r} does not go with --from" in said
        assert "--device" in said, "what does"
    assert main(["run", "--from", str(path), "--devise", "cpu"]) == 2
    assert "did you mean --device" in capsys.readouterr().err


def test_differences_of_records():
    one = make("hat")
    assert differences(one, make("hat")) == []
    other = make("hat", accuracy=[[0.9, 0.2], [0.8, 0.7]])
    assert differences(one, other) == [
        f"{name}: not the same, by 0.1 at most" for name in ("accuracy", "loss", "train_loss")
    ]


def test_training_losses_before_a_task_was_learned_are_in_older_records_only():
    older = make("hat")
    (first, later), second = older.train_loss
    assert differences(older, replace(older, train_loss=[[first, None], second])) == []
    assert differences(older, replace(older, train_loss=[[first + 0.5, later], second])) == [
        "train_loss: not the same, by 0.5 at most"
    ]


def test_a_sweep(tmp_path, capsys):
    words = [
        "sweep",
        "smnist",
        "hat",
        *SHORT,
        "--smax",
        "50,400",
        "--lr",
        "0.05,0.1",
        "--seeds",
        "0-1",
        "--out",
        str(tmp_path),
    ]
    assert main(words) == 0
    found = records_in(tmp_path)
    points = {(r.spec.method_options["smax"], r.spec.regime["lr"], r.spec.seed) for r in found}
    assert points == {(s, lr, seed) for s in (50, 400) for lr in (0.05, 0.1) for seed in (0, 1)}
    table = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    expected = {(r.spec.seed, r.summary["accuracy"]) for r in found if r.spec.method_options["smax"] == 50}
    assert {(int(row["seed"]), float(row["accuracy"])) for row in table if row["smax"] == "50"} == expected
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    last = {(r.spec.seed, sum(r.valid_accuracy[-1]) / 2) for r in found if r.spec.method_options["smax"] == 50}
    assert {(int(row["seed"]), float(row["valid_accuracy"])) for row in table if row["smax"] == "50"} == last
    assert len(re.findall(r"^ *(?:50|400) +0\.(?:05|1) +2 ", capsys.readouterr().out, re.MULTILINE)) == 4


def test_a_sweep_of_lists_and_switches(tmp_path):
    words = ["sweep", "smnist", "ewc", "--data", "sample", "--epochs", "1", "--out", str(tmp_path)]
    assert main([*words, "--widths", "20;20,10", "--rescale", "true,false"]) == 0
    found = {(tuple(r.spec.network_options["widths"]), r.spec.method_options["rescale"]) for r in records_in(tmp_path)}
    assert found == {(widths, rescale) for widths in ((20,), (20, 10)) for rescale in (True, False)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sgd"], "several values"),
        (["sgd", "--lr", "0.1"], "several values"),
        (["sgd", "--lr", "0.1,x"], "--lr must be a number"),
        (["ewc", "--rescale", "true,maybe"], "true or false"),
        (["hat,sgd", "--lr", "0.1,0.2"], "one method"),
        (["sgd", "--lr", "0.1,0.10"], "--lr has a value twice"),
    ],
)
def test_bad_sweeps(words, said, tmp_path, capsys):
    assert main(["sweep", "smnist", *words, "--out", str(tmp_path / "no")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_value_that_diverges_leaves_the_table_of_the_others(tmp_path, capsys):
    words = ["sweep", "smnist", "sgd", *SHORT, "--lr", "1e30,0.05", "--out", str(tmp_path)]
    assert main(words) == 2
    shown = capsys.readouterr()
    assert "the loss is" in shown.err
    assert re.search(r"0\.05 +1 +\d", shown.out)
    assert (tmp_path / "sweep.png").exists()
