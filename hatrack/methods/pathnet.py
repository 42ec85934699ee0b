"""PathNet (Fernando, Banarse, Blundell and others, 2017), https://arxiv.org/abs/1701.08734

Every layer has many small modules, and a task uses a few of each layer: its path, the winner of a tournament. The modules on
the path of a finished task are frozen. The tournament is that of the HAT authors' code (https://arxiv.org/abs/1801.01423),
with two paths at a time. Departures from it: the learning rate of a path falls between generations only; a module that a
path names twice in a layer counts once, as in the paper.
"""

import math
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from hatrack.methods.fit import Fit, FitResult
from hatrack.methods.method import Method
from hatrack.methods.parts.on_host import OnHost
from hatrack.methods.parts.snapshot import Snapshot
from hatrack.methods.parts.stages import Stage, stages, training_only
from hatrack.methods.parts.used_tensors import used_modules
from hatrack.methods.stored_images import ProbesOption, stored_images
from hatrack.networks.heads import grouped
from hatrack.networks.initial_weights import initialise
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.regime import LRSchedule
from hatrack.seeds import generator, seeded
from hatrack.tasks.split import TaskId
from hatrack.tasks.task import Task


class Choice(nn.Module):
    """The modules of one layer; its output is the sum over the modules on a path."""

    def __init__(self, parts: list[Stage]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, genes: list[int]) -> Tensor:
        first, *rest = [self.parts[gene](x) for gene in sorted(set(genes))]
        return sum(rest, start=first)  # type: ignore[no-any-return]


class Candidate(NamedTuple):
    """A path in the tournament, and its schedule of the learning rate."""

    path: Tensor  # (layers, active)
    schedule: LRSchedule


