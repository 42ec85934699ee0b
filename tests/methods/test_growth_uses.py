"""What one does with a method that grows: tasks that fail or are released, files, copies, routes, runs that are killed."""

import copy

import pytest
import torch

from hatrack import Regime, Run, compare_certificates, load, run, save
from hatrack.files import tensors
from tests.helpers.growing import IMAGES, SHAPE, answers, assert_answers, build, changed, make, trainer
from tests.helpers.killing import OFTEN, assert_same, killed_at, to_the_end
from tests.helpers.learning import FunctionFit
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under .* free", "ignore:with some units closed")
both = pytest.mark.parametrize("name", ["hat", "pmask"])


@both
def test_a_task_that_fails_after_growth_leaves_the_old_network(name):
    tasks = toy_tasks(3, shape=SHAPE)
    method = make(name, tasks, "norms", grow="auto", grow_below=1.0)
    method.learn(tasks[0], trainer())
    before, certificate = {0: answers(method, 0)}, method.certificate()
    state = {key: value.clone() for key, value in method.state_dict().items()}
    widths = []

    def fail(method, task, **changes):
        widths.append(method.net.features)
        with torch.no_grad():
            for p in method.parameters():
                p.add_(1)
        raise RuntimeError("the power failed")

    with pytest.raises(RuntimeError, match="the power failed"):
        method.learn(tasks[1], FunctionFit(fail))
    assert widths == [12], "it had grown"
    assert changed(method, state) == []
    assert method.net.features == 8
    assert_answers(method, before)
    method.learn(tasks[1], trainer())
    assert method.net.features == 12
    assert_answers(method, before)
    assert compare_certificates(method.certificate(), certificate).kept


@both
def test_tasks_that_are_released_or_learned_again_have_the_present_width(name):
    tasks = toy_tasks(4, shape=SHAPE)
    method, fit = make(name, tasks, "norms"), trainer()
    for task in tasks[:3]:
        method.learn(task, fit)
    method.grow(1.0)
    before = {0: answers(method, 0)}
    method.learn(tasks[3], fit)
    method.learn(tasks[1], fit)
    method.release(2)
    assert [method.net.heads[k].in_features for k in range(4)] == [8, 16, 16, 16]
    assert_answers(method, before)
    before[1] = answers(method, 1)
    method.learn(tasks[2], fit)
    assert_answers(method, before)
    method.learn(tasks[0], fit)
    assert method.net.heads[0].in_features == 16
    assert method.growth.born == {}
    del before[0]
    assert_answers(method, before)


def fail_to_learn(method, task, **changes):
    raise RuntimeError("no")


@both
def test_a_task_that_could_not_be_learned_again_is_what_it_was(name):
    tasks = toy_tasks(2, shape=SHAPE)
    method = make(name, tasks, "norms")
    for task in tasks:
        method.learn(task, trainer())
    before = {k: answers(method, k) for k in range(2)}
    method.grow(0.5)
    for task in tasks:
        with pytest.raises(RuntimeError, match="no"):
            method.learn(task, FunctionFit(fail_to_learn))
    assert_answers(method, before)


@both
def test_tasks_that_are_added_after_growth(name, tmp_path):
    tasks = toy_tasks(3, shape=SHAPE)
    method, before = make(name, tasks[:1], "norms"), {}
    for task in tasks:
        if task.index:
            assert method.net.add_task(task.classes) == task.index
        method.learn(task, trainer())
        before[task.index] = answers(method, task.index)
        method.grow(0.3)
        assert_answers(method, before)
        save(method, tmp_path / "model")
        method = load(tmp_path / "model", build("norms"))
        assert_answers(method, before)
    assert len(method.growth.steps) == 3


def test_files_of_methods_that_never_grew_have_nothing_new(tmp_path):
    tasks = toy_tasks(1, shape=SHAPE)
    for name in ("hat", "pmask"):
        method = make(name, tasks)
        method.learn(tasks[0], trainer())
        save(method, tmp_path / "model")
        values, metadata = tensors.load(tmp_path / "model")
        assert not [key for key in values if "growth" in key]
        assert not [key for key in metadata["options"] if "grow" in key]


@pytest.mark.parametrize("steps", [[[10**9, 7]], [[9, 7]], [[15]], [[15, 11, 3]], [[15, 12]], [[-15, 11]]])
def test_damaged_steps_are_refused(steps):
    tasks = toy_tasks(1, shape=SHAPE)
    method = make("hat", tasks)
    method.grow(0.5)
    state = {**method.state_dict(), "growth.steps": torch.tensor(steps)}
    with pytest.raises(RuntimeError):
        make("hat", tasks).load_state_dict(state)


