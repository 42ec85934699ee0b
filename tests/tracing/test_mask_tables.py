"""The tables of masks: the same masks from floats and bools, on another device, and with weights that are used in parts."""

import pytest
import torch
from torch import nn

from hatrack.tracing.units import Units


class InParts(nn.Module):
    """A trunk whose layer uses every second row of a parameter: its positions are not consecutive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows = nn.Linear(4, 3), nn.Parameter(torch.randn(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch.relu(self.first(x)), self.rows[::2])


TRUNKS = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
    "twice": lambda: nn.Sequential(nn.Linear(4, 4), layer := nn.Linear(4, 4), nn.ReLU(), layer),
    "parts": InParts,
}


@pytest.mark.parametrize("name", TRUNKS)
@pytest.mark.parametrize("near", [False, True])
def test_bools_and_floats_have_the_same_masks(name, near):
    units = Units(TRUNKS[name](), torch.randn(2, 4))
    units.to(torch.device("cpu"))
    for seed in range(5):
        gates = torch.rand(units.count, generator=torch.Generator().manual_seed(seed)) < 0.5
        floats = units.weight_masks(gates.float())
        found = units.weight_masks(gates, near=near)
        assert found.keys() == floats.keys()
        assert all(torch.equal(found[name].float(), mask) for name, mask in floats.items())


def test_masks_by_hand_and_anew_for_every_call():
    units = Units(TRUNKS["linear"](), torch.randn(2, 4))
    gates = torch.tensor([1, 0, 1, 0, 1], dtype=torch.bool)
    masks = units.weight_masks(gates)
    assert masks["0.weight"].tolist() == [[True] * 4, [False] * 4, [True] * 4]
    assert masks["2.weight"].tolist() == [[False] * 3, [True, False, True]]
    masks["2.weight"].fill_(True)  # a caller may write into what it gets
    assert units.weight_masks(gates)["2.weight"].tolist() == [[False] * 3, [True, False, True]]
    soft = units.weight_masks(torch.tensor([0.5, 0.0, 1.0, 0.2, 0.7]))
    assert torch.equal(soft["2.weight"], torch.tensor([[0.2, 0.0, 0.2], [0.5, 0.0, 0.7]]))


def test_tables_with_positions_stay_on_the_cpu():
    units = Units(InParts(), torch.randn(2, 4))
    assert units._tables.scattered
    assert units._tables.to(torch.device("meta")) is units._tables
    plain = Units(TRUNKS["linear"](), torch.randn(2, 4))._tables
    assert plain.to(torch.device("meta")).unused.is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRUNKS)
def test_a_gpu_has_the_masks_of_the_cpu(name):
    units = Units(TRUNKS[name](), torch.randn(2, 4))
    units.to(torch.device("cuda"))
    gates = torch.rand(units.count) < 0.5
    here, there = units.weight_masks(gates), units.weight_masks(gates.cuda(), near=True)
    assert all(torch.equal(there[name].cpu() == 1, mask == 1) for name, mask in here.items())
