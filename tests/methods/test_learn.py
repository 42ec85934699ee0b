"""`Method.learn`, the same for all methods: what is refused, what is rolled back, and what a call and `predict` take."""

import numpy as np
import pytest
import torch

from hatrack import EWC, METHODS, PNN, Diverged, Method, Network, PackNet, Regime, Task, Trainer, evaluate
from hatrack.networks.mlp import mlp
from tests.helpers.learning import SMALLER, learn, logits, make
from tests.helpers.models import fresh
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

SHORT = Regime(epochs=2, batch=16, optimizer="adam", lr=0.01, keep_state=True)


class StopAt:
    """A progress callback that fails at its n-th call."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, event: object) -> None:
        self.number -= 1
        if self.number == 0:
            raise KeyboardInterrupt


def small(kind: type[Method], tasks: list[Task]) -> Method:
    torch.manual_seed(0)
    return kind(Network(mlp(tasks[0].shape, widths=(24, 24), dropout=0.0, input_dropout=0.0), tasks=tasks))


def assert_same_state(one: Method, two: Method) -> None:
    state, other = one.state_dict(), two.state_dict()
    assert state.keys() == other.keys()
    assert [key for key in state if not torch.equal(state[key], other[key])] == []


class LateFault(EWC):
    """A method that fails after its fit, as often as it is told."""

    faults = 0

    def learn_task(self, task, fit):
        super().learn_task(task, fit)
        if self.faults:
            self.faults -= 1
            raise RuntimeError("late")


def test_a_task_that_failed_after_a_fit_leaves_no_trace_in_the_trainer():
    tasks = toy_tasks(2)
    plain, faulty = small(LateFault, tasks), small(LateFault, tasks)
    fits = [Trainer(SHORT), Trainer(SHORT)]
    for method, fit in zip((plain, faulty), fits, strict=True):
        method.learn(tasks[0], fit)
    faulty.faults = 1
    with pytest.raises(RuntimeError, match="late"):
        faulty.learn(tasks[1], fits[1])
    assert len(fits[1].fits) == 1
    for method, fit in zip((plain, faulty), fits, strict=True):
        method.learn(tasks[1], fit)
    assert_same_state(plain, faulty)
    assert len(fits[0].fits) == len(fits[1].fits) == 2


def test_a_method_with_several_fits_that_failed_in_the_second_begins_anew():
    tasks = toy_tasks(1)
    plain, faulty = small(PackNet, tasks), small(PackNet, tasks)
    plain.learn(tasks[0], Trainer(SHORT))
    fit = Trainer(SHORT, progress=StopAt(3))
    with pytest.raises(KeyboardInterrupt):
        faulty.learn(tasks[0], fit)
    assert fit.fits == []
    faulty.learn(tasks[0], fit)
    assert_same_state(plain, faulty)


def test_the_result_says_that_a_task_was_learned_before():
    tasks = toy_tasks(2)
    method = small(PackNet, tasks)
    first = [method.learn(task, Trainer(SHORT)) for task in tasks]
    second = method.learn(tasks[0], Trainer(SHORT))
    assert [result.again for result in (*first, second)] == [False, False, True]
    assert str(second).startswith(f"learned {tasks[0].name!r} again in ")


def test_a_task_that_could_not_be_learned_again_leaves_no_column_behind():
    tasks = toy_tasks(3)
    method = small(PNN, tasks)
    for task in tasks[:2]:
        method.learn(task, Trainer(SHORT))
    before = method.num_parameters()
    with pytest.raises(KeyboardInterrupt):
        method.learn(tasks[0], Trainer(SHORT, progress=StopAt(1)))
    assert method.num_parameters() == before
    method.learn(tasks[0], Trainer(SHORT))
    assert method.num_parameters() > before, "the control: learned again, it has one more"


@pytest.mark.parametrize("training", [True, False])
def test_after_a_failure_the_method_is_in_the_mode_that_it_had(training):
    tasks = toy_tasks(1)
    method = make("hat", tasks).train(training)
    with pytest.raises(KeyboardInterrupt):
        method.learn(tasks[0], Trainer(SHORT, progress=StopAt(1)))
    assert method.training == training


class Careful(Method):
    """A method that catches a fit that diverges and tries again."""

    def learn_task(self, task, fit):
        try:
            fit(self, task, lr=1e30, optimizer="sgd")
        except Diverged:
            assert all(p.isfinite().all() for p in self.parameters()), "a fit that failed leaves the method as it was"
            fit(self, task)


def test_a_fit_that_failed_may_be_tried_again():
    tasks = toy_tasks(1)
    method = small(Careful, tasks)
    result = method.learn(tasks[0], Trainer(SHORT))
    assert result.epochs == 2
    assert evaluate(method, tasks[0].test).loss < 100


def test_a_fit_by_itself_sets_the_preprocessing():
    x, y = np.random.RandomState(0).randint(0, 256, (60, 4, 4), dtype=np.uint8), np.arange(60) % 2
    task = Task.from_arrays(0, "bytes", x, y, x, y, mean=0.5, std=0.1)
    method = make("sgd", [task])
    Trainer(SHORT)(method, task)
    seen = method.eval()(task.test.inputs(torch.arange(60)), 0)
    assert torch.equal(method.predict(x, 0), seen.argmax(1))


class Outer(Method):
    """A method made of another one, which learns within its `learn_task`."""

    def __init__(self, net):
        super().__init__(net)
        self.inner = EWC(net)

    def learn_task(self, task, fit):
        self.inner.learn(task, fit)


def test_a_method_may_learn_within_another():
    tasks = toy_tasks(2)
    method, fit = small(Outer, tasks), Trainer(SHORT)
    for task in tasks:
        assert method.learn(task, fit).epochs == 2
    assert method.history == method.inner.history == {0: "toy 0", 1: "toy 1"}
    assert len(fit.fits) == 2


def test_a_fit_may_be_any_function():
    tasks = toy_tasks(1)
    assert small(Method, tasks).learn(tasks[0], lambda method, task: Trainer(SHORT)(method, task)).epochs == 2


def test_joint_drops_the_data_of_a_task_that_failed_or_was_given_up():
    tasks = toy_tasks(3)
    method, fit = make("joint", tasks), Trainer(SHORT)
    method.learn(tasks[0], fit)
    with pytest.raises(KeyboardInterrupt):
        method.learn(tasks[1], Trainer(SHORT, progress=StopAt(1)))
    assert [task.index for task in method.tasks] == [0]
    method.learn(tasks[2], fit)
    method.restore_data(tasks[2])
    assert [task.index for task in method.tasks] == [0, 2]
    method.forget_task(0)
    assert [task.index for task in method.tasks] == [2]


def test_learn_is_not_to_be_overridden():
    with pytest.raises(TypeError, match=r"Old overrides learn.*learn_task"):
        type("Old", (Method,), {"learn": lambda self, task, fit: fit(self, task)})


@pytest.mark.parametrize(
    ("name", "function", "arguments"),
    [
        ("edit_grads", lambda self, batch: None, "self, batch, aux"),
        ("learn_task", lambda self, task: None, "self, task, fit"),
        ("loss", lambda self: None, "self, batch"),
        ("constrain", lambda self, batch: None, "self"),
    ],
)
def test_the_five_places_have_their_arguments(name, function, arguments):
    with pytest.raises(TypeError, match=rf"Wrong\.{name} .*{arguments}"):
        type("Wrong", (Method,), {name: function})


def test_other_names_for_the_arguments_are_fine():
    places = {"edit_grads": lambda self, b, *rest: None, "loss": lambda self, examples, scale=1: None}
    assert issubclass(type("Fine", (Method,), places), Method)


# What a call and `predict` take


@pytest.mark.parametrize("name", ["sgd", "hat", "independent", "den", "pnn"])
@pytest.mark.parametrize("number", [-1, 2, 5])
def test_a_task_that_the_network_does_not_have(name, number):
    tasks = toy_tasks(2)
    with pytest.raises(IndexError, match=f"no task {number}: the network has 2"):
        make(name, tasks)(tasks[0].test.inputs(torch.arange(2)), number)


@pytest.mark.parametrize("numbers", [[0], [0, 1, 0]])
def test_one_task_number_per_image(numbers):
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    with pytest.raises(ValueError, match="one task number per image"):
        method(tasks[0].test.inputs(torch.arange(2)), torch.tensor(numbers))
    with pytest.raises(ValueError, match="one task number per image"):
        method.predict(tasks[0].test.x[:2], torch.tensor(numbers))


def test_no_number_of_several_may_be_of_a_task_that_was_not_learned():
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    method.learn(tasks[0], Trainer(SHORT))
    with pytest.raises(ValueError, match=r"task 1 .*learned are 0"):
        method.predict(tasks[0].test.x[:2], torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="not True"):
        method.predict(tasks[0].test.x[:2], True)


def test_images_of_any_type_are_predicted_as_they_were_learned():
    x, y = np.random.RandomState(0).randint(0, 2**16, (40, 4, 4), dtype=np.uint16), np.arange(40) % 2
    task = Task.from_arrays(0, "16 bits", x, y, x, y, scale=65535)
    method = make("hat", [task])
    method.learn(task, Trainer(SHORT))
    assert torch.equal(method.predict(x, 0), method.predict(x.astype(np.float32), 0))


class Broken(torch.nn.Module):
    """A trunk that fails when it is told to."""

    fails = False

    def forward(self, x):
        if self.fails:
            raise RuntimeError("broken")
        return x.flatten(1)


def test_an_error_in_the_trunk_leaves_the_mode_as_it_was():
    tasks = toy_tasks(1)
    method = Method(Network(Broken(), tasks=tasks)).train()
    method.net.trunk.fails = True
    for call in (lambda: evaluate(method, tasks[0].test), lambda: method.predict(tasks[0].test.x[:2], 0)):
        with pytest.raises(RuntimeError, match="broken"):
            call()
        assert method.training


def test_a_data_set_without_images_is_not_evaluated():
    task = toy_tasks(1, valid=0.0)[0]
    with pytest.raises(ValueError, match="no images"):
        evaluate(make("sgd", [task]), task.valid)


@pytest.mark.parametrize("wrong", [{"engine": "fast"}, {"seed": "a"}, {"seed": 1.5}, {"seed": -1}, {"seed": True}])
def test_a_trainer_checks_what_it_is_given(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        Trainer(SHORT, **wrong)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_learning_where_the_caller_has_switched_gradients_off(mode):
    tasks, fit = toy_tasks(1), Regime(epochs=2, batch=16)
    method, plain = make("hat", tasks), make("hat", tasks)
    with mode():
        method.learn(tasks[0], Trainer(fit))
    plain.learn(tasks[0], Trainer(fit))
    assert torch.equal(logits(method, tasks[0]), logits(plain, tasks[0]))


@pytest.mark.parametrize("name", quick_and_slow(METHODS, ["sgd", "hat", "packnet", "er", "pathnet"]))
@pytest.mark.parametrize("inside", ["method", "trunk and method"])
def test_a_method_that_was_built_in_the_inference_mode_learns_or_says_why_not(name, inside):
    tasks = toy_tasks(1)
    with torch.inference_mode(inside != "method"):
        trunk = fresh()
    with torch.inference_mode():
        method = METHODS[name](Network(trunk, tasks=tasks), **SMALLER.get(name, {}))
    before = [p.clone() for p in method.parameters()]
    if inside == "method" and name in ("sgd", "stable-sgd", "joint", "independent"):
        method.learn(tasks[0], Trainer(SHORT))
        assert all(not torch.equal(p, then) for p, then in zip(method.parameters(), before, strict=True))
    else:
        with pytest.raises(ValueError, match=r"was made within .*inference_mode"):
            method.learn(tasks[0], Trainer(SHORT))
        assert method.history == {}


DEFAULT_TYPE = [*((name, {}) for name in METHODS), ("hat", {"masks": "soft"})]
QUICK_TYPES = [(name, {}) for name in ("hat", "pmask", "pnn", "er", "den")]


@pytest.mark.parametrize("case", quick_and_slow(DEFAULT_TYPE, QUICK_TYPES))
def test_another_default_type_of_numbers(case):
    """Heads, gates, memories and all else are float32 whatever the default is, as a saved method is."""
    (name, options), tasks, found = case, toy_tasks(2), []
    for kind in (torch.float32, torch.float64):
        trunk, example = fresh(), tasks[0].train.inputs(torch.arange(2))
        torch.set_default_dtype(kind)
        try:
            method = METHODS[name](Network(trunk, [tasks[0].classes], example), **SMALLER.get(name, {}), **options)
            assert torch.float64 not in {value.dtype for value in vars(method).values() if isinstance(value, torch.Tensor)}
            method.net.add_task(tasks[1].classes)
            learn(method, tasks, Trainer(Regime(epochs=2, batch=16)))
            found.append(method)
        finally:
            torch.set_default_dtype(torch.float32)
    one, two = ({key: value.dtype for key, value in method.state_dict().items()} for method in found)
    assert one == two
    assert all(logits(found[1], task).dtype == torch.float32 for task in tasks)
