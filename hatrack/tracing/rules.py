"""The rules of the tracker: the dependency sets of an operation's result, from those of its arguments.

A rule may always return None, which makes the result always active: more weights are then frozen than necessary, never too
few (see `dependencies.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hatrack.tracing.dependencies import ALWAYS_ACTIVE, ALWAYS_ZERO

if TYPE_CHECKING:
    from hatrack.tracing.tracker import DependencyTracker

COPIES = {  # operations that move elements and may put zeros between them
    "cat", "channel_shuffle", "clone", "diag_embed", "expand_copy", "flip", "gather",
    "im2col", "index", "index_select", "lift_fresh", "native_channel_shuffle", "permute_copy", "pixel_shuffle",
    "pixel_unshuffle", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "repeat", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "roll", "rot90", "select_scatter", "slice_scatter", "stack", "tril", "triu",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "view_copy", "_unsafe_view",
}  # fmt: skip
ZEROS = ("new_zeros", "zeros_like", "zero")
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "linalg_vector_norm", "norm", "cumsum"}
CHANNELWISE = {  # operations that mix no channels and map zeros to zeros, with the number of dimensions that they mix
    "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3, "max_pool1d": 1, "max_pool1d_with_indices": 1,
    "max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3, "_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3,
    "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3, "fractional_max_pool2d": 2, "upsample_linear1d": 1,
    "upsample_bilinear2d": 2, "_upsample_bilinear2d_aa": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3,
    "grid_sampler_2d": 2, "max_unpool2d": 2, "hardswish": 0, "rrelu_with_noise": 0, "_prelu_kernel": 0,
}  # fmt: skip
FACTORS = {  # products of matrices, and the names of the two that are multiplied
    "mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"),
}  # fmt: skip
ATTENTION = "_scaled_dot_product_"  # the names of the fused operations of attention begin so


@dataclass(frozen=True)
class Operation:
    """One operation, as a rule sees it.

    Attributes:
        tracker: knows the sets of all tensors.
        name: the name of the operation, without the underscore of those that write in place.
        func: the operation.
        args: its arguments by position.
        kwargs: its arguments by name.
        outputs: the tensors of floats that it returned.
    """

    tracker: "DependencyTracker"
    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(zip([a.name for a in self.func._schema.arguments], self.args, strict=False)) | self.kwargs

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments that are tensors."""
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]

    @property
    def floats(self) -> list[Tensor]:
        """The arguments that are tensors of floats."""
        return [t for t in self.tensors if t.is_floating_point()]

    def ids(self, tensor: Tensor) -> Tensor:
        """Return the set ids of a tensor's elements."""
        return self.tracker.set_ids(tensor)

    def reduced(self, tensor: Tensor, dims: Iterable[int]) -> Tensor:
        """Return the union of a tensor's sets over some dimensions, which then have length 1."""
        return self.tracker.dependencies.reduce(self.ids(tensor), list(dims))

    def on_ids(self, x: Any) -> Any:
        """Replace a float tensor by its set ids, in double precision because some operations take no integers."""
        return self.ids(x).double() if isinstance(x, Tensor) and x.is_floating_point() else x


def result_ids(op: Operation) -> Tensor | None:
    """Return the set ids of an operation's first result; None if no rule applies, so that it is always active."""
    if not op.tensors:  # a new tensor: its zeros are the same for every input, unless they are random or uninitialised
        random = torch.Tag.nondeterministic_seeded in op.func.tags or "empty" in op.name
        return None if random else torch.where(op.outputs[0] == 0, ALWAYS_ZERO, ALWAYS_ACTIVE)
    if not op.floats and op.name not in ZEROS:
        return None  # computed from bits or complex numbers: its zeros may be those of the example
    if op.name not in ZEROS and "out" in op.given:
        return None
    if op.name in REDUCTIONS and not op.floats[0].numel():
        return None  # on the example there is nothing to reduce, but there may be on others
    rule = attention_ids if op.name.startswith(ATTENTION) else RULES.get(op.name)
    if rule is not None:
        return rule(op)
    pointwise = torch.Tag.pointwise in op.func.tags
    if pointwise and (op.name == "where" or all(t.is_floating_point() for t in tree_leaves(op.args) if _is_tensor(t))):
        return pointwise_ids(op)
    return None


def pointwise_ids(op: Operation) -> Tensor | None:
    """Return the union of the arguments' sets if f(0, ..., 0) = 0, which is tried; otherwise None."""

    def zeros(x: Any) -> Any:
        return torch.zeros_like(x) if _is_tensor(x) and x.is_floating_point() else x

    results = tree_leaves(op.func(*tree_map(zeros, op.args), **tree_map(zeros, op.kwargs)))
    if not all(bool((t == 0).all()) for t in results):
        return None
    ids = op.ids(op.floats[0])
    for t in op.floats[1:]:
        ids = op.tracker.dependencies.union(ids, op.ids(t))
    return ids


def zero_ids(op: Operation) -> Tensor:
    """Return the sets of zeros."""
    return torch.full((), ALWAYS_ZERO)


