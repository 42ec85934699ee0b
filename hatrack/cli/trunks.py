"""The trunk of a saved model, made by a function of the user's."""

from torch import nn

from hatrack.registry import load_own


def own_trunk(place: str) -> nn.Module | None:
    """Return the trunk that a function of the user's makes; None without one.

    Args:
        place: "module:name" of a function without arguments; "" for none.
    """
    if not place:
        return None
    try:
        made = load_own(place)()
    except ValueError as error:
        raise ValueError(f"--trunk {place}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"--trunk {place} makes a {type(made).__name__}, not an nn.Module")
    return made
