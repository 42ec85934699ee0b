"""HAT: hard attention to the task (Serra, Suris, Miron, Karatzoglou, ICML 2018), https://arxiv.org/abs/1801.01423

Every task learns a gate per unit; units that a finished task uses keep the weights between them. Departures from the
paper, all by options: gates of finished tasks are binary (`masks="soft"` is the paper's), so nothing is forgotten at all,
not a bit; the gates have a learning rate of their own, since only plain SGD moves them; used weights are put back after
every update, so that momentum, Adam and weight decay can't move them either; norms are per task.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.annealing import Anneal, hardness
from hatrack.methods.parts.freeze import Freeze
from hatrack.methods.parts.task_norms import TaskNorms
from hatrack.networks.heads import grouped
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.seeds import generator
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.task import Task
from hatrack.tracing.units import Units

LIMIT = 6.0  # embeddings stay within the active range of a sigmoid


class PartialFreeze(NamedTuple):
    """What earlier tasks hold of one parameter while a new task is learned."""

    parameter: nn.Parameter
    freeze: Freeze
    share: Tensor | None = None  # soft masks: how much of an update is taken back,
    before: Tensor | None = None  # and the values that it begins with


class HAT(Method):
    """Hard attention to the task: gates per unit and task; what a finished task uses is frozen."""

    gates: Tensor
    done: Tensor
    frozen: Tensor

    def __init__(
        self,
        net: Network,
        *,
        smax: Annotated[float, Option("hardness of the gates at the end of an epoch", low=1)] = 400.0,
        c: Annotated[float, Option("weight of the capacity term: larger uses fewer units per task", low=0)] = 0.75,
        masks: Annotated[
            Literal["binary", "soft"], Option("gates of finished tasks: exactly 0 or 1, or the paper's sigmoid at smax")
        ] = "binary",
        protect: Annotated[
            Literal["paper", "exact"],
            Option("freeze the weights between used units, or only those whose two units one task uses together"),
        ] = "paper",
        anneal: Annotated[
            Anneal, Option("reach smax in the last batch, or a little less as in the authors' code")
        ] = "paper",
        embedding: Annotated[
            Literal["normal", "uniform"], Option("initial embeddings: N(0, 1), or U(0, 2) to start with every unit on")
        ] = "normal",
        gate_lr: Annotated[float, Option("learning rate of the embeddings, always plain SGD", above=0)] = 0.05,
        norms: Annotated[
            Literal["task", "shared"], Option("scale, shift and statistics of norms: a set per task, or one that all train")
        ] = "task",
        on_unknown: Annotated[
            Literal["freeze", "error"], Option("parameters that can't be followed: hold them whole, or refuse")
        ] = "freeze",
        leave: Annotated[str, Option("parts to hold whole after the first task, as patterns separated by commas")] = "",
    ) -> None:
        super().__init__(net)
        self.options = check(HAT, locals())
        self.smax, self.c, self.masks, self.protect = smax, c, masks, protect
        self.anneal, self.embedding, self.gate_lr = anneal, embedding, gate_lr
        self.units = Units(net.trunk, net.example, on_unknown=on_unknown, leave=leave)
        self.units.to(net.example.device)
        # Units of layers that the user froze: nothing can change them, so they stay open and cost nothing.
        self.register_buffer("frozen", self.units.frozen().to(net.example.device), persistent=False)
        self.norms = TaskNorms(net, shared=norms == "shared")
        self.embeddings = nn.ParameterList()  # (units,) per task
        self.register_buffer("gates", torch.zeros(0, self.units.count, dtype=torch.bool if masks == "binary" else None))
        self.register_buffer("done", torch.zeros(0, dtype=torch.bool))  # which tasks are finished
        self.learning = 0  # the task being learned; it and the next two are set anew by `learn`
        self.freezes: list[PartialFreeze] = []
        self.used = torch.zeros(self.units.count)  # how much finished tasks use every unit
        self.grow()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to(device)` comes here, and the numbers of the units must go along."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.units.to(self.net.example.device)
        return self

    def grow(self) -> None:
        """Embeddings and gates for every task that the network knows of."""
        self.norms.grow(len(self.net.classes))
        for task in range(len(self.embeddings), len(self.net.classes)):
            device = self.net.example.device
            self.embeddings.append(nn.Parameter(self._start(task).to(device)))
            self.gates = torch.cat([self.gates.to(device), self.gates.new_zeros(1, self.units.count, device=device)])
            self.done = torch.cat([self.done.to(device), self.done.new_zeros(1, device=device)])

    def _start(self, task: int) -> Tensor:
        """The embeddings that a task begins with."""
        e, source = torch.empty(self.units.count), generator(self.net.seed, "embedding", task)
        return e.normal_(generator=source) if self.embedding == "normal" else e.uniform_(0, 2, generator=source)

    # Forward

    def finished(self, task: int) -> Tensor:
        """The gates (units,) that a task has when it is finished, or would have if it were now."""
        e = self.embeddings[task]
        now = (e > 0) | self.frozen if self.masks == "binary" else self._open(torch.sigmoid(self.smax * e))
        return torch.where(self.done[task], self.gates[task], now)

    def _open(self, gates: Tensor) -> Tensor:
        return torch.where(self.frozen, 1.0, gates)

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        return self.net.head(self.units.run(x, self.finished(task), self.norms.of(task)), task)

    # Learning

    def learn_task(self, task: Task, fit: Fit) -> None:
        self.done[task.index] = False  # a task that is learned again gives up what it had
        self._hold()
        self.warn_if_full(task)
        self.learning = task.index
        fit(self, task, plain={self.embeddings[task.index]: self.gate_lr})
        self.norms.gather(self, task.index, task.train)  # statistics of the gates as they are from now on
        self.gates[task.index] = self.finished(task.index).detach()
        self.done[task.index] = True

    def end_learning(self) -> None:
        self.freezes = []

    @torch.no_grad()
    def _hold(self) -> None:
        """Before a task: what the finished tasks use of every unit and weight, and the values to keep."""
        finished = [self.gates[t].float() for t in range(len(self.gates)) if self.done[t]]
        self.used = torch.stack([torch.zeros_like(self.embeddings[0]), *finished]).amax(0)
        self.freezes = []
        if not finished:
            return
        everyone = [self.used] if self.protect == "paper" else finished
        spread = [self.units.weight_masks(gates) for gates in everyone]
        for name, parameter in self.net.trunk.named_parameters():
            if name in self.units.traced:
                self._keep(parameter, torch.stack([weights[name] for weights in spread]).amax(0))
        if self.net.shared:  # its outputs are used by all tasks; a head per task needs no protection
            features = torch.stack([self.units.feature_masks(gates.cpu()) for gates in everyone]).amax(0)
            head = self.net.heads[0]
            self._keep(head.get_parameter("weight"), features.expand_as(head.get_parameter("weight")))
            self._keep(head.get_parameter("bias"), torch.ones(()))

    def _keep(self, parameter: nn.Parameter, held: Tensor) -> None:
        if parameter.requires_grad:
            held = held.to(parameter.device)
            soft = () if self.masks == "binary" else (held.to(parameter.dtype), parameter.detach().clone())
            self.freezes.append(PartialFreeze(parameter, Freeze(parameter, held == 1), *soft))

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(batch.task, int), "HAT learns one task at a time"
        gates = self._open(torch.sigmoid(hardness(batch, self.smax, self.anneal) * self.embeddings[batch.task]))
        features = self.units.run(batch.x, without_denormals(gates), self.norms.of(batch.task))
        logits = self.net.head(features, batch.task)
        return F.cross_entropy(logits, batch.y) + self.c * self.capacity(gates)

    def capacity(self, gates: Tensor) -> Tensor:
        """R (Eq. 5): the share of the free units that the gates open; 0 when no unit is free."""
        free = torch.where(self.frozen, 0.0, 1 - self.used)
        return (gates * free).sum() / free.sum().clamp(min=1e-6)

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        """Mask the gradients of used weights (Eq. 2) and compensate those of the embeddings for the annealing (2.5)."""
        for parameter, freeze, _, before in self.freezes:
            freeze.mask_grad()
            if before is not None:
                before.copy_(parameter)
        assert isinstance(batch.task, int)
        e = self.embeddings[batch.task]
        if e.grad is not None:
            e.grad.mul_(compensation(e, hardness(batch, self.smax, self.anneal), self.smax))

    def constrain(self) -> None:
        """Used weights back to their exact bits, free ones finite (an infinity would pass a closed gate)."""
        for parameter, freeze, share, before in self.freezes:
            if share is not None and before is not None:  # Adam would make up for a smaller gradient
                parameter.lerp_(before, share)
            freeze.restore()
        self.embeddings[self.learning].clamp_(-LIMIT, LIMIT)

    # Afterwards

    def used_by(self, task: int) -> dict[str, Tensor]:
        """The weights between its units, its gates, norms and head; soft gates and shared norms hold nothing for good."""
        if self.masks == "soft" or (self.norms.shared and self.norms.names):
            return {}
        gates, trunk = self.gates[task].float().cpu(), dict(self.net.trunk.named_parameters())
        held = {name: mask == 1 for name, mask in self.units.weight_masks(gates).items() if name in self.units.traced}
        own = {f"trunk.{name}": torch.where(mask.to(trunk[name].device), trunk[name], 0) for name, mask in held.items()}
        own |= {f"trunk.{name}": tensor for name, tensor in self.norms.of(task).items()}
        if self.net.shared:
            weight = self.net.heads[0].get_parameter("weight")
            own["heads.0.weight"] = torch.where((self.units.feature_masks(gates) == 1).to(weight.device), weight, 0)
        return {**self.used_of_network(task, own), "gates": self.gates[task]}

    @torch.no_grad()
    def release(self, task: int) -> None:
        """Give up a task: what it alone used is free for later ones, and it is as a task that was never learned."""
        self.net.check_task_id(task)
        self.make_room()
        self.forget_task(task)
        self.done[task], self.gates[task] = False, 0
        self.embeddings[task].copy_(self._start(task))
        self.norms.reset(self.net, task)
        self.net.reset_head(task)

    def usage(self) -> dict[str, float]:
        """The share of the units of every layer that finished tasks use."""
        used = (self.gates[self.done] > 0.5).any(0).float()
        layers = [(name, units) for name, units in self.units.layers.items() if not self.frozen[units].all()]
        return {name: used[units].mean().item() for name, units in layers}


def without_denormals(gates: Tensor) -> Tensor:
    """Gates under 1e-12 become 1e-12, with the gradient they had. No sum in float32 would show the difference, but products
    of such gates are denormal numbers, which a CPU computes many times slower. Not 0: behind it a relu has no slope."""
    return gates + (gates.clamp(min=1e-12) - gates).detach()


def compensation(e: Tensor, s: Tensor, smax: float) -> Tensor:
    """The factor on the gradient of an embedding: smax (cosh(se) + 1) / (s (cosh(e) + 1)), with |se| clamped at 50."""
    return smax / s * (torch.cosh((s * e).clamp(-50, 50)) + 1) / (torch.cosh(e) + 1)
