"""Recognise a step whose operations were captured before.

Capturing a step takes most of a second, and every task of every run has a step of its own, though most of them execute the
same operations on other tensors. A log of a step's operations takes a fraction of that. It contains each operation, its
arguments and what is known of its results but their values. A tensor is written as a number, in the order of first use. The
graph of a step is a copy of this log. So two steps with the same log have the same graph, and the tensors that they did not
make themselves correspond to each other by their numbers.

The operations are logged after the decompositions, as they are in the graph. A log that cannot say exactly what was executed
has no signature; its step is captured.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from hatrack.methods.parts.capturing import CapturingMode

aten = torch.ops.aten
PLAIN_TYPES = (
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
PLAIN_TENSORS = {Tensor, nn.Parameter}
FROM_PYTHON = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # their values may become constants of the graph
INEXACT = (  # results that depend on values, and changes of a tensor's shape or memory after its first use
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
)  # fmt: skip


class InexactError(Exception):
    """An operation can't be logged exactly."""


class OperationLog(CapturingMode):
    """A context manager that executes operations with decompositions and logs them.

    Args:
        inputs: the inputs of the step. They have the first numbers.
        table: decompositions, by operation.

    Attributes:
        external: the inputs, then all tensors that the operations use but did not make, in the order of first use.
        inexact: why the log does not determine the operations; empty if it does.
    """

    def __init__(self, inputs: Sequence[Tensor], table: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table
        self.external: list[Tensor] = []
        self.inexact = ""
        self._text = hashlib.sha256()
        # Weak, as in torch's own tracer: a log keeps no result alive, and a new tensor at an old address has a new number.
        self._numbers: Any = WeakTensorKeyDictionary()
        self._count = 0
        self._own_memory: set[int] = set()  # memory that the operations allocated
        self._external_memory: set[int] = set()
        self._grads: list[tuple[Tensor, Tensor | None]] = []  # of external tensors, before their first use
        self._write(lambda: "".join(map(self._name, inputs)))

    def __enter__(self) -> Self:
        return cast(Self, super().__enter__())  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.table and PLAIN_TENSORS.issuperset(types):  # subclasses decompose their operations themselves
            with self:
                result = self.table[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        self._write(lambda: self._call(func, types, args, kwargs))
        result = func(*args, **kwargs)
        self._write(lambda: "".join(map(self._result, tree_leaves(result))))
        return result

    def finish(self, result: Any) -> None:
        """Log what the step returns."""
        if any(isinstance(t, Tensor) and t not in self._numbers for t in tree_leaves(result)):
            self.inexact = self.inexact or "the step returns a tensor that no operation made"
        self._write(lambda: f"return {self._value(result)}")

    def signature(self) -> str:
        """Return a hash of the log and of all else that the graph or its code depends on; "" if the log is inexact."""
        if self.inexact:
            return ""
        text = f"{self._text.hexdigest()} {input_signature(self.external)} {settings()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def places(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the positions of tensors among the external ones. One that is not among them makes the log inexact."""
        known = {id(t): place for place, t in enumerate(self.external)}
        if any(id(t) not in known for t in tensors):
            self.inexact = self.inexact or "the graph uses a tensor that no operation used"
            return []
        return [known[id(t)] for t in tensors]

    def restore_grads(self) -> None:
        """Give external tensors the gradients back that they had before their first use."""
        for tensor, grad in self._grads:
            tensor.grad = grad

    # The text

    def _write(self, text: Callable[[], str]) -> None:
        """Add to the log, unless it is inexact already."""
        if self.inexact:
            return
        with torch._C.DisableTorchFunction():  # otherwise the checks of the rule would see every attribute that is read
            try:
                self._text.update(f"{text()}\n".encode())
            except InexactError as error:
                self.inexact = str(error)

    def _call(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> str:
        if not isinstance(func, torch._ops.OpOverload):
            raise InexactError(f"{func} is no plain operation")
        if func in FROM_PYTHON or any(tag in func.tags for tag in INEXACT):
            raise InexactError(f"{func} depends on values, or changes how a tensor lies in memory")
        named = "".join(f"{name}={self._value(value)}" for name, value in kwargs.items())
        return f"{func} {self._value(args)}{named}"

    def _value(self, value: Any) -> str:
        """Write down an argument."""
        if isinstance(value, Tensor):
            return self._name(value)
        if type(value) in PLAIN_TYPES:
            return f"{value!r},"
        if type(value) in (list, tuple):
            return f"{type(value).__name__}({''.join(map(self._value, value))}),"
        raise InexactError(f"an argument is a {type(value).__name__}")  # a generator, say

    def _name(self, tensor: Tensor) -> str:
        """Write down a tensor that is used. One that no operation made is external."""
        number = self._numbers.get(tensor)
        if number is not None:
            return f"t{number},"
        described = f"external {self._describe(tensor)}{type(tensor).__name__} {tensor.requires_grad},"
        memory = tensor.untyped_storage()._cdata
        if tensor.is_neg() or tensor.is_conj() or memory in self._own_memory:  # such as `nn.Parameter(result)`
            raise InexactError("a tensor shares the memory of another in a way that no operation tells")
        self.external.append(tensor)
        self._external_memory.add(memory)
        if tensor.requires_grad and tensor.is_leaf:
            self._grads.append((tensor, tensor.grad))
        return described

    def _result(self, result: Any) -> str:
        """Write down a result. An operation that works in place returns a tensor that has a number already."""
        if not isinstance(result, Tensor) or result in self._numbers:
            return self._value(result)
        described = self._describe(result)
        memory = result.untyped_storage()._cdata
        if memory not in self._external_memory:
            self._own_memory.add(memory)
        return f"{described},"

    def _describe(self, tensor: Tensor) -> str:
        """Number a new tensor and write down its properties."""
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if type(tensor) not in PLAIN_TENSORS or wrapped or tensor.layout != torch.strided or tensor.is_quantized:
            raise InexactError(f"a tensor is a {type(tensor).__name__} of layout {tensor.layout}")
        self._numbers[tensor] = self._count
        self._count += 1
        bits = tensor.is_neg(), tensor.is_conj()
        where = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
        return f"t{self._count - 1} {where} {bits}"


def input_signature(tensors: Sequence[Tensor]) -> str:
    """Describe everything that compiled code may depend on besides the graph: shapes, strides, types and devices of its
    inputs, which of them share memory and at which offset, the precision, and the number of threads."""
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    first = {m: memory.index(m) for m in memory}
    described = [
        (t.shape, t.stride(), t.dtype, t.device, first[m], t.storage_offset(), t.data_ptr() % 16 if t.is_cuda else 0)
        for t, m in zip(tensors, memory, strict=True)
    ]
    products: Any = torch.backends.cuda.matmul
    tf32 = any(t.is_cuda for t in tensors) and products.fp32_precision == "tf32"
    return f"{described} {tf32} {torch.get_num_threads()}"


def settings() -> list[Any]:
    """Return the settings of torch that may change what is executed or how it is compiled."""
    flags: Any = torch.backends
    cudnn = flags.cudnn
    precision = [part.fp32_precision for part in (flags.cuda.matmul, cudnn.conv, flags.mkldnn.matmul, flags.mkldnn.conv)]
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    deterministic = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark, cudnn.enabled
    return [precision, autocast, deterministic, torch.get_default_dtype(), torch.get_default_device()]
