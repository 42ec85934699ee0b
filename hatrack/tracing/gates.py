"""The gates of a trunk's units: where they are applied, and the mode that applies them whenever the trunk runs.

A call of the trunk is identified by the parameter that it is given and a count, such as ("layer1.weight", 1), because a
module may be called several times. A call without a parameter of its own, such as a sigmoid, is identified by the call that
made its input or, if there were operations in between, by the last call with a parameter. So a block that is left out at
random in training changes no other key. A part of a parameter is identified by its place in it. A parameter that is gated
itself, such as a class token, has the key (its name, 0).

A loop may be longer or shorter than it was on the example. A call that the example did not make takes the gate of the last
call of the same parameter, and `lengths.py` checks that everything that was found out on the example holds for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from hatrack.tracing.norm_calls import NORMS, arguments
from hatrack.tracing.opened import OPENED
from hatrack.tracing.recurrent import CELL_ARGUMENTS, CELLS, FUSED, FusedGate, fused_arguments

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.addmm)
LOOKUPS = (F.embedding, F.embedding_bag)
LAYERS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(CONVOLUTIONS, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
    **dict.fromkeys(TRANSPOSED, ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")),
    **dict.fromkeys(PRODUCTS, ("input", "weight")),
    F.linear: ("input", "weight", "bias"),
    torch.addmm: ("bias", "input", "weight"),
    F.embedding: ("input", "weight", "padding_idx", "max_norm"),
    F.embedding_bag: ("input", "weight", "offsets", "max_norm"),
}
RECURRENT = {*FUSED, *CELLS}
REGATED = (  # pointwise functions with f(0) != 0: after them the gates are applied again
    torch.sigmoid, Tensor.sigmoid, F.hardsigmoid, F.softplus, F.logsigmoid, torch.exp, Tensor.exp, torch.cos, Tensor.cos,
)  # fmt: skip
TRACED = {*LAYERS, *NORMS, *REGATED, *RECURRENT}
Key = tuple[str, int]  # the name of a parameter, or of a function and its place, and which of its calls
ORIGIN = "_hatrack_origin"  # the attribute of a traced call's result that holds the key of the last call with a parameter


class Gate(NamedTuple):
    """The gates on the result of one call.

    Attributes:
        units: (channels,), the unit that gates each channel; -1 if the channel has no gate.
        dim: the dimension of the result that holds the channels.
        first: the first unit, if the units are consecutive; otherwise -1.
    """

    units: Tensor
    dim: int
    first: int

    def __call__(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return x with the gates (units,) applied: bools select, other types multiply."""
        return self.apply(x, self.values(gates))

    def values(self, gates: Tensor) -> Tensor:
        """Return the values (channels,) of the channels' gates, of those of all units (units,)."""
        if self.first < 0:
            return torch.cat([gates, gates.new_ones(1)])[self.units]
        return gates[self.first : self.first + len(self.units)]

    def apply(self, x: Tensor, values: Tensor) -> Tensor:
        """Return x with the values (channels,) of its gates applied."""
        if self.dim != x.dim() - 1:
            values = values.view([-1 if d == self.dim else 1 for d in range(x.dim())])
        return torch.where(values, x, 0) if values.dtype == torch.bool else x * values.to(x.dtype)

    def to(self, device: torch.device) -> "Gate":
        """Return the gate on a device."""
        return self._replace(units=self.units.to(device))

    def same(self, other: Any) -> bool:
        """Return whether another gate uses the same units along the same dimension."""
        return isinstance(other, Gate) and self.dim == other.dim and torch.equal(self.units, other.units)


