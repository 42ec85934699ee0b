"""What every method must do, run for every entry of METHODS by itself."""

import copy
import dataclasses
import inspect
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hatrack import METHODS, Diverged, Method, Network, Regime, Task, Trainer, evaluate
from hatrack.options import parameters
from hatrack.seeds import seeded
from tests.helpers.learning import ISOLATED, MULTI_ONLY, OPTIMIZERS, UNTRAINED, every_method, learn, logits, make
from tests.helpers.tiers import every_value
from tests.helpers.toys import toy_tasks


def well_trained() -> Trainer:
    return Trainer(Regime(epochs=12, batch=8, lr=0.1))


@cache
def learned_well(name):
    """A method that has learned two tasks; nobody may change it."""
    method = make(name, toy_tasks(2))
    learn(method, toy_tasks(2), well_trained())
    return method


@every_method
def test_learns_a_task(name):
    accuracy = evaluate(learned_well(name), toy_tasks(2)[-1].test).accuracy
    assert accuracy < 0.7 if name in UNTRAINED else accuracy > 0.8


@pytest.mark.parametrize(("optimizer", "name"), every_value(OPTIMIZERS, METHODS))
def test_every_step_obeys_the_rule(name, optimizer):
    tasks = toy_tasks(3)
    fit = Trainer(Regime(epochs=2, batch=16, **OPTIMIZERS[optimizer]), watch=True)
    learn(make(name, tasks), tasks, fit)
    assert bool(fit.fits) == (name not in UNTRAINED)


