"""Record a training step as a CUDA graph and replay it: the same signature and results, without Python between the kernels.

The rule of the step (`method.py`) makes a step recordable. For each new combination of input shapes the first calls run
eagerly as a warm-up; they are real steps. The next call is recorded, and from then on the recording is replayed.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WARM_UP = 3  # eager calls before a recording, in which libraries choose kernels

_lock = threading.Lock()  # one recording at a time


class Recorded:
    """A function with the same results as the given one, which replays a recording of it.

    Every call returns the same memory: use the result before the next call.

    Args:
        function: a function of tensors on a GPU that obeys the rule of the step.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.calls: dict[tuple[torch.Size, ...], int] = {}
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.refused = ""  # the reason why it can't be recorded, if it can't

    def __call__(self, *inputs: Tensor) -> Tensor:
        shape = tuple(t.shape for t in inputs)
        if shape not in self.graphs:
            self.calls[shape] = self.calls.get(shape, 0) + 1
            if self.refused or self.calls[shape] <= WARM_UP or not self._record(shape, inputs):
                return self.function(*inputs)
        graph, own_inputs, output = self.graphs[shape]
        for own, given in zip(own_inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        graph.replay()
        return output

    def forget(self) -> None:
        """Record anew, after a warm-up: the tensors that the function uses have other memory."""
        self.calls, self.graphs = {}, {}

    def _record(self, shape: tuple[torch.Size, ...], inputs: tuple[Tensor, ...]) -> bool:
        """Record a call without executing it. Return False if it can't be recorded."""
        graph, own_inputs = torch.cuda.CUDAGraph(), tuple(t.clone() for t in inputs)
        try:
            with (
                _lock,
                torch.cuda.graph(
                    graph, pool=self.pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
                ),
            ):
                output = self.function(*own_inputs)
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]
            warnings.warn(f"steps are not recorded and run eagerly: {self.refused}", stacklevel=4)
            return False
        self.graphs[shape] = graph, own_inputs, output
        return True


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a CUDA stream of its own, which recording requires; on a CPU this does nothing.

    The new stream waits for the work that was issued before, and the old one for the work of the block.
    """
    if device.type != "cuda" or torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        yield
        return
    stream, outside = torch.cuda.Stream(device), torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            outside.wait_stream(stream)