class CountedCalls(TorchFunctionMode):
    """Base of `ApplyGates` and `Trace`: it gives every traced call its key.

    Args:
        names: the name of every parameter and buffer of the trunk, by `id`.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.counts: dict[str, int] = {}
        self.last: Key | None = None  # of the last call with a parameter
        self.substitutes: dict[int, Tensor] = {}  # by `id` of a parameter that is gated itself: what is used in its place

    def substituted(self, given: Any) -> Any:
        """Return the arguments of a call, with parameters that are gated themselves replaced."""
        if not self.substitutes or not any(id(t) in self.substitutes for t in tree_leaves(given)):
            return given
        return tree_map(lambda t: self.substitutes.get(id(t), t), given)

    def key(self, func: Any, args: Any, kwargs: Any) -> tuple[Key, Key | None]:
        """Return the key of this call, and count it; also that of the call with a parameter that it belongs to."""
        given = named_arguments(func, args, kwargs)
        tensors = [given[k] for k in ("weight", "running_mean") if given.get(k) is not None]
        name = self.name_of(tensors)
        if name is not None:
            self.last = self._counted(name)
            return self.last, self.last
        origin: Key | None = getattr(given.get("input", args[0] if args else None), ORIGIN, self.last)
        part = self._part_of_parameter(given.get("weight"))
        return self._counted(f"{func.__name__}(){part}" if part else function_name(func, origin)), origin

    def name_of(self, tensors: list[Any]) -> str | None:
        """Return the name of the first of these tensors that is the trunk's; None if none is."""
        return next((self.names[id(t)] for t in tensors if id(t) in self.names), None)

    def _part_of_parameter(self, weight: Any) -> str:
        """Return which part of which parameter a weight is a view of, such as the queries' part of packed projections."""
        name = self.names.get(id(weight._base)) if isinstance(weight, Tensor) and weight._base is not None else None
        return "" if name is None else f" of {name} {tuple(weight.shape)} from {weight.storage_offset()}"

    def _counted(self, name: str) -> Key:
        self.counts[name] = self.counts.get(name, 0) + 1
        return name, self.counts[name]


