"""Track the dependency sets of all tensors of a forward pass, operation by operation (see `dependencies.py`).

The tracker sees every operation that torch dispatches and computes the sets of the result from those of the arguments. If
it cannot analyse an operation, it treats the result as always active; this freezes more weights than necessary, which is
safe. The sets are stored per storage, not per tensor: then a view of a tensor, or a write into one, automatically is the
same view of, or write into, the stored sets, and needs no rule of its own.

A trunk may read values of its input into Python (`.item()`, `torch.allclose`) and slice, pad or branch by them. For another
image it would then move other elements, so from such a read on only gates promise anything: all else is always active. An
operation whose result has a shape that depends on values, such as `x[mask]`, counts as such a read: the shape is known to
Python, and moves whatever the result is joined to.

It also tracks the elements of parameters that are only copied (`weight.T`, `torch.cat([w1, w2])`, `table[:3]`), so that a
layer that uses such a copy is known to use these elements.
"""

import copy
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hatrack.tracing.dependencies import ALWAYS_ACTIVE, DependencySets
from hatrack.tracing.rules import ZEROS, Operation, result_ids

APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
READ = "a read into Python"
OWN = "an autograd.Function"

PARAMETER_COPIES = {  # operations whose results are elements of their arguments, or the negatives of them
    "cat", "clone", "flip", "index", "index_select", "neg", "repeat", "roll", "rot90", "stack", "_unsafe_view",
}  # fmt: skip


class DependencyTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this mode is active, it tracks the dependency sets of all tensors, and copies of parameter elements.

    The elements of all parameters have positions 0, 1, 2, ..., counted storage by storage, because parameters may share one.

    Args:
        parameters: the parameters of the trunk, by name.
        x: the input of the trunk.
        buffers: the buffers of the trunk that stay as they are.
        changing: the other ones, which a training pass writes: they may differ between tasks, as the input does.
        dependencies: the sets of an earlier trace, if there was one.

    Attributes:
        dependencies: the sets that occur, with their ids.
        paused: True while a layer runs whose result gets its sets from `Trace`.
        untraceable: parameters whose use cannot be analysed, with the name of the operation that used them first.
        operations: all operations that used these parameters.
        channels: the dimension of such a parameter that holds channels, where what it is added to shows it.
        beside: that dimension, and the dependency sets of what the parameter is added to or multiplied with along it.
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
        changing: Iterable[Tensor] = (),
        dependencies: DependencySets | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dependencies = dependencies or DependencySets()
        self.paused = False
        self.untraceable: dict[str, str] = {}
        self.operations: dict[str, set[str]] = {}
        self.channels: dict[str, int] = {}
        self.beside: dict[str, tuple[int, list[frozenset[int] | None]]] = {}
        self._parameters = parameters
        self.first: dict[str, int] = {}
        self._storages: list[Any] = []  # kept alive, because the address of a freed storage may be used again
        self._set_ids: dict[int, Tensor] = {}  # by address of a storage: the set id of each of its elements
        self._positions: dict[int, Tensor] = {}  # by address of a storage: the position of each of its elements
        self._input_dependent: set[int] = set()  # addresses of storages without floats that may differ between inputs
        self._bits: set[int] = set()  # addresses of storages of floats that may differ and are also read as whole numbers
        self._input_dependent |= {_address(t) for t in (x, *changing) if not t.is_floating_point()}
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

    def is_trained(self, positions: Tensor) -> bool:
        """Return whether a parameter that owns elements at these positions requires a gradient."""
        return any(self._parameters[name].requires_grad for name in self.parameters_at(positions))

    def mark_untraceable(self, tensor: Tensor, operation: str) -> None:
        """Record that an operation used these parameter elements in a way that cannot be analysed."""
        positions = self.positions(tensor)
        assert positions is not None
        for name in self.parameters_at(positions):
            self.untraceable.setdefault(name, operation)
            self.operations.setdefault(name, set()).update({operation, OWN} if inside_autograd_function() else {operation})

    def depends_on_input(self, tensor: Tensor) -> bool:
        """Return whether a tensor of anything but floats, such as an index, may differ between inputs or random draws."""
        address = _address(tensor)
        return address in self._input_dependent or (address in self._bits and not tensor.is_floating_point())

    def note_read(self, tensor: Tensor) -> None:
        """Note that Python reads values of a tensor. Those of parameters decide what is computed, so they are held whole."""
        if not tensor.numel() or wrapped(tensor):
            return
        if self.positions(tensor) is not None:
            self.mark_untraceable(tensor, READ)
        elif self.depends_on_input(tensor) or self._is_variable(tensor):
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
            self._bits |= {_address(t) for t in results if not t.is_floating_point() and any(map(self._is_variable, inputs))}
            for t in inputs:
                if t.element_size() != results[0].element_size() and self.positions(t) is not None:
                    self.mark_untraceable(t, name)  # real numbers seen as complex ones, or the other way round
            return  # a view
        for t in _read(func, args, inputs, out):
            self.note_read(t)
        self._mark_input_dependent(func, inputs, [t for t in results if not t.is_floating_point()])
        self._mark_fixed(func, args, kwargs, inputs, results)
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
            self._note_channels(t, others)
        if not new or (inputs and name not in ZEROS and not any(self.is_tracked(t) for t in inputs)):
            return  # there is no result, or it is always active like all arguments
        for t in new:
            self._gated.pop(id(t), None)
        ids = None if self.reads else result_ids(Operation(self, name.rstrip("_"), func, args, kwargs, new))
        for t in new:
            known = ids is not None and t.shape == new[0].shape
            self.assign(t, ids.expand(t.shape) if ids is not None and known else torch.full((), ALWAYS_ACTIVE))

    def _mark_input_dependent(self, func: Any, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Record results that are no floats and are computed from floats, from other such results, or drawn at random."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        if results and (random or any(self._is_variable(t) or self.depends_on_input(t) for t in inputs)):
            self._input_dependent |= {_address(t) for t in results}
            self._storages += [t.untyped_storage() for t in results]

    def _mark_fixed(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Record results that are computed from constants and buffers alone, such as a causal mask."""
        random = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.overloadpacket.__name__
        if random or any(self._is_variable(t) or self.depends_on_input(t) for t in inputs):
            self._fixed -= {_address(t) for t in (*results, *_written(func, args, kwargs))}
        else:
            self._fixed |= {_address(t) for t in results}
            self._storages += [t.untyped_storage() for t in results]

    def _is_variable(self, tensor: Tensor) -> bool:
        """Return whether a tensor of real or complex numbers may differ between inputs or tasks."""
        return (tensor.is_floating_point() or tensor.is_complex()) and _address(tensor) not in self._fixed

    def _note_channels(self, tensor: Tensor, others: list[Tensor]) -> None:
        """Note which dimension of a parameter holds channels: that along which the sets of what it is added to differ."""
        positions = self.positions(tensor)
        assert positions is not None
        for other in (t for t in others if t.is_floating_point() and self.is_tracked(t)):
            ids = self.set_ids(other)
            for d in range(-1, -1 - min(tensor.dim(), other.dim()), -1):
                if not 1 < tensor.shape[d] == other.shape[d] or torch.equal(ids, ids.narrow(d, 0, 1).expand_as(ids)):
                    continue
                step = int(positions.select(d, 1).flatten()[0] - positions.select(d, 0).flatten()[0])
                for name in self.parameters_at(positions):
                    p = self._parameters[name]
                    found = [k for k in range(p.dim()) if p.stride(k) == step and p.shape[k] == tensor.shape[d]]
                    if found:
                        self.channels.setdefault(name, found[-1])
                        along = self.dependencies.reduce(ids, [k for k in range(ids.dim()) if k != ids.dim() + d]).flatten()
                        sets = [self.dependencies.sets[k] for k in along.tolist()]
                        self.beside.setdefault(name, (found[-1], sets))
                break

    def _reset_written(self, func: Any, args: Any, kwargs: Any, new: list[Tensor]) -> None:
        """Make arguments always active that are written but not returned, or written as another data type."""
        returned = {_address(t) for t in new}
        for t in _written(func, args, kwargs):
            if self.is_tracked(t) and _address(t) not in returned:
                self._set_ids[_address(t)].fill_(ALWAYS_ACTIVE)

    def _copy_positions(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """Apply a copying operation to the positions as well: the copies are still elements of the parameters."""

        def positions(x: Any) -> Any:
            return self.positions(x) if isinstance(x, Tensor) and x.is_floating_point() else x

        copied = torch.zeros(_size(out), dtype=torch.int64)
        copied.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(func(*tree_map(positions, args), **kwargs))
        self._positions[_address(out)] = copied.abs_()  # of negatives, too
        self._storages.append(out.untyped_storage())


def _read(func: Any, args: Any, inputs: list[Tensor], out: Any) -> list[Tensor]:
    """Return the arguments whose values an operation turns into something of Python or into the shape of its result."""
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.masked_select):  # the masks alone decide on the shape
        return [t for t in tree_leaves(args[1]) if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8)]
    tagged = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    plain = [value for value in tree_leaves(out) if value is not None and not isinstance(value, Tensor)]
    if func.namespace == "aten":  # without a tag, whole numbers are read off shapes
        plain = [value for value in plain if isinstance(value, float)]
    return inputs if tagged or plain else []


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes."""
    found: list[Tensor] = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


def inside_autograd_function() -> bool:
    """Return whether this runs within `forward` of a `torch.autograd.Function`, whose `backward` knows of no gates."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not APPLY:
        frame = frame.f_back
    return frame is not None


def wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor is one of `torch.vmap` and the like, which has no memory to follow."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def users_line() -> str:
    """Return the file and the line of the innermost call that is neither torch's, `copy`'s nor of this package."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent), copy.__file__)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def _size(tensor: Tensor) -> int:
    """Return how many elements the storage of a tensor has."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _address(tensor: Tensor) -> int:
    """Return where the memory of a tensor lies; sparse and nested ones have none of their own."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "sparse"
        raise ValueError(
            f"the trunk computes with a {kind} tensor ({users_line()}), which can't be followed; use a dense one"
        )
    return tensor.untyped_storage().data_ptr()
