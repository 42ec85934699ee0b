"""HAT: hard attention to the task (Serra, Suris, Miron, Karatzoglou, ICML 2018), https://arxiv.org/abs/1801.01423

Every task learns a gate per unit. The weights between units that a finished task uses are frozen. Departures from the
paper, with options: gates of finished tasks are binary (the paper has `masks="soft"`), so that nothing is forgotten, not a
bit; the gates have their own learning rate, because they are always trained by plain SGD; frozen weights are restored after
every update, so that momentum, Adam and weight decay can't move them either; each task has its own norms.
"""

import copy
from collections.abc import Callable, Sequence
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
    AnnealedGates,
    Masks,
    SlopeOption,
    ValidationOption,
    exact_sigmoid,
    hardness,
    initial_embedding,
)
from hatrack.methods.parts.candidates import (
    ReuseOption,
    RoomOption,
    check_options,
    own_weights,
    unit_candidates,
    with_initial,
)
from hatrack.methods.parts.freeze import Freeze
from hatrack.methods.parts.partial_freeze import PartialFreeze
from hatrack.methods.parts.releasing import FreeOption, InitialValues, check_free, renew
from hatrack.methods.parts.task_norms import TaskNorms
from hatrack.methods.parts.unit_weights import shared_weights, used_weights, weight_shares
from hatrack.methods.parts.usage import layer_usage, warn_if_full, warn_of_trunk
from hatrack.methods.release import releasing
from hatrack.methods.serving import ServedNetwork, ServedTask
from hatrack.methods.stored_images import ProbesOption, stored_images
from hatrack.networks.heads import grouped
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.task import Task
from hatrack.text import held_whole
from hatrack.tracing.units import Units


