"""Saving a method to one file and loading it: `save(method, path)` and `load(path, trunk)`; never a pickle.

The trunk is Python code and not in the file: loading takes one of the same architecture, whatever its values. Of every
finished task the file has a digest of the bits that it uses and its logits on the network's example
(`methods/guarantees.py`). Both are compared after loading, the logits only to a tolerance: the last bits of a product
depend on the machine and on the build of PyTorch.
"""

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hatrack._version import __version__
from hatrack.files import tensors as tensor_files
from hatrack.methods import METHODS
from hatrack.methods.growth.growth import STEPS
from hatrack.methods.guarantees import check_digests, close, digest, logits
from hatrack.methods.method import Method
from hatrack.methods.parts.task_norms import own_tensors
from hatrack.networks import NETWORKS
from hatrack.networks.adapters import lora
from hatrack.networks.network import Network
from hatrack.networks.preprocessing import current_name
from hatrack.options import expect, nearest, parameters, shown, without_added_defaults
from hatrack.tasks.targets import target_from_dict

FORMAT = 1
KIND = "method"
TOLERANCE = 1e-2  # of logits, as a share of the largest of them; products in TF32 are that far from exact ones
FIELDS = {
    "method": str, "options": dict, "classes": list, "built": int, "heads": str, "init": str, "seed": int, "frozen": list,
    "stopped": list, "tasks": list, "versions": dict,
}  # fmt: skip


# Saving


def save(
    method: Method,
    path: Path | str,
    *,
    network: tuple[str, Mapping[str, Any]] | None = None,
    adapters: Mapping[str, Any] | None = None,
) -> None:
    """Save a method to one file, from which `load(path, trunk)` reads it.

    The file is written whole or not at all. If a finished task has changed although the method guarantees that it does
    not, nothing is written.

    Args:
        method: the method, with all that it has learned.
        path: the file; a file of this name is replaced.
        network: the name and the options of the library's network that is the trunk; then `load(path)` needs no trunk. A
            method that was loaded without a trunk keeps what its file said.
        adapters: the arguments `rank` and `layers` of `lora`, if that network was given adapters.

    Raises:
        ValueError: if the method could not be loaded again, or a finished task has changed.

    Example:
        >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
        >>> result = method.learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
        >>> hr.save(method, "model.safetensors")
    """
    path = Path(path)
    expect("method", method, Method, "a method, such as HAT(net)")
    metadata = _describe(method)
    _check_loadable(method)
    tensors = {f"logits.{task}": logits(method, task) for task in method.history}
    method.make_room()
    check_digests(method)
    digests = {task: digest(method, task) for task in method.history}
    tasks: list[dict[str, Any]] = [
        {"index": task, "name": name, "digest": digests[task], **_target(method.net, task)}
        for task, name in method.history.items()
    ]
    for name, value in method.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is of type {type(value).__name__}: only tensors can be kept")
        if name not in method.transient:
            tensors[f"state.{name}"] = value
    more = {"adapters": dict(adapters)} if adapters else {}
    built = {"name": network[0], "options": dict(network[1]), **more} if network else method.net.trunk_in_file
    own = {"network": built} if built else {}
    tensor_files.save(
        path, {**tensors, "example": method.net.example}, {**metadata, **own, **_notes(method), "tasks": tasks}
    )
    method.digests = {task: found for task, found in digests.items() if found}


def _target(net: Network, task: int) -> dict[str, Any]:
    """Return what a file says of the target of a task; nothing if it has plain classes."""
    return {"target": net.targets[task].to_dict()} if task in net.targets else {}


def _notes(method: Method) -> dict[str, Any]:
    """Return what a file says of tasks that were learned before, for `release`; only what there is to say."""
    after, example = {str(task): others for task, others in method.learned_after.items()}, method.net.example_task
    return {**({"learned_after": after} if after else {}), **({} if example is None else {"example_task": example})}


