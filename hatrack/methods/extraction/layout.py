"""The layout of an extracted network in memory: convolutions with channels last, which are quicker on a CPU."""

import torch
from torch import Tensor, fx

CONVOLUTIONS = (torch.ops.aten.conv2d.default, torch.ops.aten.conv2d.padding)


def channels_last(graph: fx.GraphModule) -> None:
    """Let the weights of 2-d convolutions lie in memory with channels last.

    torch then computes these convolutions, and what follows them up to the next reshaping, in that layout, whatever the
    layout of the images is. Channel counts that are no multiples of 8 or 16, as cutting leaves them, and pooling are quicker
    so: 64 images through an AlexNet of which 8 % were left took 16 ms in place of 39 (one thread).
    """
    for node in graph.graph.nodes:
        weight = node.args[1] if node.op == "call_function" and node.target in CONVOLUTIONS else None
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            tensor = getattr(graph, str(weight.target), None)
            if isinstance(tensor, Tensor) and tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
