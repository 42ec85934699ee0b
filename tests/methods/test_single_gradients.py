"""Sums of squared or absolute gradients of single examples against a plain loop in float64, and how they are computed."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack import Method
from hatrack.methods.parts import single_gradients
from hatrack.methods.parts.layer_calls import LayerCall
from hatrack.methods.parts.single_gradients import SumOfSizes
from hatrack.seeds import seeded
from tests.helpers.every_use import TRUNKS, Looking, make, wanted
from tests.helpers.toys import toy_tasks

SIZES = {"squares": torch.square, "absolute values": torch.abs}


def weighted_norm(logits: Tensor, weights: Tensor) -> Tensor:
    """One value per example, which depends on something else that is given for it."""
    return (logits**2).sum(1) * weights


def images(count: int = 20) -> Tensor:
    return toy_tasks(1, train=count, valid=0.0)[0].train.inputs(torch.arange(count))


def of_three(method: Method, **changes) -> SumOfSizes:
    trial = images()[:3], torch.ones(3)
    return SumOfSizes(method.eval(), 0, wanted(method), weighted_norm, trial, **{"size": torch.abs, **changes})


def loop(method: Method, x: Tensor, weights: Tensor, size, group: int) -> list[Tensor]:
    """The same sums by their definition, one group after the other."""
    totals = [torch.zeros_like(p) for p in wanted(method)]
    for rows, some in zip(x.split(group), weights.split(group), strict=True):
        value = weighted_norm(method(rows, 0), some).sum()
        gradients = torch.autograd.grad(value, wanted(method), allow_unused=True, materialize_grads=True)
        for total, gradient in zip(totals, gradients, strict=True):
            total += size(gradient)
    return totals


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert any(e.any() for e in expected), "with zeros the test could not fail"
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm(), f"a parameter of shape {tuple(b.shape)}"


@pytest.mark.parametrize("group", [1, 3, 50])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TRUNKS)
def test_sums_are_those_of_a_plain_loop(name, size, group):
    """20 examples; in groups of 3 the last one has 2."""
    with seeded(0, "weights"):
        method = make(TRUNKS[name]())
    x, weights = images(), torch.linspace(0.5, 2, 20).double()
    sums = of_three(method, size=SIZES[size], group=group)
    assert_equal(sums(x, weights), loop(method, x, weights, SIZES[size], group))


@pytest.mark.parametrize("how", [
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": (1, 3), "stride": (2, 1), "groups": 2},
    {"kernel_size": 2, "padding": "valid", "bias": False},
    {"kernel_size": 3, "padding": "same", "padding_mode": "reflect"},
])  # fmt: skip
@pytest.mark.parametrize("size", SIZES)
def test_convolutions_of_every_kind(how, size):
    with seeded(0, "weights"):
        method = make(nn.Sequential(nn.Conv2d(1, 4, 2, padding=1), nn.Tanh(), nn.Conv2d(4, 6, **how), nn.Flatten()))
    x, weights = images(), torch.ones(20)
    sums = of_three(method, size=SIZES[size])
    assert not sums.others
    assert_equal(sums(x, weights), loop(method, x, weights, SIZES[size], 1))


def test_a_convolution_whose_arguments_have_names():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 1, 2, 2)), nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(F.conv2d(bias=self.bias, input=x, padding=1, weight=self.weight)).flatten(1)

    with seeded(0, "weights"):
        method = make(Named())
    sums = of_three(method)
    assert not sums.others
    assert_equal(sums(images(), torch.ones(20)), loop(method, images(), torch.ones(20), torch.abs, 1))


@pytest.mark.parametrize(
    ("name", "others", "way"),
    [
        ("mlp", set(), "_by_vmap"),
        ("residual", set(), "_by_vmap"),
        ("layer used three times", set(), "_by_vmap"),
        ("one and three dimensions", set(), "_by_vmap"),
        ("three positions first", {"first.weight", "first.bias", "folded.weight", "folded.bias"}, "_by_vmap"),
        ("in place", {"shift"}, "_by_loop"),
        ("statistics of the batch", {"layer.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"}, "_by_vmap"),
    ],
)
def test_the_whole_network_is_differentiated_only_for_parameters_outside_layers(name, others, way):
    method = make(TRUNKS[name]())
    squares = of_three(method)
    assert {n.replace("net.trunk.1.", "").replace("net.heads.0", "head") for n in squares.others} == others
    assert squares._of_others.__name__ == way


def test_a_network_that_reads_values_is_run_on_single_examples():
    """Its branch depends on the sum over the batch; the three of the trial take the same branch as each of them alone."""
    with seeded(0, "weights"):
        method = make(Looking())
    x = images(40)
    looks = [bool(row.double().sum() > 0) for row in x]
    assert len(set(looks)) == 2
    alike = x[torch.tensor(looks)]
    for trial in (x[:3], alike[:3]):
        sums = SumOfSizes(method.eval(), 0, wanted(method), weighted_norm, (trial, torch.ones(3)), size=torch.abs)
        assert_equal(sums(x, torch.ones(40)), loop(method, x, torch.ones(40), torch.abs, 1))


def test_memory_is_bounded(monkeypatch):
    """A pass has as many examples as their outputs and gradients fit into memory, at least one group. The gradients of a
    layer are computed for fewer of them at a time if need be."""
    at_a_time: dict[int, int] = {}  # groups, by the numbers of one
    per_group = LayerCall.per_group

    def noted(self: LayerCall, delta: Tensor, part: slice, size: int) -> Tensor:
        numbers, count = self.numbers(size), len(delta[part]) // size
        at_a_time[numbers] = max(at_a_time.get(numbers, 0), count)
        return per_group(self, delta, part, size)

    monkeypatch.setattr(LayerCall, "per_group", noted)
    large = nn.Sequential(nn.Conv2d(1, 8, 4), nn.Flatten())  # 8 outputs and 3 of the head
    wide = nn.Sequential(nn.Conv2d(1, 2, 2, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())  # 18 outputs and 3
    for trunk, room, group, rows, largest in (
        (TRUNKS["residual"](), 770, 1, 1, {384: 1}),
        (
            TRUNKS["residual"](),
            2400,
            1,
            3,
            {384: 3},
        ),  # all layers together have 771 outputs; the largest patches are 384 numbers
        (large, 300, 1, 27, {128: 2}),  # the weights of the convolution
        (large, 300, 4, 24, {128: 2}),
        (wide, 80, 1, 3, {36: 2}),  # 8 weights, but patches of 4 numbers at 9 positions
        (TRUNKS["parameters used anyhow"](), 500, 1, 3, {}),  # 144 numbers go through the whole network
        (TRUNKS["mlp"](), 1000, 1, 40, {}),  # 25 outputs; linear layers need no gradients of single examples
    ):
        monkeypatch.setattr(single_gradients, "MEMORY", room)
        method, x = make(trunk), images()
        sums = of_three(method, group=group)
        assert sums.rows == rows
        at_a_time.clear()
        parts = [sums(part, torch.ones(len(part))) for part in x.split(rows)]
        assert_equal([sum(each) for each in zip(*parts, strict=True)], loop(method, x, torch.ones(20), torch.abs, group))
        assert all(count == 1 or count * numbers <= room for numbers, count in at_a_time.items())
        assert largest.items() <= at_a_time.items()


def test_sizes_do_not_change_what_is_recorded():
    """Two calls in a row give the same bits."""
    with seeded(0, "weights"):
        method = make(TRUNKS["residual"]())
    sums = of_three(method, size=torch.square)
    first, second = (sums(images(), torch.ones(20)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
