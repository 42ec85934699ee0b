"""Which channels can be left out, and the graph without them."""

from typing import Any

import torch
from torch import Tensor, fx

from hatrack.methods.extraction.analysis import Analysis
from hatrack.methods.extraction.capture import add_constant, aten, clean, constant, is_constant, shape
from hatrack.methods.extraction.folding import SELECT, gate_of
from hatrack.methods.extraction.labels import Channels, Read
from hatrack.methods.extraction.shapes import PIECES, VIEWS

CONVOLUTIONS_IN_GROUPS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


class Cut:
    """The labels of a graph that can be left out.

    A group of labels is left out if nothing pins it, and if every layer that adds up its channels may leave them out: they
    are constant, or all weights that read them are 0. This is repeated, because what is left out reads nothing.

    Args:
        analysis: the channels of every value in the graph.
    """

    def __init__(self, analysis: Analysis) -> None:
        self.analysis, self.labels = analysis, analysis.labels
        self.roots = self.labels.roots(torch.arange(len(self.labels.parents)))  # (labels,)
        self.removed = torch.zeros(len(self.roots), dtype=torch.bool)  # (labels,)
        self._keep_one()

    def gone(self, labels: Tensor) -> Tensor:
        """Return which of these labels are left out."""
        return self.removed[labels]

    def _find(self) -> None:
        """Find what can be left out, until nothing is added."""
        free = ~self.labels.is_pinned(self.roots.tolist())
        self.removed = torch.zeros_like(free)
        while True:
            needed = torch.zeros_like(free)  # (labels,), noted at the root of a group
            for read in self.analysis.reads:
                needed[self.roots[read.channels.labels[~read.passes(self.gone(read.rows))]]] = True
            found = free & ~needed[self.roots]
            if found.equal(self.removed):
                return
            self.removed = found

    def _keep_one(self) -> None:
        """Find what can be left out such that one channel is left of every value."""
        while True:
            self._find()
            groups = [c.labels for found in self.analysis.found.values() for c in _each(found)]
            empty = [labels for labels in [*groups, *self.analysis.parameters.values()] if self.gone(labels).all()]
            if not empty:
                return
            for labels in empty:
                self.labels.pin(labels[:1])


def _each(found: Any) -> list[Channels]:
    """Return the channels of a value, or of several."""
    return [c for c in (found if isinstance(found, list) else [found]) if c is not None]


@torch.no_grad()
def cut(analysis: Analysis) -> int:
    """Leave out of a graph what can be left out.

    Args:
        analysis: the channels of every value in the graph, which is changed in place.

    Returns:
        How many channels are always 0 and stay: what reads them, or is added to them, needs their places.
    """
    graph, chosen = analysis.graph, Cut(analysis)
    for read in analysis.reads:
        _fold_into_bias(graph, chosen, read)
    for node in [n for n in graph.graph.nodes if n.op == "call_function"]:
        _rewrite(analysis, chosen, node)
    for node in analysis.gathered:
        _gather(graph, chosen, node, analysis.channels(node))
    slices = dict[str, list[tuple[int, Tensor]]]()
    for (name, dim), labels in analysis.parameters.items():
        slices.setdefault(name, []).append((dim, ~chosen.gone(labels)))
    for name, parts in slices.items():
        value = getattr(graph, name)
        for dim, kept in parts:
            value = value.index_select(dim, kept.nonzero().flatten().to(value.device))
        setattr(graph, name, value.contiguous().clone())
    for node in list(graph.graph.nodes):
        _without_open_gates(graph, node)
    clean(graph)
    layers = {read.node for read in analysis.reads}
    return sum(
        int(((c.values == 0) & ~chosen.gone(c.labels)).sum())
        for node, found in analysis.found.items() if node in layers for c in _each(found)
    )  # fmt: skip


