"""Recurrent layers, cells and loops: units and masks by hand, closed units that stay 0, other lengths than the example's."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from hatrack.tracing.units import Units
from tests.helpers.nets import Lambda, check_units
from tests.helpers.recurrent import BY_HAND, CELLS, Steps, cell, rows_of_closed_units
from tests.helpers.tiers import every_value

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
KINDS = {"rnn": nn.RNN, "relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options)}
KINDS |= {"gru": nn.GRU, "lstm": nn.LSTM, "projected": lambda *args, **options: nn.LSTM(*args, proj_size=3, **options)}


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def sequences(steps=8, channels=4, count=5):
    return torch.randn(count, steps, channels, generator=torch.Generator().manual_seed(0))


def around(layer):
    """A linear layer, a recurrent one all of whose results are read, and another linear layer."""

    def forward(own, x):
        x = own.before(x)
        out, state = own.layer(x if layer.batch_first else x.transpose(0, 1))
        out = out if layer.batch_first else out.transpose(0, 1)
        h, c = state if isinstance(state, tuple) else (state, state)
        return own.after(torch.cat([out[:, -1] + out.mean(1), h[0], c[-1]], 1))

    leaving = layer.proj_size or layer.hidden_size
    width = leaving * (2 if layer.bidirectional else 1) + leaving + layer.hidden_size
    return Lambda(forward, before=nn.Linear(4, 6), layer=layer, after=nn.Linear(width, 7))


# Fused layers


@pytest.mark.parametrize(("depth", "kind"), every_value([(1, False), (2, True), (3, False)], KINDS))
def test_fused_layers(depth, kind):
    layers, bidirectional = depth
    bias, first = layers != 3, layers != 2
    layer = KINDS[kind](6, 5, num_layers=layers, bidirectional=bidirectional, bias=bias, batch_first=first)
    units = check_units(around(layer), sequences())
    assert units.held_whole() == {}
    names = [f"layer.l{k}{way}" for k in range(layers) for way in ("", "_reverse")[: 1 + bidirectional]]
    assert [name for name in units.layers if "projection" not in name] == ["before", *names, "after"]
    gates = torch.rand(units.count, generator=torch.Generator().manual_seed(1)).requires_grad_()
    units.run(sequences(), gates).sum().backward()
    assert (gates.grad != 0).float().mean() > (0.5 if kind == "relu" else 0.99), "a relu may have no slope"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_with_all_options(kind):
    for layers, bidirectional, bias, first in itertools.product((1, 2, 3), *[(False, True)] * 3):
        layer = KINDS[kind](6, 5, num_layers=layers, bidirectional=bidirectional, bias=bias, batch_first=first)
        assert check_units(around(layer), sequences()).held_whole() == {}


def test_masks_of_a_gru_by_hand():
    """Units: before 0 to 5, the GRU's 6 to 10 and 11 to 15, after 16 to 22."""
    units = Units(around(nn.GRU(6, 5, num_layers=2)), sequences())
    assert units.layers["layer.l0"] == slice(6, 11)
    assert units.layers["layer.l1"] == slice(11, 16)
    values = torch.zeros(units.count)
    values[[2, 7, 9, 14]] = 1
    masks = {name: mask.nonzero().tolist() for name, mask in units.weight_masks(values).items()}
    rows = [1, 3, 6, 8, 11, 13]  # units 7 and 9 in three blocks
    assert masks["layer.weight_ih_l0"] == [[row, 2] for row in rows]
    assert masks["layer.weight_hh_l0"] == [[row, column] for row in rows for column in (1, 3)]
    assert masks["layer.bias_ih_l0"] == masks["layer.bias_hh_l0"] == [[row] for row in rows]
    assert masks["layer.weight_ih_l1"] == [[row, column] for row in (3, 8, 13) for column in (1, 3)]
    assert masks["layer.weight_hh_l1"] == [[row, 3] for row in (3, 8, 13)]


