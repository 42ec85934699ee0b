"""The guard of a backbone: tasks are learned in blocks of the user's own loop, and finished ones never change by a bit."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hatrack.guard import checks
from hatrack.guard.backbone import Attachment, SharedMode, evaluating
from hatrack.guard.embedding import Embedding
from hatrack.guard.finished import Finished, check_load
from hatrack.guard.learning import begin, finish, follow_device, make_room, warn_about_statistics, warn_about_the_end
from hatrack.guard.lesson import Lesson, gate_count
from hatrack.guard.rollback import Rollback
from hatrack.guard.sealing import Sealed
from hatrack.guard.settling import check_settle
from hatrack.guard.soft_gates import Gated
from hatrack.guard.steps import GuardedSteps
from hatrack.guard.writing import write
from hatrack.methods import METHODS
from hatrack.methods.certificate import certificate_of, entry
from hatrack.methods.guarantees import logits
from hatrack.methods.hidden_state import HiddenState
from hatrack.methods.modes import without_autocast_cache
from hatrack.methods.parts.usage import warn_if_full
from hatrack.options import choose

GUARDS = WeakSet["Guard"]()  # all that exist: an optimizer may hold the backbones of several


class Guard:
    """Zero forgetting in a training loop of your own. `protect` makes it.

    Within `learn` the loop trains a task, with its own loss, data and schedule. What finished tasks use is frozen meanwhile:
    weights, gates, norms, and the modules that were given as `own`. Within `use` the backbone answers for a finished task.

    Args:
        backbone: the module whose forward pass gets gates.
        optimizers: the optimizers that train it.
        method: HAT or PMASK on the backbone.

    Attributes:
        backbone: the module.
        method: HAT or PMASK; its tasks are numbered from 1.
        tasks: the finished tasks by name.

    Example:
        >>> optimizer = torch.optim.AdamW(trunk.parameters())
        >>> hr.protect(trunk, optimizer, example=torch.rand(2, 1, 28, 28))
        Guard(hat on Sequential; nothing learned)
    """

    def __init__(self, backbone: nn.Module, optimizers: Sequence[Optimizer], method: Gated) -> None:
        self.backbone, self.method = backbone, method
        self.tasks: dict[str, Finished] = {}
        self.module = Embedding(gate_count(method), method.net.example.device)
        self.attachment = Attachment(backbone, self.module, self._forward, self._check_load, self)
        self.lesson: Lesson | None = None
        self.before: Rollback | None = None  # what restores the state before the task that is being learned
        self.local = threading.local()  # `task`: what this thread uses
        self.removed = False
        self.shared_mode = SharedMode()  # of all blocks of `use` that are open
        stopped = [backbone.get_parameter(name) for name in method.built[1]]
        self.steps = GuardedSteps(backbone, self.module, stopped, self._current)
        for optimizer in optimizers:
            self.add_optimizer(optimizer)
        GUARDS.add(self)

    def __repr__(self) -> str:
        learned = f"learned: {', '.join(map(repr, self.tasks))}" if self.tasks else "nothing learned"
        return f"Guard({METHODS.name_of(type(self.method))} on {type(self.backbone).__name__}; {learned})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ValueError("a guard can't be copied: guard.save(path) writes it, hr.load_guard(path, ...) makes another of it")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError("a guard can't be pickled: guard.save(path) writes a file that hr.load_guard reads")

    # Learning

    @contextmanager
    def learn(
        self, name: str, *, steps: int, own: Sequence[nn.Module] = (), settle: Iterable[Any] | None = None
    ) -> Iterator[None]:
        """Learn a task in the block. If the block or a check after it fails, everything is rolled back.

        Args:
            name: the name of the task, a new one.
            steps: how many steps of the optimizer an epoch has; within each epoch the gates become hard.
            own: modules that only this task has, such as its head. They are sealed when the block ends.
            settle: batches of inputs, or of tuples that begin with inputs, such as the loader of the training data. When
                the block ends, the running statistics of norms are estimated on them anew, with the final gates.

        Returns:
            A context for `with`. In training mode `backbone(x)` has soft gates there, in evaluation mode final ones.

        Raises:
            ValueError: if a finished task has changed, or nothing was learned.
        """
        with self.attachment.lock:
            self.require_idle("learn")
            modules = checks.check_learn(self.backbone, self.tasks, name, steps, own)
            checks.check_kind(self.module.embedding)
            check_settle(settle, self.method.net.example.dim())
            warn_about_statistics(self.method, name, settle)
            with self.attachment.bare():
                number = make_room(self.method, self.module.embedding.device)
            self.lesson = lesson = Lesson(self.method, self.module, name, number, steps, modules)
        try:
            with self.attachment.bare():
                self.before = before = begin(lesson, self.tasks, self.steps.optimizers)
            warn_if_full(self.method, name)
            with without_autocast_cache(), self.steps.watching():
                yield
            with self.attachment.bare():
                self.tasks[name] = finish(lesson, self.tasks, settle)
        except BaseException:
            if self.before is not None:
                with self.attachment.bare():
                    lesson.close()
                    self.before.restore()
            raise
        finally:
            self.lesson = self.before = None
        warn_about_the_end(lesson, before, _guarded())

    # The forward pass

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Let the backbone answer for a finished task in the block, in evaluation mode. Every thread may use another task.

        Args:
            name: the name of the task.

        Returns:
            A context for `with`.
        """
        with self.attachment.lock:
            if self.removed or self.lesson is not None or getattr(self.local, "task", None) is not None:
                self.require_idle("use")
            task = choose("learned task", name, self.tasks)
            with self.attachment.bare():
                follow_device(self.method, self.module.embedding.device)
            self.shared_mode.enter(self.backbone)
            task.sealed.restore_buffers()  # a call outside of a block, in training mode, may have changed statistics
            self.local.task = task
        try:
            yield
        finally:
            with self.attachment.lock:
                self.local.task = None
                self.shared_mode.leave()
                task.sealed.restore_buffers()  # the user may have set training mode in the block

    def _forward(self, *args: Any, **keywords: Any) -> Tensor:
        """The forward pass of the backbone, with the gates of the block in which it is called."""
        if keywords or len(args) != 1 or not isinstance(args[0], Tensor):
            raise ValueError("a protected backbone takes one tensor of inputs: backbone(x)")
        task: Finished | None = getattr(self.local, "task", None)
        if task is None and self.lesson is None:
            raise ValueError(
                "the backbone is protected: call it within `with guard.learn(name, ...)` or `with guard.use(name)`; "
                "guard.remove() makes it a plain module again"
            )
        with self.attachment.bare():
            if task is None:
                assert self.lesson is not None
                return self.lesson.forward(args[0])
            follow_device(self.method, self.module.embedding.device)  # a loop may have moved the backbone within the block
            kept = HiddenState(self.method, buffers=True) if self.backbone.training else None
            try:
                return self.method.forward(args[0], task.number)
            finally:
                if kept:
                    kept.restore()

    # Looking after what was learned

    def verify(self) -> dict[str, str]:
        """Check that all finished tasks use the bits that they used when they were learned, and answer the same.

        Returns:
            A digest by the name of the task, to compare with later ones.

        Raises:
            ValueError: that names the first task that has changed.
        """
        self.require_idle("verify")
        with self.attachment.bare(), evaluating(self.backbone):
            follow_device(self.method, self.module.embedding.device)
            for name, task in self.tasks.items():
                task.check(self.method, name)
        return {name: task.digest for name, task in self.tasks.items()}

    @torch.no_grad()
    def certificate(self) -> dict[str, Any]:
        """Return the certificate of all finished tasks, for `hr.compare_certificates`: of each the digest of all that it
        uses, its own modules included, and the features of the example.

        Raises:
            ValueError: if nothing has been learned, or a task has changed.
        """
        self.verify()
        if not self.tasks:
            raise ValueError("nothing has been learned, so there is nothing to certify")
        with self.attachment.bare(), evaluating(self.backbone):
            found = {name: (task.number, task.digest, logits(self.method, task.number)) for name, task in self.tasks.items()}
        entries = [entry(n, name, digest, {"kind": "features"}, answers) for name, (n, digest, answers) in found.items()]
        return certificate_of(self.method, entries)

    def usage(self) -> dict[str, float]:
        """Return the share of every layer that finished tasks have taken, and 1 for what is held whole by them."""
        with self.attachment.bare():
            return self.method.usage()

    def release(self, name: str) -> None:
        """Forget a task and free what only it uses. Its modules may be trained again.

        Args:
            name: the name of the task.
        """
        self.require_idle("release")
        task = choose("learned task", name, self.tasks)
        with self.attachment.bare():
            self.method.release(task.number)
        task.sealed.open()
        del self.tasks[name]

    def save(self, path: Path | str) -> None:
        """Write one file, from which `load_guard` reads: the backbone, all gates and norms, the tasks' own modules.

        Args:
            path: the file; it is written whole or not at all. The state of the optimizer is not in it.

        Raises:
            ValueError: if a finished task has changed; then nothing is written.
        """
        self.verify()
        with self.attachment.bare():
            write(Path(path), self.method, self.tasks)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Guard the steps of one more optimizer, such as a new one for a new task; also within a block of learning.

        Args:
            optimizer: the optimizer; it may hold parameters of the backbone, of heads, or both. The guard does not keep it
                alive: one that nobody else holds is forgotten.
        """
        if self.lesson is None:
            self.require_idle("add_optimizer")
        found = checks.bare_optimizer(optimizer)
        self.steps.add(found)
        if self.before is not None:
            self.before.add(found)

    def remove(self) -> None:
        """Make the backbone a plain module and the optimizers plain optimizers again; the guard is of no use afterwards."""
        self.require_idle("remove")
        self.detach()
        for task in self.tasks.values():
            task.sealed.open()

    def detach(self) -> None:
        """Take the guard out of the backbone and the optimizers. The modules of tasks stay sealed."""
        self.attachment.remove()
        self.steps.remove()
        self.removed = True

    def _current(self) -> tuple[Lesson | None, list[Sealed]]:
        """Return the task that is being learned, and the modules that are sealed, for the hooks of optimizers."""
        return self.lesson, [task.sealed for task in self.tasks.values()]

    def _check_load(self, state: dict[str, Tensor]) -> None:
        """Raise an error if a state that is loaded outside of a block would change a finished task.

        Within a block of learning all may be loaded, as by a loop that loads its best state: the bits of finished tasks are
        restored when the block ends.
        """
        if self.lesson is None and not self.removed:
            with self.attachment.bare():
                check_load(self.method, self.tasks, state)

    def modules(self) -> list[nn.Module]:
        """Return all modules that the guard looks after: the backbone, those of finished tasks, those being learned."""
        own = [] if self.lesson is None else self.lesson.own
        return [self.backbone, *own, *(module for task in self.tasks.values() for module in task.sealed.modules)]

    def require_idle(self, what: str) -> None:
        """Raise an error if the guard was removed, or if a task is being learned or used."""
        if self.removed:
            raise ValueError(f"guard.{what}: the guard was removed from the backbone; hr.protect makes a new one")
        if self.lesson is not None:
            raise ValueError(f"guard.{what}: the task {self.lesson.name!r} is being learned, and blocks can't be nested")
        if self.shared_mode.users:
            raise ValueError(f"guard.{what}: a task is in use, in a block of guard.use that has not ended")


def _guarded() -> set[int]:
    """Return the parameters that any guard protects, by `id`."""
    modules = [module for guard in list(GUARDS) if not guard.removed for module in guard.modules()]
    return {id(p) for module in modules for p in module.parameters()}
