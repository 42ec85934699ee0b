"""PMASK: Continual Learning with Hard Attention Parameter Masking (Raskoti, Ghimire; 003, the year and a link are not known)

HAT with a gate per weight instead of per unit. The paper leaves much open (docs/methods/pmask.md lists it); what it does not
specify is as in HAT (https://arxiv.org/abs/1801.01423). Gates of finished tasks are binary and stored as bits; those of the
paper need not be (`masks="soft"`).
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from hatrack.methods.fit import Fit
from hatrack.methods.growth.grow import try_growth
from hatrack.methods.growth.growth import GrowBelowOption, GrowByOption, GrowOption, Growth, grown_initial
from hatrack.methods.growth.wider import Wider
from hatrack.methods.method import Method
from hatrack.methods.parts.annealing import (
    LIMIT,
    MASKS,
    Anneal,
    Masks,
    ValidationOption,
    hardness,
    initial_embedding,
)
from hatrack.methods.parts.candidates import ReuseOption, RoomOption, check_options, weight_candidates
from hatrack.methods.parts.divisors import divisors
from hatrack.methods.parts.freeze import Freeze
from hatrack.methods.parts.masked_weights import Masked
from hatrack.methods.parts.partial_freeze import PartialFreeze
from hatrack.methods.parts.releasing import FreeOption, InitialValues, check_free, renew
from hatrack.methods.parts.task_norms import TaskNorms
from hatrack.methods.parts.usage import warn_if_full
from hatrack.methods.parts.vectors import pieces
from hatrack.methods.parts.weight_gates import (
    FinalGates,
    gated_names,
    gates_by_name,
    unpacked_masks,
    used_weights,
    widened_masks,
)
from hatrack.methods.release import releasing
from hatrack.methods.serving import ServedNetwork, ServedTask
from hatrack.methods.stored_images import ProbesOption, stored_images
from hatrack.networks.heads import grouped
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import Regime
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.task import Task
from hatrack.tracing.units import Units


class PMASK(Method):
    """Hard attention on single parameters: a gate per weight and task; the weights that a finished task uses are frozen.

    Every task learns an embedding per weight, whose sigmoid is the gate of the weight. Within an epoch the gates are
    annealed from soft to hard. A capacity term in the loss keeps a task from using more weights than it needs. Later tasks
    may use frozen weights, and train those that are still free.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list pmask`.

    Example:
        >>> method = hr.PMASK(hr.Network(trunk, tasks=tasks), smax=400, c=0.75)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/pmask.md for formulas, published values and results.
    """

    scenarios = ("task",)

    transient: ClassVar[tuple[str, ...]] = ("embeddings",)
    keeps: ClassVar = {"packed_masks": "masks", "embeddings": "masks"}
    same_step: ClassVar = ("embedding", "gate_lr", "validation")  # c is a number in the step

    packed_masks: Tensor  # (tasks, bytes): a bit per task and weight; soft ones are (tasks, weights), a number for each
    done: Tensor  # (tasks,): whether a task is finished
    embeddings: nn.Parameter | None  # (weights,), of the task being learned

    def __init__(
        self,
        net: Network,
        *,
        smax: Annotated[float, Option("hardness of the gates at the end of an epoch", low=1)] = 400.0,
        c: Annotated[float, Option("weight of the capacity term: larger uses fewer weights per task", low=0)] = 0.75,
        masks: Annotated[Masks, Option(MASKS, added=True)] = "binary",
        anneal: Annotated[
            Anneal, Option("reach smax in the last batch, or a little less as in HAT's authors' code")
        ] = "paper",
        embedding: Annotated[
            Literal["normal", "uniform"], Option("initial embeddings: N(0, 1), or U(0, 2) to start with every weight on")
        ] = "normal",
        gate_lr: Annotated[
            float,
            Option("learning rate of the embeddings, always plain SGD, times the weights per unit", above=0, high=1e30),
        ] = 0.05,
        norms: Annotated[
            Literal["task", "shared"], Option("normalisation of each task its own, or one that all tasks train")
        ] = "task",
        probes: ProbesOption = 0,
        free: FreeOption = "kept",
        reuse: ReuseOption = "allowed",
        room: RoomOption = 0,
        grow: GrowOption = "off",
        grow_below: GrowBelowOption = 0.5,
        grow_by: GrowByOption = 0.5,
        validation: ValidationOption = "loss",
    ) -> None:
        super().__init__(net)
        self.options = check(PMASK, locals())
        room = check_options(net, reuse, room, norms=norms, masks=masks)
        check_free(free, masks)
        self.stored_images = stored_images(probes, net.example)
        self.smax, self.c, self.kind, self.form, self.validation = smax, c, masks, FinalGates(masks, smax), validation
        self.anneal, self.embedding, self.gate_lr = anneal, embedding, gate_lr
        self.norms = TaskNorms(net, shared=norms == "shared", more=divisors(net))  # no gate may make a divisor 0
        self._count_weights()
        named = dict(zip(self.names, self.weights(), strict=True))
        self.initial = InitialValues(named) if free == "initial" or room else None
        self.candidates = weight_candidates(named, net.seed, room).to(net.example.device) if room else None
        self.register_buffer("packed_masks", self.form.store(torch.zeros(self.count))[None][:0])
        self.register_buffer("done", torch.zeros(0, dtype=torch.bool))
        self.register_parameter("embeddings", None)  # it and the next four are set by `learn_task`
        self.learning = 0  # the task being learned
        self.freezes: list[PartialFreeze] = []
        self.own: list[Tensor] = []  # with candidates: which weights are the task's own
        self.price = torch.zeros(0, dtype=torch.float32)  # (weights,): of the capacity term, 0 for weights that are used
        self.growth = Growth()
        self.on_new_tasks()
        try_growth(self)

    def _count_weights(self) -> None:
        """Find the parameters that have gates, and count their weights."""
        self.names = gated_names(self.net, self.norms)
        weights = self.weights()
        self.count = sum(w.numel() for w in weights)
        # The capacity term divides by the number of weights, HAT's by that of units. This factor makes up for it.
        self.per_unit = self.count / max(1, sum(len(w) for w in weights if w.dim() > 1))

    def weights(self) -> list[nn.Parameter]:
        """Return the parameters that have gates."""
        return [self.net.get_parameter(name) for name in self.names]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move also the prices and what is frozen, when `.to(device)` is called."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.net.example.device
        self.price = self.price.to(device)
        for partial in self.freezes:
            partial.to(device)
        return self

    def on_new_tasks(self) -> None:
        """Make masks for every task of the network: before a task is learned, those of its initial embeddings."""
        self.norms.grow(len(self.net.classes))
        device = self.net.example.device
        for task in range(len(self.done), len(self.net.classes)):
            self.packed_masks = torch.cat([self.packed_masks.to(device), self.form.store(self.initial_gates(task))[None]])
            self.done = torch.cat([self.done.to(device), self.done.new_zeros(1, device=device)])

    def _initial_embeddings(self, task: int) -> Tensor:
        """Return the embeddings (weights,) with which a task starts."""
        return initial_embedding(self.count, self.embedding, self.net, task, self.candidates)

    def initial_gates(self, task: int) -> Tensor:
        """Return the final gates (weights,) of the embeddings with which a task starts."""
        return self.form.of(self._initial_embeddings(task))

    # Forward

    def final_gates(self, task: int) -> Tensor:
        """Return the gates (weights,) of a finished task, or those that a task would have if it were finished now."""
        if self.embeddings is not None and task == self.learning:
            return self.form.of(self.embeddings)
        return self.form.read(self.packed_masks[task], self.count)

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        if (old := self.growth_of(task)) is not None:  # the task was learned before the trunk was widened
            return self.net.head(old.run(self.net, x, self._of_trunk(self._exchanged(task, self.gated_weights(task)))), task)
        return self.run(x, task, self.gated_weights(task))

    def gated_weights(self, task: int) -> list[Tensor]:
        """Return the weights as a task uses them: 0 where its gates are closed, at the width that it was learned at."""
        weights: list[Tensor] = [*self.weights()]
        gates = [*pieces(self.final_gates(task), weights)]
        if (old := self.growth_of(task)) is not None:
            own, names = old.tensors(self.net.trunk), [name.removeprefix("trunk.") for name in self.names]
            weights = [own[name] for name in names]
            gates = [old.places.narrow(name, gate) for name, gate in zip(names, gates, strict=True)]
        return [self.form.times(gate, w) for gate, w in zip(gates, weights, strict=True)]

    def _of_trunk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by their names in the trunk."""
        return {name.removeprefix("trunk."): tensor for name, tensor in tensors.items()}

    def run(self, x: Tensor, task: int, weights: list[Tensor]) -> Tensor:
        """Return the logits with these weights and the task's own norms."""
        return self.net.run_with(self._exchanged(task, weights), x, task)

    def _exchanged(self, task: int, weights: list[Tensor]) -> dict[str, Tensor]:
        """Return these weights and the task's own norms, by their names in the network."""
        norms = {f"trunk.{name}": tensor for name, tensor in self.norms.of(task).items()}
        return {**norms, **dict(zip(self.names, weights, strict=True))}

    def served(self, task: int) -> ServedTask:
        if (old := self.growth_of(task)) is not None:
            trunk = old.filled(self.net, self._of_trunk(self._exchanged(task, self.gated_weights(task))))
            return ServedNetwork(self.net, task, {}, trunk=trunk)
        return ServedNetwork(self.net, task, self._exchanged(task, self.gated_weights(task)))

    # Learning

    def learn_task(self, task: Task, fit: Fit) -> None:
        self.begin_task(task.index)
        warn_if_full(self, task.name) if self.candidates is None else self.candidates.check(task, fit)
        assert self.embeddings is not None
        fit(self, task, plain={self.embeddings: self.gate_rate})
        self.norms.recompute(self, task.index, task.train)  # with the final gates
        self.finish_task(task.index)

    def begin_task(self, task: int, embedding: nn.Parameter | None = None) -> None:
        """Freeze what finished tasks use. A task that was learned before is not among them, so that its weights become free.

        Args:
            task: the number of the task that is learned now.
            embedding: (weights,), a parameter to learn; it gets its initial values. None: a new one is made.
        """
        self.done[task] = False
        self._freeze_used_weights(task)
        self.learning, initial = task, self._initial_embeddings(task)
        if embedding is not None:
            embedding.data.copy_(initial)
        self.embeddings = nn.Parameter(initial) if embedding is None else embedding

    def finish_task(self, task: int) -> None:
        """Store the gates that a task has now as its final ones."""
        self.packed_masks[task] = self.form.store(self.final_gates(task))
        self.done[task] = True
        self.renew_free_weights()

    @property
    def gate_rate(self) -> float:
        """The learning rate of the embeddings."""
        return self.gate_lr * self.per_unit

    def used(self) -> Tensor:
        """Return which weights (weights,) any finished task uses; of soft gates the largest of all finished tasks."""
        return self.form.largest(self.packed_masks[self.done], self.count)

    def frozen_weights(self) -> list[Freeze]:
        """Return what is frozen while a task is learned, by parameter."""
        return [partial.freeze for partial in self.freezes]

    def end_learning(self) -> None:
        self.embeddings, self.freezes, self.own = None, [], []

    def _freeze_used_weights(self, task: int) -> None:
        """Freeze the weights that finished tasks use (as far as they do if gates are soft), or all but the candidates of the
        task if there are such; in the capacity term only what is free counts."""
        used, weights = self.used(), self.weights()
        if self.candidates is not None:
            used = ~self.candidates.of(task)
            self.own = pieces(~used, weights)
        free = 1 - used.float()
        self.price = free / free.sum().clamp(min=1e-6)
        given: dict[str, bool] = {"soft": self.kind == "soft", "empty": not used.any()}
        parts = zip(weights, pieces(used, weights), strict=True)
        self.freezes = [PartialFreeze(weight, share, **given) for weight, share in parts]

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the task with annealed gates, plus c times the capacity term."""
        assert isinstance(batch.task, int), "PMASK learns one task at a time"
        weights, capacity = self.masked(hardness(batch, self.smax, self.anneal))
        return batch.loss(self.run(batch.x, batch.task, weights)) + self.c * capacity

    def masked(self, s: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the weights times the gates of the task being learned, at hardness s, and the capacity term R (HAT's
        Eq. 5)."""
        weights: list[Tensor] = [*self.weights()]
        if self.own:  # all other weights count as 0, whatever their gates are, so that the task depends on no other one
            weights = [torch.where(own, weight, 0) for own, weight in zip(self.own, weights, strict=True)]
        given = (self.embeddings, s, self.smax, self.price, *weights)
        *weights, capacity = Masked.apply(*given)  # type: ignore[no-untyped-call]
        return weights, capacity

    @torch.no_grad()
    def validation_price(self, task: int) -> float:
        """Return c times the capacity term of the gates that the task has now, if the option `validation` asks for it."""
        return self.c * float(torch.dot(self.final_gates(task).float(), self.price)) if self.validation == "total" else 0.0

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        for partial in self.freezes:
            partial.mask_grad()

    def constrain(self) -> None:
        """Restore the bits of frozen weights and clamp the embeddings."""
        for partial in self.freezes:
            partial.restore(finite=self.kind == "soft")  # binary gates select by `where`, so that no infinity passes
        self.clamp_gates()

    def clamp_gates(self) -> None:
        """Clamp the embeddings of the task being learned."""
        assert self.embeddings is not None
        self.embeddings.clamp_(-LIMIT, LIMIT)

    def explain_divergence(self, regime: Regime) -> str:
        normed = [name for name in self.names if name.endswith((".weight_v", ".original1"))]
        if not normed:
            return super().explain_divergence(regime)
        what = f"{normed[0]} is divided by its norm, 0 where all gates of a unit are closed"
        return f"probably a division by 0: {what}: try a trunk without weight norm"

    # Inspecting and releasing

    def used_by(self, task: int) -> dict[str, Tensor]:
        """Return its weights, gates, norms and head. Soft gates and shared norms guarantee nothing."""
        if self.kind == "soft" or (self.norms.shared and self.norms.names):
            return {}
        return used_weights(self, task)

    def weight_masks(self, task: int) -> dict[str, Tensor]:
        """Return which weights a task uses, also if its masks are soft, by name: bools in the shape of the parameter."""
        self.net.check_task_id(task)
        return gates_by_name(self, self.final_gates(task) > 0.5)

    def usage(self) -> dict[str, float]:
        """Return the share of the weights of every layer that finished tasks use, without biases."""
        used = gates_by_name(self, (self.used() > 0.5).float())
        return {name: part.mean().item() for name, part in used.items() if part.dim() > 1}

    @torch.no_grad()
    def release(self, task: int, *, erase: bool = False) -> None:
        """Forget a task and free the weights that only it uses. The task is then as if it had never been learned.

        Args:
            task: the number of the task.
            erase: also give new values to all weights that no remaining task uses: the initial ones if the option `free` or
                `reuse` keeps them. A warning names what may hold traces of the task; docs/releasing.md has the rules.
        """
        with releasing(self, task, [], erase=erase):
            self.packed_masks[task] = self.form.store(self.initial_gates(task))

    def renew_free_weights(self, *, erase: bool = False) -> None:
        """Return weights that no finished task uses to their initial values, if these are kept; to erase, draw others."""
        if self.initial is not None or erase:
            weights = self.weights()
            used = dict(zip(self.names, pieces(self.used() > 0, weights), strict=True))
            renew(dict(zip(self.names, weights, strict=True)), used, self.initial, self.net.seed)

    # Growing

    def units_of(self, trunk: nn.Module) -> Units:
        """Return the units of a trunk."""
        return Units(trunk, self.net.example)

    def on_growth(self, wider: Wider) -> None:
        """Make norms and masks of the wider trunk. Finished tasks use none of its new weights."""
        masks = unpacked_masks(self)
        self.norms = TaskNorms(self.net, shared=self.norms.shared, more=divisors(self.net))
        self._count_weights()
        self.initial = grown_initial(self.initial, dict(zip(self.names, self.weights(), strict=True)), wider.places)
        self.packed_masks = widened_masks(self, masks, wider)
