"""The diagonal of the Fisher information: how sensitive the loss of a task is to every parameter.

F_i = (1/n) sum_j (d loss(x_j, y_j) / d theta_i)^2 needs the gradients of single examples, but no loop over examples:
`single_gradients.py` computes them side by side.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.method import Method
from hatrack.methods.parts.single_gradients import SumOfSizes
from hatrack.methods.parts.vectors import values
from hatrack.seeds import generator, seeded
from hatrack.tasks.batches import split_batches
from hatrack.tasks.split import Split

Estimator = Literal["samples", "expected", "batches"]
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
        for part, x in split.read(split_batches(torch.arange(len(split), device=split.y.device), BATCH)):
            loss = F.cross_entropy(method(x, task), split.y[part])
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
    x, y = split.inputs(every[[0, len(split) // 2, -1]]), split.y.new_zeros(3)
    squares = SumOfSizes(method.eval(), task, parameters, weighted_loss, (x, y, x.new_ones(3)), size=torch.square)
    for part, x in split.read(torch.split(every, squares.rows)):
        y = split.y[part]
        if not expected:
            yield squares(x, y, torch.ones_like(y, dtype=x.dtype))
            continue
        with torch.no_grad():
            probabilities = F.softmax(method(x, task), 1)
        for label in range(probabilities.shape[1]):
            yield squares(x, torch.full_like(y, label), probabilities[:, label].sqrt())


def weighted_loss(logits: Tensor, y: Tensor, roots: Tensor) -> Tensor:
    """Return the loss of every example times a root: its squared gradient is that of the loss times the root's square."""
    return F.cross_entropy(logits, y, reduction="none") * roots
