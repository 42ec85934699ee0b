"""A function of tensors recorded as a CUDA graph: the same signature, the same results, no Python between the kernels.

The rule of the step (`method.py`) is what makes a step recordable. Calls with shapes not seen before run as they are a few
times (these are real calls: nothing is computed for nothing), the next one is recorded and replayed, as all that follow.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WARM_UP = 3  # calls before a recording: libraries choose kernels and optimizers make their state

recording = threading.Lock()  # one recording at a time


class Recorded:
    """`Recorded(f)` is f, replayed. What f returns lies in the same memory at every call; use it before the next."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.calls: dict[tuple[torch.Size, ...], int] = {}
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.refused = ""  # why it can't be recorded

    def __call__(self, *inputs: Tensor) -> Tensor:
        shape = tuple(t.shape for t in inputs)
        if shape not in self.graphs:
            self.calls[shape] = self.calls.get(shape, 0) + 1
            if self.refused or self.calls[shape] <= WARM_UP or not self._record(shape, inputs):
                return self.function(*inputs)
        graph, mine, output = self.graphs[shape]
        for own, given in zip(mine, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        graph.replay()
        return output

    def _record(self, shape: tuple[torch.Size, ...], inputs: tuple[Tensor, ...]) -> bool:
        """Record a call, which is not carried out by that; False if it can't be done."""
        graph, mine = torch.cuda.CUDAGraph(), tuple(t.clone() for t in inputs)
        try:
            with (
                recording,
                torch.cuda.graph(
                    graph, pool=self.pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
                ),
            ):
                output = self.function(*mine)
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]
            warnings.warn(f"steps are not recorded and run eagerly: {self.refused}", stacklevel=4)
            return False
        self.graphs[shape] = graph, mine, output
        return True


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, everything within runs on a stream of its own, as recording demands; what came before is waited for."""
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
