"""Joint (multi-task) training, the upper reference of the HAT paper (Serra et al., ICML 2018), https://arxiv.org/abs/1801.01423"""

import warnings
from dataclasses import replace
from typing import Annotated

from hatrack.methods.fit import Fit
from hatrack.methods.method import Method
from hatrack.methods.parts.memory import mixing
from hatrack.methods.parts.snapshot import Snapshot
from hatrack.networks.network import Network
from hatrack.options import Option, check
from hatrack.tasks.device import to_device
from hatrack.tasks.split import Split
from hatrack.tasks.task import Task


class Joint(Method):
    """Every new task: start again from the initial weights and train on all tasks so far, mixed in every batch.

    It keeps the data of all tasks, which a continual learner may not do. So it shows what accuracy is possible.

    Args:
        net: the network; the method trains it in place. The options are listed by `hatrack list joint`.

    Example:
        >>> method = hr.Joint(hr.Network(trunk, tasks=tasks))
        >>> for task in tasks:
        ...     method.learn(task, hr.Trainer(hr.Regime(epochs=20)))

    See docs/methods/joint.md for formulas, published values and results.
    """

    targets = "plain"

    step_forms = "many"

    def __init__(
        self,
        net: Network,
        *,
        at: Annotated[
            tuple[int, ...],
            Option("fit only after these numbers of tasks, such as 2,8; by default after every task", low=1, added=True),
        ] = (),
        warm: Annotated[bool, Option("go on from the network before, in place of the initial weights", added=True)] = False,
    ) -> None:
        super().__init__(net)
        self.options = check(Joint, locals())
        self.at, self.warm = at, warm
        if at and min(at) > len(net.classes) > 0:
            warnings.warn(
                f"joint is first fitted after {min(at)} tasks, and the network knows {len(net.classes)}", stacklevel=2
            )
        self.initial = Snapshot(net.trunk)
        self.tasks: list[Task] = []

    def _reset_weights(self) -> None:
        """Give the network its initial weights."""
        self.initial.restore(self.net.trunk)
        for number, head in enumerate(self.net.heads):
            head.load_state_dict(self.net.new_head(number).state_dict())

    def learn_task(self, task: Task, fit: Fit) -> None:
        if missing := [name for index, name in self.history.items() if index not in {t.index for t in self.tasks}]:
            raise ValueError(
                f"joint has no data of {', '.join(map(repr, missing))}: give them back by method.restore_data(task)"
            )
        tasks = [t for t in self.tasks if t.index != task.index] + [task]
        if not self.at or len(tasks) in self.at:
            self._fit_all(tasks, fit)
        self.tasks = tasks

    def _fit_all(self, tasks: list[Task], fit: Fit) -> None:
        """Train on all these tasks; the last of them is the new one, whose number decides the order of batches."""
        if not self.warm:
            self._reset_weights()
        task = tasks[-1]
        train, valid = (Split.join([getattr(t, part) for t in tasks]) for part in ("train", "valid"))
        all_tasks = replace(task, name=f"{task.name} and all before", train=train, valid=valid)
        with mixing(self, Joint, [t.index for t in tasks]):
            fit(self, all_tasks, lr=fit.regime.lr, batch=fit.regime.batch, keep_state=False)  # trained like a first task

    def restore_data(self, task: Task) -> None:
        kept = [t for t in self.tasks if t.index != task.index]
        self.tasks = [*kept, to_device(task, self.net.example.device)]

    def kept_bytes(self) -> dict[str, int]:
        """Return the bytes by kind; the images are the training and validation data of all tasks."""
        found, splits = super().kept_bytes(), [split for task in self.tasks for split in (task.train, task.valid)]
        found["images"] += sum(len(s) * (s.x.nbytes // max(1, len(s.x)) + s.y.itemsize) for s in splits)
        return found

    def forget_task(self, task: int) -> None:
        super().forget_task(task)
        self.tasks = [t for t in self.tasks if t.index != task]
