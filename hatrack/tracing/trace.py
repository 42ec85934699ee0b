"""Trace one forward pass of a trunk, call by call: where its units are, and which weights connect them.

`Trace` watches the calls once, on an example: every linear and convolutional layer gets units, one per output channel,
with a gate behind the layer. A layer that is called again, as in a loop over time, has the same units at every call.
`gates.ApplyGates` later applies the gates at the same calls; `recurrent.py` has the recurrent layers.
"""

from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from hatrack.tracing.dependencies import ALWAYS_ACTIVE
from hatrack.tracing.gates import (
    CONVOLUTIONS,
    LAYERS,
    LOOKUPS,
    PRODUCTS,
    RECURRENT,
    TRACED,
    TRANSPOSED,
    CountedCalls,
    Gate,
    Key,
    marked,
    named_arguments,
)
from hatrack.tracing.norm_calls import NORMS, arguments
from hatrack.tracing.opened import OPENED
from hatrack.tracing.recurrent import CELLS, FUSED, FusedGate, trace_cell, trace_fused
from hatrack.tracing.tracker import DependencyTracker, inside_autograd_function, wrapped
from hatrack.tracing.unit_table import UnitTable

ALWAYS_OPEN = -1  # stands for the unit that a weight writes if its layer has no units
READS = {  # functions that read values into Python, many of them without an operation that the tracker sees
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
    Tensor.__array__, Tensor.__dlpack__, Tensor.__repr__, Tensor.__format__, Tensor.apply_, Tensor.map_, Tensor.__deepcopy__,
    Tensor.storage, Tensor.untyped_storage,  # pickle uses the latter
}  # fmt: skip
SPLITS = {Tensor.tensor_split, torch.tensor_split}  # they read where to split, not what
CHANNELWISE_NORMS = (F.batch_norm, F.instance_norm)  # they mix no channels


@dataclass(frozen=True)
class Use:
    """One use of some weights by a layer. `writes` and `reads` broadcast to `shape`.

    Attributes:
        positions: the positions of the parameter elements used (see `DependencyTracker`); None if they are consecutive.
        start: the smallest of these positions.
        shape: the shape of the weights.
        writes: for every weight, the unit whose value it contributes to; ALWAYS_OPEN if that has no gate.
        reads: for every weight, the set id of the input that it is multiplied by.
    """

    positions: Tensor | None
    start: int
    shape: torch.Size
    writes: Tensor
    reads: Tensor


