"""The base class of all methods: plain sequential SGD, with five places to change it. A method is one class in one file.

The rule of the step. `loss`, `edit_grads` and `constrain` run inside the training step. There, Python may depend on the
task but never on a tensor's value, nothing is rebound, and no tensor is made from Python numbers (`torch.tensor(...)`).
Then the same step runs eagerly, compiled, or recorded as a CUDA graph. `engine/rules.py` checks it on any machine.

Predictions and everything else that only uses what was learned are in `trained.py`.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from hatrack.methods.arguments import check_images, check_task, task_number
from hatrack.methods.divergence import rate
from hatrack.methods.finished_tasks import note_finished, notes, take_notes
from hatrack.methods.fit import CountedFit, Fit, LearnResult
from hatrack.methods.growth.generation import Generation
from hatrack.methods.growth.grow import grow, replay, room_for
from hatrack.methods.growth.growth import Growth
from hatrack.methods.guarantees import Bits, Probes, transaction
from hatrack.methods.hidden_state import HiddenState
from hatrack.methods.loading import unchanged_by_failed_load
from hatrack.methods.modes import with_gradients, without_autocast_cache
from hatrack.methods.overrides import check_overrides
from hatrack.methods.ownership import check_owner, claim
from hatrack.methods.parts.releasing import note_forgotten
from hatrack.methods.router import Router
from hatrack.methods.serving import ServedMethod, ServedNetwork, ServedTask
from hatrack.methods.stored_images import StoredImages
from hatrack.methods.trained import TrainedMethod
from hatrack.networks.description import LISTED
from hatrack.networks.network import Network
from hatrack.networks.trunk import check_precision
from hatrack.options import parameters
from hatrack.regime import Regime
from hatrack.registry import Scenario, undefined
from hatrack.tasks.device import to_device
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.targets import Able
from hatrack.tasks.task import Task


class Method(TrainedMethod):
    """Plain sequential SGD: each task is trained in turn and nothing protects the earlier ones.

    A method's parameters are what it learns, its buffers are what it remembers, and `state_dict()` holds both. A method of
    your own is a subclass that changes any of `forward`, `learn_task`, `loss`, `edit_grads` and `constrain`.

    Args:
        net: the network; the method trains it in place.

    Attributes:
        net: the network.
        options: the method's options and their values.
        history: the names of the learned tasks by number, in the order of learning.

    Example:
        >>> method = hr.Method(hr.Network(trunk, tasks=tasks))
        >>> fit = hr.Trainer(hr.Regime(epochs=2))
        >>> for task in tasks:
        ...     result = method.learn(task, fit)
        >>> classes = method.predict(x_test, task=0)
        >>> method
        Method(learned: 'digits', 'signs'; Network(Sequential, 39,913 parameters, images 1x28x28, 2 tasks: 10, 3 classes))
    """

    replaces: ClassVar[Mapping[str, str]] = {}  # options of the regime that do nothing here, and the option to use
    transient: ClassVar[tuple[str, ...]] = ()  # parameters that exist only while a task is learned: no file holds them
    # How many forms (lists of operations and shapes) the step has if all tasks have the same size: "one", "two" (the first
    # task has its own) or "many" (each task has its own). A wrong value costs time when steps are compiled, nothing else.
    step_forms: ClassVar[Literal["one", "two", "many"]] = "one"
    # Options that change no operation of the step, only values of its tensors or what happens outside of it. Runs that
    # differ in nothing else share stacks, and helpers that compile. A wrong name costs time, nothing else.
    same_step: ClassVar[tuple[str, ...]] = ()

    # What the attributes of these names hold, if it is "masks" or "images": see `kept_bytes`.
    keeps: ClassVar[Mapping[str, Literal["masks", "images"]]] = {}
    scenarios: ClassVar[tuple[Scenario, ...]] = ("task", "domain", "class")  # where the method is defined
    targets: ClassVar[Able] = "any"  # what its tasks may ask for: see tasks/targets.py
    splits_batches: ClassVar[bool] = True  # whether the loss of a batch is the mean over its parts: see `Regime.accumulate`
    exchanges: ClassVar[bool] = True  # whether `forward` may exchange tensors within modules, as `functional_call` does

    def __init__(self, net: Network) -> None:
        super().__init__()
        if not isinstance(net, Network):
            raise ValueError(f"a method is made of a Network, such as Network(trunk, tasks=tasks), not {type(net).__name__}")
        if net.incremental and "class" not in self.scenarios:
            raise ValueError(undefined(type(self).__name__, "class", self.scenarios))
        self.lock = threading.RLock()  # held by the thread that computes with the network: tensors and modes are exchanged
        self.net = net
        self.options: dict[str, Any] = {}  # a method that has options writes self.options = check(Class, locals())
        self.built = len(net.classes), [name for name, p in net.trunk.named_parameters() if not p.requires_grad]
        self.grown = len(net.classes)  # how many tasks there is room for: see `on_new_tasks`
        self.history: dict[int, str] = {}  # the finished tasks and their names, in the order of learning
        self.learned_after: dict[int, list[int]] = {}  # those after an earlier version of a task: see releasing.py
        self.current_task: int | None = None  # the number of the task that is being learned
        self.fitting = False  # while a fit runs the steps of an epoch
        self.stored_images: StoredImages | None = None  # a method with the option `probes` makes them: see stored_images.py
        self.probes: Probes | None = None  # while a task is learned: what the finished ones answered before
        self.router = Router(net.example.device)  # finds the task of an image, once it was fitted: see router.py
        self.bits: Bits | None = None  # digests as they were when the last task was learned: see guarantees.py
        self.digests: dict[int, str] = {}  # of what tasks use, once the method was saved or loaded: see guarantees.py
        self.growth: Growth | None = None  # a method whose trunk can be widened makes one: see `grow`
        claim(net, self)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        check_overrides(cls)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: all but the lock."""
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.lock = threading.RLock()

    def state_dict(self, *args: Any, prefix: str = "", **keywords: Any) -> Any:
        """Return all tensors by name. Which tasks are learned is in its metadata, where torch keeps versions."""
        state = super().state_dict(*args, prefix=prefix, **keywords)
        if (own := getattr(state, "_metadata", {}).get(prefix[:-1])) is not None:
            own["learned"] = notes(self)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over a state. If it does not fit, torch's RuntimeError is raised and the method is as it was."""
        with unchanged_by_failed_load(self):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any, **keywords: Any
    ) -> None:
        try:
            replay(self, state_dict, prefix)
        except ValueError as error:
            raise RuntimeError(str(error)) from None  # as torch does if tensors don't fit
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **keywords)
        if (learned := local_metadata.get("learned")) is not None:  # a plain dictionary of tensors does not say it
            take_notes(self, learned)

    def __repr__(self) -> str:
        known = parameters(type(self))
        changed = {name: v for name, v in self.options.items() if name not in known or v != known[name].default}
        options = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        names = [repr(name) for name in self.history.values()]
        few = ", ".join(names[:LISTED]) + (f", ... ({len(names)} tasks)" if len(names) > LISTED else "")
        parts = [options, f"learned: {few}" if names else "nothing learned", repr(self.net)]
        return f"{type(self).__name__}({'; '.join(part for part in parts if part)})"

    # What a method's file may change

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        """Return the logits of a task for images as the network sees them."""
        return self.net(x, task)  # type: ignore[no-any-return]

    def learn_task(self, task: Task, fit: Fit) -> None:
        """Learn a task: the paper's algorithm box, in plain Python. `learn` calls it once per task.

        Args:
            task: the task, on the method's device.
            fit: trains the method; it may be called several times, with changes of the regime.
        """
        fit(self, task)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, a 0-d tensor. It runs inside the training step.

        It may also return two things: the loss, and what `edit_grads` needs of its computation.
        """
        return batch.loss(self(batch.x, batch.task))

    def edit_grads(self, batch: Batch, aux: Any) -> None:
        """Change the gradients (`.grad`) in place, between backward and the optimizer. It runs inside the training step.

        Args:
            batch: the batch of this step.
            aux: the second part of what `loss` returned, or None.
        """

    def constrain(self) -> None:
        """Change the parameters in place, after the optimizer. It runs inside the training step."""

    def on_new_tasks(self) -> None:
        """Make room for every task that the network knows. It is called when the network has new tasks, before one of them
        is learned or predicted; a method that keeps something per task calls it in its `__init__` as well."""

    def end_learning(self) -> None:
        """Drop what only learning needs. It is called after `learn_task`, whether it succeeded or failed."""

    def restore_data(self, task: Task) -> None:
        """Restore the data of a finished task, when a run continues or a model was loaded; for methods that keep data."""

    def validation_price(self, task: int) -> float:
        """Return what is added to the validation loss of the task being learned, by which its epochs are compared."""
        return 0.0

    def explain_divergence(self, regime: Regime) -> str:
        """Return the likely cause of a loss that is not finite, and what to try."""
        return rate(regime)

    def num_parameters(self) -> int:
        """Return how many weights the method has for all tasks together."""
        return sum(p.numel() for p in self.parameters())

    def usage(self) -> dict[str, float]:
        """Return the share of every layer that finished tasks have taken; empty if the method takes nothing."""
        return {}

    def used_by(self, task: int) -> dict[str, Tensor]:
        """Return all tensors that a finished task uses and that no later task may change in any bit, by name.

        It is empty if the method guarantees nothing.
        """
        return {}

    def weight_masks(self, task: int) -> dict[str, Tensor]:
        """Return which elements of the parameters that tasks share a task uses, or would if it were finished now: bools in
        the shape of each parameter, by its name in the trunk. It is empty if the method has no masks."""
        return {}

    def frozen_by(self, tasks: Sequence[int]) -> dict[str, Tensor]:
        """Return which elements of these parameters can't change once these tasks are finished: all that one of them uses,
        unless a method freezes more."""
        masks = [self.weight_masks(task) for task in tasks]
        return {name: torch.stack([mask[name] for mask in masks]).any(0) for name in (masks[0] if masks else ())}

    def layer_masks(self, task: int) -> dict[str, Tensor]:
        """Return what `masks` returns: the masks of weights, unless a method has masks of units."""
        return self.weight_masks(task)

    # What every method does in the same way

    @final
    def learn(self, task: Task, fit: Fit) -> LearnResult:
        """Learn a task. If that fails for any reason, the state of the method is rolled back.

        Args:
            task: the task; it is brought to the device of the method.
            fit: what trains, usually a `Trainer`.

        Returns:
            The number of epochs, the best of them, its accuracy on validation data, the share of capacity taken.

        Raises:
            ValueError: if the task does not fit the network, or another task was learned under its number.
            Diverged: if the loss is not finite.
        """
        check_task(self, task, fit)
        check_owner(self)
        with self.lock, without_autocast_cache(), with_gradients(self), room_for(self, task):
            task, counted = to_device(task, self.net.example.device), CountedFit(fit)
            again = task.index in self.history
            with transaction(self, task, counted), self._while_learning(task.index):
                self.net.set_preprocessing(task)
                self.learn_task(task, counted)
                usage = self.usage()
                kept = self.stored_images.select(task.train) if self.stored_images and self.used_by(task.index) else None
            note_finished(self, task, kept)
        return counted.end(task, usage, again)

    def __call__(self, x: Tensor, task: TaskId) -> Tensor:
        """Return the logits of a task. Threads may call it at any time; they run one after the other, see `for_task`.

        Args:
            x: images as the network sees them; `predict` takes raw images.
            task: the number of the task, or a tensor of numbers, one per image.

        Returns:
            Logits (images, classes of the task); for several tasks as wide as the widest, see `Network.head`. With one head
            of all classes, the logits of all classes seen so far, whatever the task is: see `reach`.
        """
        check_images(self.net, x)
        task = task_number(task, len(x))
        if isinstance(task, int):
            self.net.check_task_id(task)
        with self.lock:
            self.make_room()
            with HiddenState(self, buffers=True) if self._must_keep(task) else nullcontext():
                try:
                    return super().__call__(x, self.reach(task))  # type: ignore[no-any-return]
                except RuntimeError:  # perhaps the cause is known, and the message can be clearer
                    check_precision(self.net.trunk, x, "the images")
                    raise

    def reach(self, task: TaskId) -> TaskId:
        """Return the task up to whose classes a forward pass computes logits, if the network has one head of all classes.

        It is the last task that has been learned or is being learned, whichever task the images belong to; or the given
        task, if this one is later. With other heads the given task is returned.
        """
        if not self.net.incremental:
            return task
        seen = max([*self.history, -1 if self.current_task is None else self.current_task], default=-1)
        if isinstance(task, int):
            return max(task, seen)
        return seen if seen >= 0 else len(self.net.classes) - 1

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the first of `net.shared_parameters()`: all but the rows of classes that have not been seen yet. A penalty
        on those would give them a gradient of zeros, with which weight decay would move them."""
        last = self.reach(0)
        return self.net.shared_parameters(last if isinstance(last, int) else None)

    @final
    def grow(self, by: float | Mapping[str, float] = 0.5) -> dict[str, tuple[int, int]]:
        """Widen the trunk, so that later tasks find room. Finished tasks stay as they are, bit for bit.

        A finished task runs at the width that it was learned at; later ones use the wider trunk, which is a new module:
        `method.net.trunk`. HAT and PMASK can grow, with a head and norms per task.

        Args:
            by: a share, by which every layer is widened (0.5: half as many units more), or a mapping of layers, as `usage`
                names them, to shares (float) or numbers of units (int). Layers that must have the same width grow together.

        Returns:
            The old and the new number of units of every layer that has grown.

        Raises:
            ValueError: if the method or the trunk can't grow; then nothing has changed.

        Example:
            >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
            >>> result = method.learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
            >>> method.grow(0.5)
            {'1': (50, 75)}
        """
        check_owner(self)
        if self.current_task is not None:
            raise ValueError("a method can't grow while it learns a task")
        with self.lock:
            self.make_room()
            return grow(self, by)

    def growth_of(self, task: int) -> Generation | None:
        """Return the earlier width of the trunk at which a finished task runs; None if it is the present one."""
        return None if self.growth is None else self.growth.of(task)

    @contextmanager
    def _while_learning(self, task: int) -> Iterator[None]:
        """Note which task is learned in the block. No batch has examples of tasks after it and all that were learned, so
        that results do not depend on how many tasks the network knows already."""
        self.current_task, self.net.in_use = task, 1 + max(task, *self.history, 0)
        try:
            yield
        finally:
            self.current_task, self.net.in_use = None, 0

    @contextmanager
    def while_fitting(self) -> Iterator[None]:
        """Note that the steps of an epoch run in the block: what they change is meant to change."""
        self.fitting = True
        try:
            yield
        finally:
            self.fitting = False

    def _must_keep(self, task: TaskId) -> bool:
        """Return whether a forward pass, since it is one in training mode outside of `learn`, could change the statistics
        of a finished task whose answers the method guarantees."""
        if not self.training or self.fitting or self.probes is not None or type(self).used_by is Method.used_by:
            return False
        return not self.history.keys().isdisjoint([task] if isinstance(task, int) else task.tolist())

    def served(self, task: int) -> ServedTask:
        """Return the module of a task for `for_task`; a method that exchanges tensors returns a `ServedNetwork` of them."""
        return ServedNetwork(self.net, task, {}) if type(self).forward is Method.forward else ServedMethod(self, task)

    def make_room(self) -> None:
        """Call `on_new_tasks` if the network has new tasks."""
        if self.grown < len(self.net.classes):  # what it grows by is to be learned, so it must not be of the inference mode
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                self.on_new_tasks()
            self.grown = len(self.net.classes)

    def forget_task(self, task: int) -> None:
        """Remove a task from the list of finished ones: what it uses may change. What was stored of it is deleted."""
        self.net.check_task_id(task)
        note_forgotten(self, task)
        self.history.pop(task, None)
        self.digests.pop(task, None)
        self.router.delete(task)
        self.net.targets.pop(task, None)
        if self.stored_images:
            self.stored_images.delete(task)
