"""Which engine "auto" chooses: by the steps of the whole run, and the same for a run that was killed and goes on."""

import copy

import pytest

from hatrack import METHODS, Regime, Trainer, run
from hatrack.engine import choice, compiled
from hatrack.engine.choice import PAYS, choose_engine
from hatrack.experiments.build import build
from tests.helpers.killing import assert_same, killed_at, spec, to_the_end
from tests.helpers.learning import learn, make
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks


@pytest.fixture(autouse=True)
def captured_only(monkeypatch):
    """Run the captured operations without compiling them, which takes seconds each time."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: copy.deepcopy(graph))
    monkeypatch.setattr(compiled, "_code_cache", {})
    monkeypatch.setattr(choice, "can_compile", lambda gpu: True)


def pays_from(steps, monkeypatch):
    monkeypatch.setitem(PAYS, "cpu", steps)


def steps_of_a_fit(method="hat", **regime):
    """Of each of the two tasks of `spec`."""
    one = spec(method, **regime)
    return -(-len(build(one)[0][0].train) // one.regime.batch) * one.regime.epochs


def test_the_steps_of_all_tasks_count(monkeypatch):
    fit = steps_of_a_fit()
    pays_from(2 * fit, monkeypatch)
    assert run(spec("hat")).versions["engine"] == "compiled"
    pays_from(2 * fit + 1, monkeypatch)
    assert run(spec("hat")).versions["engine"] == "eager"


def test_a_method_whose_tasks_each_have_their_own_form_is_compiled_by_the_fit(monkeypatch):
    fit = steps_of_a_fit("lwf")
    pays_from(fit + 1, monkeypatch)
    assert run(spec("lwf")).versions["engine"] == "eager"
    pays_from(fit, monkeypatch)
    assert run(spec("lwf")).versions["engine"] == "compiled"


@pytest.mark.parametrize(("threshold", "engine"), [(4 * 3, "compiled"), (4 * 3 + 1, "eager")])
def test_a_trainer_without_a_run_counts_the_tasks_of_the_network(threshold, engine, monkeypatch):
    """60 examples, of which 48 are trained on, in batches of 16: three steps for each of four tasks."""
    pays_from(threshold, monkeypatch)
    tasks, fit = toy_tasks(4), Trainer(Regime(epochs=1, batch=16))
    learn(make("hat", tasks), tasks, fit)
    assert [result.engine for result in fit.fits] == [engine] * 4


@pytest.mark.slow
def test_a_run_that_is_killed_and_goes_on_keeps_its_engine(tmp_path, monkeypatch):
    """Also in its last task, of which alone there are too few steps."""
    pays_from(2 * steps_of_a_fit(batch=64), monkeypatch)
    whole = run(spec("hat", batch=64), tmp_path / "whole")
    kills = killed_at(monkeypatch, 0.2, seed=0, most=4)
    again = to_the_end(spec("hat", batch=64), tmp_path / "again", save_every=1e-5)
    assert len(kills) == 4
    assert whole.versions["engine"] == again.versions["engine"] == "compiled"
    assert_same(whole, again)


def test_fewer_steps_pay_on_a_gpu():
    assert choose_engine("auto", "cuda", PAYS["cuda"]) == (True, True)
    assert choose_engine("auto", "cuda", PAYS["cuda"] - 1) == (False, True)
    assert choose_engine("auto", "cpu", PAYS["cuda"]) == (False, False)
    assert choose_engine("auto", "cpu", PAYS["cpu"]) == (True, False)
    assert choose_engine("auto", "mps", 10 * PAYS["cpu"]) == (False, False), "other devices run eagerly"


@pytest.mark.parametrize("name", quick_and_slow(name for name in METHODS if name != "random"))
def test_every_method_says_how_many_forms_its_step_has(name):
    """Four tasks of one size. A method with several fits per task may have a form for each."""
    tasks, counts = toy_tasks(4), []
    method, fit = make(name, tasks), Trainer(Regime(epochs=1, batch=16), engine="compiled")
    for task in tasks:
        method.learn(task, fit)
        counts.append(len(compiled._code_cache))
    new = [now > before for before, now in zip([0, *counts], counts, strict=False)]
    expected = {"one": [True, False, False, False], "two": [True, True, False, False], "many": [True] * 4}
    assert new == expected[method.step_forms]
