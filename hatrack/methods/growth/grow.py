"""Growing a method: on request, by itself before a task that finds little room, and once more when a file is loaded."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hatrack.methods.growth.growth import BORN, STEPS, Growable, commit, remember, to_generation, to_present
from hatrack.methods.growth.wider import Shapes, build_wider, new_shapes
from hatrack.methods.growth.widths import Ties, new_widths, size_of, width_of, wished_widths
from hatrack.methods.guarantees import logits
from hatrack.networks.adapters import AdaptedTrunk
from hatrack.tasks.task import Task
from hatrack.text import is_held
from hatrack.tracing.labels import Labels, labels_of
from hatrack.tracing.units import Units

if TYPE_CHECKING:
    from hatrack.methods.method import Method

LISTED = 3  # layers named in one line
ROUNDING = 1e-6  # of shares, which are means of float32


def grow(method: "Method", by: Any, *, but: int | None = None) -> dict[str, tuple[int, int]]:
    """Widen the trunk of a method; see `Method.grow`.

    Args:
        method: the method.
        by: a share, or a mapping of layers to numbers of units or shares.
        but: a finished task that is about to be learned again, at the new width.
    """
    own = check_growable(method)
    units = own.units_of(method.net.trunk)
    labels = labels_of(units)
    widths = _widths(method, units, labels, by)
    old = {name: used.stop - used.start for name, used in units.layers.items()}
    kept = [task for task in own.done.nonzero().flatten().tolist() if task != but]
    before = {task: logits(method, task) for task in kept}
    undo = remember(method)
    try:
        _widen(method, units, labels, widths, kept)
        if changed := [task for task in kept if not torch.equal(logits(method, task), before[task])]:
            raise ValueError(f"the network can't grow: task {changed[0]} would no longer answer as it did")
    except BaseException:
        undo()
        raise
    return {name: (old[name], new) for name, new in widths.items() if new != old[name]}


def check_growable(method: "Method") -> Growable:
    """Return the method if it can grow; raise a ValueError in one line otherwise."""
    if method.growth is None:
        raise ValueError(f"{type(method).__name__} can't grow; hat and pmask can")
    own = cast("Growable", method)
    if len(method.net.heads) < len(method.net.classes) and not method.net.needs_no_task:  # that of a guard has no heads
        raise ValueError(
            "a protected backbone can't grow: the loop and the optimizer hold its modules, which growing replaces"
        )
    if own.options.get("reuse") == "never":
        raise ValueError("reuse='never' can't grow: it divides the network among tasks when the method is made; see `room`")
    if isinstance(method.net.trunk, AdaptedTrunk):
        raise ValueError("a trunk with adapters can't grow: its layers are frozen; a larger rank gives adapters more room")
    if method.net.needs_no_task:
        raise ValueError(f"a network with heads={method.net.kind!r} can't grow: heads='multi' gives every task its own head")
    if own.norms.shared and own.norms.names:
        raise ValueError("norms='shared' can't grow: finished tasks would change; norms='task' gives every task its own")
    if own.options.get("masks") == "soft":
        raise ValueError("masks='soft' can't grow: it does not keep finished tasks as they are; masks='binary' does")
    return own


def _widths(method: "Method", units: Units, labels: Labels, by: Any) -> dict[str, int]:
    """Return the new width of every layer."""
    ties = Ties(method.net.trunk, units, labels)
    if not isinstance(by, Mapping):
        ties.tie_equal()
    return new_widths(ties, wished_widths(by, units))


def _widen(
    method: "Method",
    units: Units,
    labels: Labels,
    widths: Mapping[str, int],
    kept: list[int],
    limits: Mapping[str, Tensor] | None = None,
) -> None:
    """Exchange the trunk by a wider one.

    Args:
        method: the method.
        units: the units of its trunk.
        labels: its labels.
        widths: the new widths.
        kept: the tasks that stay at the present width.
        limits: tensors of a file, by their names in the trunk: no shape may be larger.
    """
    own = check_growable(method)
    assert method.growth is not None
    shapes = new_shapes(method.net.trunk, labels, widths)
    if limits is not None:
        _check_limits(shapes, limits)
    given = (method.net.trunk, labels, shapes, method.net.example, own.units_of)
    wider = build_wider(*given, seed=method.net.seed, number=len(method.growth.steps))
    commit(own, units, widths, wider, kept)


def _check_limits(shapes: Shapes, limits: Mapping[str, Tensor]) -> None:
    for name, shape in shapes.items():
        known = limits.get(name)
        if known is None or len(shape) != known.dim() or any(a > b for a, b in zip(shape, known.shape, strict=True)):
            raise ValueError(f"it says that {name} has grown to {shape}, which does not fit its values")


# By itself


@contextmanager
def room_for(method: "Method", task: Task) -> Iterator[None]:
    """Make room for a task that is learned in the block. If that fails, the trunk has its old width again."""
    method.make_room()
    if method.growth is None:
        yield
        return
    undo, before = remember(method), (method.growth.steps, method.growth.born)
    try:
        prepare_trunk(method, task)
        yield
    except BaseException:
        if method.growth.steps is not before[0] or method.growth.born is not before[1]:
            undo()
        raise


def prepare_trunk(method: "Method", task: Task) -> None:
    """Prepare the trunk for a task: one that was learned at an earlier width gets the present one, and if a layer has too
    little room and the method grows by itself, it grows."""
    own = cast("Growable", method)
    to_present(own, task.index)
    if own.options.get("grow") != "auto":
        return
    below = own.options["grow_below"]
    if more := _units_to_add(method, below, own.options["grow_by"]):
        grown = _grow_some(method, more, but=task.index)
        named = [f"{name} from {old} to {new} units" for name, (old, new) in grown.items()]
        few = ", ".join(named[:LISTED]) + (f", ... ({len(named)} layers)" if len(named) > LISTED else "")
        found = ", ".join([*more][:LISTED]) + (" ..." if len(more) > LISTED else "")
        warnings.warn(f"task {task.name!r} finds under {below:.0%} free in {found}; widened: {few}", stacklevel=5)


def _units_to_add(method: "Method", below: float, by: float) -> dict[str, int]:
    """Return how many units the layers need of which too little is free, by their names in `usage`.

    What is free is compared with the first size of the layer, and a layer grows by shares of its first width, until enough
    is free. Shares of the present width would grow exponentially, because a task takes a share of what is free.

    Args:
        method: the method.
        below: a layer grows if less than this share of its first size is free.
        by: the share of its first width by which it grows, or a multiple of it.
    """
    assert method.growth is not None
    own = cast("Growable", method)
    now = own.units_of(method.net.trunk)
    generations = method.growth.all()
    first = generations[0][0].units if generations else now
    found = {}
    for name, used in method.usage().items():
        if is_held(name):
            continue
        free = (1 - used) * size_of(now, name) / size_of(first, name)
        if free < below - ROUNDING:
            steps = math.ceil((below - free) / by - ROUNDING)
            found[name] = max(1, round(steps * by * width_of(first, name)))
    return found


def _grow_some(method: "Method", more: Mapping[str, int], *, but: int | None) -> dict[str, tuple[int, int]]:
    """Widen some layers by numbers of units or, if these can't grow without the others, all of them in proportion."""
    try:
        return grow(method, more, but=but)
    except ValueError:
        now = cast("Growable", method).units_of(method.net.trunk)
        return grow(method, max(units / width_of(now, name) for name, units in more.items()), but=but)


