"""Tasks in the three scenarios: labels, normalisation, and what is refused."""

import dataclasses

import pytest
import torch

from hatrack import BENCHMARKS, Network, Task, in_scenario
from hatrack.registry import SCENARIOS
from tests.helpers.toys import toy_tasks


def uneven_tasks() -> list[Task]:
    """Three tasks of 3, 5 and 2 classes."""
    return [toy_tasks(3, classes=count)[k] for k, count in enumerate((3, 5, 2))]


def normalised_tasks() -> list[Task]:
    """Two tasks of bytes with normalisations of their own."""
    x, y = torch.randint(0, 256, (40, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)), torch.arange(40)
    return [Task.from_arrays(k, f"raw {k}", x, y % 2, x, y % 2, mean=0.5 - 0.1 * k, std=0.1 + 0.1 * k) for k in range(2)]


def test_labels_are_counted_on_in_class_only():
    tasks = uneven_tasks()
    for scenario, firsts in (("task", [0, 0, 0]), ("class", [0, 3, 8])):
        found = in_scenario(tasks, scenario)
        assert [task.first for task in found] == firsts
        assert [task.classes for task in found] == [3, 5, 2]
        for task, before, first in zip(found, tasks, firsts, strict=True):
            for part in ("train", "valid", "test"):
                assert getattr(task, part).y.tolist() == [first + y for y in getattr(before, part).y.tolist()]
                assert getattr(task, part).x is getattr(before, part).x


def test_tasks_in_class_can_be_put_into_class_again():
    once = in_scenario(uneven_tasks(), "class")
    twice = in_scenario(once, "class")
    assert all(torch.equal(a.train.y, b.train.y) and a.first == b.first for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_the_task_does_not_decide_the_normalisation(scenario):
    tasks = normalised_tasks()
    found = in_scenario(tasks, scenario)
    images = tasks[1].test.raw(torch.arange(5)).float() / 255
    torch.testing.assert_close(found[1].test.inputs(torch.arange(5)), (images - 0.5) / 0.1)
    torch.testing.assert_close(tasks[1].test.inputs(torch.arange(5)), (images - 0.4) / 0.2)
    torch.testing.assert_close(in_scenario(tasks, "task")[1].test.inputs(torch.arange(5)), (images - 0.4) / 0.2)


def test_pixels_stay_where_the_task_put_them():
    tasks = BENCHMARKS["pmnist"](0, data="sample", tasks=2)
    for before, after in zip(tasks, in_scenario(tasks, "domain"), strict=True):
        assert torch.equal(before.test.inputs(torch.arange(3)), after.test.inputs(torch.arange(3)))


def test_validation_on_the_training_set_stays_so():
    tasks = [dataclasses.replace(task, valid=task.train) for task in toy_tasks(2)]
    assert all(task.valid is task.train for task in in_scenario(tasks, "class"))


def test_domain_needs_as_many_classes_in_every_task():
    with pytest.raises(ValueError, match=r"'toy 0' has 3, 'toy 1' 5") as error:
        in_scenario(uneven_tasks(), "domain")
    assert "\n" not in str(error.value)


def test_an_unknown_scenario_names_the_nearest():
    with pytest.raises(ValueError, match="no scenario 'clas'; did you mean 'class'"):
        in_scenario(toy_tasks(2), "clas")
    assert list(SCENARIOS) == ["task", "domain", "class"]


@pytest.mark.parametrize(("heads", "scenario"), [("class", "task"), ("multi", "class"), ("shared", "class")])
def test_a_network_refuses_tasks_of_another_scenario(heads, scenario):
    tasks = toy_tasks(2)
    net = Network(torch.nn.Flatten(), tasks=tasks, heads=heads)
    with pytest.raises(ValueError, match=f"'toy 1' count from {3 * (scenario == 'class')}"):
        net.check_task(in_scenario(tasks, scenario)[1])
    net.check_task(in_scenario(tasks, scenario)[0])
