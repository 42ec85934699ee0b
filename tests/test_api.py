"""The public names: importable without torch, documented, with examples that work."""

import doctest
import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hatrack as hr
from hatrack import METHODS, Method, Network, Task
from tests.helpers.learning import make
from tests.helpers.models import fresh
from tests.helpers.toys import toy_tasks

RECORDS = Path(__file__).parent.parent / "docs" / "results" / "records"
NAMES = sorted(set(hr.__all__) - {"__version__"})
TABLES = ("BENCHMARKS", "METHODS", "NETWORKS")
# The options of methods are documented by their Option, and the fields of an error by comments.
OPTIONS = {name for name in NAMES if inspect.isclass(getattr(hr, name)) and issubclass(getattr(hr, name), Method)} - {
    "Method"
}


def test_every_name_is_there():
    assert set(dir(hr)) == set(hr.__all__) == {*hr.PLACES, "__version__"}
    names: dict[str, object] = {}
    exec("from hatrack import *", names)
    assert set(hr.__all__) <= set(names)
    with pytest.raises(AttributeError, match="no attribute 'Hat'"):
        _ = hr.Hat


def test_importing_the_package_imports_no_torch():
    code = "import sys, hatrack; dir(hatrack); print(sorted({'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_training_without_a_terminal_imports_no_rich():
    code = "import sys, hatrack.training.trainer as t; t.find_console(); print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Docstrings


def missing(thing: Any) -> list[str]:
    """The parts that the docstring of a public class or function lacks."""
    doc = inspect.getdoc(thing) or ""
    if not doc:
        return ["docstring"]
    signature = inspect.signature(thing)
    takes = [name for name in signature.parameters if name not in ("self", "args", "kwargs")]
    heading = next((heading for heading in ("Args:", "Attributes:") if heading in doc), "")
    lacks = ["Args"] if takes and not heading else [name for name in takes if f"{name}:" not in doc.split(heading)[-1]]
    if inspect.isroutine(thing) and signature.return_annotation not in (None, "None") and "Returns:" not in doc:
        lacks.append("Returns")
    return lacks + ([] if "Example:" in doc else ["Example"])


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_a_docstring(name):
    assert (inspect.getdoc(getattr(hr, name)) or "").strip()


@pytest.mark.parametrize("name", sorted(set(NAMES) - OPTIONS - set(TABLES) - {"Diverged"}))
def test_docstrings_say_what_goes_in_and_what_comes_out(name):
    assert missing(getattr(hr, name)) == []


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_docstrings_of_methods_name_the_network_and_show_an_example(name):
    assert not {"docstring", "Args", "net", "Example"} & set(missing(getattr(hr, name)))


@pytest.mark.parametrize("thing", [Task.from_arrays, Task.from_dataset, hr.Network.from_classifier])
def test_what_users_call_to_make_something_is_documented(thing):
    assert missing(thing) == []


PLAIN = [Method.learn, Method.predict, Method.__call__, hr.Network.add_task, hr.Network.preprocess, hr.Trainer.__call__]


@pytest.mark.parametrize("thing", PLAIN, ids=lambda thing: thing.__qualname__)
def test_methods_that_users_call_are_documented(thing):
    assert set(missing(thing)) <= {"Example"}


def test_a_docstring_that_lacks_something_is_noticed():
    def undocumented(a, b):
        pass

    def half(a, b) -> int:
        """Add two numbers.

        Args:
            a: the first.
        """

    assert missing(undocumented) == ["docstring"]
    assert missing(half) == ["b", "Returns", "Example"]
    half.__doc__ = "Add two numbers.\n\nReturns:\n    The sum.\n\nExample:\n    >>> half(1, 2)\n"
    assert missing(half) == ["Args"]


# Examples


