"""Methods on a device, as far as a machine without one can tell: nothing of them is left on the CPU."""

import copy

import pytest
import torch
from torch import Tensor, nn

from hatrack import METHODS, Method, Task, evaluate
from hatrack.tasks.device import all_to_device
from tests.helpers.elsewhere import CPU, THERE, LeavesBehind, elsewhere, is_there
from tests.helpers.learning import SMALLER, every_method, learn, make
from tests.helpers.toys import toy_tasks


def built_on(device: torch.device, name: str, tasks: list[Task]) -> Method:
    """A method that is built on a network which is on the device already and knows the first task."""
    net = make("sgd", tasks, known=1).to(device).net
    return METHODS[name](net, **SMALLER.get(name, {}))


def learned_on(device: torch.device, name: str) -> tuple[Method, list[Task]]:
    """A method that has learned three tasks, of which the last two came later."""
    tasks = all_to_device(toy_tasks(3), device)
    method = built_on(device, name, tasks)
    for task in tasks:
        if task.index:
            method.net.add_task(task.classes)
        learn(method, [task])
    return method, tasks


@every_method
def test_a_method_is_wholly_on_the_device_of_its_network(name):
    """And learns there what it learns on the CPU, bit for bit."""
    here, _ = learned_on(CPU, name)
    with elsewhere():
        method, tasks = learned_on(THERE, name)
        state = method.state_dict() | {key: value for key, value in vars(method).items() if isinstance(value, Tensor)}
        assert [key for key, value in state.items() if not is_there(value.device)] == []
        for task in tasks:
            assert is_there(method.predict(task.test.x, task.index).device)
            evaluate(method, task.test)
        assert all(torch.equal(method.state_dict()[key].cpu(), value) for key, value in here.state_dict().items())


def test_a_router_asks_for_the_task_on_the_device():
    with elsewhere():
        method, tasks = learned_on(THERE, "hat")
        for task in tasks:
            method.fit_router(task)
        assert is_there(method.predict(tasks[0].test.x).device)


def test_what_is_left_on_the_cpu_is_noticed():
    with elsewhere():
        tasks = all_to_device(toy_tasks(1), THERE)
        method = LeavesBehind(make("sgd", tasks).to(THERE).net)
        with pytest.raises(RuntimeError, match="two devices"):
            learn(method, tasks)


def test_the_device_that_is_not_there():
    with elsewhere():
        a, b = torch.ones(3), torch.ones(3, device=THERE)
        for operation in (torch.add, torch.dot, torch.maximum):
            with pytest.raises(RuntimeError, match="two devices"):
                operation(a, b)
        with pytest.raises(TypeError):
            b.numpy()
        for draw in (b.normal_, lambda generator: torch.rand(2, generator=generator, device=THERE)):
            with pytest.raises(RuntimeError, match="generator"):
                draw(generator=torch.Generator())
        assert is_there(b.quantile(torch.ones(2, device=THERE)).device)
        assert (2 * b + a.to(b)).cpu().tolist() == [3, 3, 3]
        assert b[torch.tensor([0, 2])].device == THERE
        with pytest.raises(RuntimeError, match="two devices"):
            a[torch.tensor([0, 2], device=THERE)]
        assert copy.deepcopy(b).device == THERE
        assert torch.zeros(3).copy_(b).device == CPU
        assert torch.zeros(3, device=THERE).copy_(a).device == THERE
        assert nn.Linear(2, 2).to(b).weight.device == nn.Linear(2, 2).to(THERE).bias.device == THERE
        assert a.device == b.cpu().device == CPU
    assert torch.ones(3).device == CPU
