"""Images and other inputs from arrays: checked, brought into one form, and in known units."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hatrack.options import shown
from hatrack.tasks.transform import Transform

UNITS = 2.0  # images that were scaled to [0, 1] have no values beyond it


def hold_out(count: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw the examples held out for validation as the HAT paper's authors do; return their numbers, and the others'."""
    order = np.arange(count)
    np.random.RandomState(seed % 2**32).shuffle(order)
    held = int(share * count)
    return torch.from_numpy(order[:held]), torch.from_numpy(order[held:])


def normalisation(
    shape: Sequence[int], mean: float | Sequence[float], std: float | Sequence[float], scale: float = 1.0
) -> Transform:
    """Return the transform that divides images by `scale` and normalises them by one number, or by one per channel."""
    channels = shape[0] if len(shape) == 3 else 1
    table = []
    for name, value in (("mean", mean), ("std", std)):
        row = numbers(name, value).reshape(1, -1) * scale
        if row.shape[1] not in (1, channels):
            raise ValueError(f"{name} must be one number or {channels}, one per channel, not {value!r}")
        table.append(row.expand(1, channels).contiguous())
    if not table[0].isfinite().all():
        raise ValueError(f"mean must be finite, not {mean!r}")
    if not ((table[1] > 0) & table[1].isfinite()).all():
        raise ValueError(f"std must be finite and greater than 0, not {std!r}")
    return Transform(tuple(shape), *table)


def numbers(name: str, value: Any) -> Tensor:
    """Return one number or several as a tensor; raise a ValueError for anything else."""
    try:
        found = torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(0)
    if not found.numel():
        raise ValueError(f"{name} must be a number, or one per channel, not {shown(value)}")
    return found


def to_inputs(what: str, given: Any, labels: Any, *, tokens: bool = False, images: bool = True) -> Tensor:
    """Return images as (n, channels, height, width) or vectors as (n, features); or raise an error.

    Token ids stay whole numbers, int64. Inputs that are no images keep their shape.

    Args:
        what: names the data in errors.
        given: the images.
        labels: their labels, of which there must be as many.
        tokens: the inputs are token ids.
        images: the inputs are images or vectors.
    """
    x, y = (
        as_tensor(f"{what}: images must be numbers", given),
        as_tensor(f"{what}: labels must be whole numbers, or numbers", labels),
    )
    if not x.dim() or not y.dim():
        raise ValueError(f"{what}: images of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}")
    if len(x) != len(y):
        raise ValueError(f"{what}: {len(x)} images, but labels of shape {tuple(y.shape)}; one label per image is needed")
    if not len(x):
        raise ValueError(f"{what}: there are no images")
    if tokens:
        x = token_ids(what, x, flat=images)
    elif images:
        x = channels_first(what, x)
    if x.dim() < 2:
        raise ValueError(f"{what}: inputs must have 2 dimensions or more, (n, ...), not {x.dim()}")
    if x.is_complex() or not x[0].numel():
        raise ValueError(f"{what}: images must be real numbers, not {x.dtype} of shape {tuple(x.shape[1:])}")
    if x.dtype != torch.uint8 and not tokens:
        x = x.float()
        if not x.isfinite().all():
            raise ValueError(f"{what}: NaN or infinite values in {int((~x.isfinite()).flatten(1).any(1).sum())} images")
    return x


def token_ids(what: str, x: Tensor, *, flat: bool = True) -> Tensor:
    """Return token ids (n, length) as int64; raise an error if they are anything but whole numbers from 0.

    Args:
        what: names the data in errors.
        x: the token ids.
        flat: refuse those of more dimensions.
    """
    if (x.dim() != 2 and flat) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{what}: token ids must be whole numbers of shape (n, length), not {x.dtype} {tuple(x.shape)}")
    if x.numel() and int(x.min()) < 0:
        raise ValueError(f"{what}: token ids count from 0, not {int(x.min())}")
    return x.long()


def check_plain(what: str, mean: Any, std: Any, scale: Any) -> float:
    """Return the scale of token ids, 1; raise an error if they were to be normalised."""
    if scale is not None or torch.as_tensor(mean).any() or (torch.as_tensor(std) != 1).any():
        raise ValueError(f"{what}: token ids are taken as they are, without mean, std and scale")
    return 1.0


