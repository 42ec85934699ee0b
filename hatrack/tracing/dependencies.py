"""Labels: for every element of every tensor of a forward pass, the units without which it is exactly zero.

A label is the number of a set of units. NEVER is the empty set (the element is zero whatever the gates are), ALWAYS stands
for an element that no set of closed gates makes zero. Labels are kept per storage, not per tensor, so that views and
operations in place need no rule: a view of the data is the same view of the labels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NEVER, ALWAYS = 0, 1
COPIES = {  # operations that move elements and may put zeros between them
    "cat", "channel_shuffle", "clone", "constant_pad_nd", "diag_embed", "expand_copy", "flip", "gather",
    "im2col", "index", "index_select", "lift_fresh", "native_channel_shuffle", "permute_copy", "pixel_shuffle",
    "pixel_unshuffle", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "repeat", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "roll", "rot90", "select_scatter", "slice_scatter", "stack", "tril", "triu",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "view_copy", "_unsafe_view",
}  # fmt: skip
PARAMETER_COPIES = {"cat", "clone", "flip", "index", "index_select", "repeat", "roll", "stack", "_unsafe_view"}
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "linalg_vector_norm", "norm", "cumsum"}
CHANNELWISE = {  # operations within a channel that make zeros of zeros, with the number of dimensions they work on
    "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3, "max_pool1d": 1, "max_pool1d_with_indices": 1,
    "max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3, "_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3,
    "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3, "fractional_max_pool2d": 2, "upsample_linear1d": 1,
    "upsample_bilinear2d": 2, "_upsample_bilinear2d_aa": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3,
    "grid_sampler_2d": 2, "max_unpool2d": 2, "hardswish": 0, "rrelu_with_noise": 0, "_prelu_kernel": 0,
}  # fmt: skip


class Labels:
    """The sets of units that occur, each with a number, and their algebra on tensors of such numbers."""

    def __init__(self) -> None:
        self.sets: list[frozenset[int] | None] = [frozenset(), None]
        self._numbers: dict[frozenset[int] | None, int] = {s: n for n, s in enumerate(self.sets)}

    def number(self, units: frozenset[int] | None) -> int:
        if units not in self._numbers:
            self._numbers[units] = len(self.sets)
            self.sets.append(units)
        return self._numbers[units]

    def singles(self, first: int, count: int) -> Tensor:
        """The labels of units that stand for themselves."""
        return torch.tensor([self.number(frozenset([u])) for u in range(first, first + count)])

    def _join(self, a: int, b: int) -> int:
        one, two = self.sets[a], self.sets[b]
        return ALWAYS if one is None or two is None else self.number(one | two)

    def _smaller(self, a: int, b: int) -> int:
        one, two = self.sets[a], self.sets[b]
        return a if two is None or (one is not None and len(one) <= len(two)) else b

    def _pairs(self, rule: Callable[[int, int], int], a: Tensor, b: Tensor) -> Tensor:
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
        width = len(self.sets)
        codes, place = (a * width + b).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        return torch.tensor([rule(*divmod(code, width)) for code in codes.tolist()], dtype=torch.int64)[place]

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """Of a sum: zero when both are."""
        return self._pairs(self._join, a, b)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Of a product: zero when either is, so that the smaller set will do."""
        return self._pairs(self._smaller, a, b)

    def reduce(self, labels: Tensor, dims: Sequence[int]) -> Tensor:
        """The join over some dimensions, which become 1 long."""
        for dim in dims:
            while labels.shape[dim] > 1:
                if torch.equal(labels, labels.narrow(dim, 0, 1).expand_as(labels)):
                    labels = labels.narrow(dim, 0, 1)
                    break
                half = (labels.shape[dim] + 1) // 2  # fold it; the middle may be joined with itself
                labels = self.join(labels.narrow(dim, 0, half), labels.narrow(dim, labels.shape[dim] - half, half))
        return labels