def test_masks_of_a_projected_lstm_by_hand():
    """Units: the first direction's cells 0 to 3 and outputs 4 and 5, the second's 6 to 9, 10 and 11."""
    layer = nn.LSTM(4, 4, bidirectional=True, proj_size=2, batch_first=True, bias=False)
    units = Units(Lambda(lambda own, x: own.layer(x)[0][:, -1], layer=layer), sequences())
    assert list(units.layers) == [f"layer.l0{way}{what}" for way in ("", "_reverse") for what in ("", " (projection)")]
    values = torch.zeros(units.count)
    values[[1, 5]] = 1
    masks = {name: mask.nonzero().tolist() for name, mask in units.weight_masks(values).items()}
    assert masks["layer.weight_ih_l0"] == [[row, column] for row in (1, 5, 9, 13) for column in range(4)]
    assert masks["layer.weight_hh_l0"] == [[row, 1] for row in (1, 5, 9, 13)]
    assert masks["layer.weight_hr_l0"] == [[1, 1]]
    assert not any(masks[name] for name in masks if "reverse" in name)
    assert [units.members(k) for k in units.features.tolist()] == [[4], [5], [10], [11]]


@pytest.mark.parametrize("kind", ["rnn", "relu", "gru", "lstm", *CELLS])
def test_closed_units_are_those_of_a_smaller_layer(kind):
    if kind in KINDS:
        layer, smaller = (KINDS[kind](4, hidden, batch_first=True) for hidden in (6, 3))
        trunk = Lambda(lambda own, x: own.layer(x)[0], layer=layer)
    else:
        layer, smaller = (cell(kind, 4, hidden) for hidden in (6, 3))
        trunk = Lambda(lambda own, x: own.layer(x), layer=Steps(layer, 6))
    units, keep = Units(trunk.eval(), sequences()), torch.tensor([0, 2, 3])
    with torch.no_grad():
        for own, other in zip(layer.parameters(), smaller.parameters(), strict=True):
            rows = own.unflatten(0, (-1, 6))[:, keep].flatten(0, 1)
            other.copy_(rows[:, keep] if rows.dim() == 2 and rows.shape[1] == 6 else rows)
        out = units.run(sequences(), torch.tensor([True, False, True, True, False, False]))
        expected = smaller(sequences())[0] if kind in KINDS else Steps(smaller, 3)(sequences())
    torch.testing.assert_close(out[..., keep], expected)
    assert (out[..., [1, 4, 5]] == 0).all()


def test_soft_gates_scale_what_is_read():
    """An LSTM of two layers and a projection in the second, against a loop over time with the gates written out."""
    for layer in (nn.RNN(4, 6, 2, batch_first=True), nn.LSTM(4, 6, 2, batch_first=True, proj_size=3)):
        units = Units(Lambda(lambda own, x: own.layer(x)[0], layer=layer), sequences())
        gates = torch.rand(units.count)
        of = {name: gates[own] for name, own in units.layers.items()}
        weights = dict(layer.named_parameters())

        def step(k, x, h, c, weights=weights, of=of):
            blocks = x @ weights[f"weight_ih_l{k}"].T + weights[f"bias_ih_l{k}"] + weights[f"bias_hh_l{k}"]
            blocks = blocks + h @ weights[f"weight_hh_l{k}"].T
            if blocks.shape[1] == 6:
                return torch.tanh(blocks) * of[f"layer.l{k}"], c
            i, f, g, o = blocks.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            out = (o.sigmoid() * c.tanh() * of[f"layer.l{k}"]) @ weights[f"weight_hr_l{k}"].T
            return out * of[f"layer.l{k} (projection)"], c

        x = sequences()
        for k in (0, 1):
            h, c, outputs = torch.zeros(5, layer.proj_size or 6), torch.zeros(5, 6), []
            for t in range(8):
                h, c = step(k, x[:, t], h, c)
                outputs.append(h)
            x = torch.stack(outputs, 1)
        torch.testing.assert_close(units.run(sequences(), gates), x)


# Whatever a closed unit's weights are, it stays 0


