"""Hooks around the steps of optimizers: gradients are masked before a step, and bits are restored after it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hatrack.guard.backbone import eagerly
from hatrack.guard.checks import held_by
from hatrack.guard.embedding import Embedding
from hatrack.guard.lesson import Lesson
from hatrack.guard.sealing import Sealed


class GuardedSteps:
    """The optimizers of a guard, with a hook before and after every step of each.

    Only steps of optimizers that hold weights of the backbone move its gates. Those of others, such as an optimizer of a
    head that makes more steps, are not counted.

    Args:
        backbone: the backbone.
        module: the embedding. Optimizers of the backbone hold it, so that they clear its gradient and a GradScaler sees it;
            when they make their step it has none, so that they leave it alone.
        stopped: the parameters that required no gradient when the backbone was protected: no task may train them.
        current: returns the task that is being learned, and the modules that are sealed.
    """

    def __init__(
        self,
        backbone: nn.Module,
        module: Embedding,
        stopped: Sequence[nn.Parameter],
        current: Callable[[], tuple[Lesson | None, list[Sealed]]],
    ) -> None:
        self.backbone, self.module, self.stopped, self.current = backbone, module, stopped, current
        self.known: list[ReferenceType[Optimizer]] = []
        self.hooks: list[Any] = []
        self.joined: list[ReferenceType[Optimizer]] = []  # those that hold the embedding because of us

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that still exist: whoever makes a new one for every task drops the old ones."""
        return [optimizer for one in self.known if (optimizer := one()) is not None]

    def add(self, optimizer: Optimizer) -> None:
        """Guard the steps of an optimizer."""
        if any(optimizer is known for known in self.optimizers):
            raise ValueError(f"the guard has this {type(optimizer).__name__} already")
        e = self.module.embedding
        if id(e) not in held_by(optimizer) and self._trains_backbone(optimizer):
            optimizer.param_groups[0]["params"].append(e)  # a group of its own would disturb schedulers
            self.joined.append(ref(optimizer))
        self.known.append(ref(optimizer))
        self.hooks.append(optimizer.register_step_pre_hook(eagerly(self._before)))
        self.hooks.append(optimizer.register_step_post_hook(eagerly(self._after)))

    def remove(self) -> None:
        """Remove all hooks, and the embedding from the optimizers."""
        for hook in self.hooks:
            hook.remove()
        for optimizer in (one() for one in self.joined):
            for group in [] if optimizer is None else optimizer.param_groups:
                group["params"][:] = [p for p in group["params"] if p is not self.module.embedding]

    def _trains_backbone(self, optimizer: Optimizer) -> bool:
        held = held_by(optimizer)
        return any(id(p) in held for p in self.backbone.parameters())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block a step of an optimizer that holds the backbone's parameters, but is not the guard's, is refused.

        Otherwise a library that makes its own optimizer would train for hours before the end of the block shows it.
        """

        def look(optimizer: Optimizer, args: Any, keywords: Any) -> None:
            if not any(optimizer is known for known in self.optimizers) and self._trains_backbone(optimizer):
                raise ValueError(
                    f"a step of an optimizer ({type(optimizer).__name__}) that trains the backbone and is not one of the "
                    "guard: call guard.add_optimizer(optimizer) where it is made"
                )

        hook = register_optimizer_step_pre_hook(eagerly(look))
        try:
            yield
        finally:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: Any, keywords: Any) -> Any:
        lesson, _ = self.current()
        if lesson is None:
            raise ValueError(
                f"a step of {type(optimizer).__name__} outside of a block of learning: its weights are protected; make it "
                "within `with guard.learn(name, ...)`"
            )
        if any(p.requires_grad for p in self.stopped):
            raise ValueError(
                "a parameter of the backbone requires a gradient now that required none when it was protected: let it "
                "require one before hr.protect, and stop it afterwards"
            )
        if not self._trains_backbone(optimizer):
            return None
        closure = keywords.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            lesson.before_step(optimizer)
            return None
        return (args[0], _prepared(closure, lesson, optimizer)), {k: v for k, v in keywords.items() if k != "closure"}

    def _after(self, optimizer: Optimizer, args: Any, keywords: Any) -> None:
        lesson, sealed = self.current()
        if lesson is not None and self._trains_backbone(optimizer):
            lesson.after_step(optimizer)
        held = held_by(optimizer)
        with torch.no_grad():
            for modules in sealed:
                modules.restore_held(held)


def _prepared(closure: Callable[[], Any], lesson: Lesson, optimizer: Optimizer) -> Callable[[], Any]:
    """Return a closure after which the gradients are ready for the optimizer."""

    def prepared() -> Any:
        loss = closure()
        lesson.before_step(optimizer)
        return loss

    return prepared