def _fold_into_bias(graph: fx.GraphModule, chosen: Cut, read: Read) -> None:
    """Add to the bias of a layer what constant channels contribute that are left out."""
    values = torch.where(chosen.gone(read.channels.labels) & read.channels.known(), read.channels.values, 0)
    if not values.any():
        return
    node, shift = read.node, read.sums @ values
    args = list(node.args)
    if node.target in (aten.matmul.default, aten.mm.default):  # no bias of their own
        name = str(add_constant(graph, shift.to(node.meta["val"].dtype), node).target)
        with graph.graph.inserting_after(node):
            added = graph.graph.call_function(aten.add.Tensor, (node, graph.graph.get_attr(name)))
        node.replace_all_uses_with(added, lambda user: user is not added)
        chosen.analysis.parameters[name, 0] = read.rows
        return
    place = 0 if node.target == aten.addmm.default else 2
    args += [None] * (place + 1 - len(args))
    weight = constant(graph, args[1])  # type: ignore[arg-type]
    before = constant(graph, args[place]) if is_constant(args[place]) else 0  # type: ignore[arg-type]
    bias = add_constant(graph, before + shift.to(weight), node)
    args[place], node.args = bias, tuple(args)
    node.args = tuple(args)
    chosen.analysis.parameters[str(bias.target), 0] = read.rows


def _rewrite(analysis: Analysis, chosen: Cut, node: fx.Node) -> None:
    """Write the numbers of channels that are left into the arguments of an operation."""
    args: list[Any] = list(node.args)
    found = analysis.found.get(node)
    channels = found if isinstance(found, Channels) else None
    if node.target in (*VIEWS, aten.expand.default) and channels is not None:
        sizes = list(shape(node))
        sizes[channels.dim] = int((~chosen.gone(channels.labels)).sum())
        given = args[1]
        args[1] = [g if isinstance(g, fx.Node) or s == -1 else s for g, s in zip(given, sizes, strict=True)]
    elif node.target == aten.unflatten.int and channels is not None:
        sizes = list(shape(node))
        sizes[channels.dim] = int((~chosen.gone(channels.labels)).sum())
        first = args[1] % len(shape(args[0]))
        args[2] = sizes[first : first + len(args[2])]
    elif node.target in CONVOLUTIONS_IN_GROUPS and len(args) > 6 and args[6] > 1:
        source = analysis.channels(args[0])
        args[6] = args[6] if source is None else int((~chosen.gone(source.labels)).sum()) * args[6] // len(source.labels)
        if source is not None and not chosen.gone(source.labels).any():
            args[6] = node.args[6]
    elif node.target in PIECES and isinstance(found, list) and (source := analysis.channels(args[0])) is not None:
        dim = (args[2] if len(args) > 2 else 0) % len(shape(args[0]))
        if dim == source.dim:
            node.target = aten.split_with_sizes.default
            args = [args[0], [int((~chosen.gone(c.labels)).sum()) for c in _each(found)], dim]
    elif node.target == aten.slice.Tensor and channels is not None:
        source = analysis.channels(args[0])
        dim = (args[1] if len(args) > 1 else 0) % len(shape(args[0]))
        if source is not None and dim == source.dim:
            start, _, _ = slice(*args[2:4]).indices(len(source.labels))
            before = int((~chosen.gone(source.labels[:start])).sum())
            args = [args[0], dim, before, before + int((~chosen.gone(channels.labels)).sum())]
    node.args = tuple(args)


def _gather(graph: fx.GraphModule, chosen: Cut, node: fx.Node, channels: Channels | None) -> None:
    """Reduce the result of a norm to the channels that are left."""
    if channels is None or not chosen.gone(channels.labels).any():
        return
    device = node.meta["val"].device
    kept = (~chosen.gone(channels.labels)).nonzero().flatten().to(device)
    name = str(add_constant(graph, kept, node).target)
    with graph.graph.inserting_after(node):
        index = graph.graph.get_attr(name)
    with graph.graph.inserting_after(index):
        taken = graph.graph.call_function(aten.index_select.default, (node, channels.dim, index))
    node.replace_all_uses_with(taken, lambda user: user is not taken)


def _without_open_gates(graph: fx.GraphModule, node: fx.Node) -> None:
    """Remove a gate that is open for all channels that are left."""
    found = gate_of(graph, node) if node.target in (*SELECT, aten.mul.Tensor) else None
    if found is not None and bool((found[1] == 1).all()) and found[1].dim() <= node.meta["val"].dim():
        node.replace_all_uses_with(found[0])
        graph.graph.erase_node(node)