class ApplyGates(CountedCalls):
    """While this mode is active, the results of the trunk's calls are gated as the trace found out.

    Args:
        names: the name of every parameter and buffer of the trunk, by `id`.
        places: the gate of every traced call; None if the call has none.
        gates: (units,), the value of every gate.
        layers: the units of every layer, consecutive; none: every call takes its part of the gates by itself.
        training: the trunk is in training mode, in which it may compute statistics that the example did not need.

    Attributes:
        others: the calls that the example did not make.
    """

    def __init__(
        self,
        names: dict[int, str],
        places: "Places",
        gates: Tensor,
        layers: Sequence[slice] = (),
        *,
        training: bool = False,
    ) -> None:
        super().__init__(names)
        self.places, self.gates, self.training = places, gates, training
        # Once, if they learn: each slice would have a backward pass of its own.
        learn = bool(layers) and gates.requires_grad
        parts = torch.split(gates, [units.stop - units.start for units in layers]) if learn else ()
        self.parts = {units.start: part for units, part in zip(layers, parts, strict=False)}
        self.others: list[Key] = []
        self._own = {number: gate for number, name in names.items() if isinstance(gate := places.gates.get((name, 0)), Gate)}

    def substituted(self, given: Any) -> Any:
        """Return the arguments of a call, with parameters that are gated themselves replaced by their gated values."""
        for t in tree_leaves(given):
            if id(t) in self._own and id(t) not in self.substitutes:
                self.substitutes[id(t)] = self._own[id(t)](t, self.gates)
        return super().substituted(given)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OPENED:
            with self:
                return OPENED[func](*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if self._own:
            args, kwargs = self.substituted((args, kwargs))
        if func not in TRACED:
            return func(*args, **kwargs)
        key, origin = self.key(func, args, kwargs)
        found = self.places.key(key, func, origin)
        if found is None:
            if self.training and key != origin and not torch.is_grad_enabled():
                return func(*args, **kwargs)  # statistics without a gradient, as a product of activations
            raise only_in_training(key) if self.training else not_on_example(key)
        if found != key:
            self.others.append(key)
        gate = self.places.gates[found]
        if isinstance(gate, FusedGate):
            return marked(gate.run(func, args, self.gates), origin)
        return marked(self.call(found, gate, func, args, kwargs), origin)

    def values(self, gate: Gate) -> Tensor:
        """Return the values (channels,) of a gate."""
        found = self.parts.get(gate.first)
        return found if found is not None and len(found) == len(gate.units) else gate.values(self.gates)

    def call(self, found: Key, gate: Gate | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function and apply the gate of its place to the result."""
        out = func(*args, **kwargs)
        if gate is None:
            return out
        if isinstance(out, tuple):  # of an LSTM's cell, the state and the memory have the same gates
            return tuple(gate.apply(t, self.values(gate)) for t in out)
        return gate.apply(out, self.values(gate))


class Places:
    """The gate of every call that was traced on the example, and which of them another call takes.

    Args:
        gates: the gate of every traced call; None if the call has none.

    Attributes:
        calls: how often every parameter was used on the example.
    """

    def __init__(self, gates: Mapping[Key, Gate | FusedGate | None]) -> None:
        self.gates, self.calls = dict(gates), dict[str, int]()
        for name, number in gates:
            self.calls[name] = max(number, self.calls.get(name, 0))

    def key(self, key: Key, func: Any, origin: Key | None) -> Key | None:
        """Return the traced call whose gate a call takes: itself, or the last one of the same parameter; None if none."""
        if key in self.gates:
            return key
        if origin is None or origin[0] not in self.calls:
            return None
        last = (origin[0], self.calls[origin[0]])
        other = last if key == origin else (function_name(func, last), key[1])
        return other if other in self.gates else None

    def to(self, device: torch.device) -> "Places":
        """Return the gates on a device."""
        return Places({key: gate and gate.to(device) for key, gate in self.gates.items()})


def function_name(func: Any, origin: Key | None) -> str:
    """Return the name of a call without a parameter of its own."""
    return f"{func.__name__}()" + ("" if origin is None else f" after {origin[0]} (call {origin[1]})")


NOT_FOLLOWED = "pmask and packnet, whose masks are of single weights, take such a trunk, but can't widen it"


def not_on_example(key: Key) -> ValueError:
    """Return the error for a call that the example did not make."""
    return ValueError(
        f"the trunk calls {key[0]} (call {key[1]}), but it did not when it was traced on the example; "
        f"all inputs must take the same path; {NOT_FOLLOWED}"
    )


def only_in_training(key: Key) -> ValueError:
    """Return the error for a call in training mode that the example, in evaluation mode, did not make."""
    return ValueError(
        f"in training mode the trunk calls {key[0]} (call {key[1]}), but it did not when it was traced on the example, in "
        "evaluation mode: both must call the same with the same weights (dropout on a weight, or noise, makes another one); "
        "pmask and packnet, whose masks are of single weights, take such a trunk"
    )


def marked(result: Any, origin: Key | None) -> Any:
    """Return a call's result, with a mark of where it came from for the next call."""
    for t in result if isinstance(result, tuple) else (result,):
        if isinstance(t, Tensor) and origin is not None:
            setattr(t, ORIGIN, origin)
    return result


def named_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a traced call by name; the others by position are left out."""
    if func in FUSED and not kwargs:
        return fused_arguments(args)
    if func in CELLS and not kwargs:
        return dict(zip(CELL_ARGUMENTS, args, strict=False))
    return arguments(func, args, kwargs) if func in NORMS else dict(zip(LAYERS.get(func, ()), args, strict=False)) | kwargs


def tensor_names(trunk: nn.Module) -> dict[int, str]:
    """Return the name of every parameter and buffer of a trunk, by the tensor's `id`."""
    found: dict[int, str] = {}
    _note_names(trunk, "", found)
    return found


def _note_names(part: nn.Module, prefix: str, found: dict[int, str]) -> None:
    """Note the names of tensors, the first of each; torch's own lists of them take several times as long."""
    for table in (part._parameters, part._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                found.setdefault(id(tensor), prefix + name)
    for name, module in part._modules.items():
        if module is not None:
            _note_names(module, f"{prefix}{name}.", found)
