"""The largest eigenvalues by Lanczos, against those of the whole matrix."""

import math

import pytest
import torch

from hatrack.inspection.lanczos import largest_eigenvalues


def symmetric(values: torch.Tensor, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    vectors, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=draw, dtype=torch.float64))
    return vectors @ values.diag() @ vectors.T


def start(size: int, kind: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(kind)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_largest_eigenvalues_of_a_matrix_with_values_of_both_signs(seed, kind):
    spread = torch.randn(120, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    matrix = symmetric(spread, seed).to(kind)
    found = largest_eigenvalues(lambda v: matrix @ v, start(120, kind), count=4, tolerance=1e-4)
    largest = spread.sort(descending=True).values[:4]
    assert found.values == pytest.approx(largest.tolist(), rel=1e-3)
    scale = float(spread.abs().max())
    assert max(found.errors) <= 1e-4 * scale
    rows = zip(found.values, largest, found.errors, strict=True)
    assert all(abs(value - true) <= error + 1e-5 * scale for value, true, error in rows)


def test_a_looser_tolerance_takes_fewer_products():
    matrix = symmetric(torch.linspace(-1, 1, 200, dtype=torch.float64) ** 5, 0)
    loose, tight = (largest_eigenvalues(lambda v: matrix @ v, start(200), tolerance=t).products for t in (1e-1, 1e-5))
    assert loose < tight <= 80
    assert largest_eigenvalues(lambda v: matrix @ v, start(200), steps=5, tolerance=1e-9).products == 5


def test_no_eigenvalue_appears_twice_by_rounding():
    """One eigenvalue far above the others: without reorthogonalisation copies of it appear."""
    values = torch.cat([torch.tensor([1000.0]), torch.linspace(0, 1, 99)]).double()
    matrix = symmetric(values, 3).float()
    found = largest_eigenvalues(lambda v: matrix @ v, start(100, torch.float32), count=3, steps=60, tolerance=0.0)
    assert found.values[0] == pytest.approx(1000, rel=1e-4)
    assert found.values[1] < 1.1


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_matrix_of_low_rank_ends_early(rank):
    values = torch.cat([torch.arange(rank, 0, -1), torch.zeros(50 - rank)]).double()
    matrix = symmetric(values, 1)
    found = largest_eigenvalues(lambda v: matrix @ v, start(50), count=6, tolerance=0.0)
    assert found.products <= rank + 2
    assert found.values[:rank] == pytest.approx(list(range(rank, 0, -1)))
    assert all(abs(value) < 1e-9 for value in found.values[rank:])


def test_a_product_that_is_not_finite():
    with pytest.raises(ValueError, match="not finite"):
        largest_eigenvalues(lambda v: v * math.nan, start(5))


def test_a_space_of_one_dimension():
    assert largest_eigenvalues(lambda v: -2 * v, torch.ones(1)).values == pytest.approx([-2.0])
