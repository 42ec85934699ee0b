"""The recurrent network: its layers against the formulas in float64, its sizes, and that nothing is left in its modules."""

import copy

import pytest
import torch
from torch import nn

from hatrack import METHODS, NETWORKS, Network, Regime, Trainer
from hatrack.seeds import seeded
from tests.helpers.counting import count
from tests.helpers.learning import learn, logits
from tests.helpers.toys import toy_tasks

SMALL = {"width": 10, "layers": 2}


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((1, 28, 28), {}, 3 * 256 * (28 + 256 + 2) + 3 * 256 * (256 + 256 + 2)),
        ((3, 32, 32), {}, 3 * 256 * (96 + 256 + 2) + 3 * 256 * (256 + 256 + 2)),
        ((2, 5, 7), {"width": 4, "layers": 1}, 3 * 4 * (14 + 4 + 2)),
    ],
)
def test_parameters_and_shape(shape, options, expected):
    trunk = NETWORKS["gru"](shape, **options)
    assert count(trunk) == expected
    assert trunk(torch.zeros(2, *shape)).shape == (2, options.get("width", 256))
    if not options and shape[0] == 1:
        assert expected == 614_400


def by_formulas(sequence, layer):
    """The states of one layer of gated units, step by step."""
    (w_r, w_z, w_n), (u_r, u_z, u_n) = layer.weight_ih_l0.chunk(3), layer.weight_hh_l0.chunk(3)
    (b_r, b_z, b_n), (c_r, c_z, c_n) = layer.bias_ih_l0.chunk(3), layer.bias_hh_l0.chunk(3)
    h, states = sequence.new_zeros(layer.hidden_size), []
    for x in sequence:
        r, z = torch.sigmoid(w_r @ x + b_r + u_r @ h + c_r), torch.sigmoid(w_z @ x + b_z + u_z @ h + c_z)
        n = torch.tanh(w_n @ x + b_n + r * (u_n @ h + c_n))
        h = (1 - z) * n + z * h
        states.append(h)
    return torch.stack(states)


@torch.no_grad()
def test_it_computes_what_its_layers_say():
    with seeded(0, "weights"):
        trunk = NETWORKS["gru"]((2, 6, 5), **SMALL).double().eval()
    images = torch.randn(3, 2, 6, 5, generator=torch.Generator().manual_seed(0)).double()
    layers = [part for part in trunk.modules() if isinstance(part, nn.GRU)]
    for image, features in zip(images, trunk(images), strict=True):
        states = torch.stack([image[:, row].flatten() for row in range(6)])  # a row of both channels is one step
        for layer in layers:
            states = by_formulas(states, layer)
        torch.testing.assert_close(features, states[-1])


def test_dropout_is_behind_every_layer():
    trunk = NETWORKS["gru"]((1, 4, 4), layers=3, dropout=0.4)
    assert [type(part).__name__ for part in trunk] == ["Rows", *["Layer", "Dropout"] * 3, "Last"]
    assert {part.p for part in trunk if isinstance(part, nn.Dropout)} == {0.4}
    assert {part.dropout for part in trunk.modules() if isinstance(part, nn.GRU)} == {0.0}


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((784,), {}, r"not inputs of shape \(784,\)"),
        ((1, 28, 28), {"layers": 0}, "layers must be at least 1, not 0"),
        ((1, 28, 28), {"dropout": 1.0}, "dropout must be at most 0.99, not 1.0"),
    ],
)
def test_what_it_cannot_do(shape, options, message):
    with pytest.raises(ValueError, match=message):
        NETWORKS["gru"](shape, **options)


def on_toys(name):
    """A method on a small recurrent network, and two tasks."""
    tasks = toy_tasks(2, shape=(1, 4, 4))
    with seeded(1, "weights"):
        return METHODS[name](Network(NETWORKS["gru"]((1, 4, 4), **SMALL), tasks=tasks)), tasks


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet", "independent"])
@pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")  # a network so small is soon full
def test_nothing_is_forgotten(name):
    method, tasks = on_toys(name)
    fit = Trainer(Regime(epochs=5, batch=16, lr=0.1))
    method.learn(tasks[0], fit)
    learned = logits(method, tasks[0])
    method.learn(tasks[1], fit)
    assert torch.equal(learned, logits(method, tasks[0]))
    assert (learned.std(0) > 0).any(), "constant logits would prove nothing"


@pytest.mark.parametrize("name", ["pmask", "packnet", "ewc", "mas"])
def test_exchanged_weights_leave_no_trace(name):
    """nn.GRU has a second list of its weights, which must not keep the tensors of a call."""
    method, tasks = on_toys(name)
    learn(method, tasks[:1])
    method(tasks[0].test.inputs(torch.arange(3)), 0)  # with a graph for a backward pass
    for part in (part for part in method.modules() if isinstance(part, nn.GRU)):
        assert [id(t) for t in part._flat_weights] == [id(t) for t in part.parameters()]
    twin = copy.deepcopy(method)
    assert torch.equal(logits(twin, tasks[0]), logits(method, tasks[0]))