class PathNet(Method):
    """PathNet: every task goes through a few modules of each layer, found by a tournament and frozen afterwards.

    Two random paths are trained in turn for a few epochs each. The path with the higher validation loss is replaced by a
    mutated copy of the other, again and again. Modules of finished tasks are frozen; later paths may use them.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list pathnet`.

    Example:
        >>> method = hr.PathNet(hr.Network(trunk, tasks=tasks), modules=16)
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/pathnet.md for formulas, published values and results.
    """

    scenarios = ("task",)

    step_forms = "many"
    keeps: ClassVar = {"paths": "masks"}
    exchanges = False

    paths: Tensor  # (tasks, layers, active): the modules of every task; -1: not learned yet

    def __init__(
        self,
        net: Network,
        *,
        modules: Annotated[int, Option("modules to choose from in each layer", low=1, high=1000)] = 16,
        active: Annotated[int, Option("modules of each layer that a path goes through, at most", low=1, high=1000)] = 3,
        expand: Annotated[float, Option("width of a module, as a share of the network's layer", above=0, high=1000)] = 0.258,
        generations: Annotated[int, Option("rounds of the tournament, which share the epochs", low=1)] = 20,
        mutations: Annotated[float, Option("modules of a path that a mutation draws anew, on average", low=0)] = 1.0,
        probes: ProbesOption = 0,
    ) -> None:
        super().__init__(net)
        self.options = check(PathNet, locals())
        self.stored_images = stored_images(probes, net.example)
        if active > modules:
            raise ValueError(f"active must be at most {modules}, the number of modules, not {active}")
        self.count, self.active, self.expand = modules, active, expand
        self.generations, self.mutations = generations, mutations
        self.pattern = stages(net)
        self.choices = self._new_choices()  # one per layer
        self.heads = nn.ModuleList()  # one per task
        rows = torch.zeros(0, len(self.pattern), active, dtype=torch.int64, device=net.example.device)
        self.register_buffer("paths", rows)
        self.learning = -1  # the task being learned
        self.path: list[list[int]] = []  # the path that it is trained on at present
        self.read_paths = OnHost()
        self.on_new_tasks()

    @torch.no_grad()
    def _new_choices(self) -> nn.ModuleList:
        """Return all modules with their initial weights, which depend on the seed alone."""
        choices = nn.ModuleList()
        x = self.net.example.cpu()
        with seeded(self.net.seed, "modules"):
            for stage in self.pattern:
                width = max(1, int(self.expand * stage.width))
                parts = [stage.fresh(x, width) for _ in range(self.count)]
                x = parts[0](x)
                choices.append(Choice(parts))
            initialise(choices, self.net.init)
        self.features = x.shape[1]
        return choices.to(self.net.example)

    def on_new_tasks(self) -> None:
        for task in range(len(self.heads), len(self.net.classes)):
            self.heads.append(self.net.new_head(0 if self.net.shared else task, features=self.features))
            self.paths = torch.cat([self.paths, self.paths.new_full((1, *self.paths.shape[1:]), -1)])

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        if isinstance(task, Tensor):
            return grouped(self, x, task)
        self.net.check_task_id(task)
        # A task that is not learned yet uses the first module of every layer.
        path = self.path if task == self.learning else self.read_paths(self.paths)[task]
        for choice, genes in zip(self.choices, path, strict=True):
            x = choice(x, [max(0, gene) for gene in genes])
        return self.heads[task](x)  # type: ignore[no-any-return]

    # Learning

    def learn_task(self, task: Task, fit: Fit) -> None:
        self.learning = task.index
        frozen = self.used(without=task.index)
        self._reset_modules(frozen)
        self.paths[task.index] = self._tournament(task, fit, frozen)

    def end_learning(self) -> None:
        self.learning = -1

    def used(self, without: int = -1) -> set[tuple[int, int]]:
        """Return the modules (layer, number) on the paths of finished tasks.

        Args:
            without: a task whose path does not count, because it is learned again.
        """
        return {
            (layer, gene)
            for task, path in enumerate(self.paths.tolist())
            for layer, genes in enumerate(path)
            for gene in genes
            if task != without and gene >= 0
        }

    def part(self, layer: int, number: int) -> nn.Module:
        """Return a module."""
        return self.choices.get_submodule(f"{layer}.parts.{number}")

    def _reset_modules(self, frozen: set[tuple[int, int]]) -> None:
        """Give every module that is not frozen its initial weights."""
        initial = self._new_choices()
        for layer in range(len(self.choices)):
            for number in range(self.count):
                if (layer, number) not in frozen:
                    part = initial.get_submodule(f"{layer}.parts.{number}")
                    self.part(layer, number).load_state_dict(part.state_dict())

    def _tournament(self, task: Task, fit: Fit, frozen: set[tuple[int, int]]) -> Tensor:
        """Return the path with the lowest validation loss of all that were tried, and give the method its best weights."""
        regime = fit.regime.at(task.index)  # whose epochs are divided among the generations
        rounds = min(self.generations, regime.epochs)
        epochs = regime.epochs // rounds
        source = generator(self.net.seed, "tournament", task.index)
        two = [
            Candidate(random_path(len(self.pattern), self.active, self.count, source), LRSchedule(regime)) for _ in range(2)
        ]
        winner, lowest = 0, math.inf
        best: dict[nn.Module, Snapshot] = {}  # what was trained so far, as it was in the best state; the rest is as then
        for first in range(0, rounds * epochs, epochs):
            for k, candidate in enumerate(two):
                parts = self._trained(candidate, frozen, task)
                best |= {part: Snapshot(part) for part in parts if part not in best}
                loss = self._train(candidate, parts, task, fit, range(first, first + epochs))
                if loss < lowest:
                    winner, lowest, best = k, loss, {part: Snapshot(part) for part in best}
            for part, snapshot in best.items():
                snapshot.restore(part)
            if two[winner].schedule.finished:
                break
            path = two[winner].path
            two[1 - winner] = Candidate(mutated(path, self.mutations / path.numel(), self.count, source), LRSchedule(regime))
            two[1 - winner].schedule.lr = two[winner].schedule.lr
        return two[winner].path

    def _trained(self, candidate: Candidate, frozen: set[tuple[int, int]], task: Task) -> list[nn.Module]:
        """Return what a candidate trains: the head of the task, and the free modules of its path."""
        places = {(layer, gene) for layer, genes in enumerate(candidate.path.tolist()) for gene in genes}
        return [self.heads[task.index], *(self.part(*place) for place in sorted(places - frozen))]

    def _train(self, candidate: Candidate, parts: list[nn.Module], task: Task, fit: Fit, epochs: range) -> float:
        """Train these parts of a path. Return its validation loss, or its training loss without validation data."""
        self.path = candidate.path.tolist()
        with training_only(self, [p for part in parts for p in part.parameters()]):
            lr = candidate.schedule.start(epochs.start)
            # The state of the optimizer is not kept: it would be that of the other candidate.
            result: FitResult = fit(self, task, epochs=len(epochs), lr=lr, schedule="constant", keep_state=False)
        losses = [e.loss if e.valid_loss is None else e.valid_loss for e in result.epochs]
        for loss in losses:
            candidate.schedule.end(loss)
        return losses[result.best]

    # Inspecting

    def num_parameters(self) -> int:
        """Return the number of weights, without those of the original network, which is only the pattern."""
        return sum(p.numel() for p in [*self.choices.parameters(), *self.heads.parameters()])

    def used_by(self, task: int) -> dict[str, Tensor]:
        """Return its path, the modules on it, and its head."""
        path = self.paths[task].tolist()
        parts = {f"part {layer} {gene}": self.part(layer, gene) for layer, genes in enumerate(path) for gene in genes}
        return {**used_modules({**parts, "head": self.heads[task]}), "path": self.paths[task]}

    def usage(self) -> dict[str, float]:
        """Return the share of the modules of every layer that finished tasks use."""
        used = self.used()
        return {s.name: sum(k == layer for layer, _ in used) / self.count for k, s in enumerate(self.pattern)}


def random_path(layers: int, active: int, count: int, source: torch.Generator) -> Tensor:
    """Draw a path (layers, active) with different modules in each layer."""
    return torch.stack([torch.randperm(count, generator=source)[:active] for _ in range(layers)])


def mutated(path: Tensor, chance: float, count: int, source: torch.Generator) -> Tensor:
    """Return a copy in which every gene has moved, with that probability, by -2 to 2 modules, modulo their number."""
    changed = torch.rand(path.shape, generator=source) < chance
    steps = torch.randint(-2, 3, path.shape, generator=source)
    return torch.where(changed, (path + steps) % count, path)
