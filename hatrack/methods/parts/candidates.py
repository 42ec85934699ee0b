"""Candidates (the option reuse="never"): the units or weights that a task may use, fixed by the seed and its number.

The candidates of two tasks have nothing in common, and a task is learned as if all other weights had their initial values.
So what it learns depends on no other task, and erasing any task gives the network that never learned it, bit for bit.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor, nn

from hatrack.methods.parts.releasing import InitialValues
from hatrack.networks.network import Network
from hatrack.options import Option
from hatrack.seeds import generator
from hatrack.tracing.units import Units

if TYPE_CHECKING:
    from hatrack.methods.fit import Fit
    from hatrack.tasks.task import Task

ReuseOption = Annotated[
    Literal["allowed", "never"],
    Option("tasks may use weights of earlier ones, or each only its own part: then any can be erased exactly", added=True),
]
RoomOption = Annotated[
    int,
    Option("parts of the network with reuse never; 0: as many as it has tasks at first", low=0, high=30000, added=True),
]


def owners(seed: int, name: str | int, count: int, room: int) -> Tensor:
    """Return for each of `count` things the number of the task that it is a candidate of, from 0 to room - 1.

    They are divided by chance, into parts whose sizes differ by 1 at most.
    """
    order = torch.randperm(count, generator=generator(seed, "candidates", name))
    return torch.empty(count, dtype=torch.int16).index_copy_(0, order, (torch.arange(count) * room // count).to(torch.int16))


class Candidates(nn.Module):
    """The units or weights that each task may use.

    Args:
        owner: (units or weights,), the number of the task that each is a candidate of; -1: of none.
        room: for how many tasks there are candidates.
    """

    owner: Tensor

    def __init__(self, owner: Tensor, room: int) -> None:
        super().__init__()
        self.room = room
        self.register_buffer("owner", owner, persistent=False)  # the seed decides it, so that files need not hold it

    def of(self, task: int) -> Tensor:
        """Return which units or weights are candidates of a task, as bools."""
        return self.owner == task

    def check(self, task: "Task", fit: "Fit") -> None:
        """Raise an error in one line if this task could not be erased exactly, trained so."""
        if task.index >= self.room:
            raise ValueError(
                f"task {task.index} ({task.name!r}) finds no room: with reuse='never' and room={self.room} the network has "
                f"parts for the tasks 0 to {self.room - 1}; a larger room must be chosen when the method is made"
            )
        if fit.regime.keep_state:
            raise ValueError(
                "keep_state=True carries the optimizer's state from task to task, so that no task could be erased exactly: "
                "with reuse='never' it must be False"
            )


def check_options(net: Network, reuse: str, room: int, **others: str) -> int:
    """Return for how many tasks there are candidates, 0 if tasks may reuse weights; raise if the options contradict.

    Args:
        net: the network.
        reuse: the option.
        room: the option.
        others: the options `norms` and `masks` of the method, as far as it has them.
    """
    if reuse != "never":
        if room:
            raise ValueError(f"room={room} does nothing with reuse={reuse!r}; it is for reuse='never'")
        return 0
    if net.needs_no_task:
        raise ValueError(
            "reuse='never' needs a head per task (heads='multi'): what tasks taught a shared head can't be erased"
        )
    for name, value in others.items():
        wanted = {"norms": "task", "masks": "binary"}[name]
        if value != wanted:
            raise ValueError(
                f"reuse='never' needs {name}={wanted!r}, not {value!r}: otherwise no task could be erased exactly"
            )
    if not (room or net.classes):
        raise ValueError("reuse='never' divides the network among tasks, and it knows none: room=10 makes parts for ten")
    return room or len(net.classes)


def unit_candidates(units: Units, seed: int, room: int) -> Candidates:
    """Divide the units of every layer among tasks; raise an error in one line if that is not possible.

    Layers of one width are divided in the same way, so that a task has the same channels on all sides of a sum or product.

    Args:
        units: the units of the trunk; those that the user froze are open to all tasks.
        seed: decides who gets what.
        room: the number of tasks.
    """
    frozen = units.frozen()
    owner = torch.full((units.count,), -1, dtype=torch.int16)
    for name, own in units.layers.items():
        if not frozen[own].all():
            count = len(owner[own])
            if count < room:
                raise ValueError(f"layer {name!r} has {count} units, too few for room={room}: with reuse='never' every task "
                                 "needs units of its own in every layer")  # fmt: skip
            owner[own] = owners(seed, count, count, room)
    _check_weights(units, owner, room)
    return Candidates(owner, room)


def _check_weights(units: Units, owner: Tensor, room: int) -> None:
    """Raise an error if a parameter belongs to no task, because it is held whole, or a weight to two."""
    always, seen = _trained_masks(units, units.frozen()), dict[str, Tensor]()
    if held := [name for name, mask in always.items() if mask.numel() and mask.all()]:
        why = units.frozen_entirely.get(held[0], "not used on the example")
        raise ValueError(
            f"{', '.join(held)} can't be divided among tasks ({why}), and reuse='never' holds nothing whole: leave and "
            "on_unknown do not help; Network(..., freeze=...) keeps a part of the trunk as it is"
        )
    for task in range(room):
        for name, mask in own_weights(units, owner == task, always).items():
            before = seen.setdefault(name, torch.zeros_like(mask))
            if (before & mask).any():
                raise ValueError(
                    f"weights of {name} lie between units of two tasks, so that reuse='never' can't divide them"
                )
            before |= mask


def own_weights(units: Units, candidates: Tensor, always: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return which weights lie between candidates of one task, as bools by the name of the parameter in the trunk.

    Args:
        units: the units of the trunk.
        candidates: (units,), those of the task.
        always: the masks without candidates, if they are known: what they have belongs to no task.
    """
    frozen = units.frozen()
    always = _trained_masks(units, frozen) if always is None else always
    masks = _trained_masks(units, candidates.cpu() | frozen)
    return {name: (mask & ~always[name]).to(candidates.device) for name, mask in masks.items()}


def _trained_masks(units: Units, gates: Tensor) -> dict[str, Tensor]:
    """Return which weights of trained parameters lie between open gates (units,), by name."""
    trained = {name for name, p in units.trunk.named_parameters() if name in units.traced and p.requires_grad}
    return {name: mask == 1 for name, mask in units.weight_masks(gates.float()).items() if name in trained}


def weight_candidates(parameters: Mapping[str, Tensor], seed: int, room: int) -> Candidates:
    """Divide the weights of every parameter among tasks; raise an error in one line if one has too few.

    Args:
        parameters: the parameters, by name.
        seed: decides who gets what.
        room: the number of tasks.
    """
    for name, parameter in parameters.items():
        if parameter.numel() < room:
            raise ValueError(
                f"{name} has {parameter.numel()} weights, too few for room={room}: with reuse='never' every task needs "
                "weights of its own in every parameter"
            )
    parts = [owners(seed, name, parameter.numel(), room) for name, parameter in parameters.items()]
    return Candidates(torch.cat(parts), room)


def with_initial(trunk: nn.Module, own: Mapping[str, Tensor], initial: InitialValues | None) -> dict[str, Tensor]:
    """Return parameters of a trunk by name, with their initial values where they are not a task's own.

    Args:
        trunk: the trunk.
        own: what is a task's own, as bools by the name of the parameter.
        initial: the initial values, by names that begin with "trunk."; None only if `own` is empty.
    """
    if initial is None:
        assert not own
        return {}
    return {name: torch.where(mask, trunk.get_parameter(name), initial.of(f"trunk.{name}")) for name, mask in own.items()}
