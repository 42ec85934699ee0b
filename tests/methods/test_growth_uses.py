"""What one does with a method that grows: tasks that fail or are released, files, copies, routes, runs that are killed."""

import copy
from itertools import pairwise

import pytest
import torch

from hatrack import Regime, Run, compare_certificates, load, run, save
from hatrack.files import tensors
from hatrack.methods.growth.grow import prepare_trunk
from tests.helpers.erasing import different, snapshot
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


@both
def test_growing_by_itself(name):
    tasks = toy_tasks(4, shape=SHAPE)
    method = make(name, tasks, grow="auto", grow_below=0.6, grow_by=1.0, c=0.1)
    before, widths = {}, []
    for task in tasks:
        room = [1 - share for share in method.usage().values()]
        method.learn(task, trainer(epochs=4))
        widths.append((method.net.trunk[2].out_features, min(room)))
        assert_answers(method, before)
        before[task.index] = answers(method, task.index)
    sizes = [10, *(width for width, _ in widths)]
    for k, (width, room) in enumerate(widths):
        assert width == sizes[k] if room >= 0.6 else width >= sizes[k]
    assert sizes[-1] > 10


def test_growth_says_how_much():
    tasks = toy_tasks(2, shape=SHAPE)
    method = make("hat", tasks, grow="auto", grow_below=1.0)
    method.learn(tasks[0], trainer())
    with pytest.warns(UserWarning, match=r"task 'toy 1' finds under 100% free in 2, 5; widened: 2 from 10 to 15 units"):
        method.learn(tasks[1], trainer())


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


@both
def test_a_run_that_grows_and_is_killed_goes_on_to_the_same_record(name, tmp_path, monkeypatch):
    spec = Run(
        "pmnist",
        name,
        0,
        benchmark_options={"data": "sample", "tasks": 4},
        network_options={"widths": (12, 12)},
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


def test_how_much_by_hand():
    """Shares are those of the first width, here 10 and 7 units, however wide the layers have become."""
    tasks = toy_tasks(4, shape=SHAPE)
    method = make("hat", tasks, grow="auto", grow_below=0.5, grow_by=0.3)

    def widths_after(task, used):
        first, second = (method.units.layers[name] for name in ("2", "5"))
        method.done[task], method.gates[task] = True, False
        method.gates[task, first.start : first.start + used] = True
        method.gates[task, second.start] = True
        prepare_trunk(method, tasks[task + 1])
        return method.net.trunk[2].out_features, method.net.trunk[5].out_features

    assert widths_after(0, 5) == (10, 7), "5 of 10 are free, which is enough"
    assert widths_after(1, 8) == (13, 7), "2 are free and 5 are needed: 3 more"
    assert widths_after(2, 13) == (19, 7), "none is free: 3 more are too few, 6 are enough"


@both
def test_a_network_does_not_grow_exponentially(name):
    tasks = toy_tasks(6, shape=SHAPE)
    method, widths = make(name, tasks, grow="auto", c=0.0), []
    for task in tasks:
        method.learn(task, trainer())
        widths.append(method.net.trunk[2].out_features)
    assert widths[-1] > 10
    assert all(new - old <= 10 for old, new in pairwise(widths))


@both
def test_erasing_the_last_task_gives_the_network_from_before_it(name, tmp_path):
    """With initial values that are kept: those of the weights from before growth in their places, and of the new ones."""
    tasks, fit = toy_tasks(4, shape=SHAPE), trainer(optimizer="adamw", lr=0.02, weight_decay=0.1)
    method, before = make(name, tasks, "norms", free="initial"), {}
    first = {key: method.initial.of(key).clone() for key in method.initial.places}
    for task in tasks[:2]:
        method.learn(task, fit)
        before[task.index] = answers(method, task.index)
        method.grow(0.5)
    for key, old in first.items():
        places = method.growth.generations[0].places
        assert torch.equal(places.narrow(key.removeprefix("trunk."), method.initial.of(key)), old)
    for task in (2, 3):
        state = snapshot(method)
        method.learn(tasks[task], fit)
        assert different(snapshot(method), {**snapshot(method), **{k: v for k, v in state.items() if "learned" not in k}})
        method.release(task, erase=True)
        assert different(snapshot(method), state) == []
        method.learn(tasks[task], fit)
        before[task] = answers(method, task)
    save(method, tmp_path / "model")
    again = load(tmp_path / "model", build("norms"))
    again.release(3, erase=True)
    del before[3]
    assert different(snapshot(again), state) == []
    assert_answers(again, before)


@both
def test_nothing_of_an_erased_task_is_left_in_an_earlier_width(name):
    tasks, fit = toy_tasks(3, shape=SHAPE), trainer(epochs=3)
    method = make(name, tasks, "norms")
    for task in tasks:
        method.learn(task, fit)
    before, mask = {k: answers(method, k) for k in (1, 2)}, method.weight_masks(0)
    others = {key: method.weight_masks(1)[key] | method.weight_masks(2)[key] for key in mask}
    values = {key: method.net.trunk.get_parameter(key)[used & ~others[key]].tolist() for key, used in mask.items()}
    norms = [value.clone() for key, value in method.net.trunk.state_dict().items() if key.startswith(("batch", "norm"))]
    assert any(value.is_floating_point() and value.unique().numel() > 1 for value in norms), "they were trained"
    method.grow(0.5)
    with pytest.warns(UserWarning, match="traces of task 0"):
        method.release(0, erase=True)
    assert_answers(method, before)
    state = [value for value in method.state_dict().values() if value.is_floating_point()]
    for value in (value for value in norms if value.is_floating_point() and value.unique().numel() > 1):
        assert not any(value.shape == other.shape and torch.equal(value, other) for other in state)
    left = set(torch.cat([value.flatten() for value in method.net.trunk.state_dict().values()]).tolist())
    assert sum(map(len, values.values())) > 0
    assert left.isdisjoint(value for own in values.values() for value in own)


@both
def test_masks_and_dependencies_have_the_present_width(name):
    tasks = toy_tasks(3, shape=SHAPE)
    method = make(name, tasks)
    method.learn(tasks[0], trainer())
    before = {key: int(mask.sum()) for key, mask in method.masks(0).items()}
    method.grow(1.0)
    method.learn(tasks[1], trainer())
    masks = {task: method.masks(task) for task in (0, 1)}
    assert {key: int(mask.sum()) for key, mask in masks[0].items()} == before
    assert all(masks[0][key].shape == mask.shape for key, mask in masks[1].items())
    weights = [method.weight_masks(task) for task in (0, 1)]
    common = sum(int((weights[0][key] & weights[1][key]).sum()) for key in weights[0])
    own = sum(int(mask.sum()) for mask in weights[1].values())
    assert method.dependencies()[1].get(0, 0.0) == pytest.approx(common / own)
