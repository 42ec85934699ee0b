"""A method of a user's own from the command line: `hatrack run BENCHMARK module:Class`."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hatrack import Record, Run
from hatrack.__main__ import main
from hatrack.experiments.record import name_of
from hatrack.methods import METHODS
from tests.helpers.commands import SHORT
from tests.helpers.fuzzing import killed, results

ANCHORED = (Path(__file__).parent.parent.parent / "docs" / "examples" / "anchored.py").read_text()
NUMBERS = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module into the present folder; return its name, which no other test uses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", ".", str(tmp_path))])

    def write(source=ANCHORED):
        name = f"own_module_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def only_record(folder):
    (path,) = folder.glob("*.json")
    return Record.load(path)


def test_it_runs_with_its_options_and_can_be_reported(module, tmp_path, capsys):
    name = f"{module()}:Anchored"
    assert main(["run", "smnist", name, *SHORT, "--strength", "0.5", "--out", "runs"]) == 0
    assert name in capsys.readouterr().out
    record = only_record(tmp_path / "runs")
    assert record.spec.method == name
    assert record.spec.method_options == {"strength": 0.5}
    assert re.fullmatch(rf"smnist-{name.replace(':', '-')}-seed0-[0-9a-f]{{12}}", record.name)
    assert main(["report", "runs"]) == 0
    assert name in (tmp_path / "runs" / "report.html").read_text()
    before = record.versions, record.seconds
    assert main(["run", "smnist", name, *SHORT, "--strength", "0.5", "--out", "runs"]) == 0
    record = only_record(tmp_path / "runs")
    assert (record.versions, record.seconds) == before, "a run that has its record is not run again"


def test_its_options_are_in_the_help_and_in_the_list(module, capsys):
    name = f"{module()}:Anchored"
    assert main(["run", "smnist", name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index(f"Method {name}:") < shown.index("--strength NUMBER") < shown.index("Benchmark smnist:")
    assert main(["list", name]) == 0
    assert "--strength" in capsys.readouterr().out


def test_its_options_are_checked(module, capsys):
    name = f"{module()}:Anchored"
    assert main(["run", "smnist", name, *SHORT, "--strength", "-1"]) == 2
    assert capsys.readouterr().err == "hatrack: --strength must be at least 0, not -1.0\n"


@pytest.mark.slow
def test_processes_of_their_own_find_it(module, tmp_path):
    """As the installed command does it: the present folder is not on the path by itself (-P)."""
    name = f"{module()}:Anchored"
    words = ["run", "smnist", name, *SHORT, "--seeds", "0-1", "--parallel", "2", "--device", "cpu", "--out", "runs"]
    root = Path(sys.modules["hatrack"].__file__).parent.parent
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-P", "-m", "hatrack", *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    records = [Record.load(path) for path in sorted(tmp_path.glob("runs/*.json"))]
    assert [(r.spec.method, r.spec.seed) for r in records] == [(name, 0), (name, 1)]


def test_a_run_that_was_stopped_is_continued(module, tmp_path, capsys):
    name = f"{module()}:Anchored"
    words = ["run", "smnist", name, *SHORT, "--device", "cpu"]
    assert main([*words, "--out", "whole"]) == 0
    killed(*words, "--out", "runs", after=3)
    (part,) = tmp_path.glob("runs/*.part")
    capsys.readouterr()
    assert main(["resume", "runs", "--device", "cpu", "--method", name]) == 0
    assert not part.exists()
    whole, found = (next((tmp_path / folder).glob("*.json")) for folder in ("whole", "runs"))
    assert results(whole) == results(found)


def test_a_stopped_run_whose_module_is_gone(module, tmp_path, capsys, monkeypatch):
    own = module()
    killed("run", "smnist", f"{own}:Anchored", *SHORT, "--device", "cpu", "--out", "runs", after=3)
    (tmp_path / f"{own}.py").unlink()
    monkeypatch.delitem(sys.modules, own)
    assert main(["resume", "runs", "--method", f"{own}:Anchored"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"there is no module {own!r}" in said


def test_a_file_alone_never_decides_what_is_imported(module, tmp_path, capsys, monkeypatch):
    own = module()
    name = f"{own}:Anchored"
    killed("run", "smnist", name, *SHORT, "--device", "cpu", "--out", "runs", after=3)
    main(["run", "smnist", name, *SHORT, "--device", "cpu", "--seed", "1", "--out", "done"])
    monkeypatch.delitem(sys.modules, own)
    capsys.readouterr()
    for words in ([], ["--method", "docs.examples.anchored:Anchored"]):
        assert main(["resume", "runs", *words]) == 2
        assert own not in sys.modules
    said = capsys.readouterr().err.splitlines()
    assert f"--method {name}" in said[0]
    assert ".part" in said[0]
    assert main(["report", "done"]) == 0
    assert own not in sys.modules
    with pytest.raises(ValueError, match=name):
        Run.from_spec(only_record(tmp_path / "done").spec.written)
    assert Run.from_spec(only_record(tmp_path / "done").spec.written, [name]).method == name


SOURCES = {  # a module, what is asked of it, and the words that the error must have
    "a syntax error": ("class Mine(:\n    pass\n", "Mine", ["SyntaxError", "line 1"]),
    "an error in a line of it": ("import hatrack\n\n1 / 0\n", "Mine", ["ZeroDivisionError", "line 3"]),
    "an import that is not there": ("import no_such_module_at_all\n", "Mine", ["no_such_module_at_all", "line 1"]),
    "another name": (ANCHORED, "Ancored", ["no 'Ancored'", "did you mean 'Anchored'?"]),
    "a class that is no method": ("class Mine:\n    pass\n", "Mine", ["is no method", "hatrack.Method"]),
    "a function": ("def Mine(net):\n    pass\n", "Mine", ["is no method", "hatrack.Method"]),
    "a number": ("Mine = 5\n", "Mine", ["is no method", "hatrack.Method"]),
    "no class": (ANCHORED, "", ["MODULE:CLASS"]),
    "no name": (ANCHORED, "a b", ["MODULE:CLASS"]),
}


@pytest.mark.parametrize("case", SOURCES)
def test_what_is_no_method_is_one_line_and_exit_code_2(case, module, tmp_path, capsys, monkeypatch):
    source, wanted, words = SOURCES[case]
    own = module(source)
    for command in (["run", "smnist", f"{own}:{wanted}", *SHORT], ["list", f"{own}:{wanted}"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert said.startswith("hatrack: ")
        for word in [own, *words]:
            assert word in said
    assert {path.suffix for path in tmp_path.iterdir()} <= {".py", ""}, "nothing but Python's own cache is left"
    monkeypatch.setenv("HATRACK_TRACEBACK", "1")
    with pytest.raises(ValueError, match=own):
        main(["list", f"{own}:{wanted}"])


def test_a_module_that_is_not_there(module, capsys):
    module()
    for name in ("no_such_module:Mine", "no_such_package.inner:Mine", "torch.no_such_module:Mine"):
        assert main(["run", "smnist", name, *SHORT]) == 2
        said = capsys.readouterr().err
        assert f"no method {name!r}: there is no module" in said
        assert said.count("\n") == 1


CLASHES = """
from typing import Annotated
from hatrack import Method, Option

