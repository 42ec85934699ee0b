"""Compute max-pooling, and all that stands between it and the next matrix products, window by window.

The gradient of max-pooling is 0 but at one pixel of each window, the chosen one. What is done to this gradient before a
matrix product takes it (dropout, relu, gates, sums over an image) needs one value per window, and of the images with which
it is multiplied only the chosen pixels. So no image of the size before pooling is kept for the backward pass, and only the
last one is written there. Results are the same but for the order of sums.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hatrack.engine.realized import realized

aten = torch.ops.aten
Node = Any  # an fx.Node, whose arguments have many types
Order = tuple[int, ...]  # where the images, rows, columns and channels are among the dimensions of a result
FIRST, LAST = (0, 2, 3, 1), (0, 1, 2, 3)  # the order of dimensions with the channels first and last
SAME = (aten.clone.default, aten.detach.default, aten.alias.default)  # operations that return what they are given
MOST = 64  # pixels of a window: larger ones would make too many operations
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def pool_by_windows(graph: fx.Graph) -> None:
    """Rewrite all max-pooling of a graph without writes in place. Pooling with windows that overlap or are large stays
    as it is."""
    for node in [node for node in graph.nodes if node.target is aten.max_pool2d_with_indices.default]:
        users = {use.args[1]: list(use.users) for use in node.users}
        backward = users.get(1, [])
        if _is_disjoint(node) and all(user.target is aten.max_pool2d_with_indices_backward.default for user in backward):
            _Pooling(graph, node).rewrite(backward)
    graph.eliminate_dead_code()


def _is_disjoint(node: Node) -> bool:
    x, size, *others = node.args
    stride, padding, dilation, ceil = others + [[], [0], [1], False][len(others) :]
    plain = list(stride) in ([], list(size)) and not any(padding) and set(dilation) == {1} and not ceil
    small = len(size) == 2 and size[0] * size[1] <= MOST
    return plain and small and x.meta["val"].dim() == 4 and x.meta["val"].is_floating_point()


def is_node(value: Any) -> bool:
    """Return whether an argument of an operation is the result of another one."""
    return isinstance(value, fx.Node)


def _inverse(order: Order) -> list[int]:
    return [order.index(place) for place in range(len(order))]


def _shape(node: Any) -> tuple[int, ...]:
    """Return the shape of a result with four dimensions; those that it lacks are the first ones."""
    shape = tuple(node.meta["val"].shape)
    return (1,) * (4 - len(shape)) + shape


def _pixels(node: Any, order: Order) -> tuple[int, int]:
    """Return how many rows and columns a result has."""
    return _shape(node)[order[1]], _shape(node)[order[2]]


def _is_elementwise(node: Any, order: Order) -> bool:
    """Return whether each pixel of a result comes from the same pixel of the arguments, or from what all pixels share."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten._to_copy.default
    given = list(filter(is_node, node.args))
    if node.op != "call_function" or not pointwise or not given or any(isinstance(arg, list | tuple) for arg in node.args):
        return False
    plain = all(arg.meta["val"].dim() <= 4 for arg in given)
    return plain and all(_pixels(arg, order) in ((1, 1), _pixels(node, order)) for arg in given)


