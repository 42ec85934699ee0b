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
    for pattern in patterns_of(patterns):
        found = [p for name, p in trunk.named_parameters() if matches(name, pattern)]
        inside = [name for name, _ in trunk.named_modules() if matches(name, pattern)]
        if not found and not inside:
            top = [name for name, _ in trunk.named_children()]
            raise ValueError(f"freeze={pattern!r} matches no part of the trunk; its parts are: {', '.join(top)}")
        for parameter in found:
            parameter.requires_grad_(False)
        modules += inside
    return modules


def freeze_all(trunk: nn.Module) -> list[str]:
    """Freeze all parameters of a trunk.

    Args:
        trunk: the trunk.

    Returns:
        The names of the modules with buffers, such as norms with running statistics. They must stay in evaluation mode;
        dropout need not.
    """
    trunk.requires_grad_(False)
    return [name for name, module in trunk.named_modules() if has_buffers(module)]


def has_buffers(module: nn.Module) -> bool:
    """Return whether a module itself, not one within it, has buffers."""
    return next(module.buffers(recurse=False), None) is not None


def patterns_of(text: str) -> list[str]:
    """Return the patterns in a text, where they are separated by commas."""
    return [pattern for part in text.split(",") if (pattern := part.strip())]


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name such as "features.0.weight", or the beginning of it up to a dot."""
    pieces = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(pieces[: k + 1]), pattern) for k in range(len(pieces)))