class Mine(Method):
    def __init__(self, net, *, {name}: Annotated[{kind}, Option("an option")] = {default}):
        super().__init__(net)
"""


@pytest.mark.parametrize(
    ("name", "kind", "default", "owner"),
    [
        ("lr", "float", "0.1", "Regime"),
        ("widths", "int", "1", "Network mlp"),
        ("data", "str", "'x'", "Benchmark smnist"),
        ("heads", "str", "'x'", "Run"),
        ("out", "str", "'x'", "every run"),
        ("help", "str", "'x'", "every run"),
        ("restore", "bool", "True", "Regime"),
    ],
)
def test_an_option_that_the_run_has_already(name, kind, default, owner, module, capsys):
    own = module(CLASHES.format(name=name, kind=kind, default=default))
    assert main(["run", "smnist", f"{own}:Mine", *SHORT]) == 2
    said = capsys.readouterr().err
    assert f"Method {own}:Mine has an option --{name}, which {owner} has too" in said
    assert said.count("\n") == 1


def test_only_methods_may_be_a_user_s_own(module, capsys):
    own = module()
    for words in (["run", f"{own}:f", "sgd"], ["run", "smnist", "sgd", "--network", f"{own}:f"]):
        assert main(words) == 2
        assert f"{own}:f" in capsys.readouterr().err
    assert own not in sys.modules


def test_the_name_of_a_class_is_found_again(module):
    name = f"{module()}:Anchored"
    assert METHODS.name_of(METHODS.find(name)) == name
    assert METHODS.find("hat") is METHODS["hat"]


def test_names_of_records():
    spec = {"benchmark": "smnist", "seed": 3, "method": "stable-sgd"}
    assert name_of(spec) == "smnist-stable-sgd-seed3-70a2518931db"
    for method in ("my.package:My_Method", "../x:y", "a b\n\x00:c", "a/b\\c"):
        name = name_of(spec | {"method": method})
        assert re.fullmatch(r"smnist-[\w-]+-seed3-[0-9a-f]{12}", name)
    assert "my-package-My_Method" in name_of(spec | {"method": "my.package:My_Method"})
    assert len({name_of(spec | {"method": method}) for method in ("a:b", "a-b", "a.b")}) == 3


def test_an_edited_method_is_another_run(module, tmp_path):
    """Its record is not taken for that of the method as it was."""
    own = module()
    before = Run("smnist", f"{own}:Anchored").name
    assert Run("smnist", f"{own}:Anchored").name == before
    path = tmp_path / f"{own}.py"
    path.write_text(path.read_text() + "\n# edited\n")
    assert Run("smnist", f"{own}:Anchored").name != before


def test_one_method_has_one_name():
    assert Run("smnist", "hatrack.methods.hat:HAT") == Run("smnist", "hat")


def test_modules_of_the_present_folder_come_after_all_others(module, tmp_path):
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('the wrong one')")
    own = module()
    assert Run("smnist", f"{own}:Anchored").method == f"{own}:Anchored"
    sys.modules.pop("colorsys", None)
    import colorsys

    assert colorsys.rgb_to_hsv(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)