def try_growth(method: "Method") -> None:
    """Raise a ValueError in one line if the method shall grow by itself and could not; nothing is changed."""
    if cast("Growable", method).options["grow"] != "auto":
        return
    own = check_growable(method)
    units = own.units_of(method.net.trunk)
    labels = labels_of(units)
    widths = _widths(method, units, labels, own.options["grow_by"])
    shapes = new_shapes(method.net.trunk, labels, widths)
    build_wider(method.net.trunk, labels, shapes, method.net.example, own.units_of, seed=method.net.seed, number=0)


# From a file


def replay(method: "Method", state: Mapping[str, Tensor], prefix: str) -> None:
    """Widen the trunk by the steps that a state_dict tells, so that its tensors fit.

    Args:
        method: the method; it may have grown by some of the steps already.
        state: the state_dict.
        prefix: what stands in front of the names of the method's own tensors in it.
    """
    steps, born = state.get(f"{prefix}growth.{STEPS}"), state.get(f"{prefix}growth.{BORN}")
    if steps is None or born is None or method.growth is None:
        return
    own = check_growable(method)
    first = f"{prefix}net.trunk."
    limits = {name.removeprefix(first): value for name, value in state.items() if name.startswith(first)}
    if steps.dim() != 2 or born.dim() != 2 or born.shape[1] != 2 or steps.is_floating_point() or born.is_floating_point():
        raise ValueError("its steps of growth are damaged")
    rows: list[list[int]] = steps.tolist()
    if method.growth.steps != rows[: len(method.growth.steps)]:
        raise ValueError("it has grown in other steps")
    for row in rows[len(method.growth.steps) :]:
        units = own.units_of(method.net.trunk)
        old = [used.stop - used.start for used in units.layers.values()]
        if len(row) != len(old) or any(b < a for a, b in zip(old, row, strict=True)):
            raise ValueError("its steps of growth don't fit the layers of the trunk")
        _widen(method, units, labels_of(units), dict(zip(units.layers, row, strict=True)), [], limits)
    wanted = dict[int, int](born.tolist())
    if not all(0 <= task < len(method.net.classes) and 0 <= k < len(rows) for task, k in wanted.items()):
        raise ValueError("its steps of growth name tasks that it has not")
    for task in range(len(method.net.classes)):  # a task that has its shapes already keeps its modules
        if method.growth.born.get(task) != wanted.get(task):
            to_present(own, task)
            if task in wanted:
                to_generation(own, task, wanted[task])
