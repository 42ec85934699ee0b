"""The network of one task: the channels that it does not use are cut out of the captured graph."""

import copy
import warnings

import torch
from torch import Tensor, fx, nn

from hatrack.methods.extraction import layers, pointwise, shapes
from hatrack.methods.extraction.analysis import Analysis
from hatrack.methods.extraction.capture import capture
from hatrack.methods.extraction.cutting import cut
from hatrack.methods.extraction.folding import fold
from hatrack.methods.extraction.layout import channels_last

RULES = layers.RULES | pointwise.RULES | shapes.RULES
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # of the largest logit
COARSE = 2e-2  # in 16 bits


def extract(served: nn.Module, example: Tensor) -> fx.GraphModule:
    """Return a task's network, cut to what the task uses.

    Args:
        served: the module of the task, in evaluation mode.
        example: images as the module takes them.

    Returns:
        A module with a graph of plain torch operations. Its attribute `extraction` tells "weights" (how many it has),
        "weights_before" and "zeros_left" (channels that are always 0 and could not be cut).

    Raises:
        ValueError: if the network cannot be captured as a graph, or the graph does not compute the same.
    """
    whole = capture(served, example)
    before = weights(served)
    probes = _probes(example)
    with torch.no_grad():
        wanted = served(probes)
    if not same(whole, probes, wanted):
        raise ValueError("the graph that was captured does not compute what the network does; for_task gives a module of it")
    try:
        graph = copy.deepcopy(whole)
        fold(graph)
        left = cut(Analysis(graph, RULES))
        graph.graph.lint()
        graph.recompile()
        agrees = same(graph, probes, wanted)
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError, KeyError) as error:
        agrees, reason = False, f"{type(error).__name__}: {error}".partition("\n")[0]
    else:
        reason = "its logits differ"
        graph = _laid_out(graph, probes, wanted)
    if not agrees:
        warnings.warn(f"nothing was cut out of the network: the smaller one failed its check ({reason})", stacklevel=3)
        graph, left = whole, 0
    result = _finished(graph)
    result.extraction = {"weights": weights(result), "weights_before": before, "zeros_left": left}  # type: ignore[assignment]
    return result


def _laid_out(graph: fx.GraphModule, probes: Tensor, wanted: Tensor) -> fx.GraphModule:
    """Return a graph with convolutions in their quicker layout, or as it is if that does not fit the other operations."""
    other = copy.deepcopy(graph)
    try:
        channels_last(other)
        return other if same(other, probes, wanted) else graph
    except RuntimeError:  # a view that needs another layout
        return graph


def weights(module: nn.Module) -> int:
    """Return how many numbers a module has in its parameters and floating-point buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(t.numel() for t in {id(t): t for t in tensors if t.is_floating_point()}.values())


def same(module: nn.Module, images: Tensor, wanted: Tensor) -> bool:
    """Return whether a module's logits are those that are wanted, up to rounding."""
    with torch.no_grad():
        logits = module(images)
    if logits.shape != wanted.shape or logits.dtype != wanted.dtype:
        return False
    return difference(logits, wanted) <= TOLERANCE.get(wanted.dtype, COARSE)


def difference(logits: Tensor, wanted: Tensor) -> float:
    """Return the largest difference between logits, as a share of the largest logit that is wanted."""
    return float((logits - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def _probes(example: Tensor) -> Tensor:
    """Return the example and, if it has real numbers, noise of the same spread: five images or more."""
    if not example.is_floating_point():
        return torch.cat([example] * 5)[: max(5, len(example))]
    source = torch.Generator().manual_seed(0)
    noise = torch.randn((5, *example.shape[1:]), generator=source, dtype=torch.float64).to(example)
    return torch.cat([example, noise * example.std().clamp(min=1e-3) + example.mean()])


def _finished(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the module without what was noted about its nodes, which a file need not hold."""
    for node in graph.graph.nodes:
        node.meta.clear()
    graph.meta.clear()
    result = fx.GraphModule(graph, graph.graph, class_name="ExtractedTask")
    return result.eval()
