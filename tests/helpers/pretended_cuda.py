"""A GPU that is not there: `pytest -p tests.helpers.pretended_cuda` runs tests of tests/gpu on a CPU.

Tensors say that they are on cuda:0 (see `elsewhere.py`), and code for GPUs runs: CUDA graphs log operations and repeat them,
numbers of the GPU come from a generator of its own, and to wait for the GPU is an error while a graph is captured and under
`set_sync_debug_mode("error")`. Streams and events do nothing: work is done at once and in order, so that nothing is noticed
that is missing between streams. Triton, cuDNN, fused kernels and other processes are not imitated, nor is a GPU's rounding.
"""

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.helpers.elsewhere import CPU, INDEXED, CheckOperations, Places, SayTheDevice, leaves, modules_move

GPU = torch.device("cuda", 0)
NEEDED = (  # operations whose values or shapes the CPU must know
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
)  # fmt: skip
PLACES, PINNED = Places(GPU), Places()
MODES = ("default", "warn", "error")  # by torch's numbers of them
OwnGenerator = torch.Generator


class State(threading.local):
    """What a thread does: which graph it captures, on which stream, and whether it makes a tensor on the GPU."""

    capture: "Graph | None" = None
    stream: Any = None
    making = False


STATE, SYNC = State(), SimpleNamespace(mode="default")


def wait(what: str = "synchronize", *_: Any) -> None:
    """Wait for the GPU, where this is allowed."""
    if STATE.capture is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
    if SYNC.mode == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")


