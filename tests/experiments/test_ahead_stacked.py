"""Steps of stacks that are compiled ahead in helper processes are those of the stacks, and nobody waits for another's."""

import threading
import time
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from hatrack import METHODS, Regime, Run, Trainer
from hatrack.engine import helpers, stacked_form
from hatrack.engine.choice import can_compile
from hatrack.engine.interleaving import others_run, run_interleaved
from hatrack.engine.stack import Stack
from hatrack.experiments import ahead
from hatrack.experiments.build import build
from hatrack.experiments.parallel import run_all
from hatrack.training.checkpoint import Stopped, stopping
from tests.helpers.killing import SAME, spec
from tests.helpers.learning import make
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

CPU = torch.device("cpu")
AHEAD = [name for name in METHODS if METHODS[name].step_forms != "many" and name != "random"]


@pytest.fixture
def captured_only(monkeypatch):
    monkeypatch.setattr(stacked_form, "compile_graph", lambda graph, *_: graph)
    monkeypatch.setattr(stacked_form, "_forms", {})


def of(method, seed=0, **regime):
    return Run(
        "smnist", method, seed, benchmark_options={"data": "sample"}, network_options={"widths": (12, 12)},
        train_examples=100, regime=Regime(**{"epochs": 1, "batch": 250, **regime}),
    )  # fmt: skip


def planned(runs, change=lambda tasks: tasks, kinds=None):
    """What each of these runs plans, if they are stacked; none ends before all have planned."""
    begun = threading.Barrier(len(runs))

    def plan(one):
        tasks, method = build(one)
        found = ahead.compile_ahead(one, change(tasks), type(method), CPU, "tf32")
        with others_run():
            begun.wait(60)  # seconds: none waits forever for one that has failed
        return found

    return run_interleaved([lambda one=one: plan(one) for one in runs], CPU, len(runs), stack=True, kinds=kinds)


def learned(runs, change=lambda tasks: tasks):
    """Let these runs learn their tasks, stacked."""

    def learn(one):
        tasks, method = build(one)
        fit = Trainer(one.regime, seed=one.seed, engine="compiled", progress=False)
        for task in change(tasks):
            method.learn(task, fit)
        return fit

    return run_interleaved([lambda one=one: learn(one) for one in runs], CPU, len(runs), stack=True)


@pytest.mark.parametrize("name", quick_and_slow(AHEAD))
def test_what_a_helper_compiles_is_the_step_of_the_stack(name, captured_only, jobs):
    """The form is the same: nothing is compiled again for any task of two runs."""
    runs = [of(name, seed) for seed in (0, 1)]
    planned(runs)
    assert len(jobs) == (2 if METHODS[name].step_forms == "two" else 1), "one for both runs"
    for job in jobs.values():
        ahead.compile_step(job)
    before = set(stacked_form._forms)
    assert before
    fits = learned(runs)
    assert {result.engine for fit in fits for result in fit.fits} == {"compiled, stacked"}
    assert set(stacked_form._forms) == before


def test_runs_whose_options_change_no_operation_share_helpers(captured_only, jobs):
    """What the helper compiles with the options of the first run is the step of the stack of both."""
    other = {"c": 3.0, "embedding": "uniform", "gate_lr": 0.5, "validation": "total"}
    runs = [of("hat"), replace(of("hat", 1), method_options=other)]
    planned(runs)
    assert [job["lanes"] for job in jobs.values()] == [2]
    for job in jobs.values():
        ahead.compile_step(job)
    before = set(stacked_form._forms)
    assert len(before) == 1
    fits = learned(runs)
    assert {result.engine for fit in fits for result in fit.fits} == {"compiled, stacked"}
    assert set(stacked_form._forms) == before


def test_names_tell_the_number_of_lanes(jobs):
    """Stacks of two and of three runs, and a step alone."""
    planned([of("hat", seed) for seed in (0, 1)])
    planned([of("hat", seed) for seed in (0, 1, 2)])
    assert [job["lanes"] for job in jobs.values()] == [2, 3]
    tasks, method = build(of("lfl"))
    ahead.compile_ahead(of("lfl"), tasks, type(method), CPU, "tf32")
    assert [job["lanes"] for job in jobs.values()] == [2, 3, 0]