class Shadows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the labels of everything that is computed while it is on, and where parameters go."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels = Labels()
        self.paused = False  # while a layer runs whose labels are set by hand
        self.unknown: dict[str, str] = {}  # parameters that can't be followed, with the operation that used them
        self._alive: list[Any] = []  # storages by their address are only unique as long as none is freed
        self._labels: dict[int, Tensor] = {}  # by storage: the label of every element of it
        self._positions: dict[int, Tensor] = {}  # by storage: which elements of which parameters these are
        self._varying: set[int] = set()  # storages of numbers other than floats that may differ from input to input
        self.first: dict[str, int] = {}  # parameters are numbered through by storage, since some may share one
        self.names: list[tuple[int, str]] = []
        total = 0
        for name, parameter in parameters.items():
            address, size = _address(parameter), _size(parameter)
            if address not in self._positions:
                self._positions[address] = torch.arange(total, total + size)
                total += size
            self.first[name] = int(self._positions[address][0]) if size else 0
            self.names += [(self.first[name], name)] if size else []
        self.total = total

    def of(self, tensor: Tensor) -> Tensor:
        """The labels of a tensor."""
        kept = self._labels.get(_address(tensor))
        if kept is None or len(kept) != _size(tensor):
            return torch.full(tensor.shape, ALWAYS)
        return kept.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def known(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._labels

    def positions(self, tensor: Tensor) -> Tensor | None:
        """Which elements of which parameters a tensor is; None if it is something else."""
        kept = self._positions.get(_address(tensor))
        if kept is None or len(kept) != _size(tensor):
            return None
        return kept.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def set(self, tensor: Tensor, labels: Tensor) -> None:
        address = _address(tensor)
        if address not in self._labels:
            self._labels[address] = torch.full((_size(tensor),), ALWAYS)
            self._alive.append(tensor.untyped_storage())
        self.of(tensor).copy_(labels)

    def lose(self, tensor: Tensor, operation: str) -> None:
        """A parameter went where it can't be followed."""
        found = self.positions(tensor)
        assert found is not None
        for name in self.owners(found):
            self.unknown.setdefault(name, operation)

    def owners(self, positions: Tensor) -> list[str]:
        """The parameters that these elements belong to."""
        firsts = torch.tensor(sorted({first for first, _ in self.names}))
        inside = firsts[(torch.bucketize(positions.reshape(-1), firsts, right=True) - 1).unique()].tolist()  # type: ignore[no-untyped-call]
        return [name for first, name in self.names if first in inside]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.paused:
            self.paused = True
            try:
                self._follow(func, args, kwargs, out)
            finally:
                self.paused = False
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.numel()]
        name, mutable, mine = func.overloadpacket.__name__, func._schema.is_mutable, {_address(t) for t in inputs}
        if results and not mutable and all(_address(t) in mine for t in results):
            return  # a view
        self._note_varying(func, inputs, [t for t in results if not t.is_floating_point()])
        new = [t for t in results if t.is_floating_point() and (mutable or _address(t) not in mine)]
        if mutable:
            self._forget_written(func, args, kwargs, new)
        parameters = [t for t in inputs if self.positions(t) is not None]
        others = [t for t in inputs if self.positions(t) is None]
        if parameters and name in PARAMETER_COPIES and not any(t.is_floating_point() or self.varies(t) for t in others):
            self._move(func, args, kwargs, out)
            return
        for t in () if name.startswith("new_") or name.endswith("_like") else parameters:  # these read no values
            self.lose(t, name)
        if not new or (inputs and not any(self.known(t) for t in inputs)):
            return  # nothing to label, or everything is always on
        labels = self._rule(name.rstrip("_"), func, args, kwargs, new)
        for t in new:
            self.set(t, torch.full((), ALWAYS) if labels is None else labels.expand(t.shape))

    def varies(self, tensor: Tensor) -> bool:
        """Whether numbers other than floats, indices say, depend on the input or on chance."""
        return _address(tensor) in self._varying

    def _note_varying(self, func: Any, inputs: list[Tensor], results: list[Tensor]) -> None:
        chance = torch.Tag.nondeterministic_seeded in func.tags
        if results and (chance or any(t.is_floating_point() or self.varies(t) for t in inputs)):
            self._varying |= {_address(t) for t in results}
            self._alive += [t.untyped_storage() for t in results]

    def _forget_written(self, func: Any, args: Any, kwargs: Any, new: list[Tensor]) -> None:
        """What is written without being a result, or as numbers of another type, is always on from then on."""
        labelled = {_address(t) for t in new}
        for k, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[k] if k < len(args) else kwargs.get(argument.name)
                for t in tree_leaves(value):
                    if isinstance(t, Tensor) and self.known(t) and _address(t) not in labelled:
                        self._labels[_address(t)].fill_(ALWAYS)

    def _move(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """Elements of parameters that are only copied elsewhere are still elements of parameters."""

        def positions(x: Any) -> Any:
            return self.positions(x) if isinstance(x, Tensor) and x.is_floating_point() else x

        kept = torch.zeros(_size(out), dtype=torch.int64)
        kept.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(func(*tree_map(positions, args), **kwargs))
        self._positions[_address(out)] = kept
        self._alive.append(out.untyped_storage())

    def _labels_of(self, x: Any) -> Any:
        """In double precision, because not every operation moves whole numbers."""
        return self.of(x).double() if isinstance(x, Tensor) and x.is_floating_point() else x

    def _rule(self, name: str, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
        """The labels of a result; None: always on, which freezes more than needed and is never wrong."""
        floats = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if not floats:  # made from nothing: zeros are zeros, unless by chance
            chance = torch.Tag.nondeterministic_seeded in func.tags or "empty" in name
            return None if chance else torch.where(outputs[0] == 0, NEVER, ALWAYS)
        if name in ("new_zeros", "zeros_like", "zero"):
            return torch.full((), NEVER)
        if "out" in given:
            return None
        if name in ("copy", "_to_copy"):
            return self.of(given["src" if name == "copy" else "self"])
        if name == "constant_pad_nd":
            return func(self._labels_of(args[0]), args[1], ALWAYS if given.get("value") else NEVER).long()  # type: ignore[no-any-return]
        if name in COPIES and any(self.varies(t) for t in tree_leaves(args) if isinstance(t, Tensor)):
            return None  # other inputs take other elements
        if name in COPIES:
            return func(*tree_map(self._labels_of, args), **kwargs).long()  # type: ignore[no-any-return]
        if name == "mul" and isinstance(args[1], Tensor):
            return self.labels.product(self.of(args[0]), self.of(args[1]))
        if name == "div" and isinstance(args[1], Tensor):
            return self.of(args[0]) if bool((self.of(args[1]) == ALWAYS).all()) else None
        if name == "masked_fill":
            return self.of(args[0]) if not isinstance(args[2], Tensor) and args[2] == 0 else None
        if name in REDUCTIONS:
            dims = given.get("dim")
            dims = [dims] if isinstance(dims, int) else dims or range(floats[0].dim())
            labels = self.labels.reduce(self.of(floats[0]), dims)
            return labels if labels.dim() == outputs[0].dim() else labels.reshape(outputs[0].shape)
        if name in CHANNELWISE:
            dims = list(range(floats[0].dim() - CHANNELWISE[name], floats[0].dim()))
            return self.labels.reduce(self.of(floats[0]), dims)
        if name == "glu":
            return self.of(args[0]).chunk(2, given.get("dim", -1))[0]
        if name == "col2im":  # (batch, channels * places of the kernel, columns) to (batch, channels, height, width)
            return self.labels.reduce(self.of(args[0]).unflatten(-2, (outputs[0].shape[-3], -1)), [-2, -1])  # type: ignore[no-untyped-call]
        if torch.Tag.pointwise in func.tags and (name == "where" or not any(_discrete(t) for t in tree_leaves(args))):
            return self._pointwise(func, args, kwargs, floats, outputs)
        return None

    def _pointwise(self, func: Any, args: Any, kwargs: Any, floats: list[Tensor], outputs: list[Tensor]) -> Tensor | None:
        """A function with f(0) = 0 joins the labels of its arguments."""

        def nothing(x: Any) -> Any:
            return torch.zeros_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x

        results = tree_leaves(func(*tree_map(nothing, args), **tree_map(nothing, kwargs)))
        if not all(bool((t == 0).all()) for t in results):
            return None
        labels = self.of(floats[0])
        for t in floats[1:]:
            labels = self.labels.join(labels, self.of(t))
        return labels


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _discrete(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point()
