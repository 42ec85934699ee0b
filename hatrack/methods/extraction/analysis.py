"""The channels of every value in a graph, by a rule for every operation: which it joins, pins, adds up or makes constant.

An operation without a rule pins all channels that it reads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from hatrack.methods.extraction.capture import constant, is_constant
from hatrack.methods.extraction.labels import UNKNOWN, Channels, Labels, Read

Found = Channels | list[Channels | None] | None  # of a value; of several values; None: its channels are not followed
Rule = Callable[["Analysis", fx.Node], Found]
Rules = dict[Any, Rule]  # the rule of every operation


def rules_in(table: Rules) -> Callable[..., Callable[[Rule], Rule]]:
    """Return a decorator that writes a function into a table, as the rule of the operations that it is given."""

    def rule(*targets: Any) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            table.update(dict.fromkeys(targets, function))
            return function

        return register

    return rule


def arguments(node: fx.Node) -> list[Any]:
    """Return the positional arguments of an operation."""
    return list(node.args)


def operation(node: fx.Node) -> Callable[..., Any]:
    """Return the function that a node calls."""
    assert callable(node.target)
    return node.target


class Analysis:
    """The channels of every value in a graph, found by rules.

    Args:
        graph: the graph, with gates and norms folded in.
        rules: the rule of every operation.

    Attributes:
        found: the channels of every operation's result.
        parameters: the labels along a dimension of a tensor of the module, by its name and the dimension.
        reads: the layers that add up channels.
        gathered: norms over all channels, whose result is reduced to the channels that are kept.
    """

    def __init__(self, graph: fx.GraphModule, rules: Rules) -> None:
        self.graph, self.labels = graph, Labels()
        self.found: dict[fx.Node, Found] = {}
        self.parameters: dict[tuple[str, int], Tensor] = {}
        self.reads: list[Read] = []
        self.gathered: set[fx.Node] = set()
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target in rules:
                self.found[node] = rules[node.target](self, node)
            elif node.op in ("call_function", "output"):
                self.pin_inputs(node)

    def channels(self, argument: Any) -> Channels | None:
        """Return the channels of an argument, if they are followed."""
        found = self.found.get(argument) if isinstance(argument, fx.Node) else None
        return found if isinstance(found, Channels) else None

    def pin_inputs(self, node: fx.Node) -> None:
        """Pin all channels that an operation reads."""
        for argument in node.all_input_nodes:
            found = self.found.get(argument)
            for own in found if isinstance(found, list) else [found]:
                self.pin(own)

    def pin(self, channels: Channels | None) -> None:
        """Pin channels."""
        if channels is not None:
            self.labels.pin(channels.labels)

    def parameter(self, node: fx.Node, dim: int) -> Tensor:
        """Return the labels along a dimension of a tensor of the module."""
        key = str(node.target), dim
        if key not in self.parameters:
            self.parameters[key] = self.labels.new(constant(self.graph, node).shape[dim])
        return self.parameters[key]

    def tie(self, argument: Any, dim: int, labels: Tensor) -> None:
        """Join the labels of a tensor of the module along a dimension with others."""
        if is_constant(argument):
            self.labels.join(self.parameter(argument, dim), labels)

    def value(self, argument: Any) -> Tensor | None:
        """Return the tensor that an argument is, in float64; None if it is none of the module's."""
        return constant(self.graph, argument).detach().double().cpu() if is_constant(argument) else None


def unknown(count: int) -> Tensor:
    """Return values of so many channels, of which nothing is known."""
    return torch.full((count,), UNKNOWN, dtype=torch.float64)


def only_zeros(values: Tensor) -> Tensor:
    """Return the values that are 0; the others are not known."""
    return torch.where(values == 0, values, UNKNOWN)


def zero_if(one: Channels, two: Channels) -> Tensor:
    """Return the values of products: 0 where one factor is."""
    return torch.where((one.values == 0) | (two.values == 0), 0, unknown(len(one.values)))
