"""A wrong keyword of a method's class is a TypeError that names the nearest right one; all else of the class stays."""

import copy
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import hatrack as hr
from tests.helpers.learning import every_method, make
from tests.helpers.toys import toy_tasks

TASKS = toy_tasks(1)


class Own(hr.Method):
    def __init__(self, net, strength=1.0, *, depth=2) -> None:
        super().__init__(net)
        self.given = strength, depth


class Passing(hr.Method):
    def __init__(self, net, **others) -> None:
        super().__init__(net)
        self.given = others


@pytest.fixture(scope="module")
def net():
    return make("sgd", TASKS).net


@pytest.mark.parametrize(
    ("method", "wrong", "right"),
    [("HAT", "smaxx", "smax"), ("HAT", "gate_rate", "gate_lr"), ("EWC", "Strength", "strength"), ("Method", "nets", "net")],
)
def test_a_wrong_keyword_names_the_nearest(method, wrong, right, net):
    with pytest.raises(TypeError) as error:
        getattr(hr, method)(net, **{wrong: 3})
    text = str(error.value)
    assert text.startswith(f"{method} has no option {wrong!r}; did you mean {right!r}? There are: ")
    assert "\n" not in text


@every_method
def test_every_method_names_its_options(name, net):
    method = hr.METHODS[name]
    with pytest.raises(TypeError, match=rf"^{method.__name__} has no option 'xyz'; there are: ") as error:
        method(net, xyz=3)
    assert str(error.value).partition("there are: ")[2].split(", ") == sorted(inspect.signature(method).parameters)


@every_method
def test_signatures_are_those_of_the_constructors(name):
    method = hr.METHODS[name]
    own = inspect.signature(method.__init__)
    assert inspect.signature(method) == own.replace(parameters=list(own.parameters.values())[1:])
    assert next(iter(inspect.signature(method).parameters)) == "net"


def test_classes_of_ones_own():
    assert Own(make("sgd", TASKS).net, strength=2.0, depth=3).given == (2.0, 3)
    assert Own(make("sgd", TASKS).net, 2.0).given == (2.0, 2)
    assert Passing(make("sgd", TASKS).net, anything=1).given == {"anything": 1}
    with pytest.raises(TypeError, match="Own has no option 'strenght'; did you mean 'strength'"):
        Own(make("sgd", TASKS).net, strenght=2.0)


def test_what_python_says_of_missing_arguments_stays():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'net'"):
        hr.HAT(smax=3.0)


def test_copies_and_pickles():
    method = make("hat", TASKS)
    for again in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert again.options == method.options


USER = """
import hatrack as hr

def f(net: hr.Network) -> hr.HAT:
    hr.HAT(net, smax=3.0)
    return hr.HAT(net, smaxx=3.0)
"""


@pytest.mark.slow
def test_a_type_checker_still_sees_a_wrong_keyword(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    words = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "user.py"]
    env = {**os.environ, "MYPYPATH": str(Path(hr.__file__).parent.parent)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, done.stdout
    assert errors[0].startswith("user.py:6: ")
    assert "smaxx" in errors[0]
