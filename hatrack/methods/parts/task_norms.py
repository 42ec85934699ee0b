"""Normalisation layers per task: each task has its own scale, shift and running statistics of every norm of a trunk.

If tasks shared a norm, the network would forget even with all weights frozen, because the statistics follow the newest data.
Every other tensor that a training pass writes, such as the vectors of a spectral norm or the weights of a module that
follows another one as a moving average, is also kept per task.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hatrack.networks.freezing import has_buffers
from hatrack.seeds import generator, seeded
from hatrack.tasks.split import Split
from hatrack.tracing.norm_calls import NORMS, arguments
from hatrack.tracing.training_pass import check_switch, count_writes
from hatrack.tracing.wrappers import check_modules, copied

if TYPE_CHECKING:
    from hatrack.methods.method import Method
    from hatrack.networks.network import Network

STATISTICS = {
    F.batch_norm: "training",
    F.instance_norm: "use_input_stats",
}  # and the argument that switches to those of the batch
ARGUMENTS = ("weight", "bias", "running_mean", "running_var")
BATCH = 256  # examples per forward pass when statistics are recomputed


class TaskNorms(nn.Module):
    """The tensors of a trunk that each task has for itself.

    The first task uses the trunk's own tensors, later ones those in this module. Every task starts from the values that the
    trunk has when this module is made. `torch.func.functional_call(trunk, norms.of(task), x)` runs the trunk with the norms
    of a task.

    Args:
        net: the network.
        shared: let all tasks use the trunk's own tensors.
        more: the names of further tensors that each task has for itself.
    """

    def __init__(self, net: "Network", *, shared: bool = False, more: Sequence[str] = ()) -> None:
        super().__init__()
        check_modules(net.trunk)
        check_switch(net.trunk)
        found = own_tensors(net)
        self.names, self.shared = [*found, *(name for name in more if name not in found)], shared
        state = _tensors(net.trunk)
        self.learnt = [state[name].requires_grad for name in self.names]  # not those that only the trunk itself writes
        self.initial = _Set([] if shared else [nn.Buffer(state[name].detach().clone()) for name in self.names])
        self.sets = nn.ModuleList()  # one per task, from the second task on
        self.lent: int | None = None  # the task that uses the trunk's own tensors for now: see `lend`
        self.grow(len(net.classes))

    def grow(self, tasks: int) -> None:
        """Make a set of tensors for each of so many tasks."""
        while self.names and not self.shared and len(self.sets) < tasks - 1:
            pairs = zip(self.initial.tensors(), self.learnt, strict=True)
            self.sets.append(_Set([nn.Parameter(v.clone()) if learnt else nn.Buffer(v.clone()) for v, learnt in pairs]))

    def of(self, task: int) -> dict[str, Tensor]:
        """Return the tensors of a task by their names in the trunk; empty if these are the trunk's own."""
        if task in (0, self.lent) or self.shared or not self.names:
            return {}
        own = self.sets[task - 1]
        assert isinstance(own, _Set)
        return dict(zip(self.names, own.tensors(), strict=True))

    def initial_values(self) -> list[Tensor]:
        """Return the values with which every task starts, in the order of `names`; none if tasks share them."""
        return self.initial.tensors()

    def take(self, task: int, values: Sequence[Tensor]) -> None:
        """Give a task tensors with these values, which may have other shapes than those of other tasks."""
        if task > 0 and self.names and not self.shared:
            pairs = zip(values, self.learnt, strict=True)
            copies = [(v.detach().clone(), learnt) for v, learnt in pairs]
            self.sets[task - 1] = _Set([nn.Parameter(v) if learnt else nn.Buffer(v) for v, learnt in copies])

    def adopt(self, task: int, other: "TaskNorms") -> None:
        """Take over the tensors of a task from other norms of the same names."""
        if task > 0 and self.names and not self.shared:
            self.sets[task - 1] = other.sets[task - 1]

    def renew(self, net: "Network", task: int) -> None:
        """Give a task new tensors with the initial values, in their present shapes."""
        self.take(task, self.initial_values())
        self.reset(net, task)

    @torch.no_grad()
    def reset(self, net: "Network", task: int) -> None:
        """Give the tensors of a task their initial values. If tasks share them, nothing happens."""
        own = {**_tensors(net.trunk), **self.of(task)}
        for name, value in zip(() if self.shared else self.names, self.initial.tensors(), strict=True):
            own[name].copy_(value)

    @torch.no_grad()
    def lend(self, net: "Network", task: int) -> None:
        """Let a task use the trunk's own tensors, with their initial values, until `take_back`. There must be no task 0."""
        self.lent = task
        self.reset(net, task)

    @torch.no_grad()
    def take_back(self, net: "Network") -> None:
        """Copy the trunk's own tensors to those of the task that used them."""
        task, self.lent = self.lent, None
        own = _tensors(net.trunk)
        for name, tensor in self.of(task).items() if task is not None else ():
            tensor.copy_(own[name])

    @torch.no_grad()
    def recompute(self, method: "Method", task: int, split: Split) -> None:
        """Recompute the running statistics of a task as the plain mean over its training data, in evaluation mode."""
        order = torch.randperm(len(split), generator=generator(method.net.seed, "statistics", task)).to(split.y.device)
        parts = order.tensor_split(-(-len(order) // BATCH)) if self.names and len(order) > 1 else ()
        self.recompute_over(method, task, (x for _, x in split.read(parts)))

    @torch.no_grad()
    def recompute_over(self, method: "Method", task: int, batches: Iterable[Tensor]) -> None:
        """Recompute the running statistics of a task as the plain mean over batches of inputs, in evaluation mode."""
        tensors = {**_tensors(method.net.trunk), **self.of(task)}
        mode = method.training
        method.eval()
        with _UseBatchStatistics({id(tensors[name]) for name in self.names}):
            for x in batches:
                method(x, task)
        method.train(mode)


class _Set(nn.Module):
    """Parameters and buffers in the order of `TaskNorms.names`."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.count = len(tensors)
        for number, tensor in enumerate(tensors):
            setattr(self, f"n{number}", tensor)

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f"n{number}") for number in range(self.count)]


class _UseBatchStatistics(TorchFunctionMode):
    """Norms with these running statistics use those of the batch, and the running ones become the mean of all batches."""

    def __init__(self, own: set[int]) -> None:
        super().__init__()
        self.own = own
        self.calls: Counter[int] = Counter()  # a norm that is called twice in a pass counts both

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in STATISTICS:
            given = arguments(func, args, kwargs)
            key = id(given.get("running_mean"))
            if key in self.own:
                self.calls[key] += 1
                return func(**given | {STATISTICS[func]: True, "momentum": 1 / self.calls[key]})
        return func(*args, **(kwargs or {}))


class _FindNorms(TorchFunctionMode):
    """Collects the tensors that norms are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NORMS:
            given = arguments(func, args, kwargs)
            self.found |= {id(given[name]) for name in ARGUMENTS if given.get(name) is not None}
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def own_tensors(net: "Network") -> list[str]:
    """Return the names of the trunk's tensors that every task needs for itself: those of norms, and what a training pass
    writes. Parts that the user froze are left out."""
    twin = copied(net.trunk, net.example).train()
    net.keep_frozen(twin)
    with _FindNorms() as norms:
        written = _written(twin, net.example)
    names = []
    for name, tensor in _tensors(twin).items():
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        in_frozen_part = any(name == f or name.startswith(f"{f}.") for f in net.frozen)
        if not in_frozen_part and (name in written or (not frozen and id(tensor) in norms.found)):
            names.append(name)
    return names


def check_frozen(net: "Network", method: str) -> None:
    """Raise an error in one line if a trunk that is frozen after the first task, as this method does, still moves tensors.

    Then every module that has buffers is in evaluation mode, and all others are not.
    """
    try:
        twin = copied(net.trunk, net.example).train()
        net.keep_frozen(twin)
        for module in filter(has_buffers, twin.modules()):
            module.training = False
        with torch.no_grad():
            written = _written(twin, net.example)
    except Exception:  # it can't be copied, or be trained on so few images: what it moves shows in training
        return
    if written:
        raise ValueError(
            f"in training mode the trunk changes {min(written)!r}, as a moving average does, but {method} keeps the trunk "
            "as the first task leaves it; hat, pmask, packnet and independent give such tensors to every task"
        )


def _written(twin: nn.Module, example: Tensor) -> set[str]:
    """Run a copy of a trunk, and return the names of the tensors that it writes."""
    before = {name: (t, t.clone(), count_writes(t)) for name, t in _tensors(twin).items()}
    with seeded(0, "norms"):
        twin(torch.cat([example, example]))  # at least two images: a batch of one has no variance
    after = _tensors(twin)
    for name, (tensor, _, _) in before.items():
        if after.get(name) is not tensor:
            raise ValueError(
                f"the trunk replaces its buffer {name!r} in a forward pass; let it write in place, as copy_ does"
            )
    # The version misses writes through `.data`, and the values miss writes of the same values.
    return {name for name, (t, old, count) in before.items() if count_writes(t) != count or not torch.equal(t, old)}


def _tensors(trunk: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name."""
    return {**dict(trunk.named_parameters()), **dict(trunk.named_buffers())}
