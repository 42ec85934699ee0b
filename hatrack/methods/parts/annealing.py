"""The annealing of hard attention: gates that are soft at the beginning of every epoch and hard at its end (HAT, Eq. 3)."""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hatrack.methods.parts.candidates import Candidates
from hatrack.networks.network import Network
from hatrack.options import Option
from hatrack.seeds import generator
from hatrack.tasks.split import Batch

Anneal = Literal["paper", "authors"]
Slope = Literal["rounded", "exact"]
Masks = Literal["binary", "soft"]
LIMIT = 6.0  # embeddings stay within the active range of a sigmoid
SMALLEST = 1e-12  # of gates that are applied: see `without_denormals`
MASKS = "gates of finished tasks: exactly 0 or 1, or the paper's sigmoid at smax"
ValidationOption = Annotated[
    Literal["loss", "total"],
    Option(
        "by what on validation data lr falls and an epoch is the best: the loss; or total, which has c times the capacity "
        "term in it as in the authors' code, so that training goes on while gates close",
        added=True,
    ),
]
SlopeOption = Annotated[
    Slope,
    Option(
        "slope of the gates: rounded by float32, so that open gates with se over 17 no longer learn, as in the authors' "
        "code; or exact, so that more of them close",
        added=True,
    ),
]


def initial_embedding(
    count: int, kind: Literal["normal", "uniform"], net: Network, task: int, candidates: Candidates | None
) -> Tensor:
    """Return the embedding (count,) with which a task starts; it depends on the seed and the task only.

    Args:
        count: how many gates there are.
        kind: N(0, 1), or U(0, 2) with every gate open.
        net: the network, for its seed and device.
        task: the number of the task.
        candidates: what the task may use; all other gates are closed. None: everything.
    """
    e, source = torch.empty(count, dtype=torch.float32), generator(net.seed, "embedding", task)
    e.normal_(generator=source) if kind == "normal" else e.uniform_(0, 2, generator=source)
    e = e.to(net.example.device)
    return e if candidates is None else torch.where(candidates.of(task), e, -LIMIT)


def hardness(batch: Batch, smax: float, anneal: Anneal) -> Tensor:
    """Return the hardness s of the gates in this batch.

    Args:
        batch: the batch.
        smax: the hardness at the end of an epoch.
        anneal: "paper": s grows from 1/smax in the first batch of an epoch to smax in the last one, and is smax if there is
            only one. "authors": s follows the share of the epoch's examples before this batch, as in the authors' code, and
            so never quite reaches smax.
    """
    if anneal == "authors":
        share = batch.seen
    else:
        # The only batch of an epoch counts as the last: 2 - steps is 1 there, and otherwise no number of a batch.
        share = torch.maximum(batch.step, 2 - batch.steps) / (batch.steps - 1).clamp_(min=1)
    return 1 / smax + (smax - 1 / smax) * share


class AnnealedGates(torch.autograd.Function):
    """Computes the gates sigmoid(se) of an embedding (HAT, Eq. 1) as they are applied, and their price: c times the capacity
    term (Eq. 4 and 5).

    The gradient of e is compensated for the annealing (2.5). All of it is in one function, because on a small network the
    gates' many operations on a few numbers, each with a backward pass, would take as long as all others.

    Args:
        e: the embedding (units,).
        s: the hardness, 0-d.
        smax: the hardness at the end of an epoch.
        price: (units,), of every gate.
        frozen: (units,), gates that are open whatever e is; None if there are none.
        slope: how the slope of the gates is computed: see `slope_times`.
    """

    @staticmethod
    def forward(
        ctx: Any, e: Tensor, s: Tensor, smax: float, price: Tensor, frozen: Tensor | None, slope: Slope
    ) -> tuple[Tensor, Tensor]:
        gates = torch.sigmoid(s * e)
        if frozen is not None:
            gates = torch.where(frozen, 1.0, gates)
        ctx.save_for_backward(e, s, price, gates, frozen)
        ctx.smax, ctx.slope = smax, slope
        return gates.clamp(min=SMALLEST), torch.dot(gates, price)

    @staticmethod
    @once_differentiable  # the compensated gradient is no gradient of a function
    def backward(ctx: Any, grad: Tensor, of_price: Tensor) -> tuple[Tensor | None, ...]:
        e, s, price, gates, frozen = ctx.saved_tensors
        total = torch.addcmul(grad, price, of_price)
        if frozen is not None and ctx.slope == "exact":
            total = torch.where(frozen, 0.0, total)
        slope = slope_times(total, e, s, gates, ctx.slope)
        return (slope * s).mul_(compensation(e, s, ctx.smax)), None, None, None, None, None


def slope_times(grad: Tensor, e: Tensor, s: Tensor, gates: Tensor, slope: Slope) -> Tensor:
    """Return a gradient by gates = sigmoid(se), times their slope: the gradient by se.

    Args:
        grad: the gradient by the gates.
        e: the embedding.
        s: the hardness.
        gates: the gates.
        slope: "rounded": gates (1 - gates), as autograd has it. In float32 that is 0 from se = 17 on, where a gate is
            rounded to 1, so that open gates no longer learn and closed ones do. "exact": as `exact_slope`.
    """
    if slope == "exact":
        return grad * exact_slope(s * e)
    rounded: Tensor = torch.ops.aten.sigmoid_backward(grad, gates)
    return rounded


def exact_slope(x: Tensor) -> Tensor:
    """Return the slope of sigmoid(x) as sigmoid(x) sigmoid(-x), which rounding does not make 0 where sigmoid(x) is 1."""
    return torch.sigmoid(x) * torch.sigmoid(-x)


def exact_sigmoid(x: Tensor) -> Tensor:
    """Return sigmoid(x), whose gradient has the exact slope: autograd takes it from a sigmoid that is not rounded to 1."""
    return torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))


def without_denormals(gates: Tensor) -> Tensor:
    """Raise gates under 1e-12 to 1e-12 without changing their gradient.

    No sum with open gates shows the difference in float32, but products of such gates are denormal numbers, with which a
    CPU is many times slower. They are not set to 0, because a relu has no slope there. In a sum of closed gates alone, as
    of a residual connection, the larger one no longer decides the sign, and so which of them a relu lets learn.
    """
    return gates + (gates.clamp(min=SMALLEST) - gates).detach()


def compensation(e: Tensor, s: Tensor, smax: float) -> Tensor:
    """Return the factor on the gradient of an embedding: smax (cosh(se) + 1) / (s (cosh(e) + 1)), |se| clamped at 50."""
    return (smax / s * (s * e).clamp_(-50, 50).cosh_().add_(1)).div_(torch.cosh(e).add_(1))
