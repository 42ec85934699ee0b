"""Track the dependency sets of all tensors of a forward pass, operation by operation (see `dependencies.py`).

The tracker sees every operation that torch dispatches and computes the sets of the result from those of the arguments. If
it cannot analyse an operation, it treats the result as always active; this freezes more weights than necessary, which is
safe. The sets are stored per storage, not per tensor: then a view of a tensor, or a write into one, automatically is the
same view of, or write into, the stored sets, and needs no rule of its own.

A trunk may read values of its input into Python (`.item()`, `.tolist()`) and slice, pad or branch by them. For another image
it would then move other elements, so from such a read on only gates promise anything: everything else is always active.

It also tracks the elements of parameters that are only copied (`weight.T`, `torch.cat([w1, w2])`, `table[:3]`), so that a
layer that uses such a copy is known to use these elements.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hatrack.tracing.dependencies import ALWAYS_ACTIVE, ALWAYS_ZERO, DependencySets

COPIES = {  # operations that move elements and may put zeros between them
    "cat", "channel_shuffle", "clone", "constant_pad_nd", "diag_embed", "expand_copy", "flip", "gather",
    "im2col", "index", "index_select", "lift_fresh", "native_channel_shuffle", "permute_copy", "pixel_shuffle",
    "pixel_unshuffle", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "repeat", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "roll", "rot90", "select_scatter", "slice_scatter", "stack", "tril", "triu",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "view_copy", "_unsafe_view",
}  # fmt: skip
PARAMETER_COPIES = {"cat", "clone", "flip", "index", "index_select", "repeat", "roll", "stack", "_unsafe_view"}
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "linalg_vector_norm", "norm", "cumsum"}
ZEROS = ("new_zeros", "zeros_like", "zero")
CHANNELWISE = {  # operations that mix no channels and map zeros to zeros, with the number of dimensions that they mix
    "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3, "max_pool1d": 1, "max_pool1d_with_indices": 1,
    "max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3, "_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3,
    "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3, "fractional_max_pool2d": 2, "upsample_linear1d": 1,
    "upsample_bilinear2d": 2, "_upsample_bilinear2d_aa": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3,
    "grid_sampler_2d": 2, "max_unpool2d": 2, "hardswish": 0, "rrelu_with_noise": 0, "_prelu_kernel": 0,
}  # fmt: skip


class DependencyTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this mode is active, it tracks the dependency sets of all tensors, and copies of parameter elements.

    The elements of all parameters have positions 0, 1, 2, ..., counted storage by storage, because parameters may share one.

    Args:
        parameters: the parameters of the trunk, by name.
        x: the input of the trunk.
        buffers: the buffers of the trunk.
        dependencies: the sets of an earlier trace, if there was one.

    Attributes:
        dependencies: the sets that occur, with their ids.
        paused: True while a layer runs whose result gets its sets from `Trace`.
        untraceable: parameters whose use cannot be analysed, with the name of the operation that used them.
        first: the position of the first element of each parameter's storage.
        total: how many positions there are.
        reads: the lines at which values that depend on the input were read into Python.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler (seconds) for the first operation under this mode."""
        return False

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        x: Tensor,
        buffers: Iterable[Tensor] = (),
        dependencies: DependencySets | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dependencies = dependencies or DependencySets()
        self.paused = False
        self.untraceable: dict[str, str] = {}
        self.first: dict[str, int] = {}
        self._storages: list[Any] = []  # kept alive, because the address of a freed storage may be used again
        self._set_ids: dict[int, Tensor] = {}  # by address of a storage: the set id of each of its elements
        self._positions: dict[int, Tensor] = {}  # by address of a storage: the position of each of its elements
        self._input_dependent: set[int] = set()  # addresses of integer or bool storages that may differ between inputs
        if not x.is_floating_point():
            self._input_dependent.add(_address(x))
        self.reads: list[str] = []
        self._fixed = {_address(b) for b in buffers}  # addresses of storages whose values do not depend on the input
        self._gated: dict[int, Tensor] = {}  # by `id`: the tensors that were gated after a read, as they are
        self._names: list[tuple[int, str]] = []  # first position and name of every parameter that is not empty
        self.total = 0
        for name, parameter in parameters.items():
            address, size = _address(parameter), _size(parameter)
            if address not in self._positions:
                self._positions[address] = torch.arange(self.total, self.total + size)
                self.total += size
            self.first[name] = int(self._positions[address][0]) if size else 0
            self._names += [(self.first[name], name)] if size else []

    def set_ids(self, tensor: Tensor) -> Tensor:
        """Return the set id of every element of a tensor; ALWAYS_ACTIVE if the tensor is not tracked."""
        if self.reads and id(tensor) not in self._gated:
            return torch.full(tensor.shape, ALWAYS_ACTIVE)
        return self._stored(tensor)

    def _stored(self, tensor: Tensor) -> Tensor:
        """Return the set ids that were assigned to a tensor."""
        stored = self._set_ids.get(_address(tensor))
        if stored is None or len(stored) != _size(tensor):
            return torch.full(tensor.shape, ALWAYS_ACTIVE)
        return stored.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def assign(self, tensor: Tensor, ids: Tensor, *, gated: bool = False) -> None:
        """Set the set ids of a tensor's elements, which hold after a read of values only if the tensor is gated itself."""
        if self.reads and gated:
            self._gated[id(tensor)] = tensor
        address = _address(tensor)
        if address not in self._set_ids:
            self._set_ids[address] = torch.full((_size(tensor),), ALWAYS_ACTIVE)
            self._storages.append(tensor.untyped_storage())
        self._stored(tensor).copy_(ids)

    def is_tracked(self, tensor: Tensor) -> bool:
        """Return whether some element of the tensor's storage got a set id."""
        return _address(tensor) in self._set_ids

    def positions(self, tensor: Tensor) -> Tensor | None:
        """Return which parameter elements a tensor consists of; None if it is computed from anything else."""
        stored = self._positions.get(_address(tensor))
        if stored is None or len(stored) != _size(tensor):
            return None
        return stored.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def parameters_at(self, positions: Tensor) -> list[str]:
        """Return the names of the parameters that own the elements at these positions."""
        firsts = torch.tensor(sorted({first for first, _ in self._names}))
        owners = firsts[(torch.bucketize(positions.reshape(-1), firsts, right=True) - 1).unique()].tolist()  # type: ignore[no-untyped-call]
        return [name for first, name in self._names if first in owners]

    def mark_untraceable(self, tensor: Tensor, operation: str) -> None:
        """Record that an operation used these parameter elements in a way that cannot be analysed."""
        positions = self.positions(tensor)
        assert positions is not None
        for name in self.parameters_at(positions):
            self.untraceable.setdefault(name, operation)

    def depends_on_input(self, tensor: Tensor) -> bool:
        """Return whether a tensor of integers or bools, such as an index, may differ between inputs or random draws."""
        return _address(tensor) in self._input_dependent

    def note_read(self, tensor: Tensor) -> None:
        """Note that Python reads values of a tensor. Those of parameters decide what is computed, so they are held whole."""
        if not tensor.numel() or wrapped(tensor):
            return
        if self.positions(tensor) is not None:
            self.mark_untraceable(tensor, "a read into Python")
        elif self.depends_on_input(tensor) or (tensor.is_floating_point() and _address(tensor) not in self._fixed):
            line = users_line()
            self.reads += [] if line in self.reads else [line]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.paused:
            self.paused = True  # the rules below compute with torch as well
            try:
                self._track(func, args, kwargs, out)
            finally:
                self.paused = False
        return out

    def _track(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the set ids and the positions of one operation's results."""
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.numel()]
        name, mutable, given = func.overloadpacket.__name__, func._schema.is_mutable, {_address(t) for t in inputs}
        if results and not mutable and all(_address(t) in given for t in results):
            return  # a view
        if (torch.Tag.dynamic_output_shape in func.tags and name != "index") or name == "_local_scalar_dense":
            for t in inputs:
                self.note_read(t)
        self._mark_input_dependent(func, inputs, [t for t in results if not t.is_floating_point()])
        new = [t for t in results if t.is_floating_point() and (mutable or _address(t) not in given)]
        if mutable:
            self._reset_written(func, args, kwargs, new)
        parameters = [t for t in inputs if self.positions(t) is not None]
        others = [t for t in inputs if self.positions(t) is None]
        fixed = not any(t.is_floating_point() or self.depends_on_input(t) for t in others)
        if parameters and name in PARAMETER_COPIES and fixed:
            self._copy_positions(func, args, kwargs, out)
            return
        for t in () if name.startswith("new_") or name.endswith("_like") else parameters:  # these use no values
            self.mark_untraceable(t, name)
        if not new or (inputs and name not in ZEROS and not any(self.is_tracked(t) for t in inputs)):
            return  # there is no result, or it is always active like all arguments
        for t in new:
            self._gated.pop(id(t), None)
        ids = None if self.reads else self._result_ids(name.rstrip("_"), func, args, kwargs, new)
        for t in new:
            self.assign(t, torch.full((), ALWAYS_ACTIVE) if ids is None else ids.expand(t.shape))

    def _mark_input_dependent(self, func: Any, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Record integer and bool results that are computed from floats, from other such results, or drawn at random."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        if results and (random or any(t.is_floating_point() or self.depends_on_input(t) for t in inputs)):
            self._input_dependent |= {_address(t) for t in results}
            self._storages += [t.untyped_storage() for t in results]

    def _reset_written(self, func: Any, args: Any, kwargs: Any, new: list[Tensor]) -> None:
        """Make arguments always active that are written but not returned, or written as another data type."""
        returned = {_address(t) for t in new}
        for k, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[k] if k < len(args) else kwargs.get(argument.name)
                for t in tree_leaves(value):
                    if isinstance(t, Tensor) and self.is_tracked(t) and _address(t) not in returned:
                        self._set_ids[_address(t)].fill_(ALWAYS_ACTIVE)

    def _copy_positions(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """Apply a copying operation to the positions as well: the copies are still elements of the parameters."""

        def positions(x: Any) -> Any:
            return self.positions(x) if isinstance(x, Tensor) and x.is_floating_point() else x

        copied = torch.zeros(_size(out), dtype=torch.int64)
        copied.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(func(*tree_map(positions, args), **kwargs))
        self._positions[_address(out)] = copied
        self._storages.append(out.untyped_storage())

    def _result_ids(self, name: str, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
        """Return the set ids of an operation's result; None if no rule applies, so that it is always active."""
        floats = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if not floats:  # a new tensor: its zeros are the same for every input, unless they are random or uninitialised
            random = torch.Tag.nondeterministic_seeded in func.tags or "empty" in name
            return None if random else torch.where(outputs[0] == 0, ALWAYS_ZERO, ALWAYS_ACTIVE)
        if name in ZEROS:
            return torch.full((), ALWAYS_ZERO)
        if "out" in given:
            return None
        if name in ("copy", "_to_copy"):
            return self.set_ids(given["src" if name == "copy" else "self"])
        if name == "constant_pad_nd":
            border = ALWAYS_ACTIVE if given.get("value") else ALWAYS_ZERO
            return func(self._ids_as_floats(args[0]), args[1], border).long()  # type: ignore[no-any-return]
        if name in COPIES and any(self.depends_on_input(t) for t in tree_leaves(args) if isinstance(t, Tensor)):
            return None  # with another input it copies other elements
        if name in COPIES:
            return func(*tree_map(self._ids_as_floats, args), **kwargs).long()  # type: ignore[no-any-return]
        if name == "mul" and isinstance(args[1], Tensor):
            return self.dependencies.smaller(self.set_ids(args[0]), self.set_ids(args[1]))
        if name == "div" and isinstance(args[1], Tensor):  # 0 / 0 is not 0
            return self.set_ids(args[0]) if bool((self.set_ids(args[1]) == ALWAYS_ACTIVE).all()) else None
        if name == "masked_fill":
            return self.set_ids(args[0]) if not isinstance(args[2], Tensor) and args[2] == 0 else None
        if name in REDUCTIONS:
            dims = given.get("dim")
            dims = [dims] if isinstance(dims, int) else dims or range(floats[0].dim())
            ids = self.dependencies.reduce(self.set_ids(floats[0]), dims)
            return ids if ids.dim() == outputs[0].dim() else ids.reshape(outputs[0].shape)
        if name in CHANNELWISE:
            dims = list(range(floats[0].dim() - CHANNELWISE[name], floats[0].dim()))
            return self.dependencies.reduce(self.set_ids(floats[0]), dims)
        if name == "glu":
            return self.set_ids(args[0]).chunk(2, given.get("dim", -1))[0]
        if name == "col2im":  # (batch, channels * kernel elements, columns) to (batch, channels, height, width)
            return self.dependencies.reduce(self.set_ids(args[0]).unflatten(-2, (outputs[0].shape[-3], -1)), [-2, -1])  # type: ignore[no-untyped-call]
        if torch.Tag.pointwise in func.tags and (name == "where" or not any(_discrete(t) for t in tree_leaves(args))):
            return self._pointwise_ids(func, args, kwargs, floats, outputs)
        return None

    def _ids_as_floats(self, x: Any) -> Any:
        """Replace a float tensor by its set ids, in double precision because some operations take no integers."""
        return self.set_ids(x).double() if isinstance(x, Tensor) and x.is_floating_point() else x

    def _pointwise_ids(
        self, func: Any, args: Any, kwargs: Any, floats: list[Tensor], outputs: list[Tensor]
    ) -> Tensor | None:
        """Return the union of the arguments' sets if f(0, ..., 0) = 0, which is tried; otherwise None."""

        def zeros(x: Any) -> Any:
            return torch.zeros_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x

        results = tree_leaves(func(*tree_map(zeros, args), **tree_map(zeros, kwargs)))
        if not all(bool((t == 0).all()) for t in results):
            return None
        ids = self.set_ids(floats[0])
        for t in floats[1:]:
            ids = self.dependencies.union(ids, self.set_ids(t))
        return ids


def wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor is one of `torch.vmap` and the like, which has no memory to follow."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def users_line() -> str:
    """Return the file and the line of the innermost call that is neither torch's nor of this package."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def _size(tensor: Tensor) -> int:
    """Return how many elements the storage of a tensor has."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _discrete(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point()