class _Pooling:
    """One max-pooling of a graph. New results have the dimensions images, rows, columns, channels."""

    def __init__(self, graph: fx.Graph, node: Node) -> None:
        self.graph, self.node, self.x = graph, node, node.args[0]
        self.high, self.wide = node.args[1]
        *_, height, width = self.x.meta["val"].shape
        self.pad = height % self.high, width % self.wide
        self.shape = height // self.high, width // self.wide  # of the windows
        self.number = {other: number for number, other in enumerate(graph.nodes)}
        self.kept: dict[tuple[Node, Order], Node] = {}  # the chosen pixels of results
        self.spots = [(down, right) for down in range(self.high) for right in range(self.wide)]

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(op, args, kwargs)

    def rewrite(self, backward: list[Node]) -> None:
        with self.graph.inserting_before(self.node):
            pooled, self.choice = self._choose()
            turned = self.call(aten.permute.default, pooled, [0, 3, 1, 2])
        for use in [use for use in self.node.users if use.args[1] == 0]:
            turned.meta["val"], pooled.meta["val"] = use.meta["val"], use.meta["val"].permute(FIRST)  # for the next pooling
            use.replace_all_uses_with(turned)
        for node in backward:
            with self.graph.inserting_before(node):
                turned = self.call(aten.permute.default, node.args[0], list(FIRST))
                grad = self.call(realized, turned)
            turned.meta["val"] = grad.meta["val"] = node.args[0].meta["val"].permute(FIRST)
            self._push(node, grad, FIRST)

    # The forward pass

    def _choose(self) -> tuple[Node, Node]:
        """Return the largest pixel of every window and which of its pixels that is; of equal ones the first."""
        best, *others = (self._follow(self.x, FIRST, self._at(spot)) for spot in self.spots)
        choice = self.call(aten.full_like.default, best, 0, dtype=torch.int8)
        for number, value in enumerate(others, 1):
            larger = self.call(aten.gt.Tensor, value, best)
            better = self.call(aten.logical_or.default, larger, self.call(aten.isnan.default, value))
            best = self.call(aten.where.self, better, value, best)
            choice = self.call(aten.where.self, better, self._constant(number, torch.int8), choice)
        return self.call(realized, best), self.call(realized, choice)

    def _constant(self, value: float, dtype: torch.dtype) -> Node:
        return self.call(aten.scalar_tensor.default, value, dtype=dtype, device=self.x.meta["val"].device)

    def _at(self, spot: tuple[int, int]) -> Callable[[Node, Order], Node]:
        """Return a function that takes the same pixel of every window of a result."""

        def take(node: Node, order: Order) -> Node:
            taken = self._aligned(node, order)
            lengths = _pixels(node, order)
            for dim, first, count, step in zip((1, 2), spot, self.shape, (self.high, self.wide), strict=True):
                if lengths[dim - 1] == 1:  # the same for all rows, or columns
                    continue
                taken = self.call(aten.slice.Tensor, taken, dim, first, first + (count - 1) * step + 1, step)
            return taken

        return take

    def _aligned(self, node: Node, order: Order) -> Node:
        """Return a result with the dimensions images, rows, columns, channels; those that it lacks have the length 1."""
        if node.meta["val"].dim() < 4:
            node = self.call(aten.reshape.default, node, list(_shape(node)))
        return self.call(aten.permute.default, node, list(order))

    def _take_chosen(self, node: Node, order: Order) -> Node:
        """Return the chosen pixels of a result of the forward pass, which are kept for the backward pass."""
        if (node, order) not in self.kept:
            early = node in self.number and self.number[node] < self.number[self.node]
            with self.graph.inserting_before(self.node if early else node.next):
                taken, *others = (self._at(spot)(node, order) for spot in self.spots)
                for number, value in enumerate(others, 1):
                    here = self.call(aten.eq.Scalar, self.choice, number)
                    taken = self.call(aten.where.self, here, value, taken)
                self.kept[node, order] = self.call(realized, taken)
        return self.kept[node, order]

    def _follow(self, node: Any, order: Order, take: Callable[[Node, Order], Node]) -> Any:
        """Return what `take` would take of a result, computed from what it takes of the results that this one comes from."""
        if not is_node(node) or node.meta["val"].dim() == 0:
            return node
        if _pixels(node, order) == (1, 1):  # the same for all pixels
            return self._aligned(node, order)
        if node.target in SAME:
            return self._follow(node.args[0], order, take)
        if node.target is aten.permute.default and node.meta["val"].dim() == 4:
            return self._follow(node.args[0], tuple(node.args[1][place] for place in order), take)
        if not _is_elementwise(node, order):
            return take(node, order)
        args = [self._follow(arg, order, take) for arg in node.args]
        kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
        return self.call(node.target, *args, **kwargs)

    # The backward pass

    def _push(self, node: Node, grad: Node, order: Order) -> None:
        """Replace a result that is 0 but at the chosen pixels, where it is `grad`, in all that uses it."""
        whole: list[Node] = []  # the result as an image, if somebody needs it
        for user in sorted(node.users):  # as they are in the graph: all of them share the image
            with self.graph.inserting_before(user):
                if (found := self._pushed(user, node, grad, order)) is not None:
                    self._push(user, *found)
                elif (total := self._summed(user, node, grad, order)) is not None:
                    total.meta["val"] = user.meta["val"]
                    user.replace_all_uses_with(total)
                else:
                    whole = whole or [self._spread(grad, order)]
                    whole[0].meta["val"] = node.meta["val"]
                    user.replace_input_with(node, whole[0])

    def _pushed(self, user: Node, node: Node, grad: Node, order: Order) -> tuple[Node, Order] | None:
        """Return the values of `user` at the chosen pixels and the order of its dimensions, if it is 0 elsewhere too."""
        if user.target in SAME:
            return grad, order
        if user.target is aten.permute.default:
            dims = list(user.args[1])
            return grad, tuple(dims.index(place) for place in order)
        if user.target is aten._to_copy.default:
            kwargs = {name: value for name, value in user.kwargs.items() if name != "memory_format"}
            return self.call(user.target, grad, **kwargs), order
        whole = getattr(user.meta.get("val"), "shape", ()) == node.meta["val"].shape
        first = user.target in (aten.threshold_backward.default, aten.div.Tensor) and user.args[1] is not node
        if whole and (user.target is aten.mul.Tensor or first):
            args = [grad if arg is node else self._follow(arg, order, self._take_chosen) for arg in user.args]
            return self.call(user.target, *args), order
        return None

    def _summed(self, user: Node, node: Node, grad: Node, order: Order) -> Node | None:
        """Return the sum of a gradient over all pixels, if that is what `user` is; as rows of pixels if it is a view."""
        if user.target is aten.sum.dim_IntList and isinstance(node.meta["val"], torch.Tensor):
            dims = {dim % 4 for dim in user.args[1]}
            if not {order[1], order[2]} <= dims:
                return None
            total = self.call(user.target, grad, [order.index(dim) for dim in dims], True, **user.kwargs)
            turned = self.call(aten.permute.default, total, _inverse(order))
            return self.call(aten.reshape.default, turned, list(user.meta["val"].shape))
        rows = tuple(user.meta["val"].shape) if user.target in VIEWS else ()
        if order != LAST or len(rows) != 2 or rows[1] != node.meta["val"].shape[3]:
            return None
        sums = [use for use in user.users if use.target is aten.sum.dim_IntList and list(use.args[1]) == [0]]
        for use in sums:
            with self.graph.inserting_before(use):
                total = self.call(aten.sum.dim_IntList, grad, [0, 1, 2], **use.kwargs)
                use.replace_all_uses_with(self.call(aten.reshape.default, total, list(use.meta["val"].shape)))
        return self.call(aten.reshape.default, self._spread(grad, order), list(rows))

    def _spread(self, grad: Node, order: Order) -> Node:
        """Return a gradient as an image: 0 but at the chosen pixels."""
        device = self.x.meta["val"].device
        numbers = self.call(aten.arange.default, self.high * self.wide, dtype=torch.int8, device=device)
        numbers = self.call(aten.reshape.default, numbers, [1, 1, self.high, 1, self.wide, 1])
        apart = [self.call(aten.unsqueeze.default, self.call(aten.unsqueeze.default, t, 2), 4) for t in (self.choice, grad)]
        here = self.call(aten.eq.Tensor, apart[0], numbers)
        zero = self.call(aten.zeros_like.default, apart[1])
        pixels = self.call(aten.where.self, here, apart[1], zero)
        (images, channels), (rows, columns) = self.x.meta["val"].shape[:2], self.shape
        image = self.call(aten.reshape.default, pixels, [images, rows * self.high, columns * self.wide, channels])
        if any(self.pad):
            image = self.call(aten.constant_pad_nd.default, image, [0, 0, 0, self.pad[1], 0, self.pad[0]], 0.0)
        return self.call(aten.permute.default, image, _inverse(order))