class Trace(CountedCalls):
    """While this mode is active, it records what a trunk does on the example.

    Args:
        names: the name of every parameter and buffer of the trunk, by `id`.
        tracker: an active tracker, which gets the dependency sets of the layers' results from here.
        table: the units of an earlier trace of the same trunk, if there was one.
        ungated: the names of the weights whose layers get no units: see `parameters.ungated_weights`.

    Attributes:
        table: the units of every layer.
        uses: which weights connect which units.
        norms: the names of the parameters of normalisation layers.
        places: the gate of every traced call, before `final_gates`.
        made_by: the function of every traced call, and the call with a parameter that it belongs to.
        norm_inputs: of every tensor of a norm the dimension that holds channels, and the dependency set of what it is
            applied to, for every channel.
        norm_units: of every unit of a norm the dependency set of its input.
        readers: by `id` of a layer's result: the result, its gate, its key, and for every call that reads the result
            whether this call is a channelwise norm that applies the same gate again.
    """

    def __init__(
        self,
        names: dict[int, str],
        tracker: DependencyTracker,
        table: UnitTable | None = None,
        ungated: Set[str] = frozenset(),
    ) -> None:
        super().__init__(names)
        self.tracker, self.table, self.ungated = tracker, table or UnitTable(), ungated
        self.uses: list[Use] = []
        self._known_uses: set[Hashable] = set()
        self.norms: set[str] = set()
        self.norm_inputs: dict[str, tuple[int, list[frozenset[int] | None]]] = {}
        self.norm_units: dict[int, frozenset[int] | None] = {}
        self.places: dict[Key, Gate | FusedGate | None] = {}
        self.made_by: dict[Key, tuple[Any, Key | None]] = {}
        self.shown: dict[Key, str] = {}  # the names of calls for people
        self.functions: dict[str, int] = {}  # how often a function was called without a parameter of its own
        self.readers: dict[int, tuple[Tensor, Gate, Key, list[bool]]] = {}

    def gate_parameter(self, name: str, parameter: Tensor, dim: int) -> None:
        """Give a parameter that is no layer's weight units of its own, one per channel, before the trunk runs."""
        key, positions, count = (name, 0), self.tracker.positions(parameter), parameter.shape[dim]
        assert positions is not None
        first = self.table.of_layer(key, name, count, [name])
        units = torch.arange(first, first + count)
        along = [-1 if d == dim else 1 for d in range(parameter.dim())]
        self.record_use(positions, units.view(along), torch.full((1,) * parameter.dim(), ALWAYS_ACTIVE))
        self.substitutes[id(parameter)] = parameter.detach().clone()
        self.made_by[key] = (None, None)
        self.add_gate(key, self.substitutes[id(parameter)], units, dim)

    def final_gates(self, features: Tensor) -> dict[Key, Gate | FusedGate | None]:
        """Return the gate of every call, without those of layers that only channelwise norms read.

        Such a layer is gated after its norms alone: the norm divides by the deviation, so a gate in front of it would get
        no gradient.
        """
        layers = [layer for layer in self.readers.values() if layer[0] is not features]
        after_norm = {key for _, _, key, readers in layers if readers and all(readers)}
        return {key: None if key in after_norm else gate for key, gate in self.places.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OPENED:
            with self:
                return OPENED[func](*args, **(kwargs or {}))
        args, kwargs = self.substituted((args, kwargs or {}))
        gate = None
        self._note_reads(func, args, kwargs)
        if func not in TRACED:
            out = func(*args, **kwargs)
        else:
            key, origin = self.key(func, args, kwargs)
            self.places[key] = None
            self.made_by[key], self.shown[key] = (func, origin), self._shown(key, origin, func, args, kwargs)
            # Within these no gate could be applied, or get a gradient.
            hidden = self._is_wrapped(args, kwargs) or inside_autograd_function()
            out = marked(func(*args, **kwargs) if hidden else self._trace(key, func, args, kwargs), origin)
            gate = self.places[key]
        if any(isinstance(t, Tensor) for t in tree_leaves(out)):
            for t in tree_leaves((args, kwargs)):
                if id(t) in self.readers:
                    self.readers[id(t)][3].append(func in CHANNELWISE_NORMS and self.readers[id(t)][1].same(gate))
        return out

    def _note_reads(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note what a function reads into Python, unless it is the tracker that calls it."""
        if (func in READS or func in SPLITS) and not self.tracker.paused:
            for t in filter(torch.is_tensor, (*args[func in SPLITS :], *kwargs.values())):
                self.tracker.note_read(t)

    def _trace(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a traced call and note its units."""
        if func in RECURRENT and (kwargs or self._is_ungated(args)):
            return func(*args, **kwargs)  # not as torch's own modules call it, or frozen
        if func in FUSED:
            return trace_fused(self, key, func, args)
        if func in CELLS:
            return trace_cell(self, key, func, args)
        trace = self._trace_layer if func in LAYERS else self._trace_norm if func in NORMS else self._trace_regated
        return trace(key, func, args, kwargs)

    def _is_ungated(self, args: Any) -> bool:
        """Return whether all parameters of a recurrent layer need no units."""
        names = [self.names[id(t)] for t in tree_leaves(args) if id(t) in self.names]
        return bool(names) and all(name in self.ungated for name in names)

    def _is_wrapped(self, args: Any, kwargs: Any) -> bool:
        """Return whether an argument is a tensor of `torch.vmap` and the like."""
        return any(wrapped(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))

    def _rows_of_parameter(self, args: Any, kwargs: Any, func: Any) -> str:
        """Return the name of the rows of a parameter that a layer uses, such as "in_proj_weight[0:16]"."""
        weight = named_arguments(func, args, kwargs).get("weight")
        base = weight._base if isinstance(weight, Tensor) else None
        if weight is None or base is None or id(base) not in self.names:
            return ""
        if weight.stride() != base.stride() or weight.shape[1:] != base.shape[1:]:
            return ""
        first = (weight.storage_offset() - base.storage_offset()) // base.stride(0)
        return f"{self.names[id(base)]}[{first}:{first + len(weight)}]"

    def _shown(self, key: Key, origin: Key | None, func: Any, args: Any, kwargs: Any) -> str:
        """Return the name of a call for people: its layer, or its function, and which of its calls if it has several."""
        name, number = key
        if key != origin:
            name = self._rows_of_parameter(args, kwargs, func) or f"{func.__name__}()"
            number = self.functions[name] = self.functions.get(name, 0) + 1
        return name.removesuffix(".weight") + (f" (call {number})" if number > 1 else "")

    def _trace_layer(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a linear or convolutional layer and give its outputs units: new ones at its first call."""
        given = dict(zip(LAYERS[func], args, strict=False)) | kwargs
        if not {"input", "weight"} <= given.keys() or "out" in kwargs:
            return func(*args, **kwargs)
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        positions = self.tracker.positions(weight)
        convolution, lookup = func in CONVOLUTIONS or func in TRANSPOSED, func in LOOKUPS
        fits = weight.dim() == 2 if lookup else x.dim() >= 2 and weight.dim() == (x.dim() if convolution else 2)
        if positions is None or not fits or given.get("max_norm") is not None:
            return func(*args, **kwargs)
        if self.tracker.positions(x) is not None:  # a learned query
            self.tracker.mark_untraceable(x, func.__name__)
        out = self.run_untracked(func, args, kwargs)
        dim = 1 if convolution else out.dim() - 1
        channels = torch.full((1,), ALWAYS_ACTIVE) if lookup else self.channel_ids(x, 1 if convolution else x.dim() - 1)
        if any(name in self.ungated for name in self._parameter_of(weight)):
            if weight.requires_grad:  # a task uses the weights that read one of its units
                writes, reads = _weight_ends(func, weight.shape, given.get("groups", 1), channels)
                self.record_use(positions, torch.full_like(writes, ALWAYS_OPEN), reads)
            return out
        kind = "x @ W" if func in PRODUCTS else "transposed" if func in TRANSPOSED else "lookup" if lookup else ""
        layer = (self.names.get(id(weight)) or elements(positions), kind, out.shape[dim])  # W may be square
        first = self.table.of_layer(layer, self.shown[key], out.shape[dim], self._parameter_of(weight))
        writes, reads = _weight_ends(func, weight.shape, given.get("groups", 1), channels)
        self.record_use(positions, writes + first, reads)
        units = torch.arange(first, first + out.shape[dim])
        if bias is not None and (found := self.tracker.positions(bias)) is not None:
            alone = not weight.requires_grad and self.tracker.is_trained(found) and not self.tracker.is_trained(positions)
            if bias.shape == units.shape and not alone:
                self.record_use(found, units, torch.full((1,), ALWAYS_ACTIVE))
            else:  # trained alone, it would be used by every task, since no gate of a frozen layer closes
                self.tracker.mark_untraceable(bias, func.__name__)
        self.readers[id(out)] = (out, self.add_gate(key, out, units, dim), key, [])
        return out

    def _parameter_of(self, weight: Tensor) -> list[str]:
        """Return the name of the parameter that a weight is, or is a view of."""
        found = [self.names[id(t)] for t in (weight, weight._base) if id(t) in self.names]
        return found[:1]

    def _trace_norm(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a normalisation and gate its result, because the norm's bias makes a closed channel non-zero.

        A channel that depends on one unit gets the gate of this unit; one that depends on several gets a new unit. So does
        every channel of a state that is all zero, as before the first step of a loop.
        """
        given = arguments(func, args, kwargs)
        own = {k: t for k in ("weight", "bias") if id(t := given.get(k)) in self.names}
        self.norms |= {self.names[id(t)] for t in own.values()}
        for name, t in given.items():  # a slice of a parameter as the weight, or a parameter that is itself normalised
            if isinstance(t, Tensor) and name not in own and self.tracker.positions(t) is not None:
                self.tracker.mark_untraceable(t, func.__name__)
        x = given["input"]
        out = self.run_untracked(func, args, kwargs)
        dim = self._normalised_dim(x, given["normalized_shape"]) if func in (F.layer_norm, F.rms_norm) else 1
        if dim is None:
            return out
        sets = self._channel_sets(x, dim)
        zero = all(s is not None and not s for s in sets)
        several = [c for c, s in enumerate(sets) if s is not None and (zero or len(s) > 1)]
        units = torch.tensor([min(s) if s else -1 for s in sets])
        units[several] = torch.tensor(self.table.of_channels(key[0], self.shown[key], several), dtype=torch.int64)
        self.norm_units |= {int(units[c]): sets[c] for c in several}
        own_dim = dim - (x.dim() - len(given["normalized_shape"])) if "normalized_shape" in given else 0
        for t in given.values():
            if isinstance(t, Tensor) and id(t) in self.names and own_dim >= 0 and (any(sets) or not self._known_norm(t)):
                self.norm_inputs[self.names[id(t)]] = (own_dim, sets)
        self.add_gate(key, out, units, dim)
        return out

    def _known_norm(self, tensor: Tensor) -> bool:
        """Return whether the inputs of the norm of this tensor are known from an earlier call."""
        return self.names[id(tensor)] in self.norm_inputs

    def _trace_regated(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function with f(0) != 0 and gate its result with the gates of its input."""
        out = func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        dim = self._channel_dim(x)
        if dim is None or "out" in kwargs or out.shape != x.shape:
            return out  # its result is already always active
        sets = self._channel_sets(x, dim)
        self.add_gate(key, out, torch.tensor([min(s) if s is not None and len(s) == 1 else -1 for s in sets]), dim)
        return out

    def run_untracked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call whose result gets its dependency sets from this trace."""
        self.tracker.paused = True
        try:
            return func(*args, **kwargs)
        finally:
            self.tracker.paused = False

    def record_use(self, positions: Tensor, writes: Tensor, reads: Tensor) -> None:
        """Record that weights write some units and read some sets, unless an earlier call is known to do the same."""
        kernel = [1] * (positions.dim() - writes.dim())
        writes, reads = (t.reshape(*t.shape, *kernel) for t in (writes, reads))
        which = elements(positions)
        signature = (which, elements(writes), elements(reads))
        if signature not in self._known_uses:
            self._known_uses.add(signature)
            start, scattered = int(positions.min()), isinstance(which[0], bytes)
            self.uses.append(Use(positions.clone() if scattered else None, start, positions.shape, writes, reads))

    def add_gate(self, key: Key, out: Tensor, units: Tensor, dim: int) -> Gate:
        """Put gates on a result and set its dependency sets accordingly; unit -1 stands for no gate."""
        dependencies = self.tracker.dependencies
        ids = torch.tensor([ALWAYS_ACTIVE if u < 0 else dependencies.id_of(frozenset([u])) for u in units.tolist()])
        self.tracker.assign(out, ids.view([-1 if d == dim else 1 for d in range(out.dim())]).expand(out.shape), gated=True)
        first = int(units[0])
        gate = Gate(units, dim, first if torch.equal(units, torch.arange(first, first + len(units))) else -1)
        if (units >= 0).any():
            self.places[key] = gate
        return gate

    def channel_ids(self, x: Tensor, dim: int) -> Tensor:
        """Return one set id per channel: the union over all other dimensions."""
        ids = self.tracker.set_ids(x)
        if not x.numel():  # no image of the example comes here, but others may
            return torch.full((x.shape[dim],), ALWAYS_ACTIVE)
        return self.tracker.dependencies.reduce(ids, [d for d in range(x.dim()) if d != dim]).flatten()

    def _channel_sets(self, x: Tensor, dim: int) -> list[frozenset[int] | None]:
        return [self.tracker.dependencies.sets[k] for k in self.channel_ids(x, dim).tolist()]

    def _normalised_dim(self, x: Tensor, shape: Sequence[int]) -> int | None:
        """Return the dimension of a norm's gates: where sets differ, or of several such dimensions the last, if normalised.

        Sets differ along two dimensions if a class token stands beside patches.
        """
        last: list[int] = [x.dim() - 1] if len(shape) == 1 and x.dim() > 1 else []
        found = self._channel_dim(x, *last)
        return found if found is not None or not last else last[0]

    def _channel_dim(self, x: Tensor, *preferred: int) -> int | None:
        """Return the only dimension, apart from the batch, along which the dependency sets differ; None if there is none."""
        ids = self.tracker.set_ids(x)
        dims: list[int] = [*preferred, *range(1, x.dim())]
        for dim in dims:
            first = ids
            for other in range(x.dim()):
                first = first if other == dim else first.narrow(other, 0, 1)
            if torch.equal(first.expand_as(ids), ids):
                return dim
        return None


def elements(numbers: Tensor) -> tuple[int | bytes, torch.Size]:
    """Return what identifies a tensor of integers: its first number, if they are consecutive, or all; and its shape."""
    flat = numbers.reshape(-1)
    start = int(flat[0]) if len(flat) else 0
    consecutive = torch.equal(flat, torch.arange(start, start + len(flat)))
    return start if consecutive else flat.numpy().tobytes(), numbers.shape


def _weight_ends(func: Any, shape: torch.Size, groups: int, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Return for every weight, by its first two dimensions, the output channel it writes and the set id of what it reads.

    Args:
        func: the function of the layer.
        shape: the shape of its weights.
        groups: the groups of a convolution.
        channels: (input channels,), the set id of every input channel.
    """
    if func in PRODUCTS or func in LOOKUPS:  # weights (inputs, outputs)
        return torch.arange(shape[1])[None], channels[:, None]
    if func in TRANSPOSED:  # (inputs, outputs / groups, ...)
        outputs = torch.arange(groups * shape[1]).view(groups, 1, shape[1])
        return outputs.expand(groups, shape[0] // groups, shape[1]).reshape(shape[:2]), channels[:, None]
    inputs = channels.view(groups, 1, -1).expand(groups, shape[0] // groups, -1).reshape(shape[0], -1)
    return torch.arange(shape[0])[:, None], inputs if groups > 1 else channels[None]  # (outputs, inputs / groups, ...)
