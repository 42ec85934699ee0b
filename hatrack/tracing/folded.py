"""Gates of a training step at less cost: those behind a norm become part of its scale and shift, all in one operation.

A gate a on the result of a norm, a (w x + b), is (a w) x + a b. The left side reads and writes all activations of a layer
once more in the forward pass and several times in the backward pass, the right side a number per channel. They round
differently, so that a Trainer, whose records stay the same, and finished tasks, whose gates select, keep to the left.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.tracing.gates import ApplyGates, Gate, Key, Places, tensor_names
from hatrack.tracing.norm_calls import NORMS, arguments
from hatrack.tracing.training_pass import count_writes

BY_CHANNEL = (F.batch_norm, F.instance_norm, F.group_norm)  # they scale dimension 1
LAST = (F.layer_norm,)  # it scales the last dimension, if it norms no other


Norms = dict[Key, tuple[Tensor, Tensor]]  # the scale and shift (channels,) of calls of norms


class LastPass:
    """What the passes of one step leave to those of the next, so that these need not find it out again.

    Attributes:
        norms: the norms that are folded together: those that the last pass before the last step called. Within a step they
            stay the same, so that a pass that is computed again (gradient checkpointing) has the same graph.
        called: the norms that the last pass called.
        names: the name of every parameter and buffer of the trunk, by `id`.
        tensors: these tensors. While they are held here, no other one can have the `id` of one of them.
        together: whether norms are folded together. Then also those that a pass leaves out are part of its graph.
        written: the norms whose scale or shift the trunk itself writes in place, such as to keep it in a range. They are
            never folded together, which would be with the values at the beginning of a pass.
    """

    def __init__(self) -> None:
        self.norms: Norms = {}
        self.called: Norms = {}
        self.names: dict[int, str] = {}
        self.tensors: list[Tensor] = []
        self.together = True
        self.written: set[Key] = set()

    def look(self, trunk: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Find the names, before the pass begins: within it the trunk may exchange tensors for a while, as
        `torch.func.functional_call` does, and what it exchanges has no name."""
        names = tensor_names(trunk) | {id(tensor): name for name, tensor in tensors.items()}
        if names != self.names:
            self.names, self.tensors = names, [*trunk.parameters(), *trunk.buffers(), *tensors.values()]

    def end_step(self) -> None:
        """Let the next passes fold together what the last one called."""
        self.norms = self.called

    def expected(self) -> Norms:
        """Return the norms that the next pass folds together.

        Not folded so: scales that are computed, whose graph may be gone, and those with hooks of the user's own, which would
        be called without a gradient if the pass leaves their norm out. Transforms of torch.func take no function of our own.
        """
        if not self.together or torch._C._are_functorch_transforms_active():
            return {}
        return {key: pair for key, pair in self.norms.items() if all(t.is_leaf and not t._backward_hooks for t in pair)}


class Fold(NamedTuple):
    """The scale and shift (channels,) of one call of a norm, and the values of its gates."""

    key: Key
    weight: Tensor
    bias: Tensor
    values: Tensor


