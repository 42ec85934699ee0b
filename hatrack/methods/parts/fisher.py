"""The diagonal of the Fisher information: how sensitive the loss of a task is to every parameter.

F_i = (1/n) sum_j (d loss(x_j, y_j) / d theta_i)^2 needs the gradients of single examples, but no loop over examples. One
batched pass records the input of every layer and the gradient of its output; from these two follow the gradients of the
examples. A linear layer with one row per example needs only squares: sum_j (delta_j x_j^T)^2 = (delta^2)^T (x^2). Parameters
that are used in any other way are differentiated by `vmap` of the whole network.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from hatrack.methods.method import Method
from hatrack.methods.parts.layer_calls import LayerCall, RecordLayerCalls
from hatrack.methods.parts.vectors import values
from hatrack.seeds import generator, seeded
from hatrack.tasks.batches import split_batches
from hatrack.tasks.split import Split

Estimator = Literal["samples", "expected", "batches"]
ROWS = 1024  # examples in one pass, at most
MEMORY = 2**26  # numbers in one pass, at most: the outputs of all layers, or the gradients of the largest parameter
BATCH = 20  # the batch size of the HAT authors' estimate


def fisher_diagonal(
    method: Method,
    split: Split,
    task: int,
    parameters: Sequence[nn.Parameter],
    *,
    samples: int | None = None,
    estimator: Estimator = "samples",
) -> Tensor:
    """Compute the Fisher diagonal of the cross-entropy of `method(x, task)`.

    Args:
        method: the method.
        split: the data.
        task: the task whose head is used.
        parameters: those that the diagonal is computed of.
        samples: how many examples to use, drawn by the network's seed; None or 0: all.
        estimator: "samples": the squared gradients of single examples with their true labels, exactly, in evaluation mode.
            "expected": the same with every label, weighted by the probability that the method gives it. "batches": as in the
            HAT authors' code, squared gradients of the mean losses of batches of 20, with dropout.

    Returns:
        One vector, in the order of the parameters.
    """
    index = torch.arange(len(split), device=split.y.device)
    if samples and samples < len(split):
        index = torch.randperm(len(split), generator=generator(method.net.seed, "fisher", task))[:samples].to(index.device)
    mode = method.training
    with torch.enable_grad(), seeded(method.net.seed, "fisher dropout", task):
        part = split.part(index)
        if estimator == "batches":
            sums = _squares_of_batches(method, part, task, parameters)
        else:
            sums = _squares_of_examples(method, part, task, parameters, expected=estimator == "expected")
        totals = [torch.zeros_like(p) for p in parameters]
        for squares in sums:
            for total, square in zip(totals, squares, strict=True):
                total += square
    method.train(mode)
    return values(totals).div_(len(index))


def _squares_of_batches(
    method: Method, split: Split, task: int, parameters: Sequence[nn.Parameter]
) -> Iterator[list[Tensor]]:
    """Yield for every batch its size times the squared gradient of its mean loss. The buffers of norms are restored."""
    buffers = [(buffer, buffer.clone()) for buffer in method.net.buffers()]
    method.train()
    try:
        for part in split_batches(torch.arange(len(split), device=split.y.device), BATCH):
            loss = F.cross_entropy(method(split.inputs(part), task), split.y[part])
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            yield [gradient.square() * len(part) for gradient in gradients]
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


def _squares_of_examples(
    method: Method, split: Split, task: int, parameters: Sequence[nn.Parameter], *, expected: bool
) -> Iterator[list[Tensor]]:
    """Yield for every pass over some examples the sums of their squared gradients."""
    every = torch.arange(len(split), device=split.y.device)
    squares = SquaredGradients(method.eval(), task, parameters, split.inputs(every[[0, len(split) // 2, -1]]))
    for part in torch.split(every, squares.rows):
        x, y = split.inputs(part), split.y[part]
        if not expected:
            yield squares(x, y, torch.ones_like(y, dtype=x.dtype))
            continue
        with torch.no_grad():
            probabilities = F.softmax(method(x, task), 1)
        for label in range(probabilities.shape[1]):
            yield squares(x, torch.full_like(y, label), probabilities[:, label])


class SquaredGradients:
    """Computes the sum over some examples of their squared gradients.

    Parameters that are used in layers only are in `by_layer`: their gradients follow from the inputs and output gradients of
    these layers. For the `others` the whole network is differentiated. A trial with three images shows which is which.
    `rows` is the number of examples that a pass may have.

    Args:
        method: the method, in evaluation mode.
        task: the task whose head is used.
        parameters: those whose gradients are computed.
        x: three images.
    """

    def __init__(self, method: Method, task: int, parameters: Sequence[nn.Parameter], x: Tensor) -> None:
        self.method, self.task, self.parameters = method, task, parameters
        self.by_layer: list[Tensor] = list(parameters)
        self.others: dict[str, Tensor] = {}
        self.three = x, torch.zeros(len(x), dtype=torch.int64, device=x.device), torch.ones(len(x), device=x.device)
        (calls, two), (_, three) = (self._run(*(t[:count] for t in self.three)) for count in (2, 3))
        self._move_to_others(set(parameters) if self._mixes_examples() else two | three)
        stored = [p.numel() for p in self.by_layer if [call.linear_rows for call, _ in calls[p]] != [True]]
        outputs = {call.probe: call.probe.numel() // 2 for of_one in calls.values() for call, _ in of_one}
        numbers = max(1, *stored, sum(outputs.values()), sum(p.numel() for p in self.others.values()))  # per example
        self.rows = max(1, min(ROWS, MEMORY // numbers))

    def __call__(self, x: Tensor, y: Tensor, weights: Tensor) -> list[Tensor]:
        """Return the sums of squared gradients, one tensor per parameter.

        Args:
            x: images.
            y: their labels.
            weights: the weight of each example in the sum.
        """
        roots = weights.sqrt()  # the loss times the root has the squared gradient times the weight
        calls, unsuitable = self._run(x, y, roots)
        if unsuitable:  # these images take another branch of the network than the three of the trial
            self._move_to_others(unsuitable)
            return self(x, y, weights)
        with torch.no_grad():
            found = {p: _sum_of_squares(p, calls[p]) for p in self.by_layer}
        found |= self._of_others(x, y, roots)
        return [found[p] for p in self.parameters]

    def _run(self, x: Tensor, y: Tensor, roots: Tensor) -> tuple[dict[Tensor, list[tuple[LayerCall, Tensor]]], set[Tensor]]:
        """Run the network forward and backward.

        Returns:
            The calls of layers that use each parameter, with the gradients of their outputs. And the parameters for which
            these do not suffice: they are used elsewhere (the loss depends on them, though all layers take them as
            constants), or in layers whose rows are not the examples.
        """
        with RecordLayerCalls(self.by_layer) as recorded:
            loss = (F.cross_entropy(self.method(x, self.task), y, reduction="none") * roots).sum()
        probes = list({call.probe: None for calls in recorded.calls.values() for call in calls})
        inputs = [*probes, *self.by_layer]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True) if inputs and loss.requires_grad else ()
        known = {t: gradient for t, gradient in zip(inputs, gradients, strict=False) if gradient is not None}
        unsuitable = {p for p, calls in recorded.calls.items() if p in known or any(call.rows != {len(x)} for call in calls)}
        found = {p: [(c, known[c.probe]) for c in calls if c.probe in known] for p, calls in recorded.calls.items()}
        return found, unsuitable

    def _mixes_examples(self) -> bool:
        """Return whether an image's logits depend on other images of the batch, as with norms on batch statistics."""
        with torch.no_grad():
            three, two = (self.method(self.three[0][:count], self.task) for count in (3, 2))
        return not torch.allclose(three[:2], two, rtol=1e-3, atol=1e-4)

    def _move_to_others(self, parameters: set[Tensor]) -> None:
        """Differentiate the whole network by these from now on: with vmap, or in a loop if vmap does not support it."""
        self.by_layer = [p for p in self.by_layer if p not in parameters]
        self.others |= {name: p for name, p in self.method.named_parameters() if p in parameters}
        self._of_others = self._by_vmap
        try:
            self._of_others(*self.three)
        except (RuntimeError, ValueError):  # the network works in place, draws random numbers or reads values
            self._of_others = self._by_loop

    @torch.no_grad()
    def _by_vmap(self, x: Tensor, y: Tensor, roots: Tensor) -> dict[Tensor, Tensor]:
        def loss(own: dict[str, Tensor], x: Tensor, y: Tensor, root: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.method, own, (x[None], self.task)), y[None]) * root

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap runs some operations in a loop
            gradients = vmap(grad(loss), (None, 0, 0, 0))(self.others, x, y, roots) if self.others else {}
        return {p: gradients[name].square().sum(0) for name, p in self.others.items()}

    def _by_loop(self, x: Tensor, y: Tensor, roots: Tensor) -> dict[Tensor, Tensor]:
        totals = {p: torch.zeros_like(p) for p in self.others.values()}
        for row, label, root in zip(x, y, roots, strict=True):
            loss = F.cross_entropy(self.method(row[None], self.task), label[None]) * root
            gradients = torch.autograd.grad(loss, list(totals), allow_unused=True, materialize_grads=True)
            for total, gradient in zip(totals.values(), gradients, strict=True):
                total += gradient.square()
        return totals


def _sum_of_squares(parameter: Tensor, calls: list[tuple[LayerCall, Tensor]]) -> Tensor:
    """Return the sum over the examples of the parameter's squared gradients. A gradient is the sum over the calls."""
    if not calls:
        return torch.zeros_like(parameter)
    if len(calls) == 1 and calls[0][0].linear_rows:
        call, delta = calls[0]
        return delta.square().t() @ call.given[0].square() if parameter.dim() == 2 else delta.square().sum(0)
    total, *more = (call.per_example(delta) for call, delta in calls)
    for gradients in more:
        total = total + gradients
    return total.square().sum(0)
