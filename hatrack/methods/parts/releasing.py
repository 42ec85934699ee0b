"""Releasing tasks: new values for weights that no finished task uses, and what erasing a task cannot promise."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor, nn

from hatrack.methods.parts.freeze import real
from hatrack.options import Option
from hatrack.seeds import generator

if TYPE_CHECKING:
    from hatrack.methods.method import Method

FreeOption = Annotated[
    Literal["kept", "initial"],
    Option("what no finished task uses at the end of a task: keep the values, or return to the initial ones", added=True),
]
LISTED = 3  # names in a warning
EXAMPLE = "images of it are the network's example, unless method.net.replace_example(images) takes others"


class InitialValues(nn.Module):
    """The values that parameters have when this module is made, kept as buffers.

    Args:
        parameters: the parameters, by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.places = {name: f"n{number}" for number, name in enumerate(parameters)}
        for name, place in self.places.items():
            self.register_buffer(place, parameters[name].detach().clone())

    def of(self, name: str) -> Tensor:
        """Return the initial values of a parameter."""
        return self.get_buffer(self.places[name])


def check_free(free: str, masks: str) -> None:
    """Raise an error if weights that no task uses shall return to their initial values, and there are none."""
    if free == "initial" and masks == "soft":
        raise ValueError("free='initial' needs masks='binary': with soft gates finished tasks use all weights a little")


def drawn(name: str, parameters: Mapping[str, Tensor], seed: int) -> Tensor:
    """Return new values for a parameter from U(-1/sqrt(n), 1/sqrt(n)), where n is the number of inputs of a unit.

    They depend on the seed, the name and the shape only. A vector takes n from the weight of its layer, if there is one.
    """
    parameter = parameters[name]
    weight = parameters.get(f"{name.rpartition('.')[0]}.weight", parameter) if parameter.dim() < 2 else parameter
    inputs = weight[0].numel() if weight.dim() > 1 else parameter.numel()
    values = torch.empty(parameter.shape, dtype=parameter.dtype)
    real(values).uniform_(-1, 1, generator=generator(seed, "erase", name)).mul_(1 / math.sqrt(max(1, inputs)))
    return values.to(parameter.device)


@torch.no_grad()
def renew(parameters: Mapping[str, Tensor], used: Mapping[str, Tensor], initial: InitialValues | None, seed: int) -> None:
    """Give all elements that no finished task uses their initial values or, if these were not kept, new ones.

    Args:
        parameters: the parameters that tasks share, by name; they are written in place.
        used: which of their elements finished tasks use, as bools in their shapes.
        initial: the initial values; None: new ones are drawn.
        seed: decides the new values.
    """
    for name, parameter in parameters.items():
        new = drawn(name, parameters, seed) if initial is None else initial.of(name)
        parameter.copy_(torch.where(used[name].to(parameter.device), parameter, new))


def note_learned(method: "Method", task: int) -> None:
    """Note which tasks were learned after an earlier version of a task. It is called when a task has been learned, before it
    is listed as the last one."""
    if method.options.get("reuse") == "never":  # then no task takes over anything from another one
        return
    if later := _later(method, task):
        _add(method.learned_after.setdefault(task, []), later)
    for other, tasks in method.learned_after.items():
        if other != task and other not in method.history:  # its traces may be in free weights and in other tasks
            _add(tasks, [task])


def note_forgotten(method: "Method", task: int) -> None:
    """Note which tasks were learned after a task that is given up. It is called while the task is still listed."""
    if task in method.history and method.options.get("reuse") != "never":
        _add(method.learned_after.setdefault(task, []), _later(method, task))


def note_renewed(method: "Method", erased: int | None = None) -> None:
    """Drop notes about tasks that are gone: it is called when all weights that no finished task uses have new values.

    Args:
        method: the method.
        erased: the task that was erased, if one was.
    """
    if method.net.example_task == erased:
        method.net.example_task = None  # as if the task had never been learned; `warn_of_example` has told the user
    kept = {task: [t for t in tasks if t in method.history] for task, tasks in method.learned_after.items()}
    method.learned_after = {task: tasks for task, tasks in kept.items() if tasks}


def _later(method: "Method", task: int) -> list[int]:
    """Return the finished tasks that were learned after a finished task."""
    order = list(method.history)
    return order[order.index(task) + 1 :] if task in order else []


def _add(tasks: list[int], more: Sequence[int]) -> None:
    tasks += [task for task in more if task not in tasks]


def warn_of_example(method: "Method", task: int) -> None:
    """Warn in one line if images of a task that is being erased are the example of the network."""
    if method.net.example_task == task:
        warnings.warn(f"traces of {_named(method, task)} remain after it is erased: {EXAMPLE}", stacklevel=3)


def _named(method: "Method", task: int) -> str:
    return f"task {task}" + (f" ({method.history[task]!r})" if task in method.history else "")


def warn_of_traces(method: "Method", task: int, held: Sequence[str], other: str = "") -> None:
    """Warn in one line of what may remain of a task that is being erased. It is called before the task is forgotten.

    Args:
        method: the method.
        task: the number of the task.
        held: the parameters that the first task trains and that no other task can change.
        other: another reason.
    """
    order = list(method.history)
    later = order[order.index(task) + 1 :] if task in order else order
    shared = method.dependencies()
    said = [f"{method.history[t]!r} ({shared.get(t, {}).get(task, 0.0):.0%} of its weights)" for t in later]
    parts = [f"{_few(said)} {'was' if len(said) == 1 else 'were'} learned after it"] if later else []
    before = [repr(method.history[t]) for t in method.learned_after.get(task, ()) if t in order and t not in (task, *later)]
    if before:
        parts.append(f"{_few(before)} {'was' if len(before) == 1 else 'were'} learned after an earlier version of it")
    first, others = task not in order or order[0] == task, set(order) - {task}
    if held and first and others:  # if no other task remains, they get new values as well
        parts.append(f"{_few(held)} {'is' if len(held) == 1 else 'are'} held whole since the first task")
    parts += [other] if other else []
    parts += [EXAMPLE] if method.net.example_task == task else []
    if parts:
        warnings.warn(f"traces of {_named(method, task)} may remain after it is erased: {'; '.join(parts)}", stacklevel=3)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (f", ... ({len(names)} in all)" if len(names) > LISTED else "")
