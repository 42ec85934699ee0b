"""Parameters that are no layer's weights: which of them get gates of their own, and which are kept per task.

Positions, class tokens, learned queries, tables that are looked up and stacks of matrices get a gate per channel: where a
gate is closed, the parameter is 0. Scales, temperatures and other vectors that are not added to anything are kept per task,
as those of norms are: they are small, and a closed gate could make a divisor 0.
"""

from collections.abc import Mapping

from torch import nn

from hatrack.tracing.tracker import READ, DependencyTracker

ADDED = {  # operations after which a closed channel of a parameter is 0 and nothing is multiplied by it
    "_to_copy", "_unsafe_view", "add", "cat", "clone", "copy", "flip", "gather", "index", "index_select", "repeat", "roll",
    "stack", "sub", "where",
}  # fmt: skip
GATED = ADDED | {  # and operations that a closed channel passes as 0
    "addmm", "baddbmm", "bmm", "constant_pad_nd", "group_norm", "layer_norm", "linear", "matmul", "mm", "mul", "rms_norm",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d",
}  # fmt: skip


def ungated_weights(trunk: nn.Module) -> set[str]:
    """Return the names of the weights of a trunk with adapters whose layers need no units.

    These are the second weights of the adapters, which a module names in its attribute `ungated`, and all frozen weights:
    they can't change, so that no gate has to protect them. In a trunk without adapters all layers have units.
    """
    marked = {name: module.ungated for name, module in trunk.named_modules() if hasattr(module, "ungated")}
    second = {f"{name}.{own}".lstrip(".") for name, ungated in marked.items() for own in ungated}
    return second | {name for name, p in trunk.named_parameters() if marked and not p.requires_grad}


def is_vector(parameter: nn.Parameter) -> bool:
    """Return whether at most one dimension of a parameter is longer than 1."""
    return parameter.numel() == max(parameter.shape, default=1)


def gated_parameters(tracker: DependencyTracker, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the parameters that can have gates of their own, with the dimension that holds the channels.

    Args:
        tracker: has seen a forward pass in which these parameters had none.
        parameters: the parameters of the trunk, by name.
    """
    found = {}
    for name, operations in tracker.operations.items():
        parameter = parameters[name]
        allowed = ADDED if is_vector(parameter) else GATED
        used = {operation.rstrip("_") for operation in operations}
        if parameter.requires_grad and parameter.numel() > 1 and used <= allowed:
            longest = max(range(parameter.dim()), key=lambda d: parameter.shape[d])
            default = longest if is_vector(parameter) else parameter.dim() - 1
            found[name] = tracker.channels.get(name, default)
    return found


def per_task_parameters(tracker: DependencyTracker, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the parameters that cannot be followed and are so small that each task has its own."""
    small = {name for name in tracker.untraceable if parameters[name].requires_grad and is_vector(parameters[name])}
    return {name for name in small if READ not in tracker.operations[name]}