@every_method
def test_one_seed_gives_one_result(name):
    tasks = toy_tasks(2)
    states = []
    for _ in range(2):
        torch.manual_seed(len(states))  # the global generator must not matter
        method = make(name, tasks)
        learn(method, tasks)
        states.append(method.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@every_method
def test_leaves_the_global_generator_alone(name):
    tasks = toy_tasks(2)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    method = make(name, tasks)
    learn(method, tasks)
    logits(method, tasks[0])
    assert torch.equal(before, torch.get_rng_state())


@every_method
def test_the_state_is_all_there_is(name):
    tasks = toy_tasks(3)
    method = make(name, tasks)
    learn(method, tasks[:2])
    twin = make(name, tasks, seed=1)
    assert name in UNTRAINED or not torch.equal(logits(method, tasks[0]), logits(twin, tasks[0]))
    twin.net.seed = method.net.seed
    twin.load_state_dict(copy.deepcopy(method.state_dict()))
    for task in tasks:
        assert torch.equal(logits(method, task), logits(twin, task))


@every_method
def test_tasks_may_come_later(name):
    tasks = toy_tasks(3)
    method, twin = make(name, tasks, known=1), make(name, tasks)
    fits = [Trainer(Regime(epochs=3, batch=16, lr=0.1)) for _ in range(2)]
    for task in tasks:
        if task.index:
            method.net.add_task(task.classes)
        method.learn(task, fits[0])
        twin.learn(task, fits[1])
    for task in tasks:
        assert torch.equal(logits(method, task), logits(twin, task)), "known in advance or not must make no difference"


@every_method
def test_a_task_has_logits_before_it_is_learned(name):
    tasks = toy_tasks(3)
    method, twin = make(name, tasks, known=1), make(name, tasks)
    for one in (method, twin):
        learn(one, tasks[:1])
    for task in tasks[1:]:
        method.net.add_task(task.classes)
    owner = torch.arange(6) % 3
    for task in tasks:
        assert torch.equal(logits(method, task), logits(twin, task))
    assert method(tasks[0].test.inputs(torch.arange(6)), owner).isfinite().all()


@every_method
def test_a_task_may_be_learned_again(name):
    tasks, others = toy_tasks(2), toy_tasks(2, seed=5)
    method = copy.deepcopy(learned_well(name))
    before = logits(method, tasks[1])
    learn(method, [others[0]], well_trained())
    assert name in UNTRAINED or evaluate(method, others[0].test).accuracy > 0.7
    if name in ISOLATED:
        assert torch.equal(logits(method, tasks[1]), before), "the other task is as it was"


@every_method
def test_a_fit_that_fails_is_rolled_back(name):
    """Diverged, or stopped by hand: the same task can be learned at once in another way, and nothing is lost."""
    tasks = toy_tasks(2)
    method, twin = make(name, tasks), make(name, tasks)
    careful = {"epochs": 3, "batch": 16, "lr": 0.1, "optimizer": "momentum", "keep_state": True}
    fits = [Trainer(Regime(**careful)) for _ in range(2)]
    for one, fit in zip((method, twin), fits, strict=True):
        one.learn(tasks[0], fit)
    if name not in UNTRAINED:
        fits[0].regime = Regime(**{**careful, "lr": 3e38, "weight_decay": 1e38, "clip": 0.0})
        with pytest.raises(Diverged):
            method.learn(tasks[1], fits[0])
        fits[0].regime = fits[1].regime
        fits[0].carried[method].fits[1] = 0  # so that both see the same batches
    assert torch.equal(logits(method, tasks[0]), logits(twin, tasks[0])) or name == "joint"
    for one, fit in zip((method, twin), fits, strict=True):
        one.learn(tasks[1], fit)
    for task in tasks:
        assert torch.equal(logits(method, task), logits(twin, task))


@every_method
def test_raw_images_are_seen_by_every_method(name):
    """Whole numbers from 0 to 255, normalised by the task's own constants."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (40, 4, 4), dtype=torch.uint8, generator=draw), torch.arange(40) % 3
    tasks = [Task.from_arrays(k, f"raw {k}", x, y, x, y, mean=0.5 - 0.1 * k, std=0.1) for k in range(2)]
    method = make(name, tasks)
    learn(method, tasks)
    method.eval()
    for task in tasks:
        seen = method(task.test.inputs(torch.arange(40)), task.index)
        assert torch.equal(method.predict(x, task.index), seen.argmax(1))
        with pytest.raises(ValueError, match="predict"):  # a call has one meaning: what the network sees
            method(x, task.index)


@every_method
def test_raw_images_may_have_fewer_channels(name):
    """Gray images of 4x4 that every method sees in three channels."""
    x, y = torch.arange(40 * 16).view(40, 1, 4, 4).to(torch.uint8), torch.arange(40) % 3
    task = Task.from_arrays(0, "gray", x, y, x, y)
    view = dataclasses.replace(task.train.transform, shape=(3, 4, 4), pixels=torch.arange(16).repeat(3)[None])
    parts = {part: dataclasses.replace(getattr(task, part), transform=view) for part in ("train", "valid", "test")}
    task = dataclasses.replace(task, **parts)
    method = make(name, [task])
    learn(method, [task])
    assert len(method.predict(x, 0)) == 40


@every_method
def test_a_batch_may_mix_tasks(name):
    tasks = toy_tasks(3)
    method = make(name, tasks)
    learn(method, tasks)
    method.eval()
    owner = torch.arange(12) % 3
    x = torch.cat([tasks[k].test.inputs(torch.tensor([i])) for i, k in enumerate(owner.tolist())])
    with torch.no_grad():
        mixed = method(x, owner)
        for k in range(3):
            single = method(x, k)
            torch.testing.assert_close(mixed[owner == k], single[owner == k])
    assert mixed.isfinite().all()


@every_method
def test_prediction_changes_nothing(name):
    tasks = toy_tasks(2)
    method = make(name, tasks)
    learn(method, tasks[:1])
    before = copy.deepcopy(method.state_dict())
    first = logits(method, tasks[0])
    assert torch.equal(first, logits(method, tasks[0]))
    assert all(torch.equal(before[key], value) for key, value in method.state_dict().items())


@every_method
def test_shared_head(name):
    tasks = toy_tasks(3)
    if name in MULTI_ONLY:
        with pytest.raises(ValueError, match="head per task"):
            make(name, tasks, heads="shared")
        return
    method = make(name, tasks, heads="shared")
    learn(method, tasks)
    assert logits(method, tasks[0]).shape == (len(tasks[0].test), 3)
    assert logits(method, tasks[2]).isfinite().all()


@pytest.mark.parametrize("name", ISOLATED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_earlier_tasks_are_unchanged_bit_for_bit(name, optimizer):
    tasks = toy_tasks(4)
    method = make(name, tasks, known=2)
    fit = Trainer(Regime(epochs=4, batch=16, **OPTIMIZERS[optimizer]))
    after: list[Tensor] = []
    for task in tasks:
        if task.index >= 2:
            method.net.add_task(task.classes)
        method.learn(task, fit)
        for earlier, kept in zip(tasks, after, strict=False):
            assert torch.equal(logits(method, earlier), kept), f"task {earlier.index} changed while {task.index} was learned"
        after.append(logits(method, task))
    assert all(kept.std(0).min() > 0 for kept in after), "constant logits would prove nothing"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_plain_sgd_does_change_earlier_tasks(optimizer):
    """The control of the test above: the same training moves the logits of a method that guarantees nothing."""
    tasks = toy_tasks(2)
    method = make("sgd", tasks)
    fit = Trainer(Regime(epochs=4, batch=16, **OPTIMIZERS[optimizer]))
    method.learn(tasks[0], fit)
    before = logits(method, tasks[0])
    method.learn(tasks[1], fit)
    assert not torch.equal(before, logits(method, tasks[0]))


def test_methods_at_one_seed_see_the_same_batches():
    tasks = toy_tasks(2)

    class Witness(Method):
        def loss(self, batch):
            seen.append((batch.task, batch.x.clone(), batch.y.clone()))
            return super().loss(batch)

    class Restless(Witness):
        """Draws numbers and uses another number of epochs, which must not disturb the batches."""

        def learn_task(self, task, fit):
            torch.rand(3)
            fit(self, task, epochs=2 + task.index)

    worlds = []
    for kind in (Witness, Restless):
        seen = []
        method = make("sgd", tasks)
        learn(kind(method.net), tasks, Trainer(Regime(epochs=2, batch=16), seed=3))
        worlds.append(seen)
    first = [s for s in worlds[0] if s[0] == 1]
    second = [s for s in worlds[1] if s[0] == 1][: len(first)]
    assert len(first) == 6
    assert all(
        torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one[1:], two[1:], strict=True)
    )
    orders = [s[2].tolist() for s in first]
    assert orders[0] != orders[3], "every epoch has an order of its own"


@every_method
def test_every_option_is_documented(name):
    method = METHODS[name]
    keywords = [p for p in inspect.signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert set(parameters(method)) == {p.name for p in keywords}, "every keyword has a help text"
    text = inspect.getdoc(method)
    assert " ".join(text.split("\n\n")[0].split()) == METHODS.entries[name].summary
    assert "\nArgs:" in text
    assert "\nExample:" in text
    entry = METHODS.entries[name]
    assert entry.paper
    assert entry.needs
    assert entry.costs
    page = Path(__file__).parent.parent.parent / "docs" / "methods" / f"{name}.md"
    text = page.read_text()
    for option in parameters(method):
        assert f"`--{option.replace('_', '-')}`" in text, f"{page.name} does not mention --{option}"


class Normed(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(16, 12), torch.nn.BatchNorm1d(12), torch.nn.ReLU())


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("den", "pnn", "pathnet")])
def test_an_example_that_is_left_over_joins_the_batch_before(name):
    """49 examples in batches of 16: one by itself has no variance, and a batch norm can't train on it."""
    tasks = toy_tasks(1, train=61)
    assert len(tasks[0].train) % 16 == 1
    net = Network(Normed(), [3], tasks[0].train.inputs(torch.arange(2)))
    method = METHODS[name](net)
    learn(method, tasks)
    assert logits(method, tasks[0]).isfinite().all()


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("den", "pnn", "pathnet", "pmask")])
def test_a_trunk_with_nothing_to_train(name):
    tasks = toy_tasks(2)
    method = METHODS[name](Network(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 8)), [3, 3],
                                   tasks[0].train.inputs(torch.arange(2)), freeze="*"))  # fmt: skip
    learn(method, tasks)
    assert logits(method, tasks[1]).isfinite().all()


