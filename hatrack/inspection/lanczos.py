"""The largest eigenvalues of a symmetric matrix that is known by its products with vectors only (Lanczos, 1950)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-6  # a remainder that is smaller than this share of the matrix is rounding: the vectors so far span a closed space


class Spectrum(NamedTuple):
    """What `largest_eigenvalues` returns.

    Attributes:
        values: the largest eigenvalues, the largest first.
        errors: for each of them the norm of the residual: an eigenvalue of the matrix is no farther away than that.
        products: how many products with the matrix were computed.
    """

    values: list[float]
    errors: list[float]
    products: int


def largest_eigenvalues(
    product: Callable[[Tensor], Tensor], start: Tensor, *, count: int = 3, steps: int = 80, tolerance: float = 1e-3
) -> Spectrum:
    """Find the largest eigenvalues of a symmetric matrix by the method of Lanczos.

    Every new vector is made orthogonal to all earlier ones, twice: without that, rounding makes eigenvalues appear several
    times. An eigenvalue that the matrix has several times is found once.

    Args:
        product: returns the product of the matrix and a vector.
        start: the first vector, random, with the size and the precision of the others; it need not be normalised.
        count: how many eigenvalues are wanted.
        steps: how many products are computed at most.
        tolerance: it ends when all residuals are below this share of the eigenvalue with the largest absolute value.

    Returns:
        The eigenvalues, or fewer if the space of the vectors has fewer dimensions.

    Raises:
        ValueError: if a product is not finite.
    """
    basis, diagonal, beside = [start / start.norm()], list[float](), list[float]()
    while True:
        new = product(basis[-1])
        diagonal.append(float(new.double() @ basis[-1].double()))
        if not math.isfinite(diagonal[-1]):
            raise ValueError("a product with the matrix is not finite: it has no eigenvalues")
        for known in (*basis, *basis):
            new = new - (known @ new) * known
        rest = float(new.norm())
        spectrum, scale = _ritz_values(diagonal, beside, rest, count)
        closed = rest <= TINY * scale or len(basis) == len(start)
        if closed or len(basis) >= steps or (len(basis) >= count and max(spectrum.errors) <= tolerance * scale):
            return spectrum
        beside.append(rest)
        basis.append(new / rest)


def _ritz_values(diagonal: list[float], beside: list[float], rest: float, count: int) -> tuple[Spectrum, float]:
    """Return the eigenvalues of the tridiagonal matrix, with their residuals, and the largest absolute value.

    The residual of a Ritz value is the norm of the remainder times the last entry of the eigenvector.
    """
    off = torch.tensor(beside, dtype=torch.float64)
    matrix = torch.tensor(diagonal, dtype=torch.float64).diag() + off.diag(1) + off.diag(-1) if beside else None
    matrix = torch.tensor([diagonal], dtype=torch.float64) if matrix is None else matrix
    values, vectors = torch.linalg.eigh(matrix)  # in ascending order
    values, last = values.flip(0)[:count], vectors[-1].flip(0)[:count]
    found = Spectrum(values.tolist(), (rest * last.abs()).tolist(), len(diagonal))
    return found, float(torch.linalg.eigvalsh(matrix).abs().max())
