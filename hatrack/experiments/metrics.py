"""Measures of matrices. Entry [t, i] is the accuracy (or loss) on task i after learning task t, both counted from 0."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]


def matrix(values: ArrayLike) -> Matrix:
    """Return the values as a square array in float64."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
        raise ValueError(f"a T x T matrix is needed, not one of shape {array.shape}")
    return array


def mean(values: ArrayLike) -> float:
    """Return the mean of a list; NaN if one of the values is None."""
    return float(np.asarray(values, dtype=np.float64).mean())


def average_accuracy(accuracy: ArrayLike) -> float:
    """A_T = 1/T sum_i a[T, i]: the mean accuracy over all tasks at the end."""
    return float(matrix(accuracy)[-1].mean())


def average_accuracies(accuracy: ArrayLike) -> Matrix:
    """A_t for every t: the mean accuracy over the tasks learned so far."""
    a = matrix(accuracy)
    return np.array([a[t, : t + 1].mean() for t in range(len(a))])


def learning_accuracy(accuracy: ArrayLike) -> float:
    """1/T sum_i a[i, i]: the accuracy on each task immediately after it was learned."""
    return float(np.diag(matrix(accuracy)).mean())


def forgetting(accuracy: ArrayLike) -> float:
    """1/(T-1) sum_{i<T} max_{i<=t<T} (a[t, i] - a[T, i]): the drop from a task's best accuracy since it was learned.

    It is exactly 0 if no accuracy changes after a task was learned, and 0 for a single task.
    """
    a = matrix(accuracy)
    return float(np.mean([a[i:-1, i].max() - a[-1, i] for i in range(len(a) - 1)])) if len(a) > 1 else 0.0


def forgetting_mirzadeh(accuracy: ArrayLike) -> float:
    """1/(T-1) sum_{i<T} max_{t<T} (a[t, i] - a[T, i]): the drop from a task's best accuracy at any time before the end.

    This is the definition of Mirzadeh et al. 2020. It counts what a task had by chance before it was learned.
    """
    a = matrix(accuracy)
    return float((a[:-1, :-1].max(0) - a[-1, :-1]).mean()) if len(a) > 1 else 0.0


def intransigence(accuracy: ArrayLike, independent: ArrayLike) -> float:
    """1/T sum_i (b[i, i] - a[i, i]): how much better a network of its own learns each task (after Chaudhry et al. 2018).

    `independent` is b, the accuracy matrix of the method of that name; of both, only the diagonal is used.
    """
    a, b = matrix(accuracy), matrix(independent)
    if len(a) != len(b):
        raise ValueError(f"the matrices are of {len(a)} and {len(b)} (independent) tasks")
    return float((np.diag(b) - np.diag(a)).mean())


def loss_forgetting(loss: ArrayLike) -> float:
    """1/(T-1) sum_{i<T} (L[T, i] - L[i, i]): the rise of a task's loss since it was learned (Mirzadeh et al. 2020)."""
    return _change(matrix(loss))


def backward_transfer(accuracy: ArrayLike) -> float:
    """1/(T-1) sum_{i<T} (a[T, i] - a[i, i]): how later tasks change the accuracy on earlier ones; negative: forgotten."""
    return _change(matrix(accuracy))


def forward_transfer(accuracy: ArrayLike, before: ArrayLike) -> float:
    """1/(T-1) sum_{i>1} (a[i-1, i] - b[i]): how much earlier tasks help with a task before it is learned.

    `before` is b, the accuracy of the untrained network on every task.
    """
    a, b = matrix(accuracy), np.asarray(before, dtype=np.float64)
    if b.shape != (len(a),):
        raise ValueError(f"one value per task is needed, {len(a)}, not values of shape {b.shape}")
    return float((np.diag(a, 1) - b[1:]).mean()) if len(a) > 1 else 0.0


def forgetting_ratios(accuracy: ArrayLike, joint: ArrayLike, random: ArrayLike, *, growing: bool = False) -> Matrix:
    """rho<=t for every t (Serra et al. 2018, Eq. 6): 0 is as good as joint training on the tasks so far, -1 as guessing.

    Args:
        accuracy: the accuracy matrix of the method.
        joint: that of joint training.
        random: that of guessing. Of it, only the diagonal is used: how well one guesses a task does not depend on others.
        growing: the classes of all tasks so far are told apart (the scenario "class"), so that it does, and all of `random`
            is used.
    """
    a, j, r = matrix(accuracy), matrix(joint), matrix(random) if growing else np.diag(matrix(random))
    if not len(a) == len(j) == len(r):
        raise ValueError(f"the matrices are of {len(a)}, {len(j)} (joint) and {len(r)} (random) tasks")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (a - r) / (j - r) - 1
    return np.array([ratio[t, : t + 1].mean() for t in range(len(a))])


def _change(values: Matrix) -> float:
    """Return the mean change of a task's value from when it was learned to the end; 0 for a single task."""
    return float((values[-1] - np.diag(values))[:-1].mean()) if len(values) > 1 else 0.0
