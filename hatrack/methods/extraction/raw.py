"""Pre-processing in front of an extracted network, so that it takes raw images."""

import math

import torch
from torch import Tensor, fx, nn

from hatrack.methods.extraction.capture import aten, capture, clean
from hatrack.methods.extraction.extract import weights
from hatrack.networks.preprocessing import FAR, Preprocessing
from hatrack.tasks.transform import scaled


class _Raw(nn.Module):
    """A network behind the transform of one task."""

    def __init__(self, network: nn.Module, preprocessing: Preprocessing, task: int) -> None:
        super().__init__()
        rows = preprocessing.rows(task)
        self.network, self.shape, self.tokens = network, preprocessing.shape, preprocessing.tokens
        broadcast = (-1,) + (1,) * (len(self.shape) - 1)
        self.mean, self.std = (rows[name].view(broadcast) for name in ("mean", "std"))
        self.blank, self.pixels = rows["pixels"] < 0, rows["pixels"].clamp(min=0)
        self.moved = int(rows["raw"]) != len(self.pixels) or not rows["pixels"].equal(
            torch.arange(len(self.pixels)).to(rows["pixels"])
        )

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.moved:
            x = x.index_select(1, self.pixels).masked_fill(self.blank, 0)
        x = x.reshape(len(x), *self.shape)
        return self.network(x if self.tokens else (scaled(x) - self.mean) / self.std)  # type: ignore[no-any-return]


def raw_example(preprocessing: Preprocessing, task: int, *, floats: bool) -> Tensor:
    """Return two raw images as a task takes them: bytes, token ids, or floats if one says so or bytes would not fit.

    Their shape is that of the network's images if it has as many values; otherwise that of a square image of one or three
    channels, or a row of values.
    """
    rows, shape = preprocessing.rows(task), preprocessing.shape
    values = int(rows["raw"])
    if values != math.prod(shape):
        side = {n * n * c: (c, n, n) for c in (3, 1) for n in range(1, values + 1) if n * n * c <= values}
        shape = side.get(values, (values,))
    if preprocessing.tokens:
        return torch.zeros((2, *shape), dtype=torch.int64)
    if floats or bool((rows["mean"] > 1).any() or (rows["std"] > FAR).any()):
        noise = torch.randn((2, *shape), generator=torch.Generator().manual_seed(0))
        return noise * rows["std"].mean().cpu() + rows["mean"].mean().cpu()
    return torch.randint(0, 256, (2, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def with_preprocessing(network: fx.GraphModule, preprocessing: Preprocessing, task: int, example: Tensor) -> fx.GraphModule:
    """Return a network of plain torch operations from raw images to logits.

    Args:
        network: the extracted network of the task.
        preprocessing: the transforms of all tasks.
        task: the number of the task.
        example: raw images of the shape and the type that the network is to take.

    Returns:
        A module that takes any number of such images, and raises an error for images of another type.
    """
    preprocessing(example, task)  # raises an error in one line if such images do not fit the task
    graph = capture(_Raw(network, preprocessing, task).eval(), example)
    (images,) = graph.graph.find_nodes(op="placeholder")
    with graph.graph.inserting_after(images):  # bytes are divided by 255 and floats are not, whatever the graph is given
        graph.graph.call_function(aten._assert_tensor_metadata.default, (images, None, None, example.dtype))
    for node in graph.graph.nodes:
        node.meta.clear()
    clean(graph)
    result = fx.GraphModule(graph, graph.graph, class_name="ExtractedTask").eval()
    result.extraction = {**network.extraction, "weights": weights(result)}  # type: ignore[assignment, dict-item]
    return result
