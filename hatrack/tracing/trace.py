"""One forward pass of a trunk, seen call by call: its layers get units, their results gates and labels.

`Trace` looks, once, on an example; `Gates` applies gates at the same calls whenever the trunk runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hatrack.tracing.dependencies import ALWAYS, Shadows
from hatrack.tracing.norm_calls import NORMS, arguments

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
LAYERS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(CONVOLUTIONS, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
    **dict.fromkeys(TRANSPOSED, ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")),
    **dict.fromkeys(PRODUCTS, ("input", "weight")),
    F.linear: ("input", "weight", "bias"),
}
BY_CHANNEL = (F.batch_norm, F.instance_norm)  # norms that mix no channels
REGATED = (  # functions of one element with f(0) != 0: behind them the gates are applied again
    torch.sigmoid, Tensor.sigmoid, F.hardsigmoid, F.softplus, F.logsigmoid, torch.exp, Tensor.exp, torch.cos, Tensor.cos,
)  # fmt: skip
FOLLOWED = {*LAYERS, *NORMS, *REGATED}
Key = tuple[str, int]  # the name of a parameter, or of a function, and which of its calls


class Gate(NamedTuple):
    """Where gates are applied: the unit of every channel (-1: always open) along one dimension of a result."""

    units: Tensor
    dim: int
    first: int  # of units that follow one another; -1 if they don't

    def __call__(self, x: Tensor, gates: Tensor) -> Tensor:
        if self.first < 0:
            values = torch.cat([gates, gates.new_ones(1)])[self.units]
        else:
            values = gates[self.first : self.first + len(self.units)]
        values = values.view([-1 if d == self.dim else 1 for d in range(x.dim())])
        return torch.where(values, x, 0) if values.dtype == torch.bool else x * values.to(x.dtype)

    def same(self, other: "Gate | None") -> bool:
        return other is not None and self.dim == other.dim and torch.equal(self.units, other.units)


@dataclass(frozen=True)
class Use:
    """One use of some weights: which elements of the parameters they are, the units they write and the labels they read."""

    positions: Tensor | None  # None: `count` elements one after the other from `start` on
    start: int
    shape: torch.Size
    writes: Tensor  # numbers of units; it and the next broadcast to the shape
    reads: Tensor  # labels


class Calls(TorchFunctionMode):
    """Knows the calls that matter by the parameter they are given and a count."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.counts: dict[str, int] = {}

    def key(self, func: Any, args: Any, kwargs: Any) -> Key:
        given = (
            arguments(func, args, kwargs) if func in NORMS else dict(zip(LAYERS.get(func, ()), args, strict=False)) | kwargs
        )
        marks = [given[k] for k in ("weight", "running_mean") if given.get(k) is not None]
        name = next((self.names[id(t)] for t in marks if id(t) in self.names), f"{func.__name__}()")
        self.counts[name] = self.counts.get(name, 0) + 1
        return name, self.counts[name]


class Gates(Calls):
    """Applies gates where they belong while a trunk runs."""

    def __init__(self, names: dict[int, str], places: Mapping[Key, Gate | None], gates: Tensor) -> None:
        super().__init__(names)
        self.places, self.gates = places, gates

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in FOLLOWED:
            key = self.key(func, args, kwargs or {})
            if key not in self.places:
                raise ValueError(f"the trunk calls {key[0]} (call {key[1]}), which it did not on the example: not followed")
            gate = self.places[key]
            if gate is not None:
                return gate(out, self.gates)
        return out


