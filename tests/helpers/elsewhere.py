"""A device that is not there: tensors that must not meet those of the CPU, on a machine that has only a CPU.

Within `elsewhere()` tensors may be moved to the device `THERE`. They are ordinary tensors; but they say that they are there,
and an operation on tensors of both devices is an error, as on a GPU. So it is noticed on any machine that a part of a method
was left on the CPU. Numbers that are read, engines, streams and kernels are not those of a GPU (`pretended_cuda.py` imitates
these, too); and a backward pass is not checked, since torch makes zeros there that do not say where they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hatrack import Batch, Method, Network

THERE = torch.device("mps", 0)  # a type that no code of ours asks for
CPU = torch.device("cpu")
GENERATOR = "a generator of the CPU can't draw numbers on"
FILLED = ("aten::copy_", "aten::set_")  # operations that bring values to where their first tensor is
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")  # by indices of any place


class Places:
    """Which memory is said to be on a device."""

    def __init__(self, there: torch.device = THERE) -> None:
        self.there = there
        self._there: dict[int, StorageWeakRef] = {}  # the reference keeps the number from being used again
        self._room = 10_000

    def put(self, tensor: Tensor) -> Tensor:
        """Say that the tensor's memory is there."""
        if len(self._there) > self._room:  # forget memory that is free: a long run has a lot
            self._there = {number: one for number, one in list(self._there.items()) if not one.expired()}
            self._room = 2 * len(self._there) + 10_000
        reference = StorageWeakRef(tensor.untyped_storage())
        self._there[reference.cdata] = reference
        return tensor

    def take(self, tensor: Tensor) -> Tensor:
        """Say that the tensor's memory is on the CPU."""
        self._there.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._there

    def device(self, tensor: Tensor) -> torch.device:
        """The device that a tensor says."""
        return self.there if tensor in self else CPU

    def are_on(self, device: Any) -> bool:
        """Whether a device, or its name, is the one of these places."""
        return device is not None and not isinstance(device, Tensor | int) and torch.device(device).type == self.there.type


def is_there(device: Any) -> bool:
    """Whether a device, or its name, is the one that is not there."""
    return Places().are_on(device)


class CheckOperations(TorchDispatchMode):
    """Computes on the CPU; results are where their arguments are."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, backward = kwargs or {}, torch._C._current_graph_task_id() >= 0
        there = [t in self.places for t in self._checked(func, args, kwargs)]
        if any(there) and not all(there) and not backward:
            raise RuntimeError(f"{func} on tensors of two devices, {self.places.there} and cpu")
        if kwargs.get("generator") is not None and any(t in self.places for t in leaves(args, kwargs)):
            raise RuntimeError(f"{GENERATOR} {self.places.there}")
        results, name = self.compute(func, args, kwargs), func._schema.name
        # C++ code that changes a type names the device that it sees. Moves are not among these: `SayTheDevice` makes them.
        made = kwargs.get("device") is not None and name != "aten::_to_copy"
        moves = made or (name in FILLED and not backward)
        if not moves and any(t in self.places for t in leaves(args, kwargs)):
            for result in leaves(results):
                self.places.put(result)
        return results

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results of an operation."""
        return func(*args, **kwargs)

    def _checked(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that must be on one device: not those of a single number on the CPU, which may be anywhere."""
        name = func._schema.name
        if name in INDEXED and args[0] not in self.places:
            return [args[0], *leaves(args[1])]  # what is on the CPU must be indexed from there
        given = [] if name in (*FILLED, *INDEXED) else leaves(args, kwargs)
        return [t for t in given if t.dim() or t in self.places]


def leaves(*values: Any) -> list[Tensor]:
    """The tensors in nested values."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class SayTheDevice(TorchFunctionMode):
    """Answers where a tensor is, and moves tensors."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return self.places.device(args[0])
        if func is Tensor.numpy and args[0] in self.places:
            raise TypeError("a tensor of another device has no numpy array")
        if func is Tensor.cpu:
            return self.move(args[0], CPU)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is Tensor.__deepcopy__ and args[0] in self.places:
            return self.places.put(func(*args, **kwargs))
        if not self.places.are_on(kwargs.get("device")):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"{GENERATOR} {self.places.there}")
        made = func(*args, **{**kwargs, "device": CPU})
        return self.move(made, self.places.there) if func is torch.as_tensor else self.places.put(made)

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.to` in all its forms: like another tensor, to a device and a type, or to a type."""
        if args and isinstance(args[0], Tensor):
            args = (self.places.device(args[0]), args[0].dtype, *args[1:])
        values = [*args, kwargs.get("device"), kwargs.get("dtype")]
        waits = not (kwargs.get("non_blocking") or args[2:3] == (True,))
        for value in values:
            if isinstance(value, torch.device | str):
                tensor = self.move(tensor, torch.device(value), waits)
        for value in values:
            if isinstance(value, torch.dtype):
                tensor = tensor.to(value)
        if kwargs.get("memory_format") is not None:
            tensor = tensor.contiguous(memory_format=kwargs["memory_format"])
        return tensor.clone() if kwargs.get("copy") else tensor

    def move(self, tensor: Tensor, device: torch.device, waits: bool = True) -> Tensor:
        """The tensor, or a copy of it, on a device; `waits`: the caller waits until it is there."""
        if self.places.are_on(device) == (tensor in self.places):
            return tensor
        copy = tensor.clone()  # is where the tensor is
        return self.places.put(copy) if self.places.are_on(device) else self.places.take(copy)


@contextmanager
def modules_move(places: Places) -> Iterator[None]:
    """Within the block modules may be moved to where a tensor says that it is."""
    parse = torch._C._nn._parse_to

    def like(*args: Any, **kwargs: Any) -> Any:
        """What `Module.to` is asked for; torch looks at the memory of a tensor that is given."""
        device, *others = parse(*args, **kwargs)
        return places.device(args[0]) if args and isinstance(args[0], Tensor) else device, *others

    torch._C._nn._parse_to = like
    try:
        yield
    finally:
        torch._C._nn._parse_to = parse


@contextmanager
def elsewhere() -> Iterator[Places]:
    """Within the block tensors may be moved to `THERE`."""
    places = Places()
    with modules_move(places), CheckOperations(places), SayTheDevice(places):
        yield places


class LeavesBehind(Method):
    """Leaves a tensor on the CPU, as a method must not."""

    def __init__(self, net: Network) -> None:
        super().__init__(net)
        self.factor = torch.ones(net.features)

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + (self.net.trunk(batch.x) * self.factor).mean()