def _check_loadable(method: Method) -> None:
    """Raise an error if what is saved could not be loaded again."""
    for head in method.net.heads:
        if (kind := head.get_parameter("weight").dtype) != torch.float32:
            name = str(kind).removeprefix("torch.")
            raise ValueError(f"the weights are {name}, and a method is loaded in float32: method.float() before it is saved")
    trunk = method.net.trunk
    hidden = {name for name, _ in trunk.named_buffers()} - trunk.state_dict().keys()
    for name in sorted(hidden.intersection(own_tensors(method.net)) if hidden else ()):
        if _matters(method, trunk.get_buffer(name)):
            raise ValueError(
                f"training changes the trunk's buffer {name!r}, and no file holds it: register it with persistent=True"
            )


@torch.no_grad()
def _matters(method: Method, buffer: Tensor) -> bool:
    """Return whether the answers of a finished task depend on the values of this buffer."""
    before, old = {task: logits(method, task) for task in method.history}, buffer.clone()
    try:
        buffer.logical_not_() if buffer.dtype is torch.bool else buffer.add_(1)
        return not all(close(then, logits(method, task), 0.0) for task, then in before.items())
    except (RuntimeError, IndexError):  # the buffer is an index, which is out of range now
        return True
    finally:
        buffer.copy_(old)


def _describe(method: Method) -> dict[str, Any]:
    """Return all that is needed to build the method again, except the trunk."""
    net, kind = method.net, type(method)
    keywords = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if lost := [name for name in keywords if name not in method.options]:
        raise ValueError(
            f"{kind.__name__} does not keep its options ({', '.join(lost)}): annotate them with an Option and write "
            f"self.options = check({kind.__name__}, locals()) behind super().__init__(net)"
        )
    try:
        json.dumps(method.options)
    except TypeError as error:
        raise ValueError(f"the options of {kind.__name__} can't be kept: {error}") from None
    tasks, stopped = method.built
    return {
        "kind": KIND,
        "format": FORMAT,
        "method": METHODS.name_of(kind),
        "options": without_added_defaults(type(method), method.options),
        "classes": net.classes,
        "built": tasks,  # so many tasks were known when the method was built: it may depend on it
        "heads": net.kind,
        "init": net.init,
        "seed": net.seed,
        "frozen": net.frozen,
        "stopped": stopped,  # parameters of the trunk that took no gradient then
        "versions": {"hatrack": __version__, "torch": torch.__version__},
    }


# Loading


