"""A backbone as a network without heads, and what the guard puts into it: a forward pass with gates, and the embedding."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hatrack.networks.network import Network
from hatrack.networks.preprocessing import Preprocessing
from hatrack.networks.trunk import cannot_run
from hatrack.tasks.split import TaskId

GATES = "hatrack_gates"  # the name of the guard's module in the backbone
HIDDEN = (  # hooks of the backbone itself
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "_load_state_dict_pre_hooks",
)


class Backbone(Network):
    """A backbone and no heads: the logits of every task are the features. Heads belong to the user.

    Its task 0 is none of the user's. It stands for the backbone's own norms, which the task being learned uses
    (`TaskNorms.lend`); tasks are numbered from 1.

    Args:
        trunk: the backbone, any module from a batch of inputs to a tensor (batch, ...).
        example: one or more inputs, as the backbone takes them.
        seed: decides the initial embeddings.
    """

    def __init__(self, trunk: nn.Module, example: Tensor, *, seed: int = 0) -> None:
        super().__init__(trunk, [], example, seed=seed)
        self.preprocessing = Preprocessing((), self.example.device)  # the user's own: one value per task is stored
        self.add_task()

    def _features(self) -> int:
        try:
            with torch.no_grad(), evaluating(self.trunk):
                out = self.trunk(self.example)
        except (RuntimeError, ValueError) as error:
            raise cannot_run(error, self.example) from error
        if not isinstance(out, Tensor) or not out.dim() or len(out) != len(self.example):
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"the backbone must turn a batch of inputs into a tensor (batch, ...), not {got}")
        return out.shape[-1]

    def add_task(self, classes: int = 1) -> int:
        """Make room for one more task, and return its number."""
        self.classes.append(classes)
        self.preprocessing.add_task()
        return len(self.classes) - 1

    def head(self, features: Tensor, task: TaskId) -> Tensor:
        """Return the features as they are."""
        return features

    def reset_head(self, task: int) -> None:
        """Do nothing: there is no head."""


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile leaves as it is, also when it compiles what calls the function."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


class GuardedForward:
    """What `backbone.forward` is while the backbone is protected. A copy of it refuses every call.

    Args:
        run: called in place of the backbone's own forward pass; None: calls are refused.
        owner: the guard.
    """

    def __init__(self, run: Callable[..., Any] | None, owner: Any = None) -> None:
        self.run, self.owner = None if run is None else eagerly(run), owner

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self.run is None:
            raise ValueError(
                "this module is a copy of a protected backbone, and no guard belongs to it: copy the weights back into the "
                "backbone, or call guard.remove() before the backbone is copied"
            )
        return self.run(*args, **keywords)

    def __deepcopy__(self, memo: Any) -> "GuardedForward":
        return GuardedForward(None)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            "a protected backbone can't be pickled: guard.save(path) writes a file, backbone.state_dict() works"
        )


class GuardedLoad:
    """Looks at every state that is loaded into a protected backbone, before it is. A copy of it does nothing.

    Args:
        check: called with the tensors of the state by their names in the backbone; it raises an error to refuse them.
    """

    def __init__(self, check: Callable[[dict[str, Tensor]], None] | None) -> None:
        self.check = check

    def __call__(self, backbone: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        if self.check is None:
            return
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict(..., assign=True) replaces the parameters that a guard holds: leave assign out"
            )
        found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        self.check({name: value for name, value in found.items() if isinstance(value, Tensor)})

    def __deepcopy__(self, memo: Any) -> "GuardedLoad":
        return GuardedLoad(None)


def _refuse_replicas(backbone: nn.Module, args: Any) -> None:
    """Raise an error if nn.DataParallel runs a copy of a backbone on another device: its parameters are no leaves."""
    if getattr(backbone, "_is_replica", False):
        raise ValueError(
            "nn.DataParallel runs copies of the backbone, which have no guard: start one process per GPU instead, with "
            "DistributedDataParallel (torchrun), or use one GPU"
        )


class Attachment:
    """Replaces the forward pass of a backbone, and adds a module to it, until `remove` is called.

    Args:
        backbone: the backbone.
        module: the module to add, with the embedding.
        run: the forward pass to put in place of the backbone's own.
        check: what looks at every state that is loaded.
        owner: the guard.

    Attributes:
        lock: held by the thread that changes or runs the backbone.
    """

    def __init__(
        self,
        backbone: nn.Module,
        module: nn.Module,
        run: Callable[..., Any],
        check: Callable[[dict[str, Tensor]], None],
        owner: Any,
    ) -> None:
        self.backbone, self.module, self.forward = backbone, module, GuardedForward(run, owner)
        self.original = vars(backbone).get("forward")  # usually none: the class has it
        self.lock, self.depth = threading.RLock(), 0
        backbone.add_module(GATES, module)
        vars(backbone)["forward"] = self.forward
        load = backbone.register_load_state_dict_pre_hook(GuardedLoad(check))  # type: ignore[no-untyped-call]
        self.hooks = [load, backbone.register_forward_pre_hook(_refuse_replicas)]

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Within the block the backbone is as the user wrote it: its own forward pass, no module of the guard, no hooks.

        The hooks of the backbone itself run around the forward pass of the guard, and must not run a second time in it.
        """
        with self.lock:
            self.depth += 1
            try:
                if self.depth > 1:
                    yield
                else:
                    with self._without_guard():
                        yield
            finally:
                self.depth -= 1

    @contextmanager
    def _without_guard(self) -> Iterator[None]:
        own = vars(self.backbone)
        before = {name: own.pop(name) for name in (*HIDDEN, "forward", "_compiled_call_impl") if name in own}
        own.update({name: OrderedDict() for name in HIDDEN})
        if self.original is not None:
            own["forward"] = self.original
        module = self.backbone._modules.pop(GATES, None)
        try:
            yield
        finally:
            own.pop("forward", None)
            own.update(before)
            if module is not None:
                self.backbone._modules[GATES] = module

    def remove(self) -> None:
        """Take out what was put into the backbone."""
        own = vars(self.backbone)
        if own.get("forward") is not self.forward:
            raise ValueError("the forward pass of the backbone was replaced after protect: undo that before guard.remove()")
        del own["forward"]
        if self.original is not None:
            own["forward"] = self.original
        self.backbone._modules.pop(GATES, None)
        for hook in self.hooks:
            hook.remove()


def is_protected(backbone: nn.Module) -> bool:
    """Return whether a guard has been put into a module, or into a part of it."""
    return any(GATES in part._modules for part in backbone.modules())  # others may have replaced the forward pass since


class SharedMode:
    """Evaluation mode for as long as any thread asks for it; then every part of the modules has the mode that it had."""

    def __init__(self) -> None:
        self.users, self.modes = 0, dict[nn.Module, bool]()

    def enter(self, *modules: nn.Module) -> None:
        """Set evaluation mode."""
        for part in (part for module in modules for part in module.modules()):
            self.modes.setdefault(part, part.training)
            part.training = False
        self.users += 1

    def leave(self) -> None:
        """Restore the modes, unless others still need evaluation mode."""
        self.users -= 1
        if not self.users:
            for part, mode in self.modes.items():
                part.training = mode
            self.modes.clear()


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Within the block the modules are in evaluation mode; afterwards every part of them has the mode that it had."""
    before = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in before:
            part.training = mode