class HAT(Method):
    """Hard attention to the task: gates per unit and task; what a finished task uses is frozen.

    Together with the weights, every task learns an embedding per unit, whose sigmoid is the gate of the unit. Within an
    epoch the gates are annealed from soft to hard. A capacity term in the loss keeps a task from using more units than it
    needs. Later tasks may read frozen units, and train the weights that are still free.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list hat`.

    Example:
        >>> method = hr.HAT(hr.Network(trunk, tasks=tasks), smax=400, c=0.75)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/hat.md for formulas, published values and results.
    """

    scenarios = ("task",)

    gates: Tensor  # (tasks, units), of finished tasks
    done: Tensor  # (tasks,): whether a task is finished
    frozen: Tensor  # (units,): units of layers that the user froze
    price: Tensor  # (units,): the gradient of c times the capacity term by every gate

    keeps: ClassVar = {"gates": "masks", "embeddings": "masks"}
    same_step: ClassVar = ("c", "embedding", "gate_lr", "validation")

    def __init__(
        self,
        net: Network,
        *,
        smax: Annotated[float, Option("hardness of the gates at the end of an epoch", low=1)] = 400.0,
        c: Annotated[float, Option("weight of the capacity term: larger uses fewer units per task", low=0)] = 0.75,
        masks: Annotated[Masks, Option(MASKS)] = "binary",
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
        probes: ProbesOption = 0,
        free: FreeOption = "kept",
        reuse: ReuseOption = "allowed",
        room: RoomOption = 0,
        grow: GrowOption = "off",
        grow_below: GrowBelowOption = 0.5,
        grow_by: GrowByOption = 0.5,
        validation: ValidationOption = "loss",
        slope: SlopeOption = "rounded",
    ) -> None:
        super().__init__(net)
        self.options = check(HAT, locals())
        room = check_options(net, reuse, room, norms=norms, masks=masks)
        check_free(free, masks)
        self.stored_images = stored_images(probes, net.example)
        self.smax, self.c, self.kind, self.protect = smax, c, masks, protect
        self.anneal, self.embedding, self.gate_rate, self.validation = anneal, embedding, gate_lr, validation
        self.slope = slope
        self.register_buffer("frozen", None, persistent=False)
        self._set_units(Units(net.trunk, net.example, on_unknown=on_unknown, leave=leave), shared_norms=norms == "shared")
        twin = copy.deepcopy(net.trunk).train()
        net.keep_frozen(twin)
        self.units.check_training(twin, torch.cat([net.example, net.example]))
        warn_of_trunk(self.units, self.held)
        self.initial = InitialValues(shared_weights(net, self.units)) if free == "initial" or room else None
        self.candidates = unit_candidates(self.units, net.seed, room).to(net.example.device) if room else None
        self.embeddings = nn.ParameterList()  # (units,) per task
        kind = torch.bool if masks == "binary" else torch.float32
        self.register_buffer("gates", torch.zeros(0, self.units.count, dtype=kind))
        self.register_buffer("done", torch.zeros(0, dtype=torch.bool))
        self.learning = 0  # the task being learned; it and the next three are set by `learn_task`
        self.freezes: list[PartialFreeze] = []
        self.own: dict[str, Tensor] = {}  # with candidates: which weights of the trunk are the task's own, by name
        # The largest gate of finished tasks, for every unit.
        self.used = torch.zeros(self.units.count, dtype=torch.float32, device=self.frozen.device)
        self._set_price()
        self.growth = Growth()
        self.on_new_tasks()
        try_growth(self)

    def _set_units(self, units: Units, *, shared_norms: bool) -> None:
        """Take the units of the trunk, and make norms for each task."""
        self.units, device = units, self.net.example.device
        units.to(device)
        self.held = units.held_whole()
        # Units of layers that the user froze can't change, so their gates are always open and need no capacity.
        self.frozen = units.frozen().to(device)
        self.any_frozen = bool(self.frozen.any())
        self.norms = TaskNorms(self.net, shared=shared_norms, more=sorted(units.per_task))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move also the tables of units and what is frozen, when `.to(device)` is called."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.net.example.device
        self.units.to(device)
        self.used, self.price = self.used.to(device), self.price.to(device)
        for partial in self.freezes:
            partial.to(device)
        return self

    def on_new_tasks(self) -> None:
        """Make embeddings and gates for every task of the network."""
        self.norms.grow(len(self.net.classes))
        for task in range(len(self.embeddings), len(self.net.classes)):
            device = self.net.example.device
            self.embeddings.append(nn.Parameter(self._initial_embedding(task)))
            self.gates = torch.cat([self.gates.to(device), self.gates.new_zeros(1, self.units.count, device=device)])
            self.done = torch.cat([self.done.to(device), self.done.new_zeros(1, device=device)])

    def _initial_embedding(self, task: int) -> Tensor:
        """Return the embedding (units,) with which a task starts."""
        return initial_embedding(self.units.count, self.embedding, self.net, task, self.candidates)

    # Forward

    def final_gates(self, task: int) -> Tensor:
        """Return the gates (units,) of a finished task, or those that a task would have if it were finished now."""
        e = self.embeddings[task]
        now = (e > 0) | self.frozen if self.kind == "binary" else self.soft_gates(e, self.smax)
        return torch.where(self.done[task], self.gates[task], now)

    def soft_gates(self, e: Tensor, s: Tensor | float) -> Tensor:
        """Return the gates (units,) of an embedding at hardness s (Eq. 1)."""
        sigmoid = torch.sigmoid if self.slope == "rounded" else exact_sigmoid
        return torch.where(self.frozen, 1.0, sigmoid(s * e))

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        if (old := self.growth_of(task)) is not None:  # the task was learned before the trunk was widened
            return self.net.head(old.run(self.net, x, self.norms.of(task), self.final_gates(task)), task)
        return self.net.head(self.units.run(x, self.final_gates(task), self.tensors(task)), task)

    def tensors(self, task: int) -> dict[str, Tensor]:
        """Return the task's own norms, by name. While it is learned and has candidates, also the weights of the trunk, with
        initial values in place of all that is not its own, so that it depends on no other task."""
        own = self.own if task == self.learning else {}
        return self.norms.of(task) | with_initial(self.net.trunk, own, self.initial)

    def served(self, task: int) -> ServedTask:
        if (old := self.growth_of(task)) is not None:
            trunk, gates = old.filled(self.net, self.norms.of(task)), self.final_gates(task)[old.places.units]
            return ServedNetwork(self.net, task, {}, old.units, gates, trunk)
        norms = {f"trunk.{name}": tensor for name, tensor in self.norms.of(task).items()}
        return ServedNetwork(self.net, task, norms, self.units, self.final_gates(task))

    # Learning

    def learn_task(self, task: Task, fit: Fit) -> None:
        self.begin_task(task.index)
        warn_if_full(self, task.name) if self.candidates is None else self.candidates.check(task, fit)
        fit(self, task, plain={self.embeddings[task.index]: self.gate_rate})
        self.norms.recompute(self, task.index, task.train)  # with the final gates
        self.finish_task(task.index)

    def begin_task(self, task: int, embedding: nn.Parameter | None = None) -> None:
        """Freeze what finished tasks use. A task that was learned before is not among them, so that its units become free.

        Args:
            task: the number of the task that is learned now.
            embedding: (units,), the parameter that is learned in place of the task's own; it gets its initial values.
        """
        self.done[task], self.learning = False, task
        self._freeze_used_weights()
        if embedding is not None:
            embedding.data.copy_(self._initial_embedding(task))
            self.embeddings[task] = embedding

    def finish_task(self, task: int) -> None:
        """Store the gates that a task has now as its final ones."""
        self.gates[task] = self.final_gates(task).detach()
        self.done[task] = True
        self.renew_free_weights()

    def frozen_weights(self) -> list[Freeze]:
        """Return what is frozen while a task is learned, by parameter."""
        return [partial.freeze for partial in self.freezes]

    def end_learning(self) -> None:
        self.freezes, self.own = [], {}

    @torch.no_grad()
    def _freeze_used_weights(self) -> None:
        """Compute which units the finished tasks use, and freeze the weights between them."""
        finished = list(self.gates[self.done].float())
        self.used = torch.stack([torch.zeros_like(self.embeddings[0]), *finished]).amax(0)
        protected = [self.used] if self.protect == "paper" and finished else finished  # all tasks together, or each
        shares, self.freezes = weight_shares(self, protected, together=self.protect == "paper"), []
        if self.candidates is not None:  # all but the candidates count as used
            mine = self.candidates.of(self.learning)
            self.used = (~mine).to(self.used)
            self.own = own_weights(self.units, mine)
            shares = {f"trunk.{name}": (~mask).float() for name, mask in self.own.items()}
        self._set_price()
        empty, soft = not finished and self.candidates is None, self.kind == "soft"
        for name, parameter in shared_weights(self.net, self.units).items():
            # What is held whole is trained by the first task, whatever the engine: see `Freeze`.
            share = torch.zeros_like(shares[name]) if empty else shares[name]
            self.freezes.append(PartialFreeze(parameter, share, soft=soft, empty=empty))

    def _set_price(self) -> None:
        """Compute the price of every gate."""
        free = self._free()
        total = free.sum().clamp(min=1e-6)
        self.price = free * (torch.full_like(total, self.c) / total)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the task with annealed gates, plus c times the capacity term (Eq. 4). Its gradient by the
        embedding is compensated for the annealing."""
        assert isinstance(batch.task, int), "HAT learns one task at a time"
        e, s = self.embeddings[batch.task], hardness(batch, self.smax, self.anneal)
        frozen = self.frozen if self.any_frozen else None
        gates, price = AnnealedGates.apply(e, s, self.smax, self.price, frozen, self.slope)  # type: ignore[no-untyped-call]
        features = self.units.run(batch.x, self.without_others(gates), self.tensors(batch.task))
        loss: Tensor = batch.loss(self.net.head(features, batch.task)) + price
        return loss

    def without_others(self, gates: Tensor) -> Tensor:
        """Close the gates of units that are no candidates: `used` is 1 for them. Those that the user froze stay open."""
        return gates if self.candidates is None else torch.where((self.used == 0) | self.frozen, gates, 0.0)

    def capacity(self, gates: Tensor) -> Tensor:
        """Return R (Eq. 5), the share of the free units that the gates open; 0 when no unit is free."""
        free = self._free()
        return (gates * free).sum() / free.sum().clamp(min=1e-6)

    def _free(self) -> Tensor:
        """Return how free every unit is (units,), from 0 to 1; those that the user froze are not."""
        return torch.where(self.frozen, 0.0, 1 - self.used)

    @torch.no_grad()
    def validation_price(self, task: int) -> float:
        """Return c times the capacity term of the gates that the task has now, if the option `validation` asks for it."""
        return self.c * float(self.capacity(self.final_gates(task))) if self.validation == "total" else 0.0

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        """Mask the gradients of used weights (Eq. 2). Those of the embeddings are compensated already (2.5)."""
        for partial in self.freezes:
            partial.mask_grad()

    def constrain(self) -> None:
        """Restore the bits of frozen weights, keep the others finite (infinity times a closed gate is not 0), and clamp the
        embedding."""
        for partial in self.freezes:
            partial.restore()
        self.clamp_gates()

    def clamp_gates(self) -> None:
        """Clamp the embedding of the task being learned."""
        self.embeddings[self.learning].clamp_(-LIMIT, LIMIT)

    # Inspecting

    def used_by(self, task: int) -> dict[str, Tensor]:
        """Return the weights between its units, its gates, norms and head. Soft gates and shared norms guarantee nothing."""
        if self.kind == "soft" or (self.norms.shared and self.norms.names):
            return {}
        return used_weights(self, task)

    def layer_masks(self, task: int) -> dict[str, Tensor]:
        """Return which units of every layer a task uses: bools (units of the layer,), by the layer's name."""
        return {name: self._open_units(task)[units] for name, units in self.units.layers.items()}

    def weight_masks(self, task: int) -> dict[str, Tensor]:
        """Return which weights lie between two units that a task uses, by name: bools in the shape of the parameter."""
        self.net.check_task_id(task)
        if self.candidates is not None:
            return own_weights(self.units, self._open_units(task))
        return self._between(self._open_units(task))

    def frozen_by(self, tasks: Sequence[int]) -> dict[str, Tensor]:
        """Return which weights can't change once these tasks are finished. By the paper's rule (Eq. 2) these are all those
        between two units that any of the tasks use, also if no task uses both."""
        if self.protect == "exact" or self.candidates is not None or not tasks:
            return super().frozen_by(tasks)
        return self._between(torch.stack([self._open_units(task) for task in tasks]).any(0))

    def _between(self, units: Tensor) -> dict[str, Tensor]:
        """Return which weights lie between two of these units (units,), by name, without those that the user froze."""
        shares, frozen = self.units.weight_masks(units.float()), self.built[1]
        return {name: share == 1 for name, share in shares.items() if name in self.units.traced and name not in frozen}

    @torch.no_grad()
    def _open_units(self, task: int) -> Tensor:
        """Return which units (units,) a task uses, also if its masks are soft."""
        return self.final_gates(task) > 0.5

    def usage(self) -> dict[str, float]:
        """Return the share of the units of every layer that finished tasks use, and 1 for what is held whole by them."""
        used = (self.gates[self.done] > 0.5).any(0).float()
        held = {held_whole(name, reason): float(self.done.any()) for name, reason in self.held.items()}
        return layer_usage(self.units, used, self.frozen) | held

    # Releasing

    @torch.no_grad()
    def release(self, task: int, *, erase: bool = False) -> None:
        """Forget a task and free the units that only it uses. The task is then as if it had never been learned.

        Args:
            task: the number of the task.
            erase: also give new values to all weights that no remaining task uses: the initial ones if the option `free` or
                `reuse` keeps them. A warning names what may hold traces of the task; docs/releasing.md has the rules.
        """
        with releasing(self, task, [name for name, n in self.units.held_elements().items() if n], erase=erase):
            self.gates[task] = 0
            self.embeddings[task].copy_(self._initial_embedding(task))

    def renew_free_weights(self, *, erase: bool = False) -> None:
        """Return weights that no finished task uses to their initial values, if these are kept; to erase, draw others."""
        if self.initial is not None or erase:
            used = {name: share > 0 for name, share in weight_shares(self, list(self.gates[self.done].float())).items()}
            renew(shared_weights(self.net, self.units), used, self.initial, self.net.seed)

    # Growing

    def units_of(self, trunk: nn.Module) -> Units:
        """Return the units of a trunk, traced with the options of this method."""
        if trunk is self.units.trunk:
            return self.units
        given = self.options["on_unknown"], self.options["leave"]
        return Units(trunk, self.net.example, on_unknown=given[0], leave=given[1])

    def on_growth(self, wider: Wider) -> None:
        """Make units, norms, gates and embeddings of the wider trunk. Finished tasks use none of its new units."""
        self._set_units(wider.units, shared_norms=self.norms.shared)
        gates, places = self.gates.new_zeros(len(self.gates), self.units.count), wider.places.units
        gates[:, places] = self.gates
        embeddings = [self._initial_embedding(task) for task in range(len(gates))]
        for new, before, done in zip(embeddings, self.embeddings, self.done.tolist(), strict=True):
            if done:
                new[places] = before.detach()
        self.gates, self.embeddings = gates, nn.ParameterList(embeddings)
        self.initial = grown_initial(self.initial, shared_weights(self.net, self.units), wider.places)