class Trace(Calls):
    """Gives every layer its units while the trunk runs on the example."""

    def __init__(self, names: dict[int, str], shadows: Shadows) -> None:
        super().__init__(names)
        self.shadows, self.count = shadows, 0
        self.layers: dict[str, slice] = {}
        self.uses: list[Use] = []
        self.norms: set[str] = set()  # the parameters of norms
        self.places: dict[Key, Gate | None] = {}
        self.readers: dict[int, tuple[Tensor, Gate, Key, list[bool]]] = {}  # of every layer's result: do they gate it again?

    def placed(self, features: Tensor) -> dict[Key, Gate | None]:
        """A layer that only norms by channel read is gated behind them alone: in front, a gate would get no gradient."""
        layers = [layer for layer in self.readers.values() if layer[0] is not features]
        behind = {key for _, _, key, readers in layers if readers and all(readers)}
        return {key: None if key in behind else gate for key, gate in self.places.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, place = kwargs or {}, None
        if func not in FOLLOWED:
            out = func(*args, **kwargs)
        else:
            key = self.key(func, args, kwargs)
            self.places[key] = None
            step = self._layer if func in LAYERS else self._norm if func in NORMS else self._regate
            out = step(key, func, args, kwargs)
            place = self.places[key]
        if any(isinstance(t, Tensor) for t in tree_leaves(out)):
            for t in tree_leaves((args, kwargs)):
                if id(t) in self.readers:
                    self.readers[id(t)][3].append(func in BY_CHANNEL and self.readers[id(t)][1].same(place))
        return out

    def _quietly(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.shadows.paused = True
        try:
            return func(*args, **kwargs)
        finally:
            self.shadows.paused = False

    def _new(self, key: Key, count: int) -> int:
        """So many new units; returns the first."""
        name = key[0].removesuffix(".weight") + (f" (call {key[1]})" if key[1] > 1 else "")
        self.layers[name] = slice(self.count, self.count + count)
        self.count += count
        return self.count - count

    def _layer(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(zip(LAYERS[func], args, strict=False)) | kwargs
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        positions = self.shadows.positions(weight)
        convolution = func in CONVOLUTIONS or func in TRANSPOSED
        plain = positions is not None and self.shadows.positions(x) is None and "out" not in kwargs
        if not plain or x.dim() < 2 or weight.dim() != (x.dim() if convolution else 2):
            return func(*args, **kwargs)
        out = self._quietly(func, args, kwargs)
        dim = 1 if convolution else out.dim() - 1
        channels = self._channels(x, 1 if convolution else x.dim() - 1)
        first = self._new(key, out.shape[dim])
        writes, reads = _ends(func, weight.shape, given.get("groups", 1), channels)
        assert positions is not None
        self._use(positions, writes + first, reads)
        units = torch.arange(first, self.count)
        if bias is not None and (found := self.shadows.positions(bias)) is not None:
            if bias.shape == units.shape:
                self._use(found, units, torch.full((1,), ALWAYS))
            else:
                self.shadows.lose(bias, func.__name__)
        self.readers[id(out)] = (out, self._mark(key, out, units, dim), key, [])
        return out

    def _use(self, positions: Tensor, writes: Tensor, reads: Tensor) -> None:
        start, flat = int(positions.min()), positions.reshape(-1)
        whole = torch.equal(flat, torch.arange(start, start + len(flat)))
        kernel = [1] * (positions.dim() - writes.dim())
        shaped = (t.reshape(*t.shape, *kernel) for t in (writes, reads))
        self.uses.append(Use(None if whole else positions.clone(), start, positions.shape, *shaped))

    def _channels(self, x: Tensor, dim: int) -> Tensor:
        labels = self.shadows.of(x)
        return self.shadows.labels.reduce(labels, [d for d in range(x.dim()) if d != dim]).flatten()

    def _mark(self, key: Key, out: Tensor, units: Tensor, dim: int) -> Gate:
        """A gate on a result, and the labels that it then has; unit -1: none."""
        labels = self.shadows.labels
        numbers = torch.tensor([ALWAYS if u < 0 else labels.number(frozenset([u])) for u in units.tolist()])
        self.shadows.set(out, numbers.view([-1 if d == dim else 1 for d in range(out.dim())]).expand(out.shape))
        first = int(units[0])
        gate = Gate(units, dim, first if torch.equal(units, torch.arange(first, first + len(units))) else -1)
        if (units >= 0).any():
            self.places[key] = gate
        return gate

    def _norm(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        given = arguments(func, args, kwargs)
        own = {k: t for k in ("weight", "bias") if id(t := given.get(k)) in self.names}
        self.norms |= {self.names[id(t)] for t in own.values()}
        for name, t in given.items():  # other parameters: a part of one as the scale, one that is normalised itself
            if isinstance(t, Tensor) and name not in own and self.shadows.positions(t) is not None:
                self.shadows.lose(t, func.__name__)
        x = given["input"]
        out = self._quietly(func, args, kwargs)
        dim = self._dimension(x) if func in (F.layer_norm, F.rms_norm) else 1
        if dim is None:
            return out
        sets = [self.shadows.labels.sets[label] for label in self._channels(x, dim).tolist()]
        several = [c for c, s in enumerate(sets) if s is not None and len(s) > 1]
        first = self._new(key, len(several)) if several else 0
        units = torch.tensor([min(s) if s else -1 for s in sets])
        units[several] = torch.arange(first, first + len(several))
        self._mark(key, out, units, dim)
        return out

    def _regate(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        dim = self._dimension(x)
        if dim is None or "out" in kwargs or out.shape != x.shape:
            return out  # an operation in place needs no word: its labels are already always on
        sets = [self.shadows.labels.sets[label] for label in self._channels(x, dim).tolist()]
        self._mark(key, out, torch.tensor([min(s) if s is not None and len(s) == 1 else -1 for s in sets]), dim)
        return out

    def _dimension(self, x: Tensor) -> int | None:
        """The one dimension, but for the batch, along which the labels of a tensor differ; None if there is no such."""
        labels = self.shadows.of(x)
        for dim in range(1, x.dim()):
            first = labels
            for other in range(x.dim()):
                first = first if other == dim else first.narrow(other, 0, 1)
            if torch.equal(first.expand_as(labels), labels):
                return dim
        return None


def _ends(func: Any, shape: torch.Size, groups: int, channels: Tensor) -> tuple[Tensor, Tensor]:
    """The number of the output that every weight writes, and the label that it reads, by the first two dimensions."""
    if func in PRODUCTS:
        return torch.arange(shape[1])[None], channels[:, None]
    if func in TRANSPOSED:
        outputs = torch.arange(groups * shape[1]).view(groups, 1, shape[1])
        return outputs.expand(groups, shape[0] // groups, shape[1]).reshape(shape[:2]), channels[:, None]
    inputs = channels.view(groups, 1, -1).expand(groups, shape[0] // groups, -1).reshape(shape[0], -1)
    return torch.arange(shape[0])[:, None], inputs if groups > 1 else channels[None]


def names_of(trunk: nn.Module) -> dict[int, str]:
    return {id(t): name for name, t in [*trunk.named_buffers(), *trunk.named_parameters()]}
