"""PMASK: Continual Learning with Hard Attention Parameter Masking (Raskoti, Ghimire; 003, the year and a link are not known)

HAT with a gate per weight instead of per unit. The paper leaves much open (docs/methods/pmask.md lists it); what it does not
say is as in HAT (https://arxiv.org/abs/1801.01423). Gates of finished tasks are binary and kept as bits.
"""

from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.annealing import Anneal, hardness
from hatrack.methods.parts.freeze import Freeze
from hatrack.methods.parts.task_norms import TaskNorms
from hatrack.methods.parts.vectors import pieces
from hatrack.networks.heads import grouped
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import Regime
from hatrack.seeds import generator
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.task import Task

LIMIT = 6.0  # embeddings stay within the active range of a sigmoid
CLOSED = 2e-22  # sigmoid(-50), rounded up
aten = torch.ops.aten


class PMASK(Method):
    """Hard attention on single parameters: a gate per weight and task; the weights that a finished task uses are frozen."""

    transient: ClassVar[tuple[str, ...]] = ("embeddings",)

    masks: Tensor
    done: Tensor
    embeddings: nn.Parameter | None

    def __init__(
        self,
        net: Network,
        *,
        smax: Annotated[float, Option("hardness of the gates at the end of an epoch", low=1)] = 400.0,
        c: Annotated[float, Option("weight of the capacity term: larger uses fewer weights per task", low=0)] = 0.75,
        anneal: Annotated[
            Anneal, Option("reach smax in the last batch, or a little less as in HAT's authors' code")
        ] = "paper",
        embedding: Annotated[
            Literal["normal", "uniform"], Option("initial embeddings: N(0, 1), or U(0, 2) to start with every weight on")
        ] = "normal",
        gate_lr: Annotated[
            float, Option("learning rate of the embeddings, always plain SGD, times the weights per unit", above=0)
        ] = 0.05,
        norms: Annotated[
            Literal["task", "shared"], Option("normalisation of each task its own, or one that all tasks train")
        ] = "task",
    ) -> None:
        super().__init__(net)
        self.options = check(PMASK, locals())
        self.smax, self.c, self.anneal, self.embedding, self.gate_lr = smax, c, anneal, embedding, gate_lr
        self.norms = TaskNorms(net, shared=norms == "shared")
        self.names = self._masked()
        weights = self.weights()
        self.count = sum(w.numel() for w in weights)
        # The capacity term divides by all weights, HAT's by all units: steps larger by this factor move as far as HAT's.
        self.per_unit = self.count / max(1, sum(len(w) for w in weights if w.dim() > 1))
        self.register_buffer("masks", torch.zeros(0, -(-self.count // 8), dtype=torch.uint8))  # a bit per task and weight
        self.register_buffer("done", torch.zeros(0, dtype=torch.bool))  # which tasks are finished
        self.register_parameter("embeddings", None)  # (weights,) of the task being learned; this and the next: see `learn`
        self.learning = 0
        self.freezes: list[Freeze] = []
        self.price = torch.zeros(0)
        self.grow()

    def _masked(self) -> list[str]:
        """The names of the parameters that have gates: those of the trunk but its norms, and of a head that tasks share."""
        norms = {f"trunk.{name}" for name in self.norms.names}
        parts = ("trunk.", "heads.") if self.net.shared else ("trunk.",)
        trained = [name for name, p in self.net.named_parameters() if p.requires_grad and name.startswith(parts)]
        if not set(trained) - norms:
            raise ValueError("pmask has no weights to mask: every part of the trunk is frozen")
        return [name for name in trained if name not in norms]

    def weights(self) -> list[nn.Parameter]:
        return [self.net.get_parameter(name) for name in self.names]

    def grow(self) -> None:
        """Masks for every task that the network knows of: before it is learned, those that it would start with."""
        self.norms.grow(len(self.net.classes))
        device = self.net.example.device
        for task in range(len(self.done), len(self.net.classes)):
            self.masks = torch.cat([self.masks.to(device), pack(self._start(task) > 0)[None]])
            self.done = torch.cat([self.done.to(device), self.done.new_zeros(1, device=device)])

    def _start(self, task: int) -> Tensor:
        """The embeddings (weights,) with which a task begins, whenever that is."""
        e, source = torch.empty(self.count), generator(self.net.seed, "embedding", task)
        e.normal_(generator=source) if self.embedding == "normal" else e.uniform_(0, 2, generator=source)
        return e.to(self.net.example.device)

    # Forward

    def finished(self, task: int) -> Tensor:
        """Which weights (weights,) a task uses, or would use if it were finished now."""
        if self.embeddings is not None and task == self.learning:
            return self.embeddings > 0
        return unpack(self.masks[task], self.count)

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        self.net.check_task_id(task)
        return self._run(x, task, self._open(task))

    def _open(self, task: int) -> list[Tensor]:
        """The weights as a task has them: 0 where its gates are closed."""
        weights = self.weights()
        gates = pieces(self.finished(task), weights)
        return [torch.where(gate, w, 0) for gate, w in zip(gates, weights, strict=True)]

    def _run(self, x: Tensor, task: int, weights: list[Tensor]) -> Tensor:
        """The logits with these weights and the task's own norms."""
        norms = {f"trunk.{name}": tensor for name, tensor in self.norms.of(task).items()}
        tensors = {**norms, **dict(zip(self.names, weights, strict=True))}
        return functional_call(self.net, tensors, (x, task))  # type: ignore[no-any-return]

    # Learning

    def learn_task(self, task: Task, fit: Fit) -> None:
        self.done[task.index] = False  # a task that is learned again gives up what it had
        self._hold()
        self.warn_if_full(task)
        self.learning, self.embeddings = task.index, nn.Parameter(self._start(task.index))
        fit(self, task, plain={self.embeddings: self.gate_lr * self.per_unit})
        self.norms.gather(self, task.index, task.train)  # statistics of the gates as they are from now on
        self.masks[task.index] = pack(self.embeddings > 0)
        self.done[task.index] = True

    def end_learning(self) -> None:
        self.embeddings, self.freezes = None, []

    def used(self) -> Tensor:
        """Which weights (weights,) any finished task uses."""
        used = self.masks.new_zeros(self.masks.shape[1])
        for row in self.masks[self.done]:
            used |= row
        return unpack(used, self.count)

    def _hold(self) -> None:
        """Before a task: the values to keep, and what it costs to open a weight, nothing if it is used anyway."""
        used, weights = self.used(), self.weights()
        free = (~used).float()
        self.price = free / free.sum().clamp(min=1)
        parts = zip(weights, pieces(used, weights), strict=True)
        self.freezes = [Freeze(weight, part) for weight, part in parts] if used.any() else []

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(batch.task, int), "PMASK learns one task at a time"
        weights, capacity = self.masked(hardness(batch, self.smax, self.anneal))
        return F.cross_entropy(self._run(batch.x, batch.task, weights), batch.y) + self.c * capacity

    def masked(self, s: Tensor) -> tuple[list[Tensor], Tensor]:
        """The weights times the gates of the task being learned, at hardness s, and the capacity term R (HAT's Eq. 5)."""
        given = (self.embeddings, s, self.smax, self.price, *self.weights())
        *weights, capacity = _Masked.apply(*given)  # type: ignore[no-untyped-call]
        return weights, capacity

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        for freeze in self.freezes:
            freeze.mask_grad()

    def constrain(self) -> None:
        """Used weights back to their exact bits."""
        for freeze in self.freezes:
            freeze.restore(finite=False)  # closed gates select: no infinity passes
        assert self.embeddings is not None
        self.embeddings.clamp_(-LIMIT, LIMIT)

    def explain_divergence(self, regime: Regime) -> str:
        normed = [name for name in self.names if name.endswith((".weight_v", ".original1"))]
        if not normed:
            return super().explain_divergence(regime)
        what = f"{normed[0]} is divided by its norm, 0 where all gates of a unit are closed"
        return f"probably a division by 0: {what}: try a trunk without weight norm"

    # Looking at it, and taking back

    def used_by(self, task: int) -> dict[str, Tensor]:
        """Its weights, gates, norms and head; norms that tasks share are held for nobody."""
        if self.norms.shared and self.norms.names:
            return {}
        own = {f"trunk.{name}": tensor for name, tensor in self.norms.of(task).items()}
        own |= dict(zip(self.names, self._open(task), strict=True))
        return {**self.used_of_network(task, own), "gates": self.masks[task]}

    def usage(self) -> dict[str, float]:
        """The share of the weights of every layer that finished tasks use; biases are too few to tell."""
        named = zip(self.names, pieces(self.used().float(), self.weights()), strict=True)
        return {name.removeprefix("trunk."): part.mean().item() for name, part in named if part.dim() > 1}

    @torch.no_grad()
    def release(self, task: int) -> None:
        """Forget a task: the weights that it alone used are free again."""
        self.net.check_task_id(task)
        self.make_room()
        self.forget_task(task)
        self.done[task] = False
        self.masks[task] = pack(self._start(task) > 0)
        self.norms.reset(self.net, task)
        self.net.reset_head(task)


class _Masked(torch.autograd.Function):
    """The weights times their gates a = sigmoid(se), and the capacity term: the share of the free weights that a opens.

    The gradient of e is compensated for the annealing as in HAT (2.5). The slope of the gate, s a (1 - a), times the factor
    smax (cosh(se) + 1) / (s (cosh(e) + 1)) is smax sigmoid(e) (1 - sigmoid(e)), because a (1 - a) = 1 / (2 (cosh(se) + 1)).
    Outside -50 < se < 50 there is none, and none where a is exactly 1, in float32 from about se = 17 on, as in HAT.
    """

    @staticmethod
    def forward(ctx: Any, e: Tensor, s: Tensor, smax: float, price: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        a = (s * e).clamp_(-50, 50).sigmoid_()  # clamped as in HAT; a CPU is slow with the numbers further out, too
        ctx.smax = smax
        ctx.save_for_backward(e, a, price, *weights)
        gates = pieces(a, weights)
        return *[(w * gate).to(w.dtype) for w, gate in zip(weights, gates, strict=True)], torch.dot(a, price)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        e, a, price, *weights = ctx.saved_tensors
        *outer, capacity = grads
        grad = price * (ctx.smax * capacity)  # smax times the gradient of a
        for part, g, w in zip(pieces(grad, weights), outer, weights, strict=True):
            part.addcmul_(g, w, value=ctx.smax)
        room = torch.sigmoid(e)  # afterwards its memory takes the gradients of the weights: new memory is slow to touch
        aten.sigmoid_backward.grad_input(grad, room, grad_input=grad)  # times sigmoid(e) (1 - sigmoid(e))
        aten.hardtanh_backward.grad_input(grad, a, CLOSED, 1, grad_input=grad)  # 0 unless CLOSED < a < 1
        parts = zip(outer, pieces(a, weights), pieces(room, weights), strict=True)
        return grad, None, None, None, *[torch.mul(g, gate, out=part) for g, gate, part in parts]


def pack(bits: Tensor) -> Tensor:
    """Booleans (count,) as bits of bytes (count / 8, rounded up,)."""
    rows = F.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """The first `count` bits of bytes as booleans."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1)[:count].bool()
