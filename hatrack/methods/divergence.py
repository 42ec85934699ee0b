"""Explain a divergence: the likely cause of a loss that is not finite, and what to try."""

import math

from hatrack.regime import Regime

NOT_THE_RATE = (
    "no update had been made, so the learning rate is not the cause: "
    "something is not finite in the weights, in the buffers of the method, or in its loss"
)


def rate(regime: Regime) -> str:
    """Explain the usual cause, a learning rate that is too large."""
    clip = "" if regime.clip else ", or clip gradients (--clip)"
    return f"probably the learning rate is too large: try one under {regime.lr:g}{clip}{_halve(regime)}"


def spring(regime: Regime, curvature: float, **per_unit: float) -> str:
    """Explain whether steps are too long for a quadratic penalty.

    Args:
        regime: the regime.
        curvature: the largest curvature of the penalty.
        per_unit: options of the method that scale the penalty, by name, and the curvature that one unit of each adds.
    """
    if not math.isfinite(curvature):
        return "the penalty itself is not finite: the importances that were measured after the earlier tasks are too large"
    if curvature < regime.steepest:
        return rate(regime)
    bound = regime.lr * regime.steepest
    options = "".join(f", or --{name} under {regime.steepest / unit:.3g}" for name, unit in per_unit.items())
    return (
        f"probably the learning rate times the penalty is too large: {regime.lr:g} times the penalty's largest curvature "
        f"{curvature:.3g} is {regime.lr * curvature:.3g}, and {regime.optimizer} needs less than {bound:.3g}: "
        f"try a learning rate under {bound / curvature:.3g}{options}{_halve(regime)}"
    )


def _halve(regime: Regime) -> str:
    """Return a hint to the option that halves the learning rate, if it is not set."""
    return ", or --on-divergence halve" if regime.on_divergence == "stop" else ""


class Diverged(ArithmeticError):  # noqa: N818
    """The loss is no longer a finite number."""

    seen = ""  # the step, and what is not finite there
    may_be_the_rate = True  # whether the learning rate may be the cause; not if the very first loss was not finite
