"""Heads that lie together in memory while batches that mix their tasks are trained on.

A step with a head per task would compute a gradient, clip it and follow it for every head by itself: after a hundred tasks
this takes longer than all the rest. So a fit packs the heads of all tasks that can be in a batch: two parameters hold them
all, and the heads' own parameters are views of these. Whoever reads or writes a head, such as an evaluation or a checkpoint,
need not know of it; but gradients and what an optimizer keeps belong to the two.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.tasks.split import TaskId

if TYPE_CHECKING:
    from hatrack.networks.network import Network

FEW = 32  # heads: up to here one product with all of them is about as fast as one per row with its own; always on a GPU
State = dict[nn.Parameter, dict[str, Tensor]]  # what an optimizer keeps of every parameter, by name


def can_be_packed(heads: Sequence[nn.Module]) -> bool:
    """Return whether heads are plain ones that are trained, each with parameters of its own. A user may have frozen one,
    tied two, or given one a parametrization or a hook."""
    parameters = [p for head in heads for p in head.parameters()]
    plain = all(type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks for head in heads)
    own = len({id(p) for p in parameters}) == 2 * len(heads)
    return plain and own and all(p.requires_grad for p in parameters) and len({p.dtype for p in parameters}) <= 1


class PackedHeads:
    """Heads whose weights are rows of one tensor, and their biases of another.

    Args:
        heads: the heads by task.

    Attributes:
        weight: (heads, most classes, features), with zeros in rows that a head does not have.
        bias: (heads, most classes).
        heads: the heads by task; their parameters are views of these two.
        in_step: a step of the fit runs; whoever else asks for logits takes the heads themselves.
    """

    def __init__(self, heads: Mapping[int, nn.Linear]) -> None:
        self.heads, self.in_step = dict(heads), False
        sizes, like = [head.out_features for head in heads.values()], next(iter(heads.values())).weight
        self.weight = nn.Parameter(like.new_zeros(len(sizes), max(sizes), like.shape[1]))
        self.bias = nn.Parameter(like.new_zeros(len(sizes), max(sizes)))
        self.index = {task: number for number, task in enumerate(heads)}
        self.places = torch.tensor([self.index.get(task, 0) for task in range(1 + max(heads))], device=like.device)
        missing = torch.arange(max(sizes)) >= torch.tensor(sizes)[:, None]
        self.missing = missing.to(like.device) if missing.any() else None  # (heads, most classes): no class of this head
        self.parts = list(self._parts())
        self.own = {id(own) for own, _, _ in self.parts}
        with torch.no_grad():
            for own, whole, place in self.parts:
                whole[place].copy_(own)
        self.follow({})

    def _parts(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, tuple[int, slice]]]:
        """Yield every parameter of a head, the one that it is a part of, and where it is in it."""
        for number, head in enumerate(self.heads.values()):
            place = (number, slice(head.out_features))
            yield head.get_parameter("weight"), self.weight, place
            yield head.get_parameter("bias"), self.bias, place

    def follow(self, state: State) -> None:
        """Let the heads be views of the memory that the two parameters have now, which a stack of runs exchanges.

        Args:
            state: what an optimizer keeps of the two; it gets entries for the heads, which are views as well.
        """
        for own, whole, place in self.parts:
            own.data = whole.data[place]
            if whole in state:
                state[own] = {name: t[place] if t.dim() else t for name, t in state[whole].items()}

    def release(self) -> None:
        """Give every head memory of its own."""
        for own, _, _ in self.parts:
            own.data = own.detach().clone()

    def replace(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return these parameters with the two in place of those of the heads, if there are any of them."""
        others = [p for p in parameters if id(p) not in self.own]
        return others if len(others) == len(parameters) else [*others, self.weight, self.bias]

    def __call__(self, features: Tensor, task: TaskId) -> Tensor:
        """Return the logits of a task, or of each example's own task as `by_task` selects them."""
        if isinstance(task, int):
            place = (self.index[task], slice(self.heads[task].out_features))
            return F.linear(features, self.weight[place], self.bias[place])
        places = self.places[task]
        if features.is_cuda or len(self.heads) <= FEW:
            logits = F.linear(features, self.weight.flatten(0, 1), self.bias.flatten())
            logits = logits.view(-1, *self.bias.shape)[torch.arange(len(task), device=task.device), places]
        else:
            own = self.weight.index_select(0, places)  # (batch, most classes, features)
            logits = (own * features[:, None]).sum(2) + self.bias.index_select(0, places)
        if self.missing is None:
            return logits
        return torch.where(self.missing[places], torch.finfo(logits.dtype).min, logits)


@contextmanager
def mixing_tasks(net: "Network", tasks: Collection[int]) -> Iterator[None]:
    """Say that in the block batches mix these tasks and no others, so that a fit may pack their heads."""
    net.mixed = () if net.needs_no_task else sorted(tasks)
    try:
        yield
    finally:
        net.mixed = ()
        unpack(net)


def pack(net: "Network") -> PackedHeads | None:
    """Put the heads of the tasks that are mixed together in memory, until `unpack`. None if there are none, or if a user has
    changed one of them."""
    unpack(net)
    heads = {task: cast("nn.Linear", net.heads[task]) for task in net.mixed}
    if heads and can_be_packed([*heads.values()]):
        net.packed = PackedHeads(heads)
    return net.packed


def unpack(net: "Network") -> None:
    """Give every head memory of its own again."""
    if net.packed is not None:
        net.packed.release()
        net.packed = None
