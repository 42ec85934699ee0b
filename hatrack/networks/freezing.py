"""Parts of a trunk that stay exactly as they are, named by patterns."""

import fnmatch

from torch import nn


def freeze_parts(trunk: nn.Module, patterns: str) -> list[str]:
    """Freeze the parameters of parts of a trunk.

    Args:
        trunk: the trunk.
        patterns: patterns of names such as "features.*", separated by commas; a part is frozen with the one it lies in.

    Returns:
        The names of the frozen modules. They must stay in evaluation mode, so that statistics do not change either.
    """
    modules: list[str] = []
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        found = [p for name, p in trunk.named_parameters() if _matches(name, pattern)]
        inside = [name for name, _ in trunk.named_modules() if _matches(name, pattern)]
        if not found and not inside:
            top = [name for name, _ in trunk.named_children()]
            raise ValueError(f"freeze={pattern!r} matches no part of the trunk; its parts are: {', '.join(top)}")
        for parameter in found:
            parameter.requires_grad_(False)
        modules += inside
    return modules


def _matches(name: str, pattern: str) -> bool:
    pieces = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(pieces[: k + 1]), pattern) for k in range(len(pieces)))
