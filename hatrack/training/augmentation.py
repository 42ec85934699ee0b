"""Augmentation of the training images by the Trainer: random crops and flips, or a function of the user's own."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from hatrack.engine.choice import Engine
from hatrack.options import nearest, shown
from hatrack.seeds import derive
from hatrack.tasks.items import keep_generators, seed_generators

Augment = Literal["crop-flip"] | Callable[[Tensor], Tensor] | None


def check_augment(augment: Any, engine: Engine) -> Augment:
    """Return what a Trainer was given as `augment`; raise an error in one line if it is none, or does not fit the engine."""
    if augment is None or augment == "crop-flip":
        return augment  # type: ignore[no-any-return]
    if not callable(augment):
        known = nearest(augment, ["crop-flip"]) if isinstance(augment, str) else "'crop-flip' or a function of images"
        raise ValueError(f"no augment {shown(augment)}; {known}")
    if engine not in ("auto", "eager"):
        raise ValueError(f"a function as augment runs eagerly: engine must be 'auto' or 'eager' beside it, not {engine!r}")
    return augment  # type: ignore[no-any-return]


def augmented(x: Tensor, function: Callable[[Tensor], Tensor], seed: int, epoch: int, step: int) -> Tensor:
    """Return the images of a step after a function of the user's own.

    Args:
        x: images as the network sees them.
        function: the function. What it draws from the generators of torch (on the CPU), NumPy and Python depends on the
            other arguments alone, and dropout goes on as if it had drawn nothing.
        seed: the seed of the fit.
        epoch: the number of the epoch.
        step: the number of the step in it.
    """
    with keep_generators(), torch.no_grad():
        seed_generators(derive(seed, "augment", epoch, step))
        found: Any = function(x)
    if not isinstance(found, Tensor) or found.shape != x.shape:
        got = f"{tuple(found.shape)}" if isinstance(found, Tensor) else shown(found)
        raise ValueError(f"augment must return images of the shape that it was given, {tuple(x.shape)}, not {got}")
    return found.to(x)