def channels_first(what: str, x: Tensor) -> Tensor:
    """Return gray images (n, height, width) and colour ones (n, height, width, 3 or 1) as (n, channels, height, width)."""
    if x.dim() == 3:
        return x[:, None]
    if x.dim() == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        return x.permute(0, 3, 1, 2).contiguous()
    if x.dim() not in (2, 4):
        raise ValueError(f"{what}: images must have 2 to 4 dimensions, not {x.dim()}")
    return x


def as_tensor(what: str, values: Any) -> Tensor:
    """Return values as a tensor, without a copy where possible: torch cannot share arrays that are read-only."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} ({error})") from None


Number = float | Sequence[float]


def in_units(
    what: str, train: Tensor, test: Tensor, mean: Number, std: Number, scale: float | None
) -> tuple[Tensor, Tensor, float]:
    """Check in which units images are.

    Bytes are always scaled to [0, 1]. Floats are not, so they must be in those units or state their scale: see
    `Task.from_arrays`.

    Returns:
        The training images, the test images, and the number by which the transform has to divide them.
    """
    scale = check_scale(scale)
    numbers("mean", mean)
    numbers("std", std)
    floats = [x for x in (train, test) if x.dtype != torch.uint8]
    if len(floats) == 2:
        return train, test, _scale_of_floats(what, train, test, mean, std, scale)
    if not floats and scale not in (None, 255):
        raise ValueError(f"{what}: bytes (uint8) are always divided by 255, so their scale is 255, not {scale:g}")
    if floats and scale is not None:  # one part has bytes, so both are kept in units of [0, 1]
        train, test = (x if x.dtype == torch.uint8 else x / scale for x in (train, test))
    highest = max((x.abs().max().item() for x in (train, test) if x.dtype != torch.uint8), default=0.0)
    if highest > UNITS:
        raise ValueError(
            f"{what}: either training or test images are bytes (uint8), which are scaled to 0 to 1, but the others are "
            f"floats up to {highest:g}; give both as bytes or both as floats"
        )
    if torch.as_tensor(mean).max() > 1:
        raise ValueError(f"{what}: bytes (uint8) are scaled to 0 to 1, and mean and std are in these units, not {mean!r}")
    return train, test, 1.0


def check_scale(scale: Any) -> float | None:
    """Return the scale as a float; raise an error unless it is None or a finite number greater than 0."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.integer | np.floating) or not 0 < scale < math.inf:
        raise ValueError(f"scale must be a number greater than 0, such as 255, not {scale!r}")
    return float(scale)


def _scale_of_floats(what: str, train: Tensor, test: Tensor, mean: Number, std: Number, scale: float | None) -> float:
    """Return the scale of images that are floats; raise an error if they look like bytes and nobody stated it."""
    lowest = min(train.min().item(), test.min().item())
    highest = max(train.max().item(), test.max().item())
    centre, spread = (torch.as_tensor(value).max().item() for value in (mean, std))
    if scale is None:
        if lowest >= 0 and highest > UNITS and centre <= 1 and spread <= 1:
            raise ValueError(
                f"{what}: values from {lowest:g} to {highest:g} look like bytes that are not scaled; state their scale: "
                "scale=255 divides them by 255, scale=1 takes them as they are (tokens=True for token ids)"
            )
        return 1.0
    if scale != 1 and centre * scale > 1.01 * highest:  # beyond all images, but for rounding
        raise ValueError(f"{what}: images are divided by scale={scale:g} first, and mean is in these units, not {mean!r}")
    return scale


def check_labels(what: str, y: Tensor, classes: int, *, every: bool) -> None:
    """Raise an error if a label is outside the classes or, where `every` asks for it, a class has no example."""
    if classes < 1:  # it was counted, as the largest label and one more
        raise ValueError(f"{what}: labels count from 0, and all are below it: the largest is {int(y.max())}")
    if int(y.min()) < 0 or int(y.max()) >= classes:
        wrong = int(y.max()) if int(y.max()) >= classes else int(y.min())
        raise ValueError(f"{what}: label {wrong} is outside the {classes} classes 0 to {classes - 1}")
    # In order. A count of every class would take memory for as many as are claimed.
    there: Tensor = y.unique()  # type: ignore[no-untyped-call]
    if every and len(there) < classes:
        gap = (there != torch.arange(len(there), device=y.device)).nonzero()
        missing = int(gap[0]) if len(gap) else len(there)
        raise ValueError(f"{what}: class {missing} of {classes} has no example (classes are counted from 0)")
