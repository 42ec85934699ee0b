"""Recurrent layers and cells of torch: their units, the weights between these, and their calls with gates.

A unit is a hidden channel of one layer in one direction, and a projected channel if there is a projection. A cell is gated
like any layer: its results are. Within a fused call of a whole layer the state of a unit is read at every step, so there the
gates are applied to the weights: those that read a unit are multiplied by its gate. If the gates are bools, they select, and
the weights that write a closed unit are set to 0 as well, so that its state is exactly 0 at every step, whatever its weights
are:

    RNN    h = tanh(0) = relu(0) = 0
    GRU    n = tanh(0) = 0, so h = (1 - z) n + z h = z h, which stays 0
    LSTM   g = tanh(0) = 0, so c = f c + i g = f c, which stays 0, and h = o tanh(c) = 0

Packed sequences have the same weights and channels. torch's `pack_padded_sequence` itself is not analysed, so what it packs
and unpacks is always active.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hatrack.tracing.cudnn import without_cudnn
from hatrack.tracing.dependencies import ALWAYS_ACTIVE

if TYPE_CHECKING:
    from hatrack.tracing.trace import Trace

FUSED = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
CELL_ARGUMENTS = ("input", "hx", "weight", "w_hh", "b_ih", "b_hh")


class Weights(NamedTuple):
    """The weights of one layer in one direction, H hidden channels in 1, 3 or 4 blocks of rows; P of them leave the layer.

    Attributes:
        ih: (blocks * H, inputs).
        hh: (blocks * H, P).
        biases: two of (blocks * H,), or none.
        hr: (P, H), the projection, or none.
    """

    ih: Tensor
    hh: Tensor
    biases: tuple[Tensor, ...]
    hr: tuple[Tensor, ...]

    @property
    def hidden(self) -> int:
        """The number of hidden channels."""
        return self.hr[0].shape[1] if self.hr else self.hh.shape[1]


class FusedCall(NamedTuple):
    """The arguments of a call of a whole recurrent layer that matter here.

    Attributes:
        at: which argument is the initial state; the weights are the next. Packed sequences have one argument more.
        state: (layers * directions, batch, channels): h, and c of an LSTM.
        layers: the weights of every layer and direction.
        directions: 1 or 2.
    """

    at: int
    state: tuple[Tensor, ...]
    layers: list[Weights]
    directions: int

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> "FusedCall":
        """Return the arguments of a call."""
        at = 2 if isinstance(args[3], list | tuple) else 1
        state, flat, biases, count, _, _, bidirectional = args[at : at + 7]
        directions = 2 if bidirectional else 1
        each, first = len(flat) // (count * directions), 4 if biases else 2
        parts = [flat[k : k + each] for k in range(0, len(flat), each)]
        layers = [Weights(p[0], p[1], tuple(p[2:first]), tuple(p[first:])) for p in parts]
        return cls(at, (state,) if isinstance(state, Tensor) else tuple(state), layers, directions)


class LayerUnits(NamedTuple):
    """The units of one layer in one direction: of its hidden channels, and of those that leave it (by a projection)."""

    hidden: slice
    leaving: slice


class FusedGate(NamedTuple):
    """The gates of a whole recurrent layer.

    Attributes:
        layers: the units of every layer and direction.
        directions: 1 or 2.
    """

    layers: tuple[LayerUnits, ...]
    directions: int

    def to(self, device: torch.device) -> "FusedGate":
        """Return the gates on a device: there is no tensor to move."""
        return self

    def same(self, other: Any) -> bool:
        """Return whether another gate uses the same units."""
        return bool(self == other)

    def run(self, func: Any, args: tuple[Any, ...], gates: Tensor) -> tuple[Tensor, ...]:
        """Call the function with the gates (units,) applied: bools select, other types multiply."""
        call, select = FusedCall.of(args), gates.dtype == torch.bool
        h, c = (torch.stack([gates[layer[k]] for layer in self.layers])[:, None] for k in (1, 0))  # (layers, 1, channels)
        weights = [w for k, own in enumerate(call.layers) for w in self._gated(k, own, gates)]
        if not torch.is_grad_enabled():
            for w, given in zip(weights, args[call.at + 1], strict=True):  # torch chooses the kernels of products by it
                w.requires_grad_(given.requires_grad)
        state = [_gate(t, g) if select else t for t, g in zip(call.state, (h, c), strict=False)]
        initial = state[0] if isinstance(args[call.at], Tensor) else tuple(state)
        with without_cudnn() if gates.is_cuda else nullcontext():
            out, *after = func(*args[: call.at], initial, weights, *args[call.at + 2 :])
        if call.layers[0].hr and not select:  # the weights of the projection have gated what leaves
            return out, after[0], _gate(after[1], c)
        last = torch.cat([gates[layer.leaving] for layer in self.layers[-self.directions :]])
        return _gate(out, last), *(_gate(t, g) for t, g in zip(after, (h, c), strict=False))

    def _gated(self, k: int, own: Weights, gates: Tensor) -> Iterator[Tensor]:
        """Yield the gated weights of layer and direction k, in torch's order."""
        units, select = self.layers[k], gates.dtype == torch.bool
        hidden, leaving = gates[units.hidden], gates[units.leaving]
        ih, hh, biases = own.ih, own.hh, own.biases
        if select or not own.hr:  # with a projection, its weights gate what is read
            hh = _gate(hh, leaving)
            if k >= self.directions:
                before = k // self.directions * self.directions
                inputs = torch.cat([gates[layer.leaving] for layer in self.layers[before - self.directions : before]])
                ih = _gate(ih, inputs)
        if select:
            rows = hidden.repeat(len(ih) // len(hidden))
            ih, hh = _gate(ih, rows[:, None]), _gate(hh, rows[:, None])
            biases = tuple(_gate(b, rows) for b in biases)
        yield from (ih, hh, *biases, *(_gate(_gate(hr, leaving[:, None]), hidden) for hr in own.hr))


def _gate(x: Tensor, gates: Tensor) -> Tensor:
    return torch.where(gates, x, 0) if gates.dtype == torch.bool else x * gates.to(x.dtype)


def fused_arguments(args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the input and the first weight of a call of a whole layer, by the names of a linear layer."""
    return {"input": args[0], "weight": FusedCall.of(args).layers[0].ih}


def trace_fused(trace: "Trace", key: tuple[str, int], func: Any, args: Any) -> Any:
    """Run a whole recurrent layer and give its channels units: new ones at its first call."""
    tracker, call = trace.tracker, FusedCall.of(args)
    if any(tracker.positions(w) is None for w in args[call.at + 1]) or tracker.positions(args[0]) is not None:
        return func(*args)  # weights that are computed before
    out, *after = trace.run_untracked(func, args, {})
    inputs = trace.channel_ids(args[0], args[0].dim() - 1)
    layers: list[LayerUnits] = []
    for k, own in enumerate(call.layers):
        layers.append(_new_units(trace, key[0], k, call.directions, own))
        if k >= call.directions and k % call.directions == 0:
            before = layers[k - call.directions : k]
            inputs = torch.cat([_ids(trace, layer.leaving) for layer in before])
        _record_weights(trace, own, layers[k], inputs, _ids(trace, layers[k].leaving))
    h, c = (torch.stack([_ids(trace, layer[k]) for layer in layers])[:, None] for k in (1, 0))  # (layers, 1, channels)
    for t, units in zip(call.state, (1, 0), strict=False):
        if (positions := tracker.positions(t)) is not None:  # a learned initial state
            writes = torch.stack([_numbers(layer[units]) for layer in layers])[:, None]
            trace.record_use(positions, writes.expand(positions.shape), torch.full(positions.shape, ALWAYS_ACTIVE))
    for t, ids in zip((out, *after), (h[-call.directions :].flatten(), h, c), strict=False):
        tracker.assign(t, ids.expand(t.shape), gated=True)
    trace.places[key] = FusedGate(tuple(layers), call.directions)
    return (out, *after)


def _new_units(trace: "Trace", name: str, k: int, directions: int, own: Weights) -> LayerUnits:
    """Return the units of layer and direction k, which are new at the first call."""
    suffix = f"l{k // directions}" + ("_reverse" if k % directions else "")
    shown = name.removesuffix("weight_ih_l0") + suffix if name.endswith("weight_ih_l0") else f"{name} {suffix}"
    weights = [trace.names[id(w)] for w in (own.ih, own.hh) if id(w) in trace.names]
    first = trace.table.of_layer((name, k), shown, own.hidden, weights)
    hidden = slice(first, first + own.hidden)
    if not own.hr:
        return LayerUnits(hidden, hidden)
    weights = [trace.names[id(w)] for w in own.hr if id(w) in trace.names]
    first = trace.table.of_layer((name, k, "projection"), f"{shown} (projection)", len(own.hr[0]), weights)
    return LayerUnits(hidden, slice(first, first + len(own.hr[0])))


def _record_weights(trace: "Trace", own: Weights, units: LayerUnits, inputs: Tensor, state: Tensor) -> None:
    """Record the uses of the weights of one layer in one direction, or of a cell.

    Args:
        trace: the trace.
        own: the weights.
        units: the units that they write.
        inputs: (inputs,), the set id of every input channel.
        state: (P,), the set id of every channel of the state that is read.
    """
    writes = _numbers(units.hidden).repeat(len(own.ih) // own.hidden)
    active = torch.full((1,), ALWAYS_ACTIVE)
    for weight, reads in ((own.ih, inputs[None]), (own.hh, state[None]), *((b, active) for b in own.biases)):
        positions = trace.tracker.positions(weight)
        assert positions is not None
        trace.record_use(positions, writes if weight.dim() == 1 else writes[:, None], reads)
    for hr in own.hr:
        positions = trace.tracker.positions(hr)
        assert positions is not None
        trace.record_use(positions, _numbers(units.leaving)[:, None], _ids(trace, units.hidden)[None])


def trace_cell(trace: "Trace", key: tuple[str, int], func: Any, args: Any) -> Any:
    """Run one step of a recurrent cell and give its channels units: new ones at its first call."""
    given = dict(zip(CELL_ARGUMENTS, args, strict=False))
    state = (given["hx"],) if isinstance(given["hx"], Tensor) else tuple(given["hx"])
    biases = tuple(b for k in ("b_ih", "b_hh") if (b := given.get(k)) is not None)
    own, tracker = Weights(given["weight"], given["w_hh"], biases, ()), trace.tracker
    if any(tracker.positions(w) is None for w in (own.ih, own.hh, *biases)) or tracker.positions(args[0]) is not None:
        return func(*args)
    for t in state:
        if tracker.positions(t) is not None:  # a learned initial state
            tracker.mark_untraceable(t, func.__name__)
    out = trace.run_untracked(func, args, {})
    weights = [trace.names[id(w)] for w in (own.ih, own.hh) if id(w) in trace.names]
    shown = key[0].removesuffix("weight_ih").removesuffix(".") or key[0]
    first = trace.table.of_layer((key[0], "cell"), shown, own.hidden, weights)
    units = slice(first, first + own.hidden)
    _record_weights(trace, own, LayerUnits(units, units), *(trace.channel_ids(t, 1) for t in (args[0], state[0])))
    for t in (out,) if isinstance(out, Tensor) else out:
        trace.add_gate(key, t, _numbers(units), 1)
    return out


def _numbers(units: slice) -> Tensor:
    return torch.arange(units.start, units.stop)


def _ids(trace: "Trace", units: slice) -> Tensor:
    """Return the set ids of units by themselves."""
    return torch.tensor([trace.tracker.dependencies.id_of(frozenset([u])) for u in range(units.start, units.stop)])
