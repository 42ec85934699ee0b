"""How much a network grows by itself, and how room is made in a grown network: erasing, masks, dependencies."""

from itertools import pairwise

import pytest
import torch

from hatrack import load, save
from hatrack.methods.growth.grow import prepare_trunk
from tests.helpers.erasing import different, snapshot
from tests.helpers.growing import SHAPE, answers, assert_answers, build, make, trainer
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under .* free", "ignore:with some units closed")
both = pytest.mark.parametrize("name", ["hat", "pmask"])


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
