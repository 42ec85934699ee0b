"""Turn the graph of one run's step into the graph of a step of several runs of the same form.

The graph of a step is a function of its inputs and of all other tensors that it uses, with writes in place. The stacked
graph is its `torch.vmap` over a leading dimension of lanes, one for each run: matrix products become batched products, all
else stays as it is. Random numbers are taken out: every run draws its own, from its own generator, and they become inputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from hatrack.engine.realized import realized
from hatrack.engine.windows import pool_by_windows

aten = torch.ops.aten
RANDOM = torch.Tag.nondeterministic_seeded


def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return a source with the shape, type and layout of a target."""
    found = source.to(target.dtype).expand(target.shape)
    return found.contiguous() if target.is_contiguous() else found


def filled(target: Tensor, value: Any) -> Tensor:
    """Return a tensor of the shape and type of a target that has one value everywhere."""
    return torch.full_like(target, value) if not isinstance(value, Tensor) else copied(target, value)


def dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the gradient of a dropout."""
    return grad * mask * scale


MANY = 2**16  # numbers of a weight of which a copy in fewer bits is kept
ELEMENTWISE = (aten.view.dtype, realized)  # the first of numbers of one size
WITHOUT_RULE: dict[Any, Any] = {  # operations for which `torch.vmap` has no rule
    aten.copy.default: copied,
    aten.fill.Scalar: filled,
    aten.fill.Tensor: filled,
    aten.native_dropout_backward.default: dropout_backward,
}


@dataclass(frozen=True)
class Draw:
    """An operation that draws random numbers, as a run alone executes it.

    Attributes:
        operation: the operation.
        shape: that of its result.
        stride: the layout of its result in memory, which decides which unit gets which number.
        dtype: the type of its result.
        first: the tensor argument that it fills or takes the shape from; None if it has none.
        args: its other arguments.
        kwargs: its keyword arguments.
    """

    operation: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    first: torch.dtype | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, device: torch.device) -> Tensor:
        """Draw from the generator that is set now."""
        if self.first is None:
            found = self.operation(*self.args, **self.kwargs)
        else:  # what it gets has no meaning; a dropout multiplies it
            given = torch.empty_strided(self.shape, self.stride, dtype=self.first, device=device)
            found = self.operation(given, *self.args, **self.kwargs)
        return cast(Tensor, found[1] if isinstance(found, tuple) else found)

    def blank(self, device: torch.device) -> Tensor:
        """Return a tensor with the shape and layout of what is drawn."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass
class StackedGraph:
    """The graph of a step of several runs.

    Attributes:
        module: a function of the inputs, the draws and all other tensors, each with a leading dimension of lanes. It writes
            to the tensors in place.
        draws: what every run draws before the step.
        written: which of the other tensors the step writes to.
        casts: of which of the other tensors the step needs a copy in fewer bits, and its type. The copies are further inputs
            at the end; the step keeps them true.
    """

    module: fx.GraphModule
    draws: list[Draw]
    written: list[bool]
    casts: list[tuple[int, torch.dtype]]


def stack_graph(graph: fx.GraphModule, inputs: Sequence[Tensor], tensors: Sequence[Tensor], lanes: int) -> StackedGraph:
    """Make the stacked graph of a step.

    Args:
        graph: the graph of one run's step. It is changed.
        inputs: the inputs of the step, of one run.
        tensors: all other tensors that it uses.
        lanes: how many runs there are.

    Raises:
        RuntimeError: if an operation can't be stacked.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    draws = _take_out_draws(graph, len(inputs))
    mode = FakeTensorMode(allow_fallback_kernels=True)
    single = [*inputs, *(draw.blank(torch.device("meta")) for draw in draws), *tensors]
    fakes = [_fake(mode, t, inputs[0].device) for t in single]
    with mode:
        plain = make_fx(torch.func.functionalize(lambda *given: graph(*given)), WITHOUT_RULE)(*fakes)
    first = len(inputs) + len(draws)
    written = _return_writes(plain, first)
    pool_by_windows(plain.graph)
    _free_of_layouts(plain.graph)
    casts = _keep_casts(plain.graph, first, written)
    single += [torch.empty_like(tensors[place], dtype=dtype, device="meta") for place, dtype in casts]
    plain.graph.eliminate_dead_code()
    plain.recompile()

    places = [first + place for place, is_written in enumerate(written) if is_written]
    places += range(len(single) - len(casts), len(single))

    def step(*given: Tensor) -> Tensor:
        values = torch.vmap(lambda *one: _Lanes(plain).run(*one))(*given)
        for place, value in zip(places, values, strict=True):
            given[place].copy_(value)
        return given[places[-1]]

    stacked = [_fake(mode, lane_tensor(t, lanes, meta=True), inputs[0].device) for t in single]
    with mode, _no_loops():
        module = make_fx(step)(*stacked)
    return StackedGraph(module, draws, written, casts)


class _Lanes(fx.Interpreter):
    """Executes a graph within `torch.vmap`. Operations for which torch 2.11 lacks a rule, and which do the same to every
    element, are executed on all lanes at once."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in ELEMENTWISE:
            return super().call_function(target, args, kwargs)
        x, *others = args
        functorch: Any = torch._C._functorch
        if not functorch.is_batchedtensor(x):
            return target(*args, **kwargs)
        result = target(functorch.get_unwrapped(x), *others, **kwargs)
        return functorch._add_batch_dim(result, functorch.maybe_get_bdim(x), functorch.maybe_get_level(x))


