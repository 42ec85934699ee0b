"""A network in one line, which is its `repr`."""

from typing import TYPE_CHECKING

from hatrack.tasks.split import shape_text

if TYPE_CHECKING:
    from hatrack.networks.network import Network

LISTED = 8  # tasks that are listed in one line


def describe(net: "Network") -> str:
    """Return a network in one line: its trunk, its size, its tasks, and the arguments that are not the default."""
    counts, parameters = net.classes, sum(p.numel() for p in net.parameters())
    few = ", ".join(map(str, counts[:LISTED])) + (", ..." if len(counts) > LISTED else "")
    tasks = f"{len(counts)} {'task' if len(counts) == 1 else 'tasks'}" + (f": {few} classes" if counts else "")
    parts = [type(net.trunk).__name__, f"{rounded(parameters)} parameters", shape_text(net.example.shape[1:]), tasks]
    parts += [f"heads={net.kind!r}"] if net.kind != "multi" else []
    parts += [f"init={net.init!r}"] if net.init != "default" else []
    parts += [f"seed={net.seed}"] if net.seed else []
    stopped = sum(p.numel() for p in net.trunk.parameters() if not p.requires_grad)
    return f"Network({', '.join(parts)}{f', {rounded(stopped)} of them frozen' if stopped else ''})"


def rounded(count: int) -> str:
    """Return a number in few digits: "9,610" or "1.2 M"."""
    return f"{count:,}" if count < 10**6 else f"{count / 10**6:.3g} M" if count < 10**9 else f"{count / 10**9:.3g} G"
