"""The gradients of single examples, without a loop over the examples: sums of their squares or of their absolute values.

One batched pass records the input of every layer and the gradient of its output; from these two follow the gradients of the
examples. A linear layer with one row per example does not even need those. The gradient of an example is delta x^T, the size
of a product is the product of the sizes, and so the sum over the examples is one product: sum_j |delta_j x_j^T| =
|delta|^T |x|, and the same with squares. Parameters that are used in any other way are differentiated by `vmap` of the whole
network, or in a loop if `vmap` does not support an operation of it.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from hatrack.methods.method import Method
from hatrack.methods.parts.layer_calls import LayerCall, RecordLayerCalls, in_groups
from hatrack.tracing.exchange import functional_call

ROWS = 1024  # examples in one pass, at most
MEMORY = 2**26  # numbers in one pass, at most: the outputs of all layers, or the gradients that `vmap` computes
# On a CPU less at a time is faster: outputs of under 2**23 numbers need no new pages of memory in every pass, and the
# gradients of 2**20 numbers of one layer stay in the cache until their sizes are summed.
CPU_OUTPUTS, CPU_GRADIENTS = 2**23, 2**20


class SumOfSizes:
    """Computes the sum over some examples of the sizes of their gradients.

    Parameters that are used in layers only are in `by_layer`: their gradients follow from the inputs and output gradients of
    these layers. For the `others` the whole network is differentiated. A trial with three examples shows which is which.
    `rows` is the number of examples that a pass may have, a multiple of `group`.

    Args:
        method: the method, in evaluation mode.
        task: the task whose head is used.
        parameters: those whose gradients are computed.
        objective: a function of the logits and of what else is given for each example; it returns one value per example,
            whose gradient is computed.
        trial: three images, and three of what else the objective takes.
        size: `torch.square` or `torch.abs`.
        group: how many examples, one after the other, have their gradients added up before the size is taken.
    """

    def __init__(
        self,
        method: Method,
        task: int,
        parameters: Sequence[nn.Parameter],
        objective: Callable[..., Tensor],
        trial: Sequence[Tensor],
        *,
        size: Callable[[Tensor], Tensor],
        group: int = 1,
    ) -> None:
        self.method, self.task, self.parameters = method, task, parameters
        self.objective, self.size, self.group = objective, size, group
        self.by_layer: list[Tensor] = list(parameters)
        self.others: dict[str, Tensor] = {}
        self.trial = trial
        (calls, two), (_, three) = (self._run(*(t[:count] for t in trial)) for count in (2, 3))
        self._move_to_others(set(parameters) if self._mixes_examples() else two | three)
        outputs = {call.probe: call.probe.numel() // 2 for of_one in calls.values() for call, _ in of_one}
        per_group = sum(p.numel() for p in self.others.values())
        room = min(ROWS, MEMORY // max(1, -(-per_group // group)), self._room(CPU_OUTPUTS) // max(1, sum(outputs.values())))
        self.rows = max(1, room // group) * group

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """Return the sums of sizes, one tensor per parameter.

        Args:
            given: images, and what else the objective takes. The last group may be smaller than the others.
        """
        complete = len(given[0]) // self.group * self.group
        parts = [(tuple(t[:complete] for t in given), self.group)] if complete else []
        if complete < len(given[0]):
            parts.append((tuple(t[complete:] for t in given), len(given[0]) - complete))
        first, *rest = [self._of_groups(part, group) for part, group in parts]
        return [torch.add(*both) for both in zip(first, *rest, strict=True)] if rest else first

    def _of_groups(self, given: tuple[Tensor, ...], group: int) -> list[Tensor]:
        """Return the sums over groups of the same number of examples."""
        calls, unsuitable = self._run(*given)
        if unsuitable:  # these images take another branch of the network than the three of the trial
            self._move_to_others(unsuitable)
            return self._of_groups(given, group)
        with torch.no_grad():
            found = {p: self._of_layer(p, calls[p], group) for p in self.by_layer}
        found |= self._of_others([in_groups(t, group) for t in given])
        return [found[p] for p in self.parameters]

    def _run(self, *given: Tensor) -> tuple[dict[Tensor, list[tuple[LayerCall, Tensor]]], set[Tensor]]:
        """Run the network forward and backward.

        Returns:
            The calls of layers that use each parameter, with the gradients of their outputs. And the parameters for which
            these do not suffice: they are used elsewhere (the objective depends on them, though all layers take them as
            constants), or in layers whose rows are not the examples. If the network looks at values, these are all.
        """
        with torch.enable_grad():
            with RecordLayerCalls(self.by_layer) as recorded:
                logits = self.method(given[0], self.task)
            total = self.objective(logits, *given[1:]).sum()
            probes = list({call.probe: None for calls in recorded.calls.values() for call in calls})
            inputs = [*probes, *self.by_layer]
            gradients = torch.autograd.grad(total, inputs, allow_unused=True) if inputs and total.requires_grad else ()
        known = {t: gradient for t, gradient in zip(inputs, gradients, strict=False) if gradient is not None}
        rows = {len(given[0])}
        unsuitable = {
            p
            for p, calls in recorded.calls.items()
            if recorded.reads or p in known or any(call.rows != rows for call in calls)
        }
        found = {p: [(c, known[c.probe]) for c in calls if c.probe in known] for p, calls in recorded.calls.items()}
        return found, unsuitable

    def _mixes_examples(self) -> bool:
        """Return whether an image's logits depend on other images of the batch, as with norms on batch statistics."""
        with torch.no_grad():
            three, two = (self.method(self.trial[0][:count], self.task) for count in (3, 2))
        return not torch.allclose(three[:2], two, rtol=1e-3, atol=1e-4)

    def _room(self, on_a_cpu: int) -> int:
        """Return how many numbers may be computed at a time."""
        return min(MEMORY, on_a_cpu) if self.trial[0].device.type == "cpu" else MEMORY

    def _of_layer(self, parameter: Tensor, calls: list[tuple[LayerCall, Tensor]], group: int) -> Tensor:
        """Return the sum for a parameter that only layers use. Its gradient is the sum over their calls."""
        if not calls:
            return torch.zeros_like(parameter)
        call, delta = calls[0]
        if len(calls) == 1 and call.linear_rows and group == 1:
            sizes = self.size(delta)
            return sizes.t() @ self.size(call.given[0]) if parameter.dim() == 2 else sizes.sum(0)
        total = torch.zeros_like(parameter)
        at_a_time = group * max(1, self._room(CPU_GRADIENTS) // max(each.numbers(group) for each, _ in calls))
        for start in range(0, len(delta), at_a_time):
            part = slice(start, start + at_a_time)
            gradients = call.per_group(delta, part, group)
            for another, its_delta in calls[1:]:
                gradients = gradients + another.per_group(its_delta, part, group)
            total += self.size(gradients).sum(0)
        return total

    def _move_to_others(self, parameters: set[Tensor]) -> None:
        """Differentiate the whole network by these from now on: with vmap, or in a loop if vmap does not support it."""
        self.by_layer = [p for p in self.by_layer if p not in parameters]
        self.others |= {name: p for name, p in self.method.named_parameters() if p in parameters}
        self._of_others = self._by_vmap
        try:
            self._of_others([t[:, None] for t in self.trial])
        except (RuntimeError, ValueError):  # the network works in place, draws random numbers or reads values
            self._of_others = self._by_loop

    @torch.no_grad()
    def _by_vmap(self, given: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return the sums for the others, given tensors of groups of examples, (groups, examples, ...) each."""

        def objective(own: dict[str, Tensor], x: Tensor, *more: Tensor) -> Tensor:
            return self.objective(functional_call(self.method, own, (x, self.task)), *more).sum()

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap runs some operations in a loop
            each = (None, *(0 for _ in given))
            gradients = vmap(grad(objective), each)(self.others, *given) if self.others else {}
        return {p: self.size(gradients[name]).sum(0) for name, p in self.others.items()}

    @torch.enable_grad()
    def _by_loop(self, given: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return the same sums by a loop over the groups."""
        totals = {p: torch.zeros_like(p) for p in self.others.values()}
        for x, *more in zip(*given, strict=True):
            value = self.objective(self.method(x, self.task), *more).sum()
            gradients = torch.autograd.grad(value, list(totals), allow_unused=True, materialize_grads=True)
            for total, gradient in zip(totals.values(), gradients, strict=True):
                total += self.size(gradient)
        return totals
