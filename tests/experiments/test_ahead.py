"""Steps that are compiled ahead in helper processes are the steps of the run."""

import copy
from dataclasses import replace

import pytest
import torch

from hatrack import METHODS, Method, Regime, Run, Trainer, run
from hatrack.engine import compiled, helpers
from hatrack.engine.choice import can_compile
from hatrack.experiments import ahead
from hatrack.experiments import run as running
from hatrack.experiments.build import build, build_tasks
from hatrack.options import parameters
from tests.helpers.killing import assert_same, spec
from tests.helpers.tiers import quick_and_slow

AHEAD = [name for name in METHODS if METHODS[name].step_forms != "many" and name != "random"]


@pytest.fixture
def captured_only(monkeypatch):
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: copy.deepcopy(graph))
    monkeypatch.setattr(compiled, "_code_cache", {})


def of(method, **regime):
    return Run(
        "smnist", method, benchmark_options={"data": "sample"}, train_examples=100,
        network_options={"widths": (12, 12), "input_dropout": 0.0},
        regime=Regime(**{"epochs": 1, "batch": 250, **regime}),
    )  # fmt: skip


def ahead_of(one):
    tasks, method = build(one)
    return tasks, method, ahead.compile_ahead(one, tasks, type(method), torch.device("cpu"), "tf32")


@pytest.mark.parametrize("name", quick_and_slow(AHEAD))
def test_what_a_helper_compiles_is_the_step_of_the_run(name, captured_only):
    """The form is the same: nothing is compiled again for the tasks that helpers took."""
    one = of(name)
    tasks, method = build(one)
    two = method.step_forms == "two"
    for order in ([0], [0, 1]) if two else ([1],):
        forms = [ahead.form_of(task, one, type(method)) for task in tasks]
        job = {"spec": one.spec, "tasks": forms, "order": order, "device": "cpu", "precision": "tf32", "lanes": 0}
        ahead.compile_step({**job, "threads": torch.get_num_threads()})
    before = set(compiled._code_cache)
    assert before
    fit = Trainer(one.regime, engine="compiled", progress=False)
    for task in tasks:
        method.learn(task, fit)
    assert set(compiled._code_cache) == before


@pytest.mark.parametrize(
    ("regime", "options"),
    [
        ({"optimizer": "adam"}, {}),
        ({"batch": 1699}, {}),
        pytest.param({"batch": 5000}, {}, marks=pytest.mark.slow),
        pytest.param({"clip": 0.0, "epochs": 3}, {}, marks=pytest.mark.slow),
        pytest.param({"batch": 1}, {}, marks=pytest.mark.slow),
        ({}, {"heads": "shared"}),
        pytest.param({"steps": 3}, {}, marks=pytest.mark.slow),
        pytest.param({"task_batch_decay": 0.5}, {}, marks=pytest.mark.slow),
    ],
)
def test_with_other_settings(regime, options, captured_only):
    """Batches of every size: one example left over, more than there are, so many that the buffer of losses is larger."""
    base = of("hat", **regime)
    one = Run(**{**vars(base), **options}) if options else base
    tasks, method = build(one)
    forms = [ahead.form_of(task, one, type(method)) for task in tasks]
    job = {"spec": one.spec, "tasks": forms, "order": [1], "device": "cpu", "precision": "tf32", "lanes": 0}
    ahead.compile_step({**job, "threads": torch.get_num_threads()})
    fit = ahead.OneStep(one.regime, forms, 1)
    loop = None

    def real(method, task, **how):
        nonlocal loop
        loop = Trainer(one.regime, engine="compiled").start(method, task, **how)
        method.train()
        index = torch.arange(loop.compiled.size)
        loop.step_on(*loop.prefetcher.split.fetch(index), torch.zeros((), dtype=torch.int64))
        return loop.close()

    method.learn(tasks[0], fit)
    method.learn(tasks[1], real)
    assert not loop.compiled.failed
    assert len(compiled._code_cache) == 1


def test_a_run_that_is_alone_compiles_its_first_form_itself(jobs):
    assert ahead_of(of("hat"))[2] is not None
    assert jobs == {}, "both tasks have one form"
    ahead_of(of("lfl"))
    assert [job["order"] for job in jobs.values()] == [[0, 1]]


