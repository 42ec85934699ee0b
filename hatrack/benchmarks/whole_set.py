"""A whole data set of the catalog as one task with images like those of a benchmark, for pretraining."""

import math
from collections.abc import Sequence

from hatrack.benchmarks.mixture import COLOUR, Norm, colour_transform, norm_of
from hatrack.datasets import sources
from hatrack.datasets.catalog import SETS
from hatrack.datasets.sources import Source
from hatrack.options import choose
from hatrack.tasks.arrays import normalisation
from hatrack.tasks.split import shape_text
from hatrack.tasks.task import Task
from hatrack.tasks.transform import Transform

VALID = 0.15  # the share of the training set that is held out for validation


def whole_set(name: str, like: Sequence[Task], *, data: str = "full", seed: int = 0) -> Task:
    """Return all classes of a data set as one task that the network of a benchmark can be trained on.

    Its images are normalised as those of the benchmark if all tasks of that have one normalisation, so that layers that
    are frozen later see pixels of one scale; otherwise by the set's own mean and standard deviation. Gray images are made
    3x32x32 as in the benchmark `mixture` if the benchmark's images are.

    Args:
        name: a set of the catalog.
        like: the tasks of the benchmark.
        data: "full" for the complete set, "sample" for the images that come with the package.
        seed: decides which images are held out for validation.

    Raises:
        ValueError: if the images of the set can't be made like those of the benchmark.
    """
    _check_shape(name, like[0].shape)
    source = sources.load(name, data)
    transform = _transform(source, like)
    return Task.build(
        0, f"pretraining on {name}", source.classes, source.train, source.test, transform, valid=VALID, seed=seed
    )


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    """Raise an error, also if the set is not there, unless its images can be made like those of a benchmark."""
    raw = _channels_first(choose("data set", name, SETS).shape)
    if not _fits(raw, shape):
        names = [key for key, known in SETS.items() if _fits(_channels_first(known.shape), shape)]
        other = f"sets that can: {', '.join(names)}" if names else "no set of the catalog can"
        raise ValueError(f"{name} ({shape_text(raw)}) can't be made like the benchmark ({shape_text(shape)}); {other}")


def _transform(source: Source, like: Sequence[Task]) -> Transform:
    """Return how the network sees the images of a set."""
    images, shape = source.train[0], like[0].shape
    raw = tuple(images.shape[1:])
    plain = Norm(0.0, 1.0)
    seen = colour_transform(raw, plain) if shape == COLOUR else normalisation(shape, *plain)
    norm = _common_norm(like) or norm_of(images, seen)
    return colour_transform(raw, norm) if shape == COLOUR else normalisation(shape, *norm)


def _fits(raw: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether images of shape `raw` have this shape, or can be made 3x32x32."""
    return raw == shape or (shape == COLOUR and raw[0] in (1, 3) and max(raw[1:]) <= COLOUR[1])


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an image with its channels first; in the catalog they are last, and gray images have none."""
    return (shape[2], *shape[:2]) if len(shape) == 3 else (1, *shape)


def _common_norm(tasks: Sequence[Task]) -> Norm | None:
    """Return mean and standard deviation by which all tasks are normalised; None if they differ."""
    tables = {(tuple(t.mean[0].tolist()), tuple(t.std[0].tolist())) for t in (task.train.transform for task in tasks)}
    if len(tables) > 1 or not all(math.isfinite(value) for table in tables for part in table for value in part):
        return None
    return Norm(*tables.pop())
