"""PackNet: iterative pruning (Mallya, Lazebnik, CVPR 2018), https://arxiv.org/abs/1711.05769

A task trains the weights that are free, prunes the smallest of them and retrains the others, which it then owns. It uses its
own weights and those of the tasks learned before it, but none of later tasks, so that nothing is forgotten, not a bit.
Departures from the paper: by default each task has its own norms; owned weights are restored after every update, so that
momentum, Adam and weight decay can't move them either.
"""

import warnings
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.divisors import divisors
from hatrack.methods.parts.freeze import Freeze
from hatrack.methods.parts.releasing import note_renewed, renew, warn_of_traces
from hatrack.methods.parts.task_norms import TaskNorms, own_tensors
from hatrack.methods.parts.usage import warn_if_full
from hatrack.methods.parts.used_tensors import used_of_network
from hatrack.methods.parts.vectors import pieces, values
from hatrack.methods.release import check_release
from hatrack.methods.serving import ServedNetwork, ServedTask
from hatrack.methods.stored_images import ProbesOption, stored_images
from hatrack.networks.heads import grouped
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.task import Task
from hatrack.text import shorten


class PackNet(Method):
    """Iterative pruning: every task owns a share of the weights that were free, and reads those of the tasks before it.

    After training, the smallest of the free weights of every layer are set to 0 and become free again for later tasks. The
    others are retrained for a few epochs, and are frozen when the task is finished.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list packnet`.

    Example:
        >>> method = hr.PackNet(hr.Network(trunk, tasks=tasks), prune=0.75)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/packnet.md for formulas, published values and results.
    """

    scenarios = ("task",)

    step_forms = "two"
    keeps: ClassVar = {"owner": "masks", "turns": "masks"}

    owner: Tensor  # (weights that can be pruned,): the position of the task that owns a weight; 0: free
    turns: Tensor  # (tasks,): the position of every task in the order of learning, from 1; 0: not learned

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
        probes: ProbesOption = 0,
    ) -> None:
        super().__init__(net)
        self.options = check(PackNet, locals())
        self.stored_images = stored_images(probes, net.example)
        self.prune, self.retrain, self.retrain_lr = prune, retrain, retrain_lr
        self.norms = TaskNorms(net, shared=norms == "shared")
        self._classify_parameters(own_biases=biases == "task", own_norms=norms == "task")
        count = sum(weight.numel() for weight in self._parameters_named(self.packed))
        self.register_buffer("owner", torch.zeros(count, dtype=torch.int16, device=net.example.device))
        self.register_buffer("turns", torch.zeros(0, dtype=torch.int16, device=net.example.device))
        if self.fixed and not self.packed:
            warnings.warn(
                "every weight that PackNet could prune is frozen, and the first task alone trains "
                f"{shorten(', '.join(self.fixed), 100)}: biases='task' and norms='task' give every task its own",
                stacklevel=2,
            )
        self.biases = nn.ParameterList()  # one vector per task, if each has its own
        self.freezes: list[Freeze] = []  # weights that keep their bits in the present fit
        self.on_new_tasks()

    def _classify_parameters(self, *, own_biases: bool, own_norms: bool) -> None:
        """Sort the names of parameters: `packed` are pruned and owned, `own` exist once per task, `fixed` are trained by the
        first task only. `fixed_norms` names the norms, as modules, that are fixed; `divisors` are packed, but none of their
        rows may be 0, as the directions of weight norm."""
        normed = [f"trunk.{name}" for name in own_tensors(self.net)]
        parts = ("trunk.", "heads.") if self.net.shared else ("trunk.",)
        found = {n: p for n, p in self.net.named_parameters() if n.startswith(parts) and p.requires_grad}
        self.packed = [name for name, p in found.items() if p.dim() >= 2 and name not in normed]
        biases = [name for name in found if name not in normed and name not in self.packed]
        # Those of a task lie in one vector of real numbers.
        self.own = [name for name in biases if not found[name].is_complex()] if own_biases else []
        self.fixed = [name for name in biases if name not in self.own] + (
            [] if own_norms else [name for name in normed if name in found]
        )
        self.fixed_norms = [] if own_norms else sorted({name.rpartition(".")[0] for name in normed})
        packed = [name.removeprefix("trunk.") for name in self.packed if name.startswith("trunk.")]
        self.divisors = {f"trunk.{name}" for name in divisors(self.net, packed)}

    def _parameters_named(self, names: list[str]) -> list[nn.Parameter]:
        """Return the parameters of the network with these names."""
        return [self.net.get_parameter(name) for name in names]

    def on_new_tasks(self) -> None:
        """Make norms and biases for every task of the network."""
        self.norms.grow(len(self.net.classes))
        for _ in range(len(self.turns), len(self.net.classes)):
            self.turns = torch.cat([self.turns, self.turns.new_zeros(1)])
            if self.own:
                self.biases.append(nn.Parameter(values(self._parameters_named(self.own)).detach().clone()))

    def train(self, mode: bool = True) -> Self:
        """Set the mode. Once a task is finished, norms that tasks share stay in evaluation mode."""
        super().train(mode)
        for name in self.fixed_norms if mode and self.turns.any() else []:
            self.net.get_submodule(name).training = False
        return self

    # Forward

    def _own_tensors(self, task: int) -> dict[str, Tensor]:
        """Return the norms and biases of a task, by their names in the network."""
        norms = {f"trunk.{name}": tensor for name, tensor in self.norms.of(task).items()}
        biases = pieces(self.biases[task], self._parameters_named(self.own)) if self.own else []
        return norms | dict(zip(self.own, biases, strict=True))

    def _used(self, task: int) -> Tensor:
        """Return which packed weights a task uses, as one vector."""
        position = self.turns[task]
        return (self.owner > 0) & (self.owner <= position) | (position == 0)

    def _used_weights(self, task: int) -> dict[str, Tensor]:
        """Return the packed weights as a task uses them: 0 where a later task owns them. A task that is not learned yet uses
        all weights. They are selected by `where`, so that not even an infinity passes."""
        weights = self._parameters_named(self.packed)
        masks = pieces(self._used(task), weights)
        selected = [torch.where(mask, weight, 0) for mask, weight in zip(masks, weights, strict=True)]
        return dict(zip(self.packed, selected, strict=True))

    def _run(self, x: Tensor, task: int, weights: dict[str, Tensor]) -> Tensor:
        """Return the logits with these weights exchanged, and with the norms and biases of the task."""
        exchanged = weights | self._own_tensors(task)
        return self.net.run_with(exchanged, x, task) if exchanged else self.net(x, task)

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        return self._run(x, task, self._used_weights(task))

    def served(self, task: int) -> ServedTask:
        return ServedNetwork(self.net, task, self._used_weights(task) | self._own_tensors(task))

    # Learning

    def learn_task(self, task: Task, fit: Fit) -> None:
        self._free_weights_of(task.index)  # if it was learned before
        position = int(self.turns.max()) + 1
        self._freeze(self.owner > 0)
        warn_if_full(self, task.name)
        first = fit(self, task)
        self._prune(position)
        self._freeze(self.owner != position)  # also the pruned weights: they stay 0
        if self.retrain:
            fit(self, task, epochs=self.retrain, lr=self.retrain_lr * first.epochs[0].lr)
        elif not (self.norms.shared and self.turns.any()):  # shared norms stay as the first task leaves them
            self.norms.recompute(self, task.index, task.train)  # without the pruned weights
        self.turns[task.index] = position

    def end_learning(self) -> None:
        self.freezes = []

    def _free_weights_of(self, task: int) -> None:
        """Count a task as not learned, and free the weights that no finished task uses. (Later tasks use its weights.)"""
        self.turns[task] = 0
        self.owner[self.owner > self.turns.max()] = 0

    def _freeze(self, frozen: Tensor) -> None:
        """Freeze packed weights, given by a mask, and after the first task also what is fixed then."""
        weights = self._parameters_named(self.packed)
        masks = pieces(frozen, weights)
        self.freezes = [Freeze(weight, mask) for weight, mask in zip(weights, masks, strict=True) if mask.any()]
        if self.turns.any():
            fixed = self._parameters_named(self.fixed)
            self.freezes += [Freeze(p, torch.ones_like(p, dtype=torch.bool)) for p in fixed]

    @torch.no_grad()
    def _prune(self, position: int) -> None:
        """In every layer, set the smallest of the free weights to 0 and leave them free; the others get an owner."""
        weights = self._parameters_named(self.packed)
        for name, weight, owner in zip(self.packed, weights, pieces(self.owner, weights), strict=True):
            free = owner == 0
            size = torch.where(free, weight.abs(), torch.inf)
            count = round(self.prune * int(free.sum()))
            if name in self.divisors:  # a row of zeros has the length 0
                size = torch.where(_largest_of_slices(size), torch.inf, size)
                count = min(count, int(size.isfinite().sum()))
            smallest = size.flatten().argsort(stable=True)[:count]
            owner[free] = position
            owner.view(-1)[smallest] = 0
            weight[free & (owner == 0)] = 0

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(batch.task, int), "PackNet learns one task at a time"
        return batch.loss(self._run(batch.x, batch.task, {}))

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        for freeze in self.freezes:
            freeze.mask_grad()

    def constrain(self) -> None:
        """Restore the bits of the weights of earlier tasks; in the retraining, keep pruned weights at 0."""
        for freeze in self.freezes:
            freeze.restore()

    # Inspecting and releasing

    def used_by(self, task: int) -> dict[str, Tensor]:
        """Return the weights that it uses, its norms, biases and head."""
        return used_of_network(self.net, task, self._used_weights(task) | self._own_tensors(task))

    def weight_masks(self, task: int) -> dict[str, Tensor]:
        """Return which weights a task uses, its own and those of tasks before it, by name. While it is learned, its own are
        those that were kept when it was pruned."""
        self.net.check_task_id(task)
        owned = self._used(task) & (self.owner > 0)
        named = zip(self.packed, pieces(owned, self._parameters_named(self.packed)), strict=True)
        return {name.removeprefix("trunk."): part for name, part in named}

    def usage(self) -> dict[str, float]:
        """Return the share of the weights of every parameter that finished tasks own."""
        owners = pieces(self.owner, self._parameters_named(self.packed))
        return {name: (owner > 0).float().mean().item() for name, owner in zip(self.packed, owners, strict=True)}

    @torch.no_grad()
    def release(self, task: int, *, erase: bool = False) -> None:
        """Forget a task: free the weights that no other task uses, and reset its head, norms and biases.

        Args:
            task: the number of the task.
            erase: also give new values to all weights that no remaining task uses: 0, as pruned weights have; random ones
                if no task remains. A warning names what may hold traces of the task; docs/releasing.md has the rules.
        """
        check_release(self, task, self.turns, erase)
        if erase:
            alone = len(self.history) == 1
            warn_of_traces(
                self,
                task,
                self.fixed,
                f"{', '.join(self.fixed_norms[:3])} keep its values" if alone and self.fixed_norms else "",
            )
        self._free_weights_of(task)
        self.forget_task(task)
        self.norms.reset(self.net, task)
        if self.own:
            self.biases[task].copy_(values(self._parameters_named(self.own)))
        self.net.reset_head(task)
        if erase:
            self.net.preprocessing.reset(task)
            self._erase_free_weights()
            note_renewed(self, task)

    def _erase_free_weights(self) -> None:
        """Set all free weights to 0, as a task that was pruned leaves them; draw new ones if no task is learned, because a
        network of zeros learns nothing."""
        if self.turns.any():
            weights = self._parameters_named(self.packed)
            for weight, owner in zip(weights, pieces(self.owner, weights), strict=True):
                weight[owner == 0] = 0
        else:
            normed = tuple(f"{name}." for name in self.fixed_norms)  # drawn at random they would hardly be norms
            names = [*self.packed, *(name for name in self.fixed if not name.startswith(normed))]
            found = dict(zip(names, self._parameters_named(names), strict=True))
            renew(found, {name: torch.zeros_like(p, dtype=torch.bool) for name, p in found.items()}, None, self.net.seed)


def _largest_of_slices(values: Tensor) -> Tensor:
    """Return where the largest value of a row is, of a column, and of every slice along another dimension: bools."""
    dims = range(values.dim())
    largest = [values == values.amax([k for k in dims if k != d], keepdim=True) for d in dims]
    return torch.stack(largest).any(0)