def copied_ids(op: Operation) -> Tensor | None:
    """Apply an operation that moves elements to their sets as well."""
    if any(op.tracker.depends_on_input(t) for t in tree_leaves(op.args) if _is_tensor(t)) and not _same_wherever(op):
        return None  # with another input it copies other elements
    return op.func(*tree_map(op.on_ids, op.args), **op.kwargs).long()  # type: ignore[no-any-return]


def _same_wherever(op: Operation) -> bool:
    """Return whether an index may pick any elements, because the sets are the same along the dimensions it picks from."""
    if op.name == "index":
        picked = [d for d, index in enumerate(op.args[1]) if index is not None]
        if any(op.args[1][d].dtype in (torch.bool, torch.uint8) for d in picked):
            return False
    elif op.name in ("index_select", "gather"):
        picked = [op.args[1]]
    else:
        return False
    ids = op.ids(op.args[0])
    return all(torch.equal(ids, ids.narrow(d, 0, 1).expand_as(ids)) for d in picked)


def padded_ids(op: Operation) -> Tensor:
    """Return the sets of a padded tensor: a border of zeros is always zero."""
    border = ALWAYS_ACTIVE if op.given.get("value") else ALWAYS_ZERO
    return op.func(op.on_ids(op.args[0]), op.args[1], border).long()  # type: ignore[no-any-return]


def times_ids(op: Operation) -> Tensor | None:
    """Return the sets of x * y: the smaller one of each pair."""
    if not isinstance(op.args[1], Tensor):
        return pointwise_ids(op)
    return op.tracker.dependencies.smaller(op.ids(op.args[0]), op.ids(op.args[1]))


def quotient_ids(op: Operation) -> Tensor | None:
    """Return the sets of x / y: those of x if no known gates make y zero, because 0 / 0 is not 0."""
    if not isinstance(op.args[1], Tensor):
        return pointwise_ids(op)
    return op.ids(op.args[0]) if bool((op.ids(op.args[1]) == ALWAYS_ACTIVE).all()) else None


def filled_ids(op: Operation) -> Tensor | None:
    """Return the sets of a tensor some of whose elements are replaced: they are kept only by zeros."""
    return op.ids(op.args[0]) if not isinstance(op.args[2], Tensor) and op.args[2] == 0 else None


def reduction_ids(op: Operation) -> Tensor:
    """Return the union over the dimensions that are summed, averaged or searched for the largest."""
    x, dims = op.floats[0], op.given.get("dim")
    ids = op.reduced(x, [dims] if isinstance(dims, int) else dims or range(x.dim()))
    return ids if ids.dim() == op.outputs[0].dim() else ids.reshape(op.outputs[0].shape)


def channelwise_ids(op: Operation) -> Tensor:
    """Return the union over the last dimensions, as many as the operation mixes."""
    x = op.floats[0]
    return op.reduced(x, range(x.dim() - CHANNELWISE[op.name], x.dim()))


def folded_ids(op: Operation) -> Tensor:
    """Return the sets of col2im: (batch, channels * kernel elements, columns) to (batch, channels, height, width)."""
    ids = op.ids(op.args[0]).unflatten(-2, (op.outputs[0].shape[-3], -1))  # type: ignore[no-untyped-call]
    return op.tracker.dependencies.reduce(ids, [-2, -1])


def product_ids(op: Operation) -> Tensor:
    """Return the sets of the sums over k of x_ik y_kj: zero if all x_ik are, or all y_kj.

    With attention's weights as x, which are always active, these are the sets of y: the channels of the values.
    """
    x, y = (op.given[name] for name in FACTORS[op.name])
    ids = op.tracker.dependencies.smaller(op.reduced(x, [-1]), op.reduced(y, [-2]))
    return ids if op.name in ("mm", "bmm") else op.tracker.dependencies.union(ids, op.ids(op.given["self"]))


def attention_ids(op: Operation) -> Tensor:
    """Return the sets of attention in one operation: those of the values (batch, heads, positions, channels)."""
    ids, out = op.reduced(op.given["value"], [-2]), op.outputs[0]
    shared = out.shape[-3] // ids.shape[-3]  # heads of queries per head of values
    return ids if shared == 1 else ids.repeat_interleave(shared, -3)


RULES: dict[str, Callable[[Operation], Tensor | None]] = {
    **dict.fromkeys(ZEROS, zero_ids),
    **dict.fromkeys(COPIES, copied_ids),
    **dict.fromkeys(REDUCTIONS, reduction_ids),
    **dict.fromkeys(CHANNELWISE, channelwise_ids),
    **dict.fromkeys(FACTORS, product_ids),
    "copy": lambda op: op.ids(op.given["src"]),
    "_to_copy": lambda op: op.ids(op.given["self"]),
    "constant_pad_nd": padded_ids,
    "mul": times_ids,
    "div": quotient_ids,
    "masked_fill": filled_ids,
    "glu": lambda op: op.ids(op.args[0]).chunk(2, op.given.get("dim", -1))[0],
    "col2im": folded_ids,
}


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)
