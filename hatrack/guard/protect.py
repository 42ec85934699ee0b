"""`protect` puts a guard into a backbone and its optimizer; `load_guard` does so with what a file has."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hatrack.files import tensors as tensor_files
from hatrack.guard import checks, writing
from hatrack.guard.backbone import Backbone, GuardedForward, evaluating
from hatrack.guard.finished import Finished
from hatrack.guard.guard import Guard
from hatrack.guard.rollback import unchanged_on_failure
from hatrack.guard.sealing import Sealed
from hatrack.guard.soft_gates import Gated
from hatrack.methods.hat import HAT
from hatrack.methods.pmask import PMASK
from hatrack.options import choose, complete, nearest, shown, whole

KINDS: dict[str, type[HAT] | type[PMASK]] = {"hat": HAT, "pmask": PMASK}


def protect(
    backbone: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    example: Tensor,
    method: Literal["hat", "pmask"] = "hat",
    seed: int = 0,
    **options: Any,
) -> Guard:
    """Protect a backbone, so that a training loop of your own learns task after task and forgets nothing, not a bit.

    From now on `backbone(x)` works within `guard.learn` and `guard.use` only, and a step of the optimizer within
    `guard.learn` only.

    Args:
        backbone: any module from one tensor of inputs to one tensor (batch, ...); it has no heads.
        optimizer: what trains it, or a list of optimizers; any of torch.optim but LBFGS, with any options.
        example: one or two inputs, on which the backbone is traced.
        method: "hat" has a gate per unit, "pmask" a gate per weight.
        seed: decides the initial gates.
        options: the options of the method, such as `smax` and `c`: see `hatrack list hat`.

    Returns:
        The guard.

    Raises:
        ValueError: if the backbone, the optimizer or an option does not fit.

    Example:
        >>> head, x, y = torch.nn.Linear(50, 10), torch.tensor(x_train)[:, None] / 255, torch.tensor(y_train)
        >>> optimizer = torch.optim.AdamW([*trunk.parameters(), *head.parameters()])
        >>> guard = hr.protect(trunk, optimizer, example=x[:2])
        >>> with guard.learn("digits", steps=1, own=[head]):
        ...     loss = torch.nn.functional.cross_entropy(head(trunk(x)), y)
        ...     loss.backward()
        ...     optimizer.step()
        >>> with guard.use("digits"):
        ...     logits = head(trunk(x))
        >>> guard
        Guard(hat on Sequential; learned: 'digits')
    """
    checks.check_backbone(backbone)
    example = checks.check_example(example)
    optimizers = checks.bare_optimizers(optimizer)
    checks.check_held(backbone, optimizers)
    kind = choose("method of a guard", method, KINDS)
    with torch.inference_mode(False):  # what is made within it can't learn
        built = _build(backbone, example, method, whole("seed", seed), complete(method, kind, options))
        return Guard(backbone, optimizers, built)


def _build(backbone: nn.Module, example: Tensor, name: str, seed: int, options: Mapping[str, Any]) -> Gated:
    """Return the method on a backbone; raise an error for options with which it would guarantee nothing."""
    if options["probes"]:
        raise ValueError(f"probes={options['probes']}: a guard stores no images; leave the option out")
    if options["reuse"] != "allowed" or options["free"] != "kept":
        raise ValueError("a guard takes neither reuse='never' nor free='initial': the optimizer is the user's own")
    if options["grow"] != "off":
        raise ValueError(
            f"grow={options['grow']!r}: a guard does not grow, since the loop and the optimizer hold the backbone"
        )
    if options["validation"] != "loss":
        raise ValueError(f"validation={options['validation']!r} does nothing in a guard: the loop validates by itself")
    if options.get("masks", "binary") != "binary":
        raise ValueError(f"masks={options['masks']!r} guarantees nothing; a guard needs masks='binary'")
    with evaluating(backbone):  # networks and methods set modes; here they are the user's
        built = KINDS[name](Backbone(backbone, example, seed=seed), **options)
    if built.norms.shared and built.norms.names:
        raise ValueError("norms='shared' guarantees nothing on a backbone that has norms; a guard needs norms='task'")
    return built


def load_guard(
    path: Path | str,
    backbone: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    own: Mapping[str, Sequence[nn.Module]] | None = None,
) -> Guard:
    """Load a guard from a file that `guard.save` wrote, ready to use its tasks and to learn another one.

    Args:
        path: the file.
        backbone: a module of the architecture that was saved; its values are overwritten. If it is protected, the file takes
            the place of what it has learned.
        optimizer: what trains it, or a list of optimizers. Its state is not in the file.
        own: the modules of every task that has some, by its name, as they were given to `guard.learn`; their values are
            overwritten and sealed.

    Returns:
        The guard.

    Raises:
        ValueError: if something does not fit, or a task is not, bit for bit, what it was.

    Example:
        >>> optimizer = torch.optim.SGD(trunk.parameters(), lr=0.1)
        >>> guard = hr.protect(trunk, optimizer, example=torch.rand(2, 1, 28, 28))
        >>> guard.save("v1.safetensors")
        >>> hr.load_guard("v1.safetensors", trunk, optimizer)
        Guard(hat on Sequential; nothing learned)
    """
    path = Path(path)
    tensors, metadata = writing.read(path)
    given = _check_own(path, own, [task["name"] for task in metadata["tasks"]])
    optimizers = checks.bare_optimizers(optimizer)
    old = _guard_of(backbone)
    there = {} if old is None else {name: task.sealed.modules for name, task in old.tasks.items()}
    modules = [module for some in (*there.values(), *given.values()) for module in some]
    with nullcontext() if old is None else old.attachment.bare():  # nothing is removed before all checks have passed
        checks.check_backbone(backbone)
        checks.check_held(backbone, optimizers)
        with unchanged_on_failure([backbone, *modules]):
            for finished in () if old is None else old.tasks.values():
                finished.sealed.open()
            built = _rebuild(path, backbone, tensors, metadata)
            tasks = _tasks_of(path, built, tensors, metadata, {**there, **given})
    if old is not None:
        old.detach()
    guard = Guard(backbone, optimizers, built)
    guard.tasks.update(tasks)
    if lacking := [name for name, task in tasks.items() if task.sealed.values and not task.sealed.modules]:
        warnings.warn(
            f"{path} has modules of the task {lacking[0]!r}, which were not given: load_guard(..., own={{{lacking[0]!r}: "
            "[head]}) fills and seals them",
            stacklevel=2,
        )
    return guard


def _check_own(path: Path, own: Any, names: Sequence[str]) -> dict[str, list[nn.Module]]:
    """Return the modules of tasks by name; raise an error unless they are modules, of tasks that a file has."""
    if not isinstance(own, Mapping | None):
        raise ValueError(f"own must be the modules of tasks by name, such as {{'digits': [head]}}, not {shown(own)}")
    if unknown := sorted(str(name) for name in own or {} if name not in names):
        raise ValueError(f"{path} has no task {unknown[0]!r}; {nearest(unknown[0], names)}")
    return {name: checks.check_own(modules) for name, modules in (own or {}).items()}


def _guard_of(backbone: Any) -> Guard | None:
    """Return the guard of a backbone, if it has one; raise an error if the guard is in use."""
    forward = vars(backbone).get("forward") if isinstance(backbone, nn.Module) else None
    guard: Guard | None = forward.owner if isinstance(forward, GuardedForward) else None
    if guard is not None:
        guard.require_idle("remove")
    return guard


def _rebuild(path: Path, backbone: nn.Module, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Gated:
    """Return the method of a file on a backbone."""
    state = {name.removeprefix("state."): value for name, value in tensors.items() if name.startswith("state.")}
    trunk = {name.removeprefix("net.trunk."): value for name, value in state.items() if name.startswith("net.trunk.")}
    if wrong := tensor_files.differences(trunk, backbone.state_dict()):
        raise ValueError(f"{path}: the backbone is not like the one that was saved: {wrong}")
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad_(name not in metadata["stopped"])
    try:
        kind = choose("method of a guard", metadata["method"], KINDS)
        options = complete(metadata["method"], kind, metadata["options"])
        built = _build(backbone, tensors["example"].nan_to_num(), metadata["method"], metadata["seed"], options)
        while len(built.net.classes) < metadata["numbers"]:
            built.net.add_task(1)
        built.make_room()
        built.net.example.copy_(tensors["example"])  # earlier versions took one with NaN
        built.load_state_dict(state)
    except (RuntimeError, TypeError, LookupError, ValueError) as error:
        raise ValueError(f"{path} does not fit the backbone: {' '.join(str(error).split())[:300]}") from None
    built.history = {task["number"]: task["name"] for task in metadata["tasks"]}
    for set_of_one in built.norms.sets:
        set_of_one.requires_grad_(False)
    return built


def _tasks_of(
    path: Path,
    built: Gated,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    own: Mapping[str, Sequence[nn.Module]],
) -> dict[str, Finished]:
    """Return the finished tasks of a file by name, with their modules filled and sealed; raise if one has changed."""
    tasks: dict[str, Finished] = {}
    for task in metadata["tasks"]:
        tasks[task["name"]] = _finished(path, task, tensors, own.get(task["name"], ()))
        with evaluating(built.net.trunk):
            _check(path, built, task["name"], tasks[task["name"]])
    return tasks


def _finished(path: Path, task: Mapping[str, Any], tensors: Mapping[str, Tensor], own: Sequence[nn.Module]) -> Finished:
    """Return a finished task of a file, with the modules that only it has."""
    start = f"own.{task['number']}."
    values = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    try:
        sealed = Sealed(list(own), values)
    except ValueError as error:
        raise ValueError(f"{path}: task {task['name']!r}: {error}") from None
    return Finished(task["number"], sealed, task["digest"], tensors[f"answers.{task['number']}"])


def _check(path: Path, method: Gated, name: str, task: Finished) -> None:
    try:
        task.check(method, name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
