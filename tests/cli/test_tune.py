"""`hatrack tune` and `hatrack run ... --tuned` from the command line: spaces, protocols, outcomes, and what is refused."""

import json
import shlex
import subprocess
import sys

import pytest

from hatrack.__main__ import main
from hatrack.cli.search_space import DEFAULT_SPACES, parse_space, space_of
from hatrack.experiments.record import Record, sign
from hatrack.experiments.tuned import Tuned
from hatrack.experiments.tuning_protocols import caution_of
from hatrack.experiments.tuning_space import Choices, Range
from hatrack.methods import METHODS
from hatrack.reporting.report import report
from hatrack.reporting.tables import label, settings, terminal
from tests.helpers.commands import SHORT
from tests.helpers.own_files import regression_file
from tests.helpers.records import make, save

FILE = "smnist-ewc-first-tasks.json"


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A small search, for the tests that only read its outcome."""
    out = tmp_path_factory.mktemp("tuned")
    assert main(["tune", "smnist", "ewc", *SHORT, "--tasks", "5", "--trials", "3", "--out", str(out)]) == 0
    return out


# Spaces


def test_a_space():
    space = parse_space("strength=1:10000:log, lr = 0.01:0.1,samples=5:50,anchors=all|online,keep-state=true|false", "ewc")
    assert space == {
        "strength": Range(1.0, 10000.0, log=True),
        "lr": Range(0.01, 0.1),
        "samples": Range(5, 50, whole=True),
        "anchors": Choices(("all", "online")),
        "keep_state": Choices((True, False)),
    }
    assert isinstance(space["samples"].low, int)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("strenght=1:10", "did you mean 'strength'?"),
        ("widths=1|2", "neither ewc nor the regime has an option 'widths'"),
        ("strength", "must be a list such as"),
        ("strength=", "must be a list such as"),
        ("", "must be a list such as"),
        ("strength=5", "must be LOW:HIGH, LOW:HIGH:log or choices X|Y|Z, not '5'"),
        ("strength=1:10:lin", "must be LOW:HIGH, LOW:HIGH:log"),
        ("strength=10:1", "must have its lower end first, not '10:1'"),
        ("strength=1:1", "must have its lower end first"),
        ("strength=0:10:log", "must begin above 0 to be on a log scale"),
        ("strength=-1:10", "--strength must be at least 0, not -1.0"),
        ("decay=0.1:1.5", "--decay must be at most 1, not 1.5"),
        ("samples=1:2.5", "--samples must be a whole number, not '2.5'"),
        ("strength=a:b", "--strength must be a number, not 'a'"),
        ("strength=1:inf", "--strength must be a finite number"),
        ("anchors=all:online", "--over anchors takes choices"),
        ("anchors=all|al", "--anchors must be one of 'all'"),
        ("anchors=all|all", "--over anchors has a value twice"),
        ("lr=0.1:0.2,lr=0.3:0.4", "--over names lr twice"),
        ("keep-state=yes|no", "--keep-state must be true or false, not 'yes'"),
        ("momentum=0.1:0.9", "--momentum does nothing with --optimizer sgd"),
        ("optimizer=adam|sgd,momentum=0.1:0.9", "--momentum does nothing with --optimizer adam"),
        ("schedule=constant|cosine,patience=2:5", "--patience does nothing with --schedule constant"),
        ("steps=5:10,epochs=1:3", "--epochs does nothing with --steps 5"),
    ],
)
def test_bad_spaces(text, said, tmp_path, capsys):
    assert main(["tune", "smnist", "ewc", "--over", text, "--out", str(tmp_path / "no")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "text",
    [
        "schedule=constant|plateau,patience=2:5",
        "schedule=plateau|constant,patience=2:5",
        "optimizer=sgd|momentum,momentum=0.1:0.9",
        "steps=0:10,epochs=1:3",
        "optimizer=adam|momentum,momentum=0.1:0.9,schedule=cosine|step,every=1:3",
    ],
)
def test_an_option_that_has_an_effect_in_some_trials_may_be_searched(text):
    assert space_of("ewc", text, {}) == parse_space(text, "ewc")


def test_options_that_were_given_must_have_an_effect_in_some_trial():
    with pytest.raises(ValueError, match="--epochs does nothing with --steps 5"):
        space_of("ewc", "steps=5:10", {"regime": {"epochs": 2}})
    assert list(space_of("ewc", "steps=0|10", {"regime": {"epochs": 2}})) == ["steps"]
    assert list(space_of("ewc", "optimizer=sgd|momentum", {"regime": {"momentum": 0.5}})) == ["optimizer"]


def test_adam_has_smaller_learning_rates_by_default():
    for method, name in (("ewc", "lr"), ("sgd", "lr"), ("stable-sgd", "first_lr")):
        for optimizer, low, high in (
            ("sgd", 0.01, 0.2),
            ("momentum", 0.01, 0.2),
            ("adam", 1e-4, 1e-2),
            ("adamw", 1e-4, 1e-2),
        ):
            space = space_of(method, None, {"regime": {"optimizer": optimizer}})
            assert space[name] == Range(low, high, log=True), (method, optimizer)
    assert space_of("ewc", None, {"regime": {"optimizer": "adam"}})["strength"] == Range(1.0, 1e5, log=True)


def test_default_spaces_are_of_methods_and_around_their_defaults():
    assert set(DEFAULT_SPACES) <= set(METHODS)
    for method in METHODS:
        space = space_of(method, None, {})
        assert space, method
    with pytest.raises(ValueError, match="lr"):
        space_of("sgd", None, {"regime": {"lr": 0.1}})
    assert list(space_of("ewc", None, {"regime": {"lr": 0.1}})) == ["strength"]
    assert "lr" not in space_of("stable-sgd", None, {})


# What is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["smnist", "ewx"], "no method 'ewx'"),
        (["smnits", "ewc"], "no benchmark 'smnits'"),
        (["smnist", "ewc,ewc"], "ewc is named twice"),
        (["smnist", "ewc", "--trials", "0"], "--trials must be at least 1, not 0"),
        (["smnist", "ewc", "--points", "0"], "--points must be at least 1"),
        (["smnist", "ewc", "--protocol", "first-task"], "did you mean 'first-tasks'?"),
        (["smnist", "ewc", "--sampler", "tpee"], "did you mean 'tpe'?"),
        (["smnist", "ewc", "--pruner", "medium"], "did you mean 'median'?"),
        (["smnist", "ewc", "--protocol", "transfer"], "--protocol transfer needs --on"),
        (["smnist", "ewc", "--protocol", "transfer", "--on", "smnist"], "--protocol transfer needs --on"),
        (["smnist", "ewc", "--protocol", "transfer", "--on", "pmnits"], "did you mean 'pmnist'?"),
        (["smnist", "ewc", "--on", "pmnist"], "--on does nothing with --protocol first-tasks"),
        (["smnist", "ewc", "--seeds", "0-2"], "--seeds does nothing with --protocol first-tasks"),
        (["smnist", "ewc", "--protocol", "one-seed", "--tasks-used", "2"], "--tasks-used does nothing with --protocol one"),
        (["smnist", "ewc", "--protocol", "whole-stream"], "--protocol whole-stream needs --seeds"),
        (["smnist", "ewc", "--data", "sample", "--tasks-used", "3"], "--tasks-used must be from 1 to 2, the tasks of"),
        (["smnist", "ewc", "--first-tasks", "2"], "--first-tasks is decided by --protocol first-tasks"),
        (["smnist", "ewc", "--lr", "0.1", "--over", "lr=0.1:0.2"], "--lr has a value and is also in --over"),
        (["smnist", "ewc", "--strenght", "1"], "No such option: --strenght"),
    ],
)  # fmt: skip
def test_bad_commands(words, said, tmp_path, capsys):
    assert main(["tune", *words, "--out", str(tmp_path / "no")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "no").exists()


def test_without_optuna_one_line_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", "smnist", "ewc", *SHORT, "--out", str(tmp_path / "no")]) == 2
    error = capsys.readouterr().err
    assert "pip install 'hatrack[tune]'" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_runs_do_not_import_optuna(searched, tmp_path):
    words = ["run", "smnist", "ewc", *SHORT, "--tasks", "5", "--tuned", str(searched / FILE), "--out", str(tmp_path)]
    program = f"import sys; from hatrack.__main__ import main; assert main({words!r}) == 0; print('optuna' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


# Searches


def test_a_dry_run_lists_the_searches(tmp_path, capsys):
    words = ["tune", "smnist", "ewc,si", *SHORT, "--tasks", "5", "--trials", "7", "--out", str(tmp_path / "no")]
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "1:100000:log" in "".join(shown.split())
    assert shown.count(" 7 ") == 2
    assert not (tmp_path / "no").exists()


def test_several_methods_have_the_same_budget(tmp_path, capsys):
    words = ["tune", "smnist", "si,mas", *SHORT, "--trials", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "smnist has 2 tasks, and first-tasks uses all of them" in shown
    outcomes = [Tuned.load(tmp_path / f"smnist-{name}-one-seed.json") for name in ("si", "mas")]
    assert [(tuned.search["protocol"], tuned.search["tasks_used"]) for tuned in outcomes] == [("one-seed", 0)] * 2
    assert [len(tuned.trials) for tuned in outcomes] == [2, 2]
    assert [set(tuned.method_options) for tuned in outcomes] == [{"c"}, {"strength"}]
    assert "trial 2 of 2" in shown
    assert "best so far" in shown
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert main(words) == 0, "nothing is left to do"
    assert "trial 2 of 2" not in capsys.readouterr().out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_a_search_names_another_score_and_takes_negative_ones(tmp_path, capsys):
    """R² is below 0 where a network is worse than the mean, and no share of 100 %."""
    out, tasks = tmp_path / "out", regression_file(tmp_path, noise=1.0)
    words = ["own", "sgd", "--tasks", str(tasks), "--network", "mlp", "--widths", "50", "--epochs", "40", "--batch", "20"]
    space = ["--over", "lr=0.05|1e30", "--sampler", "grid", "--trials", "2", "--protocol", "one-seed", "--no-restore"]
    assert main(["tune", *words, *space, "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    path = next(out.glob("own-sgd-*.json"))
    tuned = Tuned.load(path)
    assert (tuned.score, tuned.value < 0) == ("R²", True)
    assert f"with R² {tuned.value:.4g} on validation data" in shown
    assert "%" not in shown
    states = {trial["options"]["lr"]: (trial["state"], trial["value"]) for trial in tuned.trials}
    assert states[1e30][0] == "diverged"  # not the best, though Optuna was told no less than the worst
    assert tuned.regime == {"lr": 0.05}
    assert states[1e30][1] <= 0
    data = json.loads(path.read_text())
    for change in ({"score": "accuracy"}, {"score": 3}):  # a negative share of right answers
        path.write_text(json.dumps(sign({**data, **change})))
        with pytest.raises(ValueError, match=r"^[^\n]*is not the outcome of a search[^\n]*$"):
            Tuned.load(path)


def test_first_tasks_with_all_tasks_is_one_seed(tmp_path, capsys):
    words = ["tune", "smnist", "sgd", *SHORT, "--tasks", "5", "--trials", "1", "--out", str(tmp_path)]
    assert main([*words, "--tasks-used", "5"]) == 0
    assert "recorded as one-seed" in capsys.readouterr().out
    path = tmp_path / "smnist-sgd-one-seed.json"
    assert Tuned.load(path).search["protocol"] == "one-seed"
    assert main(["run", "pmnist", "sgd", *SHORT, "--tuned", str(path), "--out", str(tmp_path / "no")]) == 2
    assert "is for smnist, not for pmnist (protocol one-seed)" in capsys.readouterr().err
    assert main([*words, "--tasks-used", "4"]) == 0
    tuned = Tuned.load(tmp_path / "smnist-sgd-first-tasks.json")
    assert (tuned.search["protocol"], tuned.search["tasks_used"]) == ("first-tasks", 4)


def test_a_grid_has_as_many_trials_as_points(tmp_path, capsys):
    words = ["tune", "smnist", "sgd", *SHORT, "--over", "lr=0.01:0.1", "--sampler", "grid", "--points", "2"]
    assert main([*words, "--trials", "8", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "trial 2 of 2:" in shown
    assert "(protocol one-seed, 2 trials)" in shown
    assert "of 8" not in shown
    assert "equal budgets" not in shown
    words = ["tune", "smnist", "sgd,ewc", *SHORT, "--sampler", "grid", "--points", "2", "--trials", "8", "--dry-run"]
    assert main([*words, "--out", str(tmp_path / "no")]) == 0
    assert "do not have equal budgets: sgd 2, ewc 4 trials" in capsys.readouterr().out


def test_a_transfer_takes_the_options_of_the_other_benchmark(tmp_path, capsys):
    words = ["tune", "pmnist", "sgd", "--protocol", "transfer", "--on", "smnist", *SHORT, "--tasks", "2", "--trials", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    path = tmp_path / "pmnist-sgd-transfer-smnist.json"
    tuned = Tuned.load(path)
    assert tuned.search["on"] == "smnist"
    (record,) = (tmp_path / "pmnist-sgd-transfer-smnist" / "records").glob("*.json")
    assert Record.load(record).spec.benchmark == "smnist"
    runs = tmp_path / "runs"
    assert main(["run", "smnist", "sgd", *SHORT, "--tuned", str(path), "--out", str(runs)]) == 2
    assert "was chosen on smnist itself" in capsys.readouterr().err
    assert main(["run", "pmnist", "sgd", *SHORT, "--tasks", "2", "--tuned", str(path), "--out", str(runs)]) == 0
    (record,) = map(Record.load, runs.glob("*.json"))
    assert (record.tuned["protocol"], record.tuned["on"], record.tuned["trials"]) == ("transfer", "smnist", 1)


# What was tuned


def test_a_run_takes_what_was_tuned_and_says_so(searched, tmp_path, capsys):
    tuned = Tuned.load(searched / FILE)
    words = ["run", "smnist", "ewc,sgd", *SHORT, "--tasks", "5", "--seed", "1", "--out", str(tmp_path)]
    assert main([*words, "--tuned", str(searched / FILE)]) == 0
    shown = capsys.readouterr().out
    assert "taken from" in shown
    found = {record.spec.method: record for record in map(Record.load, tmp_path.glob("*.json"))}
    ewc = found["ewc"]
    assert ewc.spec.method_options["strength"] == tuned.method_options["strength"]
    assert ewc.spec.regime["lr"] == tuned.regime["lr"]
    assert (ewc.tuned["protocol"], ewc.tuned["trials"]) == ("first-tasks", 3)
    assert (ewc.tuned["tasks_used"], ewc.tuned["seeds"], ewc.tuned["options"]) == (3, [0], ["lr", "strength"])
    assert found["sgd"].spec.regime["lr"] == 0.05, "another method takes nothing"
    assert found["sgd"].tuned == {}
    assert len(settings(found.values())) == 1, "a tuned learning rate does not prevent a comparison"
    again = {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}
    assert main([*words, "--tuned", str(searched / FILE)]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.json")} == again


def test_the_name_of_a_record_does_not_tell_how_its_options_were_found(searched, tmp_path):
    tuned = Tuned.load(searched / FILE)
    words = ["run", "smnist", "ewc", *SHORT, "--tasks", "5"]
    by_hand = ["--strength", str(tuned.method_options["strength"]), "--lr", str(tuned.regime["lr"])]
    assert main([*words, *by_hand, "--out", str(tmp_path / "hand")]) == 0
    assert main([*words, "--tuned", str(searched / FILE), "--out", str(tmp_path / "file")]) == 0
    names = [[path.name for path in (tmp_path / folder).glob("*.json")] for folder in ("hand", "file")]
    assert names[0] == names[1]
    assert "tuned" not in json.loads((tmp_path / "hand" / names[0][0]).read_text())


def test_an_option_that_the_outcome_leaves_without_effect(searched, tmp_path, capsys):
    path = change(searched / FILE, tmp_path, regime={"steps": 5})
    assert main(["run", "smnist", "ewc", *SHORT, "--tuned", str(path), "--out", str(tmp_path / "no")]) == 2
    assert "--epochs does nothing with --steps 5" in capsys.readouterr().err


def test_options_given_by_hand_win(searched, tmp_path, capsys):
    words = ["run", "smnist", "ewc", *SHORT, "--tasks", "5", "--tuned", str(searched / FILE), "--out", str(tmp_path)]
    assert main([*words, "--lr", "0.011"]) == 0
    assert "--lr was given" in capsys.readouterr().out
    (record,) = map(Record.load, tmp_path.glob("*.json"))
    assert record.spec.regime["lr"] == 0.011
    assert record.tuned["options"] == ["strength"]
    assert main([*words, "--lr", "0.011", "--strength", "3", "--seed", "5"]) == 0
    (record,) = (r for r in map(Record.load, tmp_path.glob("*.json")) if r.spec.seed == 5)
    assert record.tuned == {}, "nothing of it was tuned"


def test_a_record_keeps_what_it_says_about_its_options(searched, tmp_path, capsys):
    """Neither a file with the same values nor a record that was made by hand changes how a record was tuned."""
    other = tmp_path / "other"
    other.mkdir()
    whole = change(searched / FILE, other, search={"protocol": "whole-stream"})
    words = ["run", "smnist", "ewc", *SHORT, "--tasks", "5", "--seed", "1", "--out", str(tmp_path)]
    assert main([*words, "--tuned", str(whole)]) == 0
    (path,) = tmp_path.glob("*.json")
    before = path.read_bytes()
    capsys.readouterr()
    assert main([*words, "--tuned", str(searched / FILE)]) == 0
    assert path.read_bytes() == before
    shown = capsys.readouterr().out
    assert "tuned on the whole stream" in " ".join(shown.split())
    assert "chosen by the protocol whole-stream" in shown
    assert main([*words, "--tuned", str(searched / FILE), "--again"]) == 0
    assert Record.load(path).tuned["protocol"] == "first-tasks", "a new record says how its own options were chosen"


def test_a_record_that_was_made_by_hand_stays_so(searched, tmp_path, capsys):
    tuned = Tuned.load(searched / FILE)
    words = ["run", "smnist", "ewc", *SHORT, "--tasks", "5", "--seed", "1", "--out", str(tmp_path)]
    assert main([*words, "--strength", str(tuned.method_options["strength"]), "--lr", str(tuned.regime["lr"])]) == 0
    (path,) = tmp_path.glob("*.json")
    before = path.read_bytes()
    assert main([*words, "--tuned", str(searched / FILE)]) == 0
    assert path.read_bytes() == before
    assert "ewc seed 1: there already; the options were not taken from a search" in capsys.readouterr().out


def test_a_run_says_in_what_it_differs_from_the_search(searched, tmp_path, capsys):
    words = ["run", "smnist", "ewc", *SHORT, "--seed", "1", "--tuned", str(searched / FILE), "--out", str(tmp_path)]
    assert main([*words, "--tasks", "5", "--lr", "0.02", "--watch-tasks", "--dry-run"]) == 0
    assert "warning" not in capsys.readouterr().out, "what was searched, and what is measured, may differ"
    others = ["--optimizer", "adam", "--scenario", "domain", "--anchors", "online", "--widths", "20,20"]
    assert main([*words, *others, "--dry-run"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning, ewc"))
    names = sorted(part.split()[0] for part in line.partition(f"{FILE}: ")[2].split("; "))
    assert names == ["anchors", "optimizer", "scenario", "tasks", "widths"]
    assert "tasks 2, there 5" in line
    assert "widths 20,20, there 10" in line
    words[words.index("--widths") : words.index("--widths") + 2] = []
    assert main([*words, "--tasks", "5", "--network", "cnn", "--dry-run"]) == 0
    assert "network cnn, there mlp" in capsys.readouterr().out


def test_the_command_that_uses_what_was_tuned_repeats_the_options_of_the_search(tmp_path, capsys):
    words = [
        "tune",
        "smnist",
        "ewc",
        *SHORT,
        "--tasks",
        "5",
        "--protocol",
        "one-seed",
        "--trials",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert main(words) == 0
    (line,) = (line for line in capsys.readouterr().out.replace("\n", " ").split("to use it: hatrack ")[1:])
    command = shlex.split(line.split("smnist-ewc-one-seed.json")[0] + "smnist-ewc-one-seed.json")
    assert command[command.index("--seeds") + 1] == "1-5"
    assert main([*command, "--device", "cpu", "--dry-run"]) == 0
    assert "warning" not in capsys.readouterr().out


def change(path, folder, **changes):
    """Return a copy of an outcome with other values, signed anew."""
    data = json.loads(path.read_text())
    data["search"] |= changes.pop("search", {})
    copy = folder / path.name
    copy.write_text(json.dumps(sign({**data, **changes})))
    return copy


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        (["smnist", "si"], {}, "is for the method ewc, not for si"),
        (["pmnist", "ewc"], {"search": {"protocol": "one-seed"}}, "is for smnist, not for pmnist (protocol one-seed)"),
        (["pmnist", "ewc"], {"search": {"protocol": "whole-stream"}}, "is for smnist, not for pmnist"),
        (["smnist", "ewc"], {"search": {"protocol": "guess"}}, "knows no protocol 'guess'"),
        (["smnist", "ewc"], {"method_options": {"strength": -1.0}}, "strength must be at least 0, not -1.0"),
        (["smnist", "ewc"], {"method_options": {"strenght": 1.0}}, "has no option 'strenght'"),
        (["smnist", "ewc"], {"value": "good"}, "value must be a number"),
        (["smnist", "ewc"], {"trials": []}, "trials must be a list of at least 1"),
        (["smnist", "ewc"], {"tuned": 2}, "newer version"),
    ],
)
def test_files_that_are_refused(words, changes, said, searched, tmp_path, capsys):
    path = change(searched / FILE, tmp_path, **changes)
    assert main(["run", *words, *SHORT, "--tuned", str(path), "--out", str(tmp_path / "no")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "no").exists()


def test_a_file_that_was_changed_by_hand_or_is_none(searched, tmp_path, capsys):
    data = json.loads((searched / FILE).read_text())
    (tmp_path / "changed.json").write_text(json.dumps({**data, "value": 1.0}))
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    for name, said in (
        ("changed", "digest differs"),
        ("text", "not JSON"),
        ("other", "not the outcome"),
        ("no", "no such file"),
    ):
        path = str(tmp_path / f"{name}.json")
        assert main(["run", "smnist", "ewc", *SHORT, "--tuned", path, "--out", str(tmp_path / "no")]) == 2
        assert said in capsys.readouterr().err
    path = str(searched / FILE)
    assert main(["run", "smnist", "ewc", "--tuned", path, "--tuned", path, "--out", str(tmp_path / "no")]) == 2
    assert "two files for ewc" in capsys.readouterr().err


def test_first_tasks_on_another_benchmark_is_a_transfer(searched, tmp_path):
    words = ["run", "pmnist", "ewc", *SHORT, "--tasks", "2", "--tuned", str(searched / FILE), "--out", str(tmp_path)]
    assert main(words) == 0
    (record,) = map(Record.load, tmp_path.glob("*.json"))
    assert (record.tuned["protocol"], record.tuned["on"]) == ("transfer", "smnist")


def test_a_choice_on_the_whole_stream_has_a_caution_wherever_it_is_shown(tmp_path, capsys):
    kind, plain = make("sgd", 0), make("hat", 0)
    kind.tuned = {"protocol": "whole-stream", "trials": 5, "options": ["lr"], "regime": ["lr"], "regime_without": [0.05]}
    plain.tuned = {"protocol": "first-tasks", "trials": 5, "options": ["c"], "regime": [], "regime_without": []}
    assert label(kind) == "sgd (lr=0.05, tuned on the whole stream)"
    assert label(plain) == "hat"
    folder = save(tmp_path / "records", [kind, plain])
    (setting,) = settings([kind, plain])
    assert "too kind" in str(terminal(setting).caption)
    assert terminal(settings([plain])[0]).caption is None
    page = report(folder, tmp_path / "page").read_text()
    assert page.count("too kind") == 1
    assert "tuned on the whole stream" in (tmp_path / "page" / "table.csv").read_text()
    for form in ("markdown", "latex", "csv"):
        assert main(["table", str(folder), "--format", form]) == 0
        shown = capsys.readouterr().out
        assert "tuned on the whole stream" in shown
        assert ("too kind" in shown) == (form != "csv")


@pytest.mark.parametrize("protocol", ["one-seed", "first-tasks"])
def test_a_result_at_the_seed_of_the_search_has_a_caution(protocol):
    own, other = (make("hat", seed, accuracy=[[0.9, 0.5], [0.8, 0.7]]) for seed in (3, 4))
    for record in (own, other):
        record.tuned = {
            "protocol": protocol,
            "trials": 5,
            "options": ["c"],
            "regime": [],
            "regime_without": [],
            "seeds": [3],
        }
    caution = caution_of(own.tuned, 3)
    assert caution is not None
    assert "too kind" in caution.text
    assert (label(own), label(other)) == (f"hat ({caution.short})", "hat")
    (setting,) = settings([own, other])
    assert {name: [r.spec.seed for r in group] for name, group in setting.methods.items()} == {label(own): [3], "hat": [4]}
    assert "this very seed" in str(terminal(setting).caption)
    assert caution_of({**own.tuned, "protocol": "transfer", "on": "pmnist"}, 3) is None
    assert caution_of({}, 3) is None


def test_a_run_at_the_seed_of_the_search(tmp_path, capsys):
    words = ["smnist", "sgd", *SHORT, "--seed", "3"]
    assert main(["tune", *words, "--protocol", "one-seed", "--trials", "1", "--out", str(tmp_path)]) == 0
    path, runs = tmp_path / "smnist-sgd-one-seed.json", tmp_path / "runs"
    assert main(["run", *words[:-2], "--seeds", "3-4", "--tuned", str(path), "--out", str(runs)]) == 0
    assert "caution, sgd at seed 3: its options" in capsys.readouterr().out
    assert sorted(label(Record.load(file)).endswith("tuned on this seed)") for file in runs.glob("*.json")) == [False, True]


def test_whole_stream_from_the_command_line(tmp_path, capsys):
    words = ["tune", "smnist", "sgd", *SHORT, "--protocol", "whole-stream", "--seeds", "0-1", "--trials", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert "caution" in capsys.readouterr().out
    path = tmp_path / "smnist-sgd-whole-stream.json"
    assert Tuned.load(path).search["seeds"] == [0, 1]
    assert main(["run", "smnist", "sgd", *SHORT, "--tuned", str(path), "--out", str(tmp_path / "runs")]) == 0
    assert "too kind" in " ".join(capsys.readouterr().out.split())
