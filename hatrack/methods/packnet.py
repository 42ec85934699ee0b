"""PackNet: iterative pruning (Mallya, Lazebnik, CVPR 2018), https://arxiv.org/abs/1711.05769

A task trains the weights that are free, gives the smallest of them back and retrains the others, which then are its own for
good. It reads its own weights and those of the tasks learned before it, never what comes later, so nothing is forgotten, not
a bit. Departures from the paper: norms per task by default; owned weights are put back after every update, so that momentum,
Adam and weight decay can't move them either.
"""

from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.freeze import Freeze
from hatrack.methods.parts.task_norms import TaskNorms, own_tensors
from hatrack.methods.parts.vectors import pieces, values
from hatrack.networks.heads import grouped
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.task import Task


class PackNet(Method):
    """Iterative pruning: every task owns a share of the weights that were free, and reads those of the tasks before it."""

    owner: Tensor  # (weights that can be pruned,): the turn of the task that owns a weight; 0: free
    turns: Tensor  # (tasks,): the place of every task in the order of learning, from 1; 0: not learned

    def __init__(
        self,
        net: Network,
        *,
        prune: Annotated[float, Option("share of a task's weights that it gives back, per layer", low=0, high=0.99)] = 0.75,
        retrain: Annotated[int, Option("epochs after pruning, at most; 0: none", low=0)] = 10,
        retrain_lr: Annotated[float, Option("learning rate after pruning, as a share of the one before", above=0)] = 0.1,
        biases: Annotated[
            Literal["first", "task"], Option("biases stay as the first task leaves them, or every task has its own")
        ] = "first",
        norms: Annotated[
            Literal["task", "shared"], Option("every task has its own norms, or they stay as the first task leaves them")
        ] = "task",
    ) -> None:
        super().__init__(net)
        self.options = check(PackNet, locals())
        self.prune, self.retrain, self.retrain_lr = prune, retrain, retrain_lr
        self.norms = TaskNorms(net, shared=norms == "shared")
        self._sort_names(own_biases=biases == "task", own_norms=norms == "task")
        count = sum(weight.numel() for weight in self._parameters_named(self.packed))
        self.register_buffer("owner", torch.zeros(count, dtype=torch.int16, device=net.example.device))
        self.register_buffer("turns", torch.zeros(0, dtype=torch.int16, device=net.example.device))
        self.biases = nn.ParameterList()  # one vector per task, if each has its own
        self.freezes: list[Freeze] = []  # what earlier tasks hold while a task is learned
        self.grow()

    def _sort_names(self, *, own_biases: bool, own_norms: bool) -> None:
        """The parameters that tasks share: those that are packed, that stop after the first task, that each task has."""
        normed = [f"trunk.{name}" for name in own_tensors(self.net)]
        parts = ("trunk.", "heads.") if self.net.shared else ("trunk.",)
        found = {n: p for n, p in self.net.named_parameters() if n.startswith(parts) and p.requires_grad}
        self.packed = [name for name, p in found.items() if p.dim() >= 2 and name not in normed]
        biases = [name for name in found if name not in normed and name not in self.packed]
        self.own = biases if own_biases else []
        self.fixed = ([] if own_biases else biases) + ([] if own_norms else [name for name in normed if name in found])
        self.still = [] if own_norms else sorted({name.rpartition(".")[0] for name in normed})  # norms, as modules

    def _parameters_named(self, names: list[str]) -> list[nn.Parameter]:
        return [self.net.get_parameter(name) for name in names]

    def grow(self) -> None:
        """A place in the order, norms and biases for every task that the network knows of."""
        self.norms.grow(len(self.net.classes))
        for _ in range(len(self.turns), len(self.net.classes)):
            self.turns = torch.cat([self.turns, self.turns.new_zeros(1)])
            if self.own:
                self.biases.append(nn.Parameter(values(self._parameters_named(self.own)).detach().clone()))

    def train(self, mode: bool = True) -> Self:
        """Norms that tasks share keep their statistics once a task is finished."""
        super().train(mode)
        for name in self.still if mode and self.turns.any() else []:
            self.net.get_submodule(name).training = False
        return self

    # Forward

    def _own(self, task: int) -> dict[str, Tensor]:
        """The norms and biases of a task."""
        norms = {f"trunk.{name}": tensor for name, tensor in self.norms.of(task).items()}
        biases = pieces(self.biases[task], self._parameters_named(self.own)) if self.own else []
        return norms | dict(zip(self.own, biases, strict=True))

    def _seen(self, task: int) -> dict[str, Tensor]:
        """The packed weights as a task has them: 0 where it does not see them."""
        turn = self.turns[task]
        seen = (self.owner > 0) & (self.owner <= turn) | (turn == 0)
        weights = self._parameters_named(self.packed)
        chosen = [torch.where(s, weight, 0) for s, weight in zip(pieces(seen, weights), weights, strict=True)]
        return dict(zip(self.packed, chosen, strict=True))

    def _run(self, x: Tensor, task: int, weights: dict[str, Tensor]) -> Tensor:
        """The logits with these weights exchanged, and with the norms and biases of the task."""
        exchanged = weights | self._own(task)
        logits: Tensor = functional_call(self.net, exchanged, (x, task)) if exchanged else self.net(x, task)
        return logits

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        """Weights that came after the task are 0: selected, so that not even an infinity passes. While a task is learned,
        and before, it sees all weights."""
        self.grow()
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        self.net.check_task_id(task)
        return self._run(x, task, self._seen(task))

    # Learning

    def learn_task(self, task: Task, fit: Fit) -> None:
        self._give_up(task.index)
        turn = int(self.turns.max()) + 1
        self._hold(self.owner > 0)
        self.warn_if_full(task)
        first = fit(self, task)
        self._prune(turn)
        self._hold(self.owner != turn)  # the weights just pruned as well: they stay 0
        if self.retrain:
            fit(self, task, epochs=self.retrain, lr=self.retrain_lr * first.epochs[0].lr)
        elif not (self.norms.shared and self.turns.any()):  # shared ones stay as the first task leaves them
            self.norms.gather(self, task.index, task.train)  # statistics without the pruned weights
        self.turns[task.index] = turn

    def end_learning(self) -> None:
        self.freezes = []

    def _give_up(self, task: int) -> None:
        """The task counts as not learned. Later tasks read its weights; only what no finished task reads becomes free."""
        self.turns[task] = 0
        self.owner[self.owner > self.turns.max()] = 0

    def _hold(self, frozen: Tensor) -> None:
        """Before a fit: the weights that keep their bits; and, once a task is finished, what stops after the first."""
        weights = self._parameters_named(self.packed)
        masks = pieces(frozen, weights)
        self.freezes = [Freeze(weight, mask) for weight, mask in zip(weights, masks, strict=True) if mask.any()]
        if self.turns.any():
            fixed = self._parameters_named(self.fixed)
            self.freezes += [Freeze(p, torch.ones_like(p, dtype=torch.bool)) for p in fixed]

    @torch.no_grad()
    def _prune(self, turn: int) -> None:
        """In every layer the smallest of the free weights become 0 and stay free; the others get an owner."""
        weights = self._parameters_named(self.packed)
        for weight, owner in zip(weights, pieces(self.owner, weights), strict=True):
            free = owner == 0
            size = torch.where(free, weight.abs(), torch.inf).flatten()
            smallest = size.argsort(stable=True)[: round(self.prune * int(free.sum()))]
            owner[free] = turn
            owner.view(-1)[smallest] = 0
            weight[free & (owner == 0)] = 0

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(batch.task, int), "PackNet learns one task at a time"
        return F.cross_entropy(self._run(batch.x, batch.task, {}), batch.y)

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        for freeze in self.freezes:
            freeze.mask_grad()

    def constrain(self) -> None:
        """Weights of earlier tasks back to their exact bits; in the retraining, pruned ones back to 0."""
        for freeze in self.freezes:
            freeze.restore()

    # Looking at it

    def used_by(self, task: int) -> dict[str, Tensor]:
        """The weights that it reads, its norms, biases and head."""
        return self.used_of_network(task, self._seen(task) | self._own(task))

    def usage(self) -> dict[str, float]:
        """The share of the weights of every parameter that finished tasks own."""
        owners = pieces(self.owner, self._parameters_named(self.packed))
        return {name: (owner > 0).float().mean().item() for name, owner in zip(self.packed, owners, strict=True)}

    @torch.no_grad()
    def release(self, task: int) -> None:
        """Forget a task: its head, own norms and own biases are as at first, and what no other task reads is free."""
        if not 0 <= task < len(self.turns) or not self.turns[task]:
            raise ValueError(f"task {task} is not learned, so it has nothing to release")
        self._give_up(task)
        self.forget_task(task)
        self.norms.reset(self.net, task)
        if self.own:
            self.biases[task].copy_(values(self._parameters_named(self.own)))
        self.net.reset_head(task)