@pytest.mark.parametrize(("poison", "kind"), every_value([torch.nan, torch.inf], [*KINDS, *CELLS, *BY_HAND]))
def test_a_nan_in_a_closed_unit_reaches_no_other(kind, poison):
    if kind in KINDS:
        trunk = around(KINDS[kind](6, 5, num_layers=2, bidirectional=True))
    else:
        parts = {"before": nn.Linear(4, 6), "steps": Steps(cell(kind, 6, 5), 5), "after": nn.Linear(5, 7)}
        trunk = Lambda(lambda own, x: own.after(own.steps(own.before(x))[:, -1]), **parts)
    units = Units(trunk.eval(), sequences())
    gates = torch.ones(units.count, dtype=torch.bool)
    for own in units.layers.values():
        gates[own.start + 1] = False
    with torch.no_grad():
        before, damaged = units.run(sequences(), gates), 0
        for name, rows in rows_of_closed_units(units, gates).items():
            trunk.get_parameter(name)[rows] = poison
            damaged += int(rows.sum())
        assert torch.equal(units.run(sequences(), gates), before)
        assert not units.run(sequences(), torch.ones_like(gates)).isfinite().all()
    assert before.std() > 0
    assert damaged > 20


# Initial states


def test_a_given_initial_state_is_gated():
    for kind in ("gru", "lstm", "rnn"):
        layer = KINDS[kind](4, 5, batch_first=True)

        def forward(own, x):
            h = torch.tanh(own.start(x[:, 0]))[None]
            return own.layer(x, (h, h) if isinstance(own.layer, nn.LSTM) else h)[0].flatten(1)

        units = check_units(Lambda(forward, start=nn.Linear(4, 5), layer=layer), sequences())
        gates = torch.ones(units.count, dtype=torch.bool)
        gates[units.layers["layer.l0"].start + 2] = False
        assert (units.run(sequences(), gates).unflatten(1, (8, 5))[:, :, 2] == 0).all()


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_learned_initial_state_belongs_to_the_units(kind):
    def forward(own, x):
        h = own.h.repeat(1, len(x), 1)
        return own.layer(x, (h, own.c.expand(-1, len(x), -1)) if kind == "lstm" else h)[0][:, -1]

    parts = {"layer": KINDS[kind](4, 5, 2, batch_first=True), "h": nn.Parameter(torch.randn(2, 1, 5))}
    parts |= {"c": nn.Parameter(torch.randn(2, 1, 5))} if kind == "lstm" else {}
    units = check_units(Lambda(forward, **parts), sequences())
    assert units.held_whole() == {}
    values = torch.zeros(units.count)
    values[[3, 6]] = 1
    for name in parts.keys() & {"h", "c"}:
        assert units.weight_masks(values)[name].nonzero().tolist() == [[0, 0, 3], [1, 0, 1]]


def test_every_task_has_its_own_learned_initial_state_of_a_cell():
    def forward(own, x):
        h = own.h.expand(len(x), -1)
        for t in range(x.shape[1]):
            h = own.cell(x[:, t], h)
        return h

    units = check_units(Lambda(forward, cell=nn.GRUCell(4, 5), h=nn.Parameter(torch.randn(1, 5))), sequences())
    assert units.per_task == {"h"}
    assert units.held_whole() == {}


# Packed sequences


def test_packed_sequences():
    def forward(own, x):
        packed = pack_padded_sequence(x, [8, 6, 5, 3, 3][: len(x)], batch_first=True)
        out, h = own.layer(packed)
        return own.after(pad_packed_sequence(out, batch_first=True)[0].sum(1) + h[-1])

    units = check_units(Lambda(forward, layer=nn.GRU(4, 5, 2), after=nn.Linear(5, 3)), sequences())
    assert units.held_whole() == {}
    assert list(units.layers) == ["layer.l0", "layer.l1", "after"]


# Loops: the same units at every call, and lengths other than that of the example


@pytest.mark.parametrize(("pool", "kind"), every_value(["last", "all"], [*CELLS, *BY_HAND]))
def test_loops_of_other_lengths(kind, pool):
    parts = {"before": nn.Linear(4, 6), "steps": Steps(cell(kind, 6, 5), 5), "after": nn.Linear(5, 7)}
    pooled = {"last": lambda x: x[:, -1], "all": lambda x: x.mean(1) + x.amax(1)}[pool]
    trunk = Lambda(lambda own, x: own.after(pooled(own.steps(own.before(x)))), **parts)
    units = check_units(trunk, sequences(6))
    assert units.held_whole() == {}
    assert not any("call" in name for name in units.layers)
    gates = torch.rand(units.count, generator=torch.Generator().manual_seed(0)) < 0.7
    masks = units.weight_masks(gates.float())
    for steps in (11, 4, 6):
        with torch.no_grad():
            before = units.run(sequences(steps), gates)
            assert before.std() > 0
            changed = {
                n: torch.where(masks[n] > 0, p, p + torch.randn_like(p)).requires_grad_()
                for n, p in trunk.named_parameters()
                if n in units.traced
            }
            assert torch.equal(units.run(sequences(steps), gates, changed), before)


