"""The tensors that a finished task uses, for `Method.used_by`: of the network, or of modules of its own."""

from collections.abc import Mapping

from torch import Tensor, nn

from hatrack.networks.network import Network


def used_of_network(
    net: Network, task: int, exchanged: Mapping[str, Tensor], trunk: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of the trunk and of a task's head.

    Args:
        net: the network.
        task: the number of the task.
        exchanged: tensors by name that are returned in place of the network's own.
        trunk: the tensors of the trunk, if the task was learned at an earlier width.
    """
    parts = ("trunk.", "heads.0." if net.shared else f"heads.{task}.")
    tensors = [*net.named_parameters(), *net.named_buffers()]
    if trunk is not None:
        tensors = [(name, t) for name, t in tensors if not name.startswith("trunk.")]
        tensors += [(f"trunk.{name}", t) for name, t in trunk.items()]
    return {name: exchanged.get(name, tensor) for name, tensor in tensors if name.startswith(parts)}


def used_modules(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return all tensors of some modules, with the names of the modules in front."""
    return {f"{key}.{name}": tensor for key, module in modules.items() for name, tensor in module.state_dict().items()}
