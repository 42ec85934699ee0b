"""The options of `hatrack run`: those of everything that the command line names, in groups."""

import re

import pytest

from hatrack.__main__ import main
from hatrack.benchmarks import BENCHMARKS
from hatrack.methods import METHODS
from hatrack.networks import NETWORKS
from hatrack.options import parameters


def help_of(capsys, *words):
    assert main(["run", *words, "--help"]) == 0
    return capsys.readouterr().out


def groups(shown):
    """Return the option names under each heading, in the order of the page."""
    found = {}
    for line in shown.splitlines():
        if heading := re.match(r"(\w.*):$", line):
            options = found.setdefault(heading[1], [])
        elif option := re.match(r"  (?:-\w, )?--([\w-]+)", line):
            options.append(option[1].replace("-", "_"))
    return found


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("method", METHODS)
def test_the_options_of_the_method_come_first(method, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = help_of(capsys, "pmnist", method)
    assert max(map(len, shown.splitlines())) <= columns
    found = groups(shown)
    own = [f"Method {method}"] if parameters(METHODS[method]) else []
    assert list(found) == [*own, "Benchmark pmnist", "Network mlp", "Regime", "Run"]
    for title, source in zip(found, [METHODS[method]] * len(own) + [BENCHMARKS["pmnist"], NETWORKS["mlp"]], strict=False):
        assert found[title] == list(parameters(source))
    assert {"seeds", "out", "device", "heads", "help"} <= set(found["Run"])


def test_defaults_and_what_a_value_may_be_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    lines = [" ".join(line.split()) for line in help_of(capsys, "pmnist", "hat").splitlines()]
    assert "--smax NUMBER hardness of the gates at the end of an epoch [400.0]" in lines
    assert any(line.startswith("--widths N,N,...") and line.endswith("[2000,2000]") for line in lines)
    assert any(line.startswith("--normalise / --no-normalise") for line in lines)
    assert any(line.startswith("--heads multi|shared") and line.endswith("[multi]") for line in lines)


@pytest.mark.parametrize("words", [["--network", "alexnet"], ["--network=alexnet"], ["--c", "1", "--network", "alexnet"]])
def test_the_network_that_is_named_brings_its_options(words, capsys):
    found = groups(help_of(capsys, "pmnist", "hat", *words))
    assert "Network mlp" not in found
    assert found["Network alexnet"] == list(parameters(NETWORKS["alexnet"]))


def test_without_names_the_help_says_how_to_see_more(capsys):
    for words in ([], ["pmnist"]):
        shown = help_of(capsys, *words)
        assert "hatrack run BENCHMARK METHOD --help" in shown
        assert "hatrack list" in shown
    assert list(groups(shown)) == ["Benchmark pmnist", "Regime", "Run"]
    assert "hatrack run BENCHMARK METHOD --help" not in help_of(capsys, "pmnist", "sgd")


@pytest.mark.parametrize("words", [["--data", "sample", "pmnist", "sgd"], ["pmnist", "--data", "sample", "sgd"]])
def test_a_name_after_an_option_is_refused(words, capsys):
    assert main(["run", *words]) == 2
    assert "the names come first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "option", "owners"),
    [
        (["pmnist", "sgd"], "--smax", ["hat", "pmask"]),
        (["smnist", "sgd"], "--first", ["pmnist"]),
        (["cifar", "sgd"], "--no-normalise", ["pmnist"]),
        (["pmnist", "sgd", "--network", "alexnet"], "--widths", ["mlp"]),
    ],
)
def test_who_has_an_option_that_this_run_has_not(words, option, owners, capsys):
    assert main(["run", *words, option, "1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert option in said
    found = said.rpartition(": ")[2].strip().split(", ")
    assert set(owners) <= set(found)
    for name in found:
        table = next(table for table in (METHODS, BENCHMARKS, NETWORKS) if name in table)
        assert option.removeprefix("--no-").removeprefix("--") in parameters(table[name])


def test_an_option_that_nobody_has(capsys):
    assert main(["run", "pmnist", "hat", "--xyzzy", "1"]) == 2
    assert capsys.readouterr().err == "hatrack: No such option: --xyzzy\n"


def test_tracebacks_are_shown_when_asked_for(monkeypatch):
    monkeypatch.setenv("HATRACK_TRACEBACK", "1")
    with pytest.raises(ValueError, match="hta"):
        main(["run", "pmnist", "hta"])


def test_ctrl_c_ends_with_code_130(monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr("hatrack.cli.list.everything", stop)
    assert main(["list"]) == 130
    assert "hatrack: stopped" in capsys.readouterr().err