def delayed(own, x):
    """A state that is read only six steps later."""
    states = [x.new_zeros(len(x), 4)] * 6
    for t in range(x.shape[1]):
        states.append(torch.tanh(own.one(x[:, t]) + own.two(states[-6])))
    return own.last(states[-1])


@pytest.mark.parametrize(("example", "wrong", "right"), [(4, (7, 12), (3,)), (8, (), (2, 12))])
def test_a_length_for_which_weights_read_other_units_is_refused(example, wrong, right):
    units = Units(Lambda(delayed, one=nn.Linear(4, 4), two=nn.Linear(4, 4), last=nn.Linear(4, 3)), sequences(example))
    gates = torch.ones(units.count)
    for steps in right:
        assert torch.equal(units.run(sequences(steps), gates), units.trunk(sequences(steps)))
    for steps in wrong:
        with pytest.raises(ValueError, match=r"(one|two)\.weight \(call \d+\).*example"):
            units.run(sequences(steps), gates)


def test_another_parity_is_refused():
    parts = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4), "last": nn.Linear(4, 3)}

    def forward(own, x):
        h = torch.zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = torch.tanh((own.one, own.two)[t % 2](torch.cat([h[:, :2], x[:, t, :2]], 1)))
        return own.last(h)

    units = Units(Lambda(forward, **parts).eval(), sequences(6))
    gates = torch.ones(units.count, dtype=torch.bool)
    units.run(sequences(10), gates)
    for steps in (5, 9):
        with pytest.raises(ValueError, match=r"(one|two)\.weight \(call \d+\).*example"):
            units.run(sequences(steps), gates)


def test_a_layer_by_function_in_a_loop_has_one_set_of_units():
    def forward(own, x):
        h = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t] @ own.table[:4] + h @ own.table[4:])
        return h

    units = check_units(Lambda(forward, table=nn.Parameter(torch.randn(9, 5) / 2)), sequences(6))
    assert units.count == 10
    with pytest.raises(ValueError, match=r"matmul.*example"):  # without a name, a longer loop can't be recognised
        units.run(sequences(9), torch.ones(10))


def test_a_cell_that_is_called_by_keywords_has_gates_on_its_weights():
    def forward(own, x):
        h = torch.gru_cell(x[:, 0], x.new_zeros(len(x), 5), w_ih=own.cell.weight_ih, w_hh=own.cell.weight_hh)
        return own.last(h)

    trunk = Lambda(forward, cell=nn.GRUCell(4, 5, bias=False), last=nn.Linear(5, 3))
    units = check_units(trunk, sequences())
    assert {"cell.weight_ih", "cell.weight_hh"} <= set(units.layers)
    assert units.held_whole() == {}


def test_units_of_layers_that_the_user_froze():
    trunk = around(nn.LSTM(6, 5, num_layers=2, proj_size=3))
    for name in ("weight_ih_l0", "weight_hh_l0", "weight_hr_l1", "weight_ih_l1"):
        trunk.layer.get_parameter(name).requires_grad_(False)
    units = Units(trunk, sequences())
    frozen = {name: units.frozen()[own].all().item() for name, own in units.layers.items()}
    assert [name for name, all_of_it in frozen.items() if all_of_it] == ["layer.l0", "layer.l1 (projection)"]


def test_checkpointing_of_a_recurrent_layer_is_refused():
    trunk = Lambda(
        lambda own, x: checkpoint(lambda x: own.layer(x)[0], own.one(x), use_reentrant=False)[:, -1],
        one=nn.Linear(4, 4),
        layer=nn.GRU(4, 5, batch_first=True),
    )
    with pytest.raises(ValueError, match="gradient checkpointing"):
        Units(trunk, sequences())
