"""A network belongs to one method: two methods on one network would change each other's weights, norms and heads."""

from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, ref

from hatrack.networks.network import Network

if TYPE_CHECKING:
    from hatrack.methods.method import Method

OWNERS: WeakKeyDictionary[Network, ReferenceType["Method"]] = WeakKeyDictionary()  # a copy of a network has no owner


def claim(net: Network, method: "Method") -> None:
    """Note that a network belongs to a new method; raise if another method has learned on it.

    A method that has learned nothing gives it up: perhaps it could not be built.
    """
    owner = _owner(net)
    if owner is not None and owner.history:
        raise ValueError(_refusal(owner))
    OWNERS[net] = ref(method)


def check_owner(method: "Method") -> None:
    """Raise if the network of a method belongs to another one. A method may be part of another."""
    owner = _owner(method.net)
    if owner is None:
        OWNERS[method.net] = ref(method)
    elif owner is not method and owner not in set(method.modules()) and method not in set(owner.modules()):
        raise ValueError(_refusal(owner))


def _owner(net: Network) -> "Method | None":
    return OWNERS[net]() if net in OWNERS else None


def _refusal(owner: "Method") -> str:
    learned = f", which has learned {', '.join(map(repr, owner.history.values()))}" if owner.history else ""
    return (
        f"the network belongs to another method, {type(owner).__name__}{learned}: give every method a Network and a trunk "
        "of its own, such as copy.deepcopy(net)"
    )
