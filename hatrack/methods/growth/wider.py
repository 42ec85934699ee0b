"""Build a wider trunk beside the old one: widen it, trace it, and find the old weights' places in it, or refuse."""

import linecache
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hatrack.methods.growth.mapping import Places, match
from hatrack.methods.growth.widen import widened
from hatrack.methods.growth.widths import grown_size
from hatrack.seeds import seeded
from hatrack.tracing.labels import Labels, labels_of
from hatrack.tracing.units import Units

LEVELS = (0, 1, 2, 3)  # see `set_users_widths`
OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))  # code that is not the user's
SHAPING = ("view", "reshape", "unflatten", "expand", "split", "chunk", "narrow", "repeat", "broadcast_to")
FAILURES = (RuntimeError, ValueError, AssertionError, IndexError, TypeError, ZeroDivisionError, AttributeError)
Shapes = dict[str, tuple[int, ...]]


class Wider(NamedTuple):
    """A wider trunk.

    Attributes:
        trunk: the trunk, with the old weights in their places and fresh ones around them.
        units: its units.
        places: where the units and weights of the old trunk lie in it.
        features: the width of its feature vector.
    """

    trunk: nn.Module
    units: Units
    places: Places
    features: int


def new_shapes(trunk: nn.Module, labels: Labels, widths: Mapping[str, int]) -> Shapes:
    """Return the new shapes of the tensors of a trunk that grow, by name.

    Args:
        trunk: the trunk.
        labels: its labels.
        widths: the new width of every layer.
    """
    old = {name: own.stop - own.start for name, own in labels.layers.items()}
    layer_of, found = labels.layer_of(), dict[str, list[int]]()
    tensors = {**dict(trunk.named_parameters()), **dict(trunk.named_buffers())}
    for (name, dim), row in labels.dims.items():
        size = grown_size(row, layer_of, old, widths)
        if size != len(row):
            found.setdefault(name, list(tensors[name].shape))[dim] = size
    return {name: tuple(shape) for name, shape in found.items()}


def build_wider(
    trunk: nn.Module,
    labels: Labels,
    shapes: Shapes,
    example: Tensor,
    trace: Callable[[nn.Module], Units],
    *,
    seed: int,
    number: int,
) -> Wider:
    """Return a wider trunk; raise a ValueError in one line, with the line of the user's code, if that is not possible.

    Args:
        trunk: the trunk, which stays as it is.
        labels: its labels.
        shapes: the new shapes of the tensors that grow.
        example: images on which the wider trunk is run.
        trace: makes the units of the wider trunk.
        seed: decides the values of the new weights.
        number: how often the trunk has grown before.
    """
    reasons = []
    for level in LEVELS:
        shaping = _Shaping({size for name in shapes for size in _sizes(trunk, name)})
        try:
            wide = widened(trunk, shapes, level, seed, number)
            features = _run(wide, example, shaping)
            units, places = _traced(wide, labels, trace)
        except FAILURES as error:
            reasons.append(_reason(error, shaping))
            continue
        _fill(wide, trunk, places)
        return Wider(wide, units, places, features)
    raise ValueError(f"the network can't grow: {reasons[0]}")


def _sizes(trunk: nn.Module, name: str) -> list[int]:
    tensor = {**dict(trunk.named_parameters()), **dict(trunk.named_buffers())}[name]
    return [size for size in tensor.shape if size > 1]


@torch.no_grad()
def _run(wide: nn.Module, example: Tensor, shaping: "_Shaping") -> int:
    """Run the wider trunk and return the width of its features."""
    mode = wide.training
    with seeded(0, "growth"), shaping:
        out = wide.eval()(torch.cat([example, example]))
    wide.train(mode)
    if not isinstance(out, Tensor) or out.dim() != 2 or len(out) != 2 * len(example):
        raise ValueError(f"a batch of {2 * len(example)} images became {tuple(out.shape)}")
    return out.shape[1]


def _traced(wide: nn.Module, labels: Labels, trace: Callable[[nn.Module], Units]) -> tuple[Units, Places]:
    """Return the units of the wider trunk, and the places of the old ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown when the method was made
        units = trace(wide)
    wide_labels = labels_of(units)
    for parts, groups in ((True, True), (False, True), (True, False)):
        with suppress(ValueError):
            return units, match(labels, wide_labels, parts=parts, groups=groups)
    return units, match(labels, wide_labels, parts=False, groups=False)


@torch.no_grad()
def _fill(wide: nn.Module, trunk: nn.Module, places: Places) -> None:
    """Write the old values into their places."""
    new = {**dict(wide.named_parameters()), **dict(wide.named_buffers())}
    for name, old in [*trunk.named_parameters(), *trunk.named_buffers()]:
        places.to(old.device).put(name, new[name], old)


class _Shaping(TorchFunctionMode):
    """Notes the first line of the user's code that gives an operation one of some sizes as a number.

    Args:
        sizes: sizes that have grown, so that the number is written out.
    """

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes, self.line = sizes, ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.line and getattr(func, "__name__", "") in SHAPING:
            numbers = [v for v in tree_leaves((args[1:], kwargs or {})) if isinstance(v, int)]
            if self.sizes.intersection(numbers):
                self.line = _line(sys._getframe())
        return func(*args, **(kwargs or {}))


def _reason(error: BaseException, shaping: _Shaping) -> str:
    """Return why a wider trunk does not run, in one line, with the line of the user's code."""
    frames, step = list[FrameType](), error.__traceback__
    while isinstance(step, TracebackType):
        frames.append(step.tb_frame)
        step = step.tb_next
    lines = (
        [shaping.line] if shaping.line else [found for frame in reversed(frames) if (found := _line(frame, up=False))][:1]
    )
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return f"{lines[0]} does not fit the new widths ({said})" if lines else said


def _line(frame: FrameType | None, *, up: bool = True) -> str:
    """Return the file, the number and the text of the innermost line that is the user's; empty if there is none."""
    while up and frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith((*OURS, "<")):
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}, line {line}: {linecache.getline(file, line).strip()}"