@contextmanager
def plainly() -> Iterator[None]:
    """Within the block tensors are those of the CPU, and no gradients are computed."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


class GpuGenerator:
    """A generator of the GPU: a handle of a state, which can be exchanged, as graphs need it."""

    device = GPU

    def __init__(self, own: torch.Generator | None = None) -> None:
        self.own = own or OwnGenerator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def graphsafe_get_state(self) -> "GpuGenerator":
        return GpuGenerator(self.own)

    def graphsafe_set_state(self, state: "GpuGenerator") -> None:
        self.own = state.own

    def clone_state(self) -> "GpuGenerator":
        return GpuGenerator(self.own.clone_state())

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results of an operation that draws from this generator."""
        with plainly():
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(self.own.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.own.set_state(torch.default_generator.get_state())
                torch.default_generator.set_state(before)


class AnyGenerator:
    """Makes a generator of a device."""

    def __new__(cls, device: Any = CPU) -> Any:
        return GpuGenerator() if PLACES.are_on(device) else OwnGenerator(device)


class Graph:
    """Operations that were captured. To capture one changes nothing, on a GPU: what it writes is put back."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self._memory: dict[int, tuple[Tensor, Any]] = {}  # tensors that were written, with what their memory held
        self._states: dict[int, tuple[GpuGenerator, Tensor]] = {}

    def register_generator_state(self, generator: GpuGenerator) -> None:
        """A graph finds by itself from which generators it draws."""

    def execute(self, func: Any, args: Any, kwargs: Any, generator: GpuGenerator | None) -> Any:
        """The results of an operation, which is captured."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(leaves(args[position] if position < len(args) else kwargs.get(argument.name)))
        if generator is not None:
            generator = generator.graphsafe_get_state()  # later the handle may have another state
            self._states.setdefault(id(generator.own), (generator, generator.get_state()))
        results = generator.draw(func, args, kwargs) if generator else func(*args, **kwargs)
        self.operations.append((func, args, kwargs, results, generator))
        return results

    def _keep(self, tensors: list[Tensor]) -> None:
        with plainly():
            for tensor in tensors:
                memory = tensor.untyped_storage()
                self._memory.setdefault(memory._cdata, (tensor, memory.clone()))

    def roll_back(self) -> None:
        """Put back what the captured operations wrote and drew."""
        with plainly():
            for tensor, memory in self._memory.values():
                tensor.untyped_storage().copy_(memory)
        for generator, state in self._states.values():
            generator.set_state(state)
        self._memory.clear()

    def replay(self) -> None:
        """Repeat the operations; their results lie where they lay."""
        with plainly():
            for func, args, kwargs, results, generator in self.operations:
                if any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
                    continue  # views
                again = generator.draw(func, args, kwargs) if generator else func(*args, **kwargs)
                for old, new in zip(leaves(results), leaves(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def reset(self) -> None:
        """Forget the operations."""
        self.operations.clear()


@contextmanager
def capturing(graph: Graph, **_: Any) -> Iterator[None]:
    """Within the block operations are captured, as by `torch.cuda.graph`."""
    STATE.capture = graph
    try:
        yield
    finally:
        STATE.capture = None
        graph.roll_back()


class Stream:
    """Does its work at once; also an event."""

    device, cuda_stream = GPU, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def ignore(self, *_: Any) -> None:
        """Work that was given to any stream is done already."""

    record = wait = wait_stream = wait_event = ignore

    def record_event(self, event: Any = None) -> "Stream":
        return event or Stream()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        wait("stream or event")


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Within the block a stream is the current one."""
    before, STATE.stream = STATE.stream, stream or STATE.stream
    try:
        yield
    finally:
        STATE.stream = before


class GpuOperations(CheckOperations):
    """Notices operations that wait for the GPU, captures, and draws numbers of the GPU."""

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        there = any(tensor in PLACES for tensor in leaves(args, kwargs))
        if there:
            self._check_waits(func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags and (there or STATE.making)
        generator = torch.cuda.default_generators[0] if draws else None
        if STATE.capture is not None:
            return STATE.capture.execute(func, args, kwargs, generator)
        return generator.draw(func, args, kwargs) if generator else func(*args, **kwargs)

    def _check_waits(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name
        if name in NEEDED or (func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            wait(str(func))
        if torch._C._current_graph_task_id() >= 0:
            return  # in a backward pass torch makes tensors that do not say where they are
        if name in INDEXED:
            self._check_indices(func, [index for index in args[1] if index is not None], *args[2:3])
        if name == "aten::copy_" and (args[0] in PLACES) != (args[1] in PLACES):
            host = args[1] if args[0] in PLACES else args[0]
            if not (host in PINNED and (kwargs.get("non_blocking") or args[2:3] == (True,))):
                wait("a copy between devices")

    def _check_indices(self, func: Any, indices: list[Tensor], value: Tensor | None = None) -> None:
        for index in indices:
            fills = len(indices) == 1 and value is not None and value.numel() == 1  # a masked fill, which does not wait
            if (index.dtype == torch.bool and not fills) or index not in PLACES:
                wait(f"{func} by a mask or by indices of the CPU")


class SayTheGpu(SayTheDevice):
    """Answers what a tensor of a GPU answers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.is_cuda.__get__:
            return args[0] in PLACES
        if func == Tensor.is_cpu.__get__:
            return args[0] not in PLACES
        if func is Tensor.is_pinned:
            return args[0] in PINNED
        if func is Tensor.pin_memory:
            return PINNED.put(args[0].clone())
        if func is Tensor.cuda:
            return self.move(args[0], GPU, not kwargs.get("non_blocking"))
        if func is Tensor.__array__ and args[0] in PLACES:
            raise TypeError("a tensor of another device has no numpy array")
        if kwargs.pop("pin_memory", False):
            return PINNED.put(func(*args, **kwargs))
        if func is Tensor.tolist and args[0] in PLACES:
            wait("tolist")
        if not PLACES.are_on(kwargs.get("device")) or func is Tensor.to:
            return super().__torch_function__(func, types, args, kwargs)
        return self._make(func, types, args, kwargs)

    def _make(self, func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            wait("a tensor of Python's numbers")
        STATE.making = True
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            STATE.making = False

    def move(self, tensor: Tensor, device: torch.device, waits: bool = True) -> Tensor:
        if PLACES.are_on(device) != (tensor in PLACES) and (waits or tensor not in PINNED):
            wait("a copy between devices")
        return super().move(tensor, device, waits)


@contextmanager
def modes() -> Iterator[None]:
    """Within the block, in this thread, tensors may be on the GPU."""
    with GpuOperations(PLACES), SayTheGpu(PLACES):
        yield


def set_mode(mode: str | int) -> None:
    """As `torch.cuda.set_sync_debug_mode`."""
    SYNC.mode = mode if isinstance(mode, str) else MODES[mode]


def answers() -> dict[str, Any]:
    """What is put in the place of names of `torch.cuda`: that there is a GPU, and what it does."""
    generator, stream = GpuGenerator(), Stream()
    values = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "graph_pool_handle": (0, 0),
        "init": None, "_lazy_init": None, "set_device": None, "empty_cache": None, "reset_peak_memory_stats": None,
        "max_memory_allocated": 2**20, "mem_get_info": (2**36, 2**37), "default_stream": stream, "is_bf16_supported": True,
        "get_device_name": "pretended GPU", "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(uuid="", total_memory=2**37, multi_processor_count=100),
    }  # fmt: skip
    return {name: lambda *_, value=value, **__: value for name, value in values.items()} | {
        "Stream": Stream,
        "Event": Stream,
        "stream": on_stream,
        "current_stream": lambda *_: STATE.stream or stream,
        "CUDAGraph": Graph,
        "graph": capturing,
        "is_current_stream_capturing": lambda: STATE.capture is not None,
        "synchronize": lambda *_: wait(),
        "set_sync_debug_mode": set_mode,
        "get_sync_debug_mode": lambda: MODES.index(SYNC.mode),
        "default_generators": (generator,),
        "get_rng_state": lambda *_: generator.get_state(),
        "set_rng_state": lambda state, *_: generator.set_state(state),
        "manual_seed_all": lambda seed: generator.manual_seed(seed),
    }


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Within the block, in all threads that start there, torch has a GPU."""
    run = threading.Thread.run

    def run_there(thread: threading.Thread) -> None:
        with modes():
            run(thread)

    with pytest.MonkeyPatch.context() as patch, modules_move(PLACES), modes():
        for name, value in answers().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "Generator", AnyGenerator)
        patch.setattr(SYNC, "mode", "default")
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(threading.Thread, "run", run_there)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Run each test on the GPU that is not there."""
    with pretended_cuda():
        return (yield)