def test_runs_that_are_left_get_code_for_fewer_lanes(jobs):
    """A run asks for it when it needs it, once for all."""
    for plan in planned([of("hat", seed) for seed in (0, 1, 2)]):
        for lanes in (3, 2, 2):
            plan.wait(build(of("hat"))[0][1], lanes)
    assert [job["lanes"] for job in jobs.values()] == [3, 2]


def test_only_code_for_the_lanes_that_a_run_had_is_remembered(jobs):
    """The stack became smaller before the first step: nobody has compiled that of the larger one."""
    plan = planned([of("hat", seed) for seed in (0, 1, 2)])[0]
    plan.wait(build(of("hat"))[0][0], 2)
    plan.remember()
    jobs.clear()
    planned([of("hat", seed) for seed in (0, 1)])
    assert jobs == {}
    planned([of("hat", seed) for seed in (0, 1, 2)])
    assert [job["lanes"] for job in jobs.values()] == [3]


def test_a_job_for_each_form_that_the_stacks_have(jobs, captured_only):
    """Heads have room for the most classes, and pixels that are moved make no other form; one head less makes one."""

    def mixed(tasks):
        plain = tasks[0].train
        place = torch.arange(plain.x[0].numel())[None]
        shaped = replace(plain, x=plain.x.reshape(len(plain.x), *plain.transform.shape))
        moved = replace(plain, transform=replace(plain.transform, pixels=place))
        kinds = [(5, shaped), (4, shaped), (5, moved), (4, moved)]
        return [replace(tasks[0], index=k, classes=classes, train=train) for k, (classes, train) in enumerate(kinds)]

    planned([of("hat", seed) for seed in (0, 1)], mixed)
    assert len(jobs) == 1
    planned([of("hat", seed, lr=0.01, epochs=3, schedule="constant") for seed in (0, 1)], mixed)
    assert len(jobs) == 1, "the rate and the length change no operation"
    planned([of("hat", seed, clip=0.0) for seed in (0, 1)], mixed)
    assert len(jobs) == 2
    planned([of("hat", seed, smoothing=0.1) for seed in (0, 1)], mixed)
    assert len(jobs) == 4, "labels that are smoothed need heads as they are"
    planned([of("hat", seed, weight_decay=30.0) for seed in (0, 1)], mixed)
    assert len(jobs) == 6, "a strong decay would make classes likely that a task does not have"


@pytest.mark.parametrize("decay", [0.0, 30.0])
def test_a_helper_gives_heads_the_room_that_they_have_in_the_run(decay, captured_only, jobs):
    """The first task has fewer classes than the second. In a helper the data are few and the decay is weaker in all."""
    regime = {"weight_decay": decay, "epochs": 1}

    def fewer(tasks):
        tasks[0] = replace(tasks[0], classes=tasks[0].classes - 1)
        return tasks

    planned([of("sgd", seed, **regime) for seed in (0, 1)], fewer)
    for job in jobs.values():
        ahead.compile_step(job)
    assert len(stacked_form._forms) == (2 if decay else 1)


class Waits(Trainer):
    """A trainer whose code is ready when a job has ended."""

    def __init__(self, seed, job, seen):
        super().__init__(Regime(epochs=6, batch=16, lr=0.1), seed=seed, engine="eager", progress=False)
        self.job, self.seen = job, seen

    def start(self, *given, **how):
        loop = super().start(*given, **how)
        loop.stacked.wait_for_code = self.note
        return loop

    def note(self, lanes):
        helpers.wait(self.job)
        self.seen.append((self.job, lanes, helpers._jobs[self.job].is_set()))


def test_a_stack_whose_code_is_ready_goes_on_while_others_wait(monkeypatch):
    """The job of HAT ends when both runs of SGD have ended; then both runs of HAT share one stack."""
    ready, late = threading.Event(), threading.Event()
    ready.set()
    monkeypatch.setattr(helpers, "_jobs", {"sgd": ready, "hat": late})
    monkeypatch.setattr(helpers, "PATIENCE", 30.0)
    seen, driven, left = [], [], ["sgd", "sgd"]
    plain = Stack.drive
    monkeypatch.setattr(Stack, "drive", lambda stack: driven.append((late.is_set(), len(stack.members))) or plain(stack))

    def learn(name, seed):
        tasks = toy_tasks(1, seed=seed)
        make(name, tasks, seed=seed).learn(tasks[0], Waits(seed, name, seen))
        if name == "sgd":
            left.pop()
            if not left:
                late.set()

    runs = [(name, seed) for name in ("hat", "sgd") for seed in (0, 1)]
    kinds = [name for name, _ in runs]
    run_interleaved([lambda run=run: learn(*run) for run in runs], CPU, 4, stack=True, kinds=kinds)
    assert seen == [("sgd", 2, True)] * 2 + [("hat", 2, True)] * 2
    for ended in (False, True):
        group = [members for when, members in driven if when == ended]
        assert group.count(2) > 0.8 * len(group) > 0, "in step from the first on"


