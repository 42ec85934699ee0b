"""Images and labels from arrays, checked and brought into one form."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hatrack.tasks.transform import Transform

UNITS = 2.0  # floats beyond it are not in the units of bytes that are scaled to 0 to 1


def hold_out(count: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """The numbers of the examples held out for validation, and of the rest, as the HAT paper's authors draw them."""
    order = np.arange(count)
    np.random.RandomState(seed % 2**32).shuffle(order)
    held = int(share * count)
    return torch.from_numpy(order[:held]), torch.from_numpy(order[held:])


def normalisation(shape: Sequence[int], mean: float | Sequence[float], std: float | Sequence[float]) -> Transform:
    """The view of images as they lie, normalised by one number or one per channel."""
    channels = shape[0] if len(shape) == 3 else 1
    table = []
    for name, value in (("mean", mean), ("std", std)):
        row = torch.as_tensor(value, dtype=torch.float32).reshape(1, -1)
        if row.shape[1] not in (1, channels):
            raise ValueError(f"{name} must be one number or {channels}, one per channel, not {value!r}")
        table.append(row.expand(1, channels).contiguous())
    if not table[0].isfinite().all():
        raise ValueError(f"mean must be finite, not {mean!r}")
    if not (table[1] > 0).all():
        raise ValueError(f"std must be greater than 0, not {std!r}")
    return Transform(tuple(shape), *table)


def to_tensors(what: str, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Images as (n, channels, height, width), vectors as (n, features), labels as int64; or an error."""
    x, y = as_tensor(f"{what}: images must be numbers", x), as_tensor(f"{what}: labels must be whole numbers", y)
    if x.dim() and y.dim() and (len(x) != len(y) or y.dim() != 1):
        raise ValueError(f"{what}: {len(x)} images, but labels of shape {tuple(y.shape)}; one label per image is needed")
    if not x.dim() or not y.dim():
        raise ValueError(f"{what}: images of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}")
    if not len(x):
        raise ValueError(f"{what}: there are no images")
    x = channels_first(what, x)
    if x.is_complex() or not x[0].numel():
        raise ValueError(f"{what}: images must be real numbers, not {x.dtype} of shape {tuple(x.shape[1:])}")
    if x.dtype != torch.uint8:
        x = x.float()
        if not x.isfinite().all():
            raise ValueError(f"{what}: NaN or infinite values in {int((~x.isfinite()).flatten(1).any(1).sum())} images")
    if y.is_floating_point() and not (whole := y.isfinite() & (y == y.round())).all():
        raise ValueError(f"{what}: labels must be whole numbers, not {y[~whole][0].item()}")
    return x, y.long()


def channels_first(what: str, x: Tensor) -> Tensor:
    """Gray images (n, height, width) and colour images (n, height, width, 3 or 1) as (n, channels, height, width)."""
    if x.dim() == 3:
        return x[:, None]
    if x.dim() == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        return x.permute(0, 3, 1, 2).contiguous()
    if x.dim() not in (2, 4):
        raise ValueError(f"{what}: images must have 2 to 4 dimensions, not {x.dim()}")
    return x


def as_tensor(what: str, values: Any) -> Tensor:
    """Without a copy where that is possible: torch can't share arrays that are read-only."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} ({error})") from None


def check_units(what: str, train: Tensor, test: Tensor, mean: float | Sequence[float]) -> None:
    """Bytes are scaled to 0 to 1 and floats are not: an error if they can't be in the same units."""
    floats = [x for x in (train, test) if x.dtype != torch.uint8]
    if len(floats) == 1 and floats[0].abs().max() > UNITS:
        raise ValueError(
            f"{what}: bytes (uint8) are scaled to 0 to 1, but of the training and test images one are floats up to "
            f"{floats[0].abs().max().item():g}; give both as bytes or both as floats"
        )
    if len(floats) < 2 and torch.as_tensor(mean).max() > 1:
        raise ValueError(f"{what}: bytes (uint8) are scaled to 0 to 1, and mean and std are in these units, not {mean!r}")


def check_labels(what: str, y: Tensor, classes: int, *, every: bool) -> None:
    """Labels lie within the classes, and (where asked for) every class has an example."""
    if int(y.min()) < 0 or int(y.max()) >= classes:
        wrong = int(y.max()) if int(y.max()) >= classes else int(y.min())
        raise ValueError(f"{what}: label {wrong} is outside the {classes} classes 0 to {classes - 1}")
    # In order. A count of every class would take memory for as many as are claimed.
    there: Tensor = y.unique()  # type: ignore[no-untyped-call]
    if every and len(there) < classes:
        gap = (there != torch.arange(len(there), device=y.device)).nonzero()
        missing = int(gap[0]) if len(gap) else len(there)
        raise ValueError(f"{what}: class {missing} of {classes} has no example (classes are counted from 0)")