@pytest.mark.parametrize(
    ("options", "orders"),
    [({}, [[2]]), ({"smoothing": 0.1}, [[1], [2], [4]]), ({"weight_decay": 30.0}, [[1], [2], [4]])],
)
def test_every_other_form_gets_one_helper(options, orders, jobs):
    """Gray and colour images, the first of which this process compiles; and two numbers of classes, where heads need to be
    as they are: for smoothed labels, or if a strong decay would make classes likely that a task does not have."""
    one = of("hat", **options)
    tasks, method = build(one)
    gray, colour = tasks[0].train, replace(tasks[0].train, x=tasks[0].train.x.expand(-1, 3, -1, -1))
    shapes = [(5, gray), (4, gray), (5, colour), (5, gray), (4, colour), (4, gray)]
    mixed = [replace(tasks[0], index=k, classes=classes, train=train) for k, (classes, train) in enumerate(shapes)]
    plan = ahead.compile_ahead(one, mixed, type(method), torch.device("cpu"), "tf32")
    assert [job["order"] for job in jobs.values()] == orders
    assert plan.names[0] == plan.names[3]
    assert len(set(plan.names)) == len(orders) + 1


class Mean(Method):
    """A class of the user's own, which sees its logits as they are."""

    def loss(self, batch):
        return super().loss(batch) + self(batch.x, batch.task).mean()


def test_steps_of_the_users_own_have_a_form_per_number_of_classes(jobs):
    tasks, _ = build(of("sgd"))
    tasks[1] = replace(tasks[1], classes=tasks[1].classes - 1)
    for kind, count in ((Method, 0), (Mean, 1)):
        ahead.compile_ahead(of("sgd"), tasks, kind, torch.device("cpu"), "tf32")
        assert len(jobs) == count


@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_a_helper_gives_heads_the_room_that_they_have_in_the_run(decay, captured_only):
    """The first task has fewer classes than the second. In a helper the data are fewer, so that the decay is weaker in
    all: a sum of 15 in the run is 6 there."""
    one = of("sgd", weight_decay=decay, epochs=30, batch=20)
    tasks = build(one)[0]
    tasks[0] = replace(tasks[0], classes=tasks[0].classes - 1)
    forms = [ahead.form_of(task, one, Method) for task in tasks]
    for k in range(2):
        job = {"spec": one.spec, "tasks": forms, "order": [k], "device": "cpu", "precision": "tf32", "lanes": 0}
        ahead.compile_step({**job, "threads": torch.get_num_threads()})
    assert len(compiled._code_cache) == (2 if decay else 1)


def test_runs_side_by_side_share_helpers(jobs, monkeypatch):
    monkeypatch.setattr(ahead, "is_interleaved", lambda: True)
    for seed in (0, 1):
        ahead_of(Run(**{**vars(of("hat")), "seed": seed}))
    assert [job["order"] for job in jobs.values()] == [[0]]


def test_runs_whose_options_change_no_operation_share_helpers(jobs, monkeypatch):
    monkeypatch.setattr(ahead, "is_interleaved", lambda: True)
    for options in ({}, {"c": 3.0}, {"embedding": "uniform", "gate_lr": 0.5}, {"validation": "total"}):
        ahead_of(replace(of("hat"), method_options=options))
    assert len(jobs) == 1
    ahead_of(replace(of("hat"), method_options={"smax": 100.0}))
    assert len(jobs) == 2


def steps_of(one, monkeypatch):
    """The graphs of all steps of a run, with the logs of their operations."""
    monkeypatch.setattr(compiled, "_code_cache", {})
    tasks, method = build(one)
    fit = Trainer(one.regime, engine="compiled", progress=False)
    for task in tasks:
        method.learn(task, fit)
    return {key: set(code.places) for key, code in compiled._code_cache.items()}


def other_value(parameter):
    """Another value of an option than its default."""
    others = [choice for choice in parameter.choices if choice != parameter.default]
    return others[0] if others else 3 * parameter.default + 1


def same_steps(method, option, monkeypatch):
    """Whether the steps of two runs are the same that have other values of an option."""
    other = replace(of(method), method_options={option: other_value(parameters(METHODS[method])[option])})
    first, second = steps_of(of(method), monkeypatch), steps_of(other, monkeypatch)
    assert all(first.values())
    return first == second