@pytest.mark.parametrize("born", [[[0, 5]], [[4, 0]], [[-1, 0]], [[0, 0, 0]], [[0.0, 0.0]]])
def test_damaged_generations_are_refused(born):
    tasks = toy_tasks(1, shape=SHAPE)
    method = make("hat", tasks)
    method.grow(0.5)
    with pytest.raises(RuntimeError):
        make("hat", tasks).load_state_dict({**method.state_dict(), "growth.born": torch.tensor(born)})


@both
def test_copies_and_other_lengths(name):
    """A copy of a grown method, and images of another length than the example, for which the narrow trunk is traced."""
    tasks = toy_tasks(2, shape=SHAPE)
    method = make(name, tasks, "lstm")
    method.learn(tasks[0], trainer())
    longer = torch.randn(2, 1, 11, 8)
    before, other = {0: answers(method, 0)}, method(longer, 0)
    method.grow(0.5)
    assert torch.equal(method(longer, 0), other)
    method.learn(tasks[1], trainer())
    copied = copy.deepcopy(method)
    assert_answers(copied, before)
    assert torch.equal(copied(longer, 0), other)


@both
def test_a_pass_in_training_mode_leaves_the_statistics(name):
    tasks = toy_tasks(2, shape=SHAPE)
    method = make(name, tasks, "norms")
    for task in tasks:
        method.learn(task, trainer())
    before = {k: answers(method, k) for k in range(2)}
    method.grow(0.5)
    method.train()
    for task in range(2):
        assert method(IMAGES[64], task).requires_grad
    assert_answers(method, before)


@both
def test_routes_after_growth(name):
    tasks = toy_tasks(3, shape=SHAPE, noise=0.1)
    method, fit = make(name, tasks, "convolutions"), trainer(epochs=3)
    for task in tasks[:2]:
        method.learn(task, fit)
        method.fit_router(task)
    images = torch.cat([task.test.x[:4] for task in tasks[:2]])
    before = method.route(images)
    method.grow(0.5)
    assert method.route(images).equal(before)
    method.learn(tasks[2], fit)
    assert set(method.router.tasks()) == {0, 1, 2}


@pytest.mark.slow
@both
def test_a_run_that_grows_and_is_killed_goes_on_to_the_same_record(name, tmp_path, monkeypatch):
    spec = Run(
        "pmnist",
        name,
        0,
        benchmark_options={"data": "sample", "tasks": 4},
        network_options={"widths": (12, 12), "input_dropout": 0.0},
        method_options={"grow": "auto", "grow_below": 1.0},
        train_examples=100,
        regime=Regime(epochs=2, batch=250, optimizer="adam", lr=0.003, keep_state=True),
    )
    whole = run(spec, tmp_path / "whole", keep_model=True)
    kills = killed_at(monkeypatch, 0.1, seed=3, most=4)
    again = to_the_end(spec, tmp_path / "again", save_every=OFTEN, keep_model=True)
    assert kills
    assert_same(whole, again)
    one, two = (load(next((tmp_path / folder).glob("*.safetensors"))) for folder in ("whole", "again"))
    assert len(one.growth.steps) == 3
    assert all(torch.equal(value, two.state_dict()[key]) for key, value in one.state_dict().items())
    assert whole.parameters == one.num_parameters()


@both
def test_a_state_that_fits_already_leaves_all_modules(name):
    tasks = toy_tasks(2, shape=SHAPE)
    method = make(name, tasks, "norms")
    method.learn(tasks[0], trainer())
    method.grow(0.5)
    modules = [*method.modules()]
    method.load_state_dict(method.state_dict())
    assert all(one is two for one, two in zip(modules, method.modules(), strict=True))


@both
def test_a_state_that_does_not_fit_leaves_the_width_as_it_was(name):
    tasks = toy_tasks(3, shape=SHAPE)
    one, two = (make(name, tasks, "norms") for _ in range(2))
    for method in (one, two):
        method.learn(tasks[0], trainer())
    one.learn(tasks[1], trainer())
    one.grow(0.5)
    two.learn(tasks[2], trainer())
    before, modules = {task: answers(two, task) for task in (0, 2)}, [*two.modules()]
    state = one.state_dict()
    del state["net.heads.2.bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        two.load_state_dict(state)
    assert two.history == {0: "toy 0", 2: "toy 2"}
    assert [*two.modules()] == modules
    assert_answers(two, before)
    two.grow(0.5)
    assert_answers(two, before)
