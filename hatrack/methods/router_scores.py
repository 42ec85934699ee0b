"""How well an image fits a task, as a number that is larger for a better fit: a distance of features, energy and entropy.

Scores of two tasks can't be compared as they are, because each task has features and logits of its own. A calibration on
validation data of the task brings them to one scale: 0 is the median of the task's own images, and -1 their 5 % quantile.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SHRINK = 0.01  # the share of a covariance that is replaced by its mean variance, in all directions
MOST = 128  # principal directions in which a covariance is kept; in all others it is one variance
LOW = 0.05  # the quantile that a calibration brings to -1
TINY = 1e-6


class Gaussians(NamedTuple):
    """The features of a task as a mixture of one Gaussian per class with a shared covariance, and as a single Gaussian.

    Coordinates are those in which the shared covariance is the identity and that of the single Gaussian is diagonal.

    Attributes:
        centre: (features,), the mean of all features.
        basis: (directions, features), orthonormal rows: the leading principal directions.
        whiten: (directions, directions), from the projection on `basis` to the coordinates.
        means: (classes, directions), the mean of every class in coordinates.
        spread: (directions,), the variances of the single Gaussian in coordinates.
        rest: (2,), the variances of the mixture and of the single Gaussian in all directions that `basis` leaves out.
    """

    centre: Tensor
    basis: Tensor
    whiten: Tensor
    means: Tensor
    spread: Tensor
    rest: Tensor


def fit_gaussians(features: Tensor, labels: Tensor) -> Gaussians:
    """Fit both models to the features (images, features) of a task's training images; float32, computed in float64."""
    f = features.double()
    centre = f.mean(0)
    f = f - centre
    one_hot = (labels[:, None] == torch.unique(labels)).double()  # (images, classes that occur)
    means = (one_hot / one_hot.sum(0)).T @ f
    inner = f - one_hot @ means
    total, within = f.T @ f / len(f), inner.T @ inner / len(f)
    variances, directions = torch.linalg.eigh(total)
    varied = max(1, int((variances > TINY * variances[-1]).sum()))
    basis = directions[:, -min(varied, MOST) :].T
    shared, shared_rest = _shrunk(within, basis, varied, floor=TINY * total.trace() / varied)
    single, single_rest = _shrunk(total, basis, varied)
    # Simultaneous diagonalisation: L L^T = shared; the eigenvectors V of L^-1 single L^-T give whiten = V^T L^-1.
    lower = torch.linalg.cholesky(shared)
    half = torch.linalg.solve_triangular(lower, single, upper=False)
    spread, rotation = torch.linalg.eigh(torch.linalg.solve_triangular(lower, half.T, upper=False))
    whiten = torch.linalg.solve_triangular(lower.T, rotation, upper=True).T
    rest = torch.stack([shared_rest, single_rest])
    found = Gaussians(centre, basis, whiten, means @ basis.T @ whiten.T, spread, rest)
    return Gaussians(*(part.float().contiguous() for part in found))


def _shrunk(covariance: Tensor, basis: Tensor, varied: int, *, floor: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Return a covariance in a basis, shrunk towards its mean variance, and the variance in each direction left out."""
    inside = basis @ covariance @ basis.T
    mean = (covariance.trace() / varied).clamp(min=TINY**2).clamp(min=floor)
    left = (covariance.trace() - inside.trace()).clamp(min=0) / max(1, varied - len(basis))
    identity = torch.eye(len(basis), dtype=basis.dtype, device=basis.device)
    return (1 - SHRINK) * inside + SHRINK * mean * identity, (1 - SHRINK) * left + SHRINK * mean


def relative_distance(features: Tensor, model: Gaussians) -> Tensor:
    """Return for every image the squared Mahalanobis distance to the single Gaussian minus that to the nearest class.

    Args:
        features: (images, features).
        model: what `fit_gaussians` returned for the task.

    Returns:
        (images,), larger for images that look more like a class of the task than like its images in general.
    """
    x = features.float() - model.centre
    inside = x @ model.basis.T
    outside = (x.square().sum(1) - inside.square().sum(1)).clamp(min=0)  # the squared length of what the basis leaves out
    z = inside @ model.whiten.T
    nearest = (z[:, None] - model.means).square().sum(2).amin(1) + outside / model.rest[0]
    return (z.square() / model.spread).sum(1) + outside / model.rest[1] - nearest


def energy(logits: Tensor) -> Tensor:
    """Return the log of the sum of the exponentials of the logits (images,): the negative energy of every image."""
    return logits.float().logsumexp(1)


def certainty(logits: Tensor) -> Tensor:
    """Return the negative entropy (images,) of the predicted distribution of classes."""
    log = logits.float().log_softmax(1)
    return (log.exp() * log).sum(1)


def calibration(scores: Tensor) -> Tensor:
    """Return offset and scale (2,) for scores of a task's own images: the median, and its distance to the 5 % quantile."""
    low, middle = scores.double().quantile(torch.tensor([LOW, 0.5], dtype=torch.float64, device=scores.device))
    return torch.stack([middle, (middle - low).clamp(min=TINY)]).float()


def calibrated(scores: Tensor, offset_and_scale: Tensor) -> Tensor:
    """Return scores on the scale that is common to all tasks."""
    return (scores - offset_and_scale[0]) / offset_and_scale[1]