def world() -> dict[str, object]:
    """What the examples in docstrings may use: hr, torch, a trunk, two tasks and the arrays of the first."""
    draw = np.random.RandomState(0)
    x = draw.randint(0, 256, (250, 28, 28), dtype=np.uint8)
    y = np.arange(250) % 10
    parts = (x[:200], y[:200], x[200:], y[200:])
    signs = (x[:60], y[:60] % 3, x[60:90], y[60:90] % 3)
    tasks = [Task.from_arrays(0, "digits", *parts), Task.from_arrays(1, "signs", *signs)]
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(784, 50), nn.ReLU())
    names = dict(zip(("x_train", "y_train", "x_test", "y_test"), parts, strict=True))
    return {"hr": hr, "torch": torch, "trunk": trunk, "tasks": tasks, **names}


def documented(name: str) -> list[tuple[str, str]]:
    """The docstrings of a public name, and of the public methods of a class, that have examples."""
    thing = getattr(hr, name)
    things = {name: thing}
    if inspect.isclass(thing):
        things |= {f"{name}.{key}": getattr(thing, key) for key in vars(thing) if not key.startswith("_")}
    found = {key: inspect.getdoc(value) or "" for key, value in things.items() if callable(value)}
    return [(key, doc) for key, doc in found.items() if ">>>" in doc]


EXAMPLES = [example for name in NAMES if name not in TABLES for example in documented(name)]


class Checker(doctest.OutputChecker):
    """What an example prints is compared only where the docstring shows it."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.parametrize(("name", "doc"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_examples_work(name, doc, tmp_path, monkeypatch):
    """Every example runs, with two epochs where it trains for 20 and a small network where it names none, and prints what
    the docstring shows."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RECORDS, "records", ignore=lambda _, names: [n for n in names if not n.startswith("smnist-hat")])
    doc = doc.replace("Trainer(hr.Regime(epochs=20))", "Trainer(hr.Regime(epochs=2))")
    doc = doc.replace('hr.Run("smnist", "hat", ', 'hr.Run("smnist", "hat", network_options={"widths": (20, 20)}, ')
    test = doctest.DocTestParser().get_doctest(doc, world(), name, None, None)
    said: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(Checker(), optionflags=flags).run(test, out=said.append)
    assert not said, "".join(said)


def test_an_example_that_is_wrong_is_noticed(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match="Expected"):
        test_examples_work("wrong", ">>> len(tasks)\n3\n", tmp_path, monkeypatch)


# One line each


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_it_is_in_one_line(name):
    method = METHODS[name](Network(fresh(), tasks=toy_tasks(2)))
    kind = type(method).__name__
    assert repr(method) == f"{kind}(nothing learned; {method.net!r})"
    method.history = {0: "toy 0", 1: "it's"}
    assert repr(method).startswith(f"{kind}(learned: 'toy 0', \"it's\"; Network(")


def test_a_method_shows_the_options_that_differ():
    net = make("hat", toy_tasks(1)).net
    assert repr(hr.HAT(net, c=1.5, smax=400.0)).startswith("HAT(c=1.5; nothing learned; Network(Sequential, ")
    assert repr(hr.PathNet(net, modules=4)).startswith("PathNet(modules=4; nothing learned; ")
    method = hr.EWC(net)
    method.history = {k: f"task {k}" for k in range(20)}
    assert "'task 7', ... (20 tasks); Network(" in repr(method)


def test_a_regime_and_a_trainer_show_what_differs():
    assert repr(hr.Regime()) == "Regime()"
    assert repr(hr.Regime(epochs=20, lr=0.05, optimizer="adam")) == "Regime(epochs=20, optimizer='adam')"
    assert repr(hr.Trainer()) == "Trainer(Regime())"
    fit = hr.Trainer(hr.Regime(epochs=1), seed=2, engine="eager", watch=True)
    assert repr(fit) == "Trainer(Regime(epochs=1), seed=2, watch=True, engine='eager')"
    method, tasks = make("sgd", toy_tasks(2)), toy_tasks(2)
    result = method.learn(tasks[0], fit)
    assert repr(fit).endswith("engine='eager'; 1 fit done)")
    method.learn(tasks[1], fit)
    assert repr(fit).endswith("; 2 fits done)")
    assert repr(result) == f"LearnResult({result})"
    assert repr(fit.fits[0]).startswith("FitResult(task 0, 1 epoch, best epoch 1, validation accuracy ")
