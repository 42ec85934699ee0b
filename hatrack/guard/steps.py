"""Hooks around the steps of optimizers: gradients are masked before a step, and bits are restored after it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hatrack.guard.backbone import eagerly
from hatrack.guard.checks import held_by
from hatrack.guard.embedding import Embedding
from hatrack.guard.lesson import Lesson
from hatrack.guard.sealing import Sealed


class GuardedSteps:
    """The optimizers of a guard, with a hook before and after every step of each.

    Args:
        module: the embedding. Optimizers of the backbone hold it, so that they clear its gradient and a GradScaler sees it;
            when they make their step it has none, so that they leave it alone.
        stopped: the parameters that required no gradient when the backbone was protected: no task may train them.
        current: returns the task that is being learned, and the modules that are sealed.
    """

    def __init__(
        self,
        module: Embedding,
        stopped: Sequence[nn.Parameter],
        current: Callable[[], tuple[Lesson | None, list[Sealed]]],
    ) -> None:
        self.module, self.stopped, self.current = module, stopped, current
        self.optimizers: list[Optimizer] = []
        self.hooks: list[Any] = []
        self.joined: list[Optimizer] = []  # those that hold the embedding because of us

    def add(self, optimizer: Optimizer, backbone: nn.Module) -> None:
        """Guard the steps of an optimizer."""
        if any(optimizer is known for known in self.optimizers):
            raise ValueError(f"the guard has this {type(optimizer).__name__} already")
        held, e = held_by(optimizer), self.module.embedding
        if id(e) not in held and any(id(p) in held for p in backbone.parameters()):
            optimizer.param_groups[0]["params"].append(e)  # a group of its own would disturb schedulers
            self.joined.append(optimizer)
        self.optimizers.append(optimizer)
        self.hooks.append(optimizer.register_step_pre_hook(eagerly(self._before)))
        self.hooks.append(optimizer.register_step_post_hook(eagerly(self._after)))

    def remove(self) -> None:
        """Remove all hooks, and the embedding from the optimizers."""
        for hook in self.hooks:
            hook.remove()
        for optimizer in self.joined:
            for group in optimizer.param_groups:
                group["params"][:] = [p for p in group["params"] if p is not self.module.embedding]

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
        closure = keywords.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            lesson.before_step(optimizer)
            return None
        return (args[0], _prepared(closure, lesson, optimizer)), {k: v for k, v in keywords.items() if k != "closure"}

    def _after(self, optimizer: Optimizer, args: Any, keywords: Any) -> None:
        lesson, sealed = self.current()
        if lesson is not None:
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
