"""What a method keeps of its growth: the steps, the earlier generations, and which task was learned at which of them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from hatrack.methods.growth.generation import Generation
from hatrack.methods.growth.mapping import Places
from hatrack.methods.growth.wider import Wider
from hatrack.methods.parts.releasing import InitialValues
from hatrack.methods.parts.task_norms import TaskNorms
from hatrack.networks.network import Network
from hatrack.options import Option
from hatrack.tracing.units import Units

if TYPE_CHECKING:
    from hatrack.methods.method import Method

GrowOption = Annotated[
    Literal["off", "auto"],
    Option("widen the network when a task finds little room; finished tasks stay as they are", added=True),
]
GrowBelowOption = Annotated[
    float,
    Option(
        "with --grow auto, a layer grows if less than this share of its first width is free", above=0, high=1, added=True
    ),
]
GrowByOption = Annotated[
    float, Option("with --grow auto, by which share of its first width a layer grows", above=0, high=100, added=True)
]
STEPS, BORN = "steps", "born"  # the names of the tensors in a file


class Growable(Protocol):
    """What growing needs of a method."""

    net: Network
    growth: "Growth | None"
    norms: TaskNorms
    done: Tensor
    options: dict[str, Any]

    def units_of(self, trunk: nn.Module) -> Units:
        """Trace a trunk in the way of this method, or return the units of the present one."""

    def on_growth(self, wider: Wider) -> None:
        """Bring everything that depends on the width up to date: the trunk of the network is the wider one."""


class Growth(nn.Module):
    """The generations of a trunk. A method that never grew has none, and nothing of it is in its files.

    Attributes:
        generations: the trunk at its earlier widths, from the first.
        steps: for every time the trunk grew, the new widths of all layers in the order of the trace.
        born: the generation of every finished task that was learned at an earlier width.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generations = nn.ModuleList()
        self.steps: list[list[int]] = []
        self.born: dict[int, int] = {}

    def of(self, task: int) -> Generation | None:
        """Return the generation at which a finished task runs; None if that is the present trunk."""
        found = self.generations[self.born[task]] if task in self.born else None
        assert isinstance(found, Generation | None)
        return found

    def all(self) -> list[tuple[Generation, list[int]]]:
        """Return every generation with its tasks."""
        tasks = [[task for task, born in self.born.items() if born == k] for k in range(len(self.generations))]
        return [(g, own) for g, own in zip(self.generations, tasks, strict=True) if isinstance(g, Generation)]

    def add(self, generation: Generation, widths: Mapping[str, int], later: Places) -> None:
        """Note that the trunk has grown.

        Args:
            generation: the trunk as it was.
            widths: the new widths.
            later: the places of that trunk in the wider one.
        """
        for earlier, _ in self.all():
            earlier.places = earlier.places.then(later.to(earlier.places.units.device))
        self.generations.append(generation)
        self.steps = [*self.steps, list(widths.values())]

    # Files

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.steps:
            destination[prefix + STEPS] = torch.tensor(self.steps)
            destination[prefix + BORN] = torch.tensor(sorted(self.born.items())).view(-1, 2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **keywords: Any) -> None:
        """Read the tensors of the generations; `replay` has read the steps before."""
        own = {key: v for key, v in state_dict.items() if key not in (prefix + STEPS, prefix + BORN)}
        super()._load_from_state_dict(own, prefix, *args, **keywords)


def commit(method: "Growable", units: Units, widths: Mapping[str, int], wider: Wider, kept: list[int]) -> None:
    """Exchange the trunk of a method by a wider one.

    Args:
        method: the method.
        units: the units of the present trunk.
        widths: the new widths.
        wider: the wider trunk.
        kept: the finished tasks, which run at their old width from now on.
    """
    net, growth, norms = method.net, method.growth, method.norms
    assert growth is not None
    places = wider.places.to(net.example.device)
    own = {**dict(wider.trunk.named_parameters()), **dict(wider.trunk.named_buffers())}
    with torch.no_grad():  # the trunk's own norms are those of the first task, if it is learned again
        for name, value in zip(norms.names, norms.initial_values(), strict=True):
            places.put(name, own[name], value)
    generation = Generation(net.trunk, units, places, norms.names, net.features)
    growth.add(generation, widths, wider.places)
    growth.born = {**growth.born, **{task: len(growth.generations) - 1 for task in kept if task not in growth.born}}
    net.trunk, net.features = wider.trunk, wider.features
    method.on_growth(wider._replace(places=places))
    if method.norms.names != norms.names:
        raise ValueError("the network can't grow: the wider trunk has other norms")
    for task in range(len(net.classes)):
        if task in growth.born:
            method.norms.adopt(task, norms)
        else:
            net.heads[task] = net.new_head(task)
    net.train(net.training)


def to_present(method: "Growable", task: int) -> None:
    """Give a task that was learned at an earlier width a new head and new norms at the present one."""
    assert method.growth is not None
    if (generation := method.growth.of(task)) is not None:
        if task == 0:  # it has the trunk's own norms, which the generation keeps as they were
            generation.reset(dict(zip(method.norms.names, method.norms.initial_values(), strict=True)))
        method.growth.born = {t: born for t, born in method.growth.born.items() if t != task}
        method.net.heads[task] = method.net.new_head(task)
        method.norms.renew(method.net, task)


def to_generation(method: "Growable", task: int, number: int) -> None:
    """Give a task the shapes of an earlier generation, before its values are read from a file."""
    assert method.growth is not None
    method.growth.born = {**method.growth.born, task: number}
    generation = method.growth.of(task)
    assert generation is not None
    method.net.heads[task] = method.net.new_head(task, features=generation.features)
    tensors = dict(generation.named_parameters()) | dict(generation.named_buffers())
    method.norms.take(task, [tensors[generation.own[name]] for name in method.norms.names])


def grown_initial(initial: InitialValues | None, weights: Mapping[str, Tensor], places: Places) -> InitialValues | None:
    """Return the initial values of the weights of a wider trunk: those from before in their places, new ones around them.

    Args:
        initial: the initial values from before, by names that begin with "trunk."; None if they are not kept.
        weights: the weights of the wider trunk, by such names.
        places: where the weights from before lie in them.
    """
    if initial is None:
        return None
    wide = InitialValues(weights)
    for name in weights:
        places.put(name.removeprefix("trunk."), wide.of(name), initial.of(name))
    return wide


def remember(method: "Method") -> Callable[[], None]:
    """Return a function that gives a method and its parts, except those within the trunk, the attributes of now back."""
    inside = set(method.net.trunk.modules())
    tables = ("_parameters", "_buffers", "_modules")
    parts = [
        (part, {name: dict(value) if name in tables else value for name, value in vars(part).items()})
        for part in method.modules()
        if part not in inside
    ]

    def restore() -> None:
        for part, attributes in parts:
            vars(part).clear()
            vars(part).update(attributes)

    return restore
