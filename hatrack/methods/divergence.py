"""When a loss is no longer finite: what probably made it so, and what to try, in words."""

import math

from hatrack.regime import Regime

NOT_THE_RATE = (
    "no update had been made, so the learning rate is not to blame: "
    "something is not finite in the weights, in what the method remembers, or in its loss"
)


def rate(regime: Regime) -> str:
    """The usual cause."""
    clip = "" if regime.clip else ", or clip gradients (--clip)"
    return f"probably the learning rate is too large: try one under {regime.lr:g}{clip}{_halve(regime)}"


def spring(regime: Regime, curvature: float, **per_unit: float) -> str:
    """For a penalty with this curvature at most: is a step on it too long? `per_unit` has options by name, and what one
    unit of each adds to the curvature."""
    if not math.isfinite(curvature):
        return "the penalty itself is not finite: what was measured after the earlier tasks is too large"
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
    return ", or --on-divergence halve" if regime.on_divergence == "stop" else ""


class Diverged(ArithmeticError):  # noqa: N818
    """The loss is no longer a finite number."""

    seen = ""  # where, and what is not finite
    may_be_the_rate = True  # the learning rate: not if the very first loss was not finite