def load(path: Path | str, trunk: nn.Module | None = None, *, method: type[Method] | None = None) -> Method:
    """Load a method from a file that `save` wrote, ready to predict and to learn another task (after `net.add_task`).

    Args:
        path: the file.
        trunk: a module of the architecture that was saved; its values are overwritten, and the method is put on its device.
            It is not needed if the file says which of the library's networks it is, as that of `hatrack run --keep-model`.
        method: the class of the method, if it is not one of this package.

    Returns:
        The method, in evaluation mode.

    Raises:
        ValueError: if something does not fit, or the answers of a finished task differ from those when it was saved.

    Example:
        >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
        >>> hr.save(method, "model.safetensors")
        >>> hr.load("model.safetensors", trunk)
        HAT(nothing learned; Network(Sequential, 39,913 parameters, images 1x28x28, 2 tasks: 10, 3 classes))
    """
    path = Path(path)
    if not isinstance(trunk, nn.Module | None):
        raise TypeError(f"the trunk must be an nn.Module, not {type(trunk).__name__}")
    if trunk is not None and any(map(is_lazy, trunk.parameters())):
        raise ValueError("the trunk has weights whose shape it does not know yet: run it on an image before")
    if method is not None and not (isinstance(method, type) and issubclass(method, Method)):
        raise ValueError(f"method must be the class of a method, such as HAT, not {shown(method)}")
    tensors, metadata = _read(path)
    said = metadata["network"] if trunk is None and "network" in metadata else None
    trunk = _own_trunk(path, metadata, tensors) if trunk is None else trunk
    state = {name.removeprefix("state."): value for name, value in tensors.items() if name.startswith("state.")}
    kind = _class(path, metadata["method"], method)
    own = {name.removeprefix("net.trunk."): value for name, value in state.items() if name.startswith("net.trunk.")}
    grown = f"growth.{STEPS}" in state  # then the trunk is given as it was first, and is widened before it is filled
    if wrong := "" if grown else tensor_files.differences(own, trunk.state_dict()):
        raise ValueError(f"{path}: the trunk is not like the one that was saved: {wrong}")
    built = _build(path, kind, trunk, tensors["example"], metadata)
    try:
        built.load_state_dict(state)
    except (RuntimeError, LookupError, AttributeError) as error:
        raise ValueError(f"{path} does not fit {kind.__name__}: {_one_line(error)}") from None
    built.history = {task["index"]: task["name"] for task in metadata["tasks"]}
    built.digests = {task["index"]: task["digest"] for task in metadata["tasks"] if task["digest"]}
    built.net.targets = {t["index"]: target_from_dict(t["target"]) for t in metadata["tasks"] if "target" in t}
    built.learned_after = {int(task): list(others) for task, others in metadata.get("learned_after", {}).items()}
    built.net.example_task, built.net.trunk_in_file = metadata.get("example_task"), said
    built.eval()
    _compare(path, built, tensors, metadata["versions"])
    return built


def _own_trunk(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build the trunk that a file describes: one of the library's networks. It is built without memory first, so that a
    wrong number can't make us allocate more than the file holds."""
    network = metadata.get("network")
    name = str(network.get("name")) if isinstance(network, dict) else ""
    known = name in NETWORKS or NETWORKS.in_family(name)
    if not isinstance(network, dict) or not known or not isinstance(network.get("options"), dict):
        raise ValueError(f"{path} does not say how its trunk is built: load(path, trunk) takes one")
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in network["options"].items()}
    shape = tuple(tensors["example"].shape[1:])
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in NETWORKS.find(name)(shape, **options).parameters())
        if size > sum(tensor.numel() for tensor in tensors.values()):
            raise ValueError(f"it has {size:,} weights, more than the file")
        trunk = NETWORKS.find(name)(shape, **options)
        return lora(trunk, **network["adapters"]) if network.get("adapters") else trunk
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: its trunk can't be built: {_one_line(error)}") from None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the metadata of a file, after checking all parts that are used later."""
    tensors, metadata, wrong = tensor_files.load_kind(path, KIND, FORMAT, FIELDS, "hr.save")
    if not wrong:
        wrong = [name for name, right in _contents(tensors, metadata).items() if not right]
    if wrong:
        raise ValueError(f"{path} holds no whole method: {', '.join(wrong)} missing or wrong")
    return {current_name(name): value for name, value in tensors.items()}, metadata