def lane_tensor(tensor: Tensor, lanes: int, *, meta: bool = False) -> Tensor:
    """Return a new tensor with a leading dimension of lanes, each with the layout of the given one."""
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    device = torch.device("meta") if meta else tensor.device
    shape, stride = (lanes, *tensor.shape), (max(1, size), *tensor.stride())
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)


def _fake(mode: Any, tensor: Tensor, device: torch.device) -> Any:
    """Return a tensor without data that has the same properties."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def _no_loops() -> Iterator[None]:
    """Within it `torch.vmap` raises an error for an operation without a rule, instead of a loop over the lanes."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def _take_out_draws(graph: fx.GraphModule, inputs: int) -> list[Draw]:
    """Replace every operation that draws random numbers by an input of the graph, after the inputs of the step."""
    draws: list[Draw] = []
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][inputs - 1]
    for node in [node for node in graph.graph.nodes if RANDOM in getattr(node.target, "tags", ())]:
        draws.append(_describe_draw(node))
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"draw_{len(draws)}")
        with graph.graph.inserting_before(node):
            _replace_draw(graph.graph, node, last)
        graph.graph.erase_node(node)
    graph.recompile()
    return draws


def _describe_draw(node: fx.Node) -> Draw:
    given = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node)]
    name = str(node.target).removeprefix("aten.")
    packet = name.partition(".")[0]
    if given and not (len(given) == 1 and given[0] is node.args[0] and _only_fills(node, packet)):
        raise RuntimeError(f"{name} draws random numbers in a way that can't be taken out of the step")
    value = node.meta["val"]
    result = value[1] if isinstance(value, tuple) else value
    first = given[0].meta["val"].dtype if given else None
    args = tuple(node.args[1:] if given else node.args)
    return Draw(node.target, tuple(result.shape), tuple(result.stride()), result.dtype, first, args, dict(node.kwargs))


def _only_fills(node: fx.Node, packet: str) -> bool:
    """Return whether an operation takes from its first argument no more than its shape and type."""
    return packet.endswith(("_like", "_")) or (packet == "native_dropout" and node.args[2] is not False)


def _replace_draw(graph: fx.Graph, node: fx.Node, drawn: fx.Node) -> None:
    """Let what was drawn before take the place of an operation that draws."""
    if node.target is aten.native_dropout.default:
        x, share = node.args[0], cast(float, node.args[1])
        kept = graph.call_function(aten.mul.Tensor, (x, drawn))
        scaled = graph.call_function(aten.mul.Tensor, (kept, 0.0 if share == 1 else 1 / (1 - share)))
        for use in list(node.users):
            use.replace_all_uses_with(scaled if use.args[1] == 0 else drawn)
            graph.erase_node(use)
    elif str(node.target).removeprefix("aten.").partition(".")[0].endswith("_"):
        node.replace_all_uses_with(graph.call_function(aten.copy_.default, (node.args[0], drawn)))
    else:
        node.replace_all_uses_with(drawn)


def _return_writes(graph: fx.GraphModule, first: int) -> list[bool]:
    """Let a graph without writes in place, but for copies into its inputs at the end, return the values of these copies.

    Returns:
        For each input from number `first` on whether it is written.
    """
    places = {node: place for place, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    values: dict[int, fx.Node] = {}
    for node in [n for n in graph.graph.nodes if n.target is aten.copy_.default]:
        target, value = node.args
        if target not in places:
            raise RuntimeError("the step writes to a part of a tensor in a way that can't be stacked")
        values[places[target]] = value
        node.replace_all_uses_with(value)
        graph.graph.erase_node(node)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    output.args = (tuple(values[place] for place in sorted(values) if place >= first),)
    return [place in values for place in range(first, len(places))]


def _keep_casts(graph: Any, first: int, written: list[bool]) -> list[tuple[int, torch.dtype]]:
    """Let copies of weights in fewer bits be inputs that the graph also returns, instead of making them at every step.

    Returns:
        The number of each tensor of which there is such a copy, from input number `first` on, and the type of the copy.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    values = dict(zip((place for place, is_written in enumerate(written) if is_written), output.args[0], strict=True))
    last, copies = inputs[-1], []
    found: list[tuple[int, torch.dtype]] = []
    for place in values:
        for node in [user for user in inputs[first + place].users if _is_cast(user)]:
            dtype = node.kwargs["dtype"]
            with graph.inserting_after(last):
                last = graph.placeholder(f"cast_{len(found)}")
            node.replace_all_uses_with(last)
            with graph.inserting_before(output):
                copies.append(graph.call_function(aten._to_copy.default, (values[place],), {"dtype": dtype}))
            found.append((place, dtype))
    output.args = ((*output.args[0], *copies),)
    return found


def _is_cast(node: Any) -> bool:
    """Return whether a node is a copy of many numbers in fewer bits."""
    if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    before, after = (n.meta["val"] for n in (node.args[0], node))
    return bool(before.numel() >= MANY and before.is_floating_point() and after.element_size() < before.element_size())


def _free_of_layouts(graph: fx.Graph) -> None:
    """Let a graph without writes in place not depend on how tensors lie in memory: stacked, they may lie otherwise."""
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        if node.kwargs.get("memory_format") is torch.channels_last:
            node.kwargs = {**node.kwargs, "memory_format": torch.contiguous_format}
            with graph.inserting_before(node):
                source = graph.call_function(aten.permute.default, (node.args[0], [0, 2, 3, 1]))
            with graph.inserting_after(node):
                turned = graph.call_function(aten.permute.default, (node, [0, 3, 1, 2]))
            node.replace_all_uses_with(turned, delete_user_cb=lambda user, turned=turned: user is not turned)
            node.args = (source, *node.args[1:])
