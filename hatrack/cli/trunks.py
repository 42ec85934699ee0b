"""Loading a saved model whose trunk, and perhaps whose method, is code of the user's."""

from pathlib import Path

from torch import nn

from hatrack.experiments.record import Record
from hatrack.methods import METHODS
from hatrack.methods.method import Method
from hatrack.registry import load_own
from hatrack.training.saving import load


def load_model(path: Path, trunk: str, method: str) -> Method:
    """Load a saved model.

    Args:
        path: the file.
        trunk: the place of a function that makes its trunk, "module:name"; "" if the file says it.
        method: the place of the class of its method; "" if it is one of the library's.
    """
    made, kind = own_trunk(trunk), METHODS.find(method) if method else None
    try:
        return load(path, made, method=kind)
    except ValueError as error:
        if path.suffix == ".json" and _is_record(path):
            kept = path.with_suffix(".safetensors")
            there = f"its model is {kept}" if kept.exists() else "hatrack run ... --keep-model keeps the model beside it"
            raise ValueError(f"{path} is a record, not a model: {there}") from None
        if made is None and "how its trunk is built" in str(error):
            raise ValueError(f"{path} does not say how its trunk is built: --trunk MODULE:FUNCTION does") from None
        if kind is None and "not a method of this package" in str(error):
            raise ValueError(f"{path} holds a method of your own: --method MODULE:CLASS names it") from None
        raise


def _is_record(path: Path) -> bool:
    """Return whether a file is a record."""
    try:
        Record.load(path)
    except ValueError:
        return False
    return True


def own_trunk(place: str) -> nn.Module | None:
    """Return the trunk that a function of the user's makes; None without one.

    Args:
        place: "module:name" of a function without arguments; "" for none.
    """
    if not place:
        return None
    if ":" not in place:
        raise ValueError(f"--trunk takes MODULE:FUNCTION, such as mymodule:make_trunk, not {place!r}")
    try:
        made = load_own(place)()
    except Exception as error:  # the user's function may raise anything
        raise ValueError(f"--trunk {place}: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"--trunk {place} makes a {type(made).__name__}, not an nn.Module")
    return made