class FoldedGates(ApplyGates):
    """As `ApplyGates`, for soft gates: those of norms are folded into their scale and shift.

    Args:
        trunk: the trunk.
        tensors: parameters and buffers that are used in place of the trunk's own, by name.
        places: the gate of every traced call.
        gates: (units,), the value of every gate; they multiply.
        layers: the units of every layer, consecutive.
        last: what the passes before have left. Norms that they have not called are folded one by one.

    Attributes:
        called: the norms that this pass called.
    """

    def __init__(
        self,
        trunk: nn.Module,
        tensors: Mapping[str, Tensor],
        places: Places,
        gates: Tensor,
        layers: Sequence[slice],
        last: LastPass,
    ) -> None:
        self.left = last
        last.look(trunk, tensors)
        super().__init__(last.names, places, gates, layers, training=trunk.training)
        self.called: Norms = {}
        self.versions = {} if last.norms else {id(t): count_writes(t) for t in last.tensors}  # before the first step
        expected = last.expected()
        gates_of = {key: gate for key in expected if isinstance(gate := places.gates[key], Gate)}
        folds = [Fold(key, *expected[key], self.values(gate)) for key, gate in gates_of.items()]
        self.folded = {fold.key: (fold, *pair) for fold, pair in zip(folds, _fold_together(folds), strict=True)}

    def call(self, found: Key, gate: Gate | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function and apply the gate to its result, or to what a norm is given."""
        if gate is None or func not in NORMS:
            return super().call(found, gate, func, args, kwargs)
        given = arguments(func, args, kwargs)
        weight, bias = given.get("weight"), given.get("bias")
        if weight is None or bias is None or not _scales_channels(func, given, gate):
            return super().call(found, gate, func, args, kwargs)
        if any(self.versions.get(id(t), count_writes(t)) != count_writes(t) for t in (weight, bias)):
            self.left.written.add(found)
        if found not in self.left.written:
            self.called.setdefault(found, (weight, bias))
        fold, scale, shift = self.folded.get(found, (None, None, None))
        if fold is None or fold.weight is not weight or fold.bias is not bias:
            values = self.values(gate).to(weight.dtype)
            scale, shift = weight * values, bias * values
        return func(**given | {"weight": scale, "bias": shift})


def _scales_channels(func: Any, given: dict[str, Any], gate: Gate) -> bool:
    """Return whether the scale and shift of a call of a norm lie along the dimension of its gate."""
    weight, dims = given["weight"], given["input"].dim()
    if weight.dim() != 1 or len(weight) != len(gate.units) or given["bias"].dtype != weight.dtype:
        return False
    return (func in BY_CHANNEL and gate.dim == 1) or (func in LAST and gate.dim == dims - 1)


def _fold_together(folds: list[Fold]) -> list[tuple[Tensor, Tensor]]:
    """Return the scale and shift of every norm times its gates."""
    if not folds:
        return []
    tensors = [t for fold in folds for t in (fold.weight, fold.bias)]
    values = [fold.values.to(fold.weight.dtype) for fold in folds]
    scaled = _TimesGates.apply(len(folds), *values, *tensors)  # type: ignore[no-untyped-call]
    return list(zip(scaled[::2], scaled[1::2], strict=True))


class _TimesGates(torch.autograd.Function):
    """Multiplies pairs of tensors by gates, one for both: values a1, a2, ..., tensors w1, b1, w2, b2, ..."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.count = count
        ctx.set_materialize_grads(False)  # what a pass leaves out has no gradient, as without gates
        ctx.save_for_backward(*given)
        values, tensors = given[:count], given[count:]
        return tuple(torch._foreach_mul(tensors, [v for v in values for _ in range(2)]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing gives them out a single time
        values, tensors = saved[: ctx.count], saved[ctx.count :]
        there = [k for k, grad in enumerate(grads) if grad is not None]
        if not there:
            return (None,) * (1 + len(values) + len(tensors))
        arrived = [grad for grad in grads if grad is not None]
        scaled = dict(zip(there, torch._foreach_mul(arrived, [values[k // 2] for k in there]), strict=True))
        own = dict(zip(there, torch._foreach_mul(arrived, [tensors[k] for k in there]), strict=True))
        pairs = [[own[j] for j in (2 * k, 2 * k + 1) if j in own] for k in range(ctx.count)]
        both = [k for k, pair in enumerate(pairs) if len(pair) == 2]
        sums = torch._foreach_add([pairs[k][0] for k in both], [pairs[k][1] for k in both]) if both else []
        of_values = [pair[0] if pair else None for pair in pairs]
        for k, total in zip(both, sums, strict=True):
            of_values[k] = total
        return None, *of_values, *(scaled.get(k) for k in range(len(tensors)))