@pytest.mark.parametrize("helper", ["goes on", "is ended by the signal as well"])
def test_runs_that_wait_for_a_helper_stop_at_once_and_compile_nothing(helper, captured_only, monkeypatch, tmp_path):
    """`timeout` signals the helpers too. Then each form was compiled here, one after the other, until SIGKILL came."""
    runs, compiled = [spec("hat", seed) for seed in (0, 1)], []
    whole = run_all(runs, tmp_path / "whole", parallel=2, stack=True, engine="compiled")
    monkeypatch.setattr(stacked_form, "compile_graph", lambda graph, *_: compiled.append(graph) or graph)
    monkeypatch.setattr(stacked_form, "_forms", {})
    monkeypatch.setattr(helpers, "COUNT", 1)
    monkeypatch.setattr(helpers, "PATIENCE", 20.0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    job, asked = threading.Event(), []
    monkeypatch.setattr(helpers, "_jobs", defaultdict(lambda: job))
    monkeypatch.setattr(helpers, "start", lambda name, *_: helpers._jobs[name])
    plain = helpers.wait

    def wait(*given):
        asked.append(given)
        if len(asked) == 2:
            stopping.set()
            if helper != "goes on":
                job.set()
        plain(*given)

    monkeypatch.setattr(helpers, "wait", wait)
    began = time.monotonic()
    with pytest.raises(Stopped, match="0 of 2 runs are finished"):
        run_all(runs, tmp_path / "stopped", parallel=2, stack=True, engine="compiled")
    assert time.monotonic() - began < helpers.PATIENCE / 2
    assert compiled == []
    job.set()
    found = run_all(runs, tmp_path / "stopped", parallel=2, stack=True, engine="compiled")
    for one, two in zip(whole, found, strict=True):
        assert_alike(one, two)


def dying(job) -> None:
    raise SystemExit(1)


def records(out, monkeypatch, count):
    """Those of two runs that are stacked, with so many helpers and an empty cache, and what was found in the cache."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(out / "cache"))
    monkeypatch.setattr(helpers, "COUNT", count)
    monkeypatch.setattr(helpers, "_jobs", {})
    monkeypatch.setattr(stacked_form, "_forms", {})
    counters.clear()
    found = run_all([spec("hat", seed) for seed in (0, 1)], out, parallel=2, stack=True, engine="compiled")
    assert {record.versions["engine"] for record in found} == {"compiled, stacked"}
    return found, counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


def assert_alike(one, two):
    """The same records; the losses of evaluations to rounding: runs may take their turns in another order."""
    for name in set(SAME) - {"loss", "train_loss"}:
        assert getattr(one, name) == getattr(two, name), name
    for name in ("loss", "train_loss"):
        # None: a task that is not learned yet
        tables = ([-1.0 if v is None else v for row in getattr(each, name) for v in row] for each in (one, two))
        assert next(tables) == pytest.approx(next(tables), rel=1e-6, abs=1e-6)


@pytest.mark.slow
def test_helpers_that_die_change_no_record(captured_only, monkeypatch, tmp_path):
    expected, *_ = records(tmp_path / "without", monkeypatch, 0)
    monkeypatch.setattr(ahead, "compile_step", dying)
    found, *_ = records(tmp_path / "with", monkeypatch, 1)
    assert len(helpers._jobs) == 1
    for one, two in zip(expected, found, strict=True):
        assert_alike(one, two)


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(gpu=False), reason="no C++ compiler")
def test_a_helper_leaves_code_of_a_stack_that_this_process_loads(monkeypatch, tmp_path):
    """The records are those without helpers."""
    found, hits, misses = records(tmp_path / "with", monkeypatch, 1)
    assert (hits, misses) == (1, 0)
    expected, hits, misses = records(tmp_path / "without", monkeypatch, 0)
    assert (hits, misses) == (0, 1)
    for one, two in zip(expected, found, strict=True):
        assert_alike(one, two)