@every_method
def test_what_is_remembered_is_no_part_of_a_graph(name):
    tasks = toy_tasks(2)
    method = make(name, tasks)
    learn(method, tasks)
    assert not [key for key, buffer in method.named_buffers() if buffer.requires_grad]
    copy.deepcopy(method)


@every_method
def test_another_task_does_not_take_the_place_of_a_finished_one_by_mistake(name):
    tasks = toy_tasks(2)
    method = make(name, tasks)
    learn(method, tasks[:1])
    answers = logits(method, tasks[0])
    other = dataclasses.replace(toy_tasks(1, seed=5)[0], name="other")
    with pytest.raises(ValueError, match=r"task 0 .*'toy 0'.*'other'"):
        learn(method, [other])
    assert torch.equal(logits(method, tasks[0]), answers)
    method.forget_task(0)
    learn(method, [other])
    assert method.history == {0: "other"}


def test_a_task_that_was_not_learned_has_no_predictions():
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    learn(method, tasks[:1])
    images = tasks[0].test.x[:2]
    assert len(method.predict(images, 0)) == 2
    with pytest.raises(ValueError, match=r"task 1 .*learned are 0"):
        method.predict(images, 1)
    with pytest.raises(IndexError, match="no task 2"):
        method.predict(images, 2)


@pytest.mark.parametrize("name", ["joint", "independent"])
def test_a_network_that_begins_anew_has_the_regime_of_a_first_task(name):
    tasks, seen = toy_tasks(3), []
    fit = Trainer(Regime(epochs=2, batch=16, optimizer="momentum", keep_state=True, task_lr_decay=0.3, task_batch_decay=0.5))
    start = fit.start

    def spy(*args, **how):
        course = start(*args, **how)
        moving = max(value.abs().max().item() for state in course.optimizers.main.state.values() for value in state.values())
        seen.append((course.regime.lr, course.regime.batch, moving))
        return course

    fit.start = spy
    learn(make(name, tasks), tasks, fit)
    assert seen == [(0.05, 16, 0.0)] * 3


def test_a_frozen_trunk_answers_with_the_same_bits_when_gradients_are_on():
    """Attention takes a quicker way, of other roundings, where no weight takes a gradient."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(1).view(len(x), 4, 16)).mean(1)

    tasks = toy_tasks(2, shape=(1, 8, 8))
    with seeded(0, "weights"):
        method = METHODS["frozen"](Network(Attention(), [3, 3], tasks[0].train.inputs(torch.arange(2))))
    x = tasks[0].test.inputs(torch.arange(30))
    method.learn(tasks[0], Trainer(Regime(epochs=1)))
    before = method(x, 0)
    method.learn(tasks[1], Trainer(Regime(epochs=1)))
    assert torch.equal(method(x, 0), before)
