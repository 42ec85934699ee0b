"""Heads with more classes than their task has, so that steps of tasks with other numbers of classes have one form."""

from collections.abc import Mapping

from torch import Tensor, nn

from hatrack.engine.padding import Padding
from hatrack.methods.method import Method
from hatrack.methods.parts.memory import STEP
from hatrack.networks.network import Network
from hatrack.networks.packed_heads import can_be_packed
from hatrack.regime import Regime

UNLIKELY = -1e15  # the logit of a class that a task does not have
FADED = 10.0  # weight decay makes such a logit smaller; it stays unlikely if the sum of all decays is at most this


def head_paddings(net: Network, task: int, state: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> list[Padding]:
    """Return paddings that give the head of a task, if it is its own and a plain one, as many classes as any task has.

    Those that are too many are so unlikely that the loss of classes and all gradients are as without them, and stay so.

    Args:
        net: the network.
        task: the number of the task.
        state: what the optimizer keeps of every parameter.
    """
    most = max(net.classes)
    changed = type(net) is not Network or "forward" in vars(net) or net._forward_hooks
    if changed or net.needs_no_task or most == net.classes[task]:
        return []
    if _has_gradient_hooks(net.heads[task]) or not can_be_packed([net.heads[task]]):
        return []
    found = []
    for name, parameter in net.heads[task].named_parameters():
        found.append(Padding(parameter, most, UNLIKELY if name == "bias" else 0.0))
        kept = state.get(parameter, {}).values()
        found += [Padding(tensor, most, 0.0) for tensor in kept if tensor.shape == parameter.shape]
    return found


def _has_gradient_hooks(head: nn.Module) -> bool:
    """Return whether a user's hook sees the gradients of a head."""
    own = (head._backward_hooks, head._backward_pre_hooks)
    return any(own) or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in head.parameters())


def is_ours(method: Method | type[Method]) -> bool:
    """Return whether the step is only code of this library, in which no result depends on the number of unlikely classes. A
    class of the user's own may compute a mean over all logits."""
    return all(getattr(method, name).__module__.startswith("hatrack.") for name in STEP)


def fades(regime: Regime, steps: int) -> bool:
    """Return whether weight decay brings a number near 0 in so many steps, or with momentum even beyond it."""
    momentum = regime.momentum if regime.optimizer == "momentum" else 0.0
    decay = regime.lr * regime.weight_decay
    return decay > (1 - momentum**0.5) ** 2 or decay * steps / (1 - momentum) > FADED