def _contents(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> dict[str, bool]:
    """Return for every part whether it is valid. Sizes are compared with tensors in the file, so that a wrong number in it
    cannot make us allocate memory."""
    classes, shared = metadata["classes"], metadata["heads"] == "shared"
    widths = [
        tensors[name].shape[:1].numel() for k in range(len(classes)) if (name := f"state.net.heads.{k}.weight") in tensors
    ]
    if shared and widths:
        widths = [min(count, widths[0]) if type(count) is int else 0 for count in classes]
    tasks = [task if isinstance(task, dict) else {} for task in metadata["tasks"]]
    numbers = [task.get("index") for task in tasks]
    right = [
        type(number) is int
        and 0 <= number < len(classes)
        and isinstance(task.get("name"), str)
        and isinstance(task.get("digest"), str)
        and _is_target(task.get("target"), classes[number])
        and f"logits.{number}" in tensors
        and tensors[f"logits.{number}"].is_floating_point()
        for task, number in zip(tasks, numbers, strict=True)
    ]
    return {
        "classes": classes == widths,
        "built": 0 <= metadata["built"] <= len(classes),
        "example": "example" in tensors,
        "tasks": all(right) and len(set(numbers)) == len(numbers),
        "learned_after": _are_notes(metadata.get("learned_after", {})),
        "example_task": type(metadata.get("example_task", 0)) is int,
        "frozen": all(isinstance(name, str) for name in metadata["frozen"]),
        "stopped": all(isinstance(name, str) for name in metadata["stopped"]),
    }


def _are_notes(found: Any) -> bool:
    """Return whether this is a table of lists of tasks by task."""
    return isinstance(found, dict) and all(
        re.fullmatch("[0-9]{1,9}", task) and isinstance(others, list) and all(type(other) is int for other in others)
        for task, others in found.items()
    )


def _is_target(description: Any, outputs: Any) -> bool:
    """Return whether this describes a target for so many outputs; a task without it has plain classes."""
    try:
        found = None if description is None else target_from_dict(description)
    except (ValueError, AttributeError):
        return False
    return found is None or all(len(t) == outputs for t in vars(found).values() if isinstance(t, Tensor))


def _class(path: Path, name: str, given: type[Method] | None) -> type[Method]:
    """Return the class of the method with this name in a file."""
    known = METHODS.get(name)
    own = name.rpartition(":")[2]  # a class may have moved to another module since
    if known is None and given is None:
        hint = f"load(path, trunk, method={own})" if ":" in name else nearest(name, METHODS)
        raise ValueError(f"{path} holds {name!r}, which is not a method of this package: {hint}")
    if given is not None and given is not known and (known is not None or given.__qualname__ != own):
        raise ValueError(f"{path} holds {name!r}, not {given.__qualname__}")
    found = given if known is None else known
    assert found is not None
    return found


def _build(path: Path, kind: type[Method], trunk: nn.Module, example: Tensor, metadata: Mapping[str, Any]) -> Method:
    """Build the method as it was before any learning, with room for the tasks that were added later."""
    known = parameters(kind)
    for name in metadata["options"]:
        if name not in known:
            raise ValueError(f"{path}: {kind.__name__} has no option {name!r} in this version; {nearest(name, known)}")
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in metadata["options"].items()}  # JSON has no tuples
    if missing := set(metadata["frozen"]) - set(dict(trunk.named_modules())):
        raise ValueError(f"{path}: the trunk is not like the one that was saved: it lacks {sorted(missing)[0]}")
    for name, parameter in trunk.named_parameters():
        parameter.requires_grad_(name not in metadata["stopped"])
    classes, built = metadata["classes"], metadata["built"]
    try:
        finite = example.nan_to_num()  # earlier versions took an example with NaN
        net = Network(trunk, classes[:built], finite, heads=metadata["heads"], init=metadata["init"], seed=metadata["seed"])
        net.frozen = metadata["frozen"]
        method = kind(net, **options)
        for count in classes[built:]:
            net.add_task(count)
        method.make_room()
        net.example.copy_(example)
    except (RuntimeError, TypeError, LookupError, ValueError) as error:
        raise ValueError(f"{path}: {kind.__name__} can't be built on this trunk: {_one_line(error)}") from None
    return method


def _compare(path: Path, method: Method, tensors: Mapping[str, Tensor], versions: Mapping[str, Any]) -> None:
    """Raise an error if a finished task is not what it was: its bits exactly, its logits to a tolerance."""
    try:
        check_digests(method)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for task, name in method.history.items():
        then, now = tensors[f"logits.{task}"], logits(method, task)
        if not close(then, now, TOLERANCE):
            raise ValueError(
                f"{path}: task {task} ({name!r}) answers differently than when it was saved (by hatrack "
                f"{versions.get('hatrack')}, torch {versions.get('torch')}); does the trunk compute the same?"
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
