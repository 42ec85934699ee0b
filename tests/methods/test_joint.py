"""Joint training: what is trained after which number of tasks, and from which weights."""

import copy
import json
import pickle

import pytest
import torch
from torch import Tensor

from hatrack import Joint, Method, Record, Regime, Run, Trainer, run, save
from hatrack.experiments.run import stopped_runs
from hatrack.tasks.targets import CLASSES, Target
from hatrack.training.checkpoint import Stopped, stopping
from hatrack.training.saving import load
from tests.helpers.learning import learn, make
from tests.helpers.toys import toy_tasks

SHORT = Regime(epochs=2, batch=16)


def weights(method: Method) -> list[Tensor]:
    return [p.detach().clone() for p in method.net.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_only_the_given_numbers_of_tasks_are_fitted():
    """After the others the network is what it was; a fitted one has the bits of a run that fits every time."""
    tasks = toy_tasks(4)
    every, some = make("joint", tasks), Joint(make("sgd", tasks).net, at=(4, 2))
    seen = {0: weights(some)}
    wanted = {}
    for number, task in enumerate(tasks, 1):
        every.learn(task, fit := Trainer(SHORT))
        wanted[number] = weights(every)
        result = some.learn(task, fit := Trainer(SHORT))
        seen[number] = weights(some)
        assert len(fit.fits) == len(result.fits) == (1 if number in (2, 4) else 0)
        assert result.epochs == (2 if number in (2, 4) else 0)
    assert same(seen[1], seen[0])
    assert same(seen[2], wanted[2])
    assert same(seen[3], seen[2])
    assert same(seen[4], wanted[4])
    assert not same(seen[4], seen[2])
    assert some.history == {k: f"toy {k}" for k in range(4)}, "a task counts as learned though nothing was trained"
    assert [task.index for task in some.tasks] == [0, 1, 2, 3]
    assert len(some.predict(tasks[3].test.x[:2], 3)) == 2


def test_a_result_without_epochs_says_so():
    result = Joint(make("sgd", toy_tasks(2)).net, at=(2,)).learn(toy_tasks(2)[0], Trainer(SHORT))
    assert str(result) == "learned 'toy 0' without training"
    assert (result.epochs, result.best_epoch, result.valid_accuracy, result.capacity) == (0, None, None, None)


def test_warm_goes_on_from_the_network_before():
    """With a learning rate of almost nothing, the weights after a fit are those before it."""
    tasks = toy_tasks(2)
    still = Regime(epochs=1, batch=16, lr=1e-12)
    for warm in (False, True):
        method = Joint(make("sgd", tasks).net, warm=warm)
        initial = weights(method)
        method.learn(tasks[0], Trainer(SHORT))
        first = weights(method)
        method.learn(tasks[1], Trainer(still))
        near, far = (first, initial) if warm else (initial, first)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(method), near, strict=True))
        assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(method), far, strict=True))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copied", "sent"])
def test_tasks_that_were_copied_are_joined(copied):
    """Their target is the one of plain classes, which is looked for by its identity; weighted classes stay others."""
    tasks = toy_tasks(2)
    assert copied(tasks[0]).train.target is CLASSES
    weighted = copied(Target(weights=torch.tensor([1.0, 2.0])))
    assert weighted is not CLASSES
    assert weighted.weights.tolist() == [1.0, 2.0]
    method = Joint(make("sgd", tasks).net)
    learn(method, copied(tasks[:1]))
    method = copy.deepcopy(method)
    learn(method, tasks[1:])
    assert [task.index for task in method.tasks] == [0, 1]


def test_a_task_that_fails_between_fits_leaves_no_trace():
    tasks = toy_tasks(3)
    method = Joint(make("sgd", tasks).net, at=(1, 3))
    learn(method, tasks[:2])
    before, copied = weights(method), copy.deepcopy(method)
    with pytest.raises(KeyboardInterrupt):
        method.learn(tasks[2], fails)
    assert same(weights(method), before)
    assert [task.index for task in method.tasks] == [0, 1]
    assert copied.at == (1, 3)


def fails(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


fails.regime = SHORT


@pytest.mark.parametrize(
    ("at", "said"), [((0,), "at must be at least 1, not 0"), ((2, -3), "at must be at least 1, not -3")]
)
def test_numbers_of_tasks_below_1_are_refused(at, said):
    with pytest.raises(ValueError, match=said):
        Joint(make("sgd", toy_tasks(2)).net, at=at)


def test_a_warning_if_nothing_would_ever_be_trained():
    with pytest.warns(UserWarning, match=r"after 3 tasks.* 2$"):
        Joint(make("sgd", toy_tasks(2)).net, at=(3, 4))


def test_options_are_saved_with_a_model(tmp_path):
    tasks = toy_tasks(2)
    method = Joint(make("sgd", tasks).net, at=(1, 2), warm=True)
    learn(method, tasks[:1])
    save(method, tmp_path / "model")
    loaded = load(tmp_path / "model", make("sgd", tasks).net.trunk)
    assert loaded.options == {"at": (1, 2), "warm": True}


def small_run(**options) -> Run:
    return Run(
        "smnist",
        "joint",
        benchmark_options={"data": "sample", "tasks": 5},
        method_options=options,
        network_options={"widths": (16,)},
        regime=Regime(epochs=1, batch=256),
        train_examples=50,
    )


def test_rows_between_two_fits_are_those_of_the_fitted_network(tmp_path):
    every, some = run(small_run()), run(small_run(at=(2, 4)), tmp_path)
    a, b = torch.tensor(every.accuracy), torch.tensor(some.accuracy)
    assert torch.equal(b[0], torch.tensor(some.before))
    assert torch.equal(b[1], a[1])
    assert torch.equal(b[2], b[1])
    assert torch.equal(b[3], a[3])
    assert torch.equal(b[4], b[3])
    assert [curve.task for curve in some.curves] == [1, 3]
    assert small_run().spec["method_options"] == {}, "at their defaults they do not rename records"
    assert small_run().name != small_run(at=(2, 4)).name
    file = next(tmp_path.glob("*.json"))
    spec = json.loads(file.read_text())["spec"]
    assert spec["method_options"] == {"at": [2, 4]}
    assert Run.from_spec(spec).name == small_run(at=(2, 4)).name == Record.load(file).name


def test_a_run_that_was_stopped_between_two_fits_goes_on_to_the_same_record(tmp_path):
    whole = run(small_run(at=(2, 4)))

    def stop_in_the_second_fit(event) -> None:
        if event.task.index == 3:
            stopping.set()

    try:
        with pytest.raises(Stopped):
            run(small_run(at=(2, 4)), tmp_path, progress=stop_in_the_second_fit)
    finally:
        stopping.clear()
    found, _ = stopped_runs(tmp_path)
    assert found == [small_run(at=(2, 4))]
    assert run(found[0], tmp_path).accuracy == whole.accuracy