@pytest.mark.parametrize(("method", "option"), [(name, option) for name in METHODS for option in METHODS[name].same_step])
def test_options_that_are_said_to_change_no_operation_change_none(method, option, captured_only, monkeypatch):
    assert same_steps(method, option, monkeypatch)


@pytest.mark.parametrize(("method", "option"), [("hat", "smax"), ("hat", "slope"), ("pmask", "c")])
def test_an_option_that_changes_an_operation_is_seen(method, option, captured_only, monkeypatch):
    """The control. PMASK multiplies by c in the step, where HAT has it in a tensor of prices."""
    assert option not in METHODS[method].same_step
    assert not same_steps(method, option, monkeypatch)


def test_code_that_is_on_the_disk_needs_no_helper(jobs):
    tasks, _, plan = ahead_of(of("lfl"))
    assert len(jobs) == 1
    jobs.clear()
    for task in tasks:
        plan.wait(task, 0)
    plan.remember()
    ahead_of(of("lfl"))
    assert jobs == {}


def test_what_is_not_compiled_ahead(jobs, monkeypatch):
    assert ahead_of(of("lwf"))[2] is None
    monkeypatch.setattr(helpers, "COUNT", 0)
    assert ahead_of(of("hat"))[2] is None


def dying(job) -> None:
    raise SystemExit(1)


@pytest.mark.slow
def test_a_helper_that_dies_changes_no_record(captured_only, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    expected = run(spec("lfl"), engine="compiled")
    monkeypatch.setattr(helpers, "COUNT", 1)
    monkeypatch.setattr(helpers, "_jobs", {})
    monkeypatch.setattr(ahead, "compile_step", dying)
    found = run(spec("lfl"), engine="compiled")
    assert len(helpers._jobs) == 1
    assert_same(expected, found)


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(gpu=False), reason="no C++ compiler")
def test_a_helper_leaves_code_that_this_process_loads(monkeypatch, tmp_path):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(helpers, "COUNT", 1)
    monkeypatch.setattr(helpers, "_jobs", {})
    monkeypatch.setattr(compiled, "_code_cache", {})
    tasks, method, plan = ahead_of(of("lfl"))
    counters.clear()
    fit = Trainer(of("lfl").regime, engine="compiled", progress=False)
    fit.wait_for_code = plan.wait
    for task in tasks:
        method.learn(task, fit)
    assert counters["inductor"]["fxgraph_cache_miss"] == 1, "the first task, which this process compiled"
    assert counters["inductor"]["fxgraph_cache_hit"] == 1, "the second, which a helper compiled"
    assert len(compiled._code_cache) == 2


def test_the_compiler_is_imported_and_helpers_begin_before_the_method_is_built(jobs, monkeypatch):
    order = []
    monkeypatch.setattr("hatrack.experiments.run.import_compiler", lambda: order.append("import"))
    for name in ("compile_ahead", "build_method"):
        original = getattr(running, name)
        monkeypatch.setattr(running, name, lambda *given, o=original, n=name: order.append(n) or o(*given))
    monkeypatch.setattr(running, "build_tasks", lambda *given: order.append("build_tasks") or build_tasks(of("hat"), "cpu"))
    monkeypatch.setattr(Trainer, "compiles", lambda *given: True)
    monkeypatch.setattr(Trainer, "likely_compiles", lambda *given: True)
    full = Run(**{**vars(of("hat")), "benchmark_options": {}})
    monkeypatch.setattr(running, "_run", lambda *given: order.append("run") or 1 / 0)
    sample = "build_tasks", "import", "compile_ahead", "build_method", "run"  # nothing is guessed of a sample
    for one, wanted in ((of("hat"), list(sample)), (full, ["import", *sample])):
        order.clear()
        with pytest.raises(ZeroDivisionError):
            run(one)
        assert order == wanted


def test_the_guess_whether_a_run_compiles():
    def guess(device="cuda", engine="compiled", method="hat", **regime):
        return Trainer(Regime(**regime), engine=engine).likely_compiles(METHODS[method], device)

    assert guess()
    assert not guess(engine="eager")
    assert not guess(device="cpu")
    assert not guess(method="lwf"), "its tasks have steps of their own"
    assert not guess(engine="auto", epochs=1)
    assert guess(engine="auto", epochs=30) == can_compile(gpu=True)
    assert not guess(engine="auto", epochs=30, batch=640)
    assert guess(engine="auto", epochs=1, steps=30_000) == can_compile(gpu=True)
