"""What one asks of a method that has learned something: predictions, routes, modules for serving, masks, certificates.

`Method` inherits it. It says nothing about learning: to understand a method, read its file and `method.py`.
"""

import math
import threading
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast, final

import torch
from torch import Tensor, fx, nn

from hatrack.methods.arguments import task_number
from hatrack.methods.certificate import certificate
from hatrack.methods.extraction.extract import extract
from hatrack.methods.extraction.raw import with_preprocessing
from hatrack.methods.keywords import check_keywords
from hatrack.methods.modes import evaluation_mode
from hatrack.methods.parts.reuse import shared_with_earlier
from hatrack.methods.router import Kind, Router, answers, fit_router
from hatrack.methods.serving import ServedTask
from hatrack.networks.network import Network
from hatrack.networks.preprocessing import as_raw
from hatrack.options import shown, whole
from hatrack.registry import Scenario
from hatrack.tasks.arrays import as_tensor
from hatrack.tasks.split import TaskId
from hatrack.tasks.task import Task

if TYPE_CHECKING:
    from hatrack.methods.method import Method

FAR = 50.0  # standard deviations: no image is so far off those that a task was learned from


class TrainedMethod(nn.Module):
    """The part of every method that uses what was learned and changes nothing of it, except for the router.

    Attributes:
        net: the network.
        history: the names of the learned tasks by number, in the order of learning.
        router: finds the tasks of images, once it was fitted.
        lock: held by the thread that computes with the network.
        scenarios: where the method is defined.
        keeps: what attributes hold, if it is masks or images.
    """

    net: Network
    history: dict[int, str]
    router: Router
    lock: threading.RLock
    scenarios: ClassVar[tuple[Scenario, ...]]
    keeps: ClassVar[Mapping[str, Literal["masks", "images"]]]

    if TYPE_CHECKING:  # what `Method` has

        def make_room(self) -> None: ...
        def reach(self, task: TaskId) -> TaskId: ...
        def served(self, task: int) -> ServedTask: ...
        def layer_masks(self, task: int) -> dict[str, Tensor]: ...
        def weight_masks(self, task: int) -> dict[str, Tensor]: ...

    def __new__(cls, *given: Any, **keywords: Any) -> Self:
        """Check the names of keywords, before any `__init__`. It stands here, since the `__init__` of `Method` shall be read
        by `inspect.signature` and type checkers."""
        if keywords:  # there are none when a copy is made or a pickle is read
            check_keywords(cls, keywords)
        return super().__new__(cls)

    @torch.no_grad()
    def predict(self, images: Any, task: TaskId | None = None) -> Tensor:
        """Classify raw images.

        Args:
            images: an array or tensor of uint8, or of floats in the units of the task's own data; not normalised.
            task: the number of the task, or a tensor of numbers, one per image. Without it, `route` finds the tasks; a
                method whose tasks have one head and the same transform needs none.

        Returns:
            The class of each image in its task, a tensor of int64. For a task with another target what that asks for: bools
            (n, labels) of several labels, numbers of a regression in the units of its data, grades, or plain outputs.
        """
        if task is None and not (self.net.needs_no_task and "domain" in self.scenarios):
            with self.lock:  # one state of the method for both
                return self.predict(images, self.route(images))
        task = self._any_task() if task is None else task
        raw = self._raw(images)
        task = task_number(task, len(raw))
        for number in {task} if isinstance(task, int) else set(task.tolist()):
            self._check_usable(number)
        if not len(raw):
            return torch.zeros(0, dtype=torch.int64, device=raw.device)
        seen = self.net.preprocess(raw, task)
        off = seen.abs().max().item() if raw.numel() and raw.is_floating_point() else 0.0
        if not math.isfinite(off):
            raise ValueError("images hold values that are NaN or infinite")
        if off > FAR:
            warnings.warn(
                f"images are up to {off:.0f} standard deviations off those that were learned: all but bytes (uint8) are "
                "taken in the units of a task's own data, which are 0 to 1 if that was given as bytes",
                stacklevel=3,  # `no_grad` has a frame of its own
            )
        with evaluation_mode(self):
            return self.net.answer(self(seen, task), task)

    def _any_task(self) -> int:
        """Return a task whose number stands for all of them in `predict`; raise an error if it matters which task it is."""
        learned = list(self.history) or [0]
        rows = [self.net.preprocessing.rows(task) for task in learned] if self.net.classes else []
        if not all(row[name].equal(rows[0][name]) for row in rows for name in row):
            raise ValueError("predict needs the number of the task: the tasks transform images in different ways")
        return learned[0]

    def _raw(self, images: Any) -> Tensor:
        """Return raw images as a tensor on the device of the method, channels first."""
        raw = as_raw(images, self.net.example)
        if raw.is_complex():
            raise ValueError(f"images must be real numbers, not {str(raw.dtype).removeprefix('torch.')}")
        if not raw.isfinite().all():
            raise ValueError("images hold values that are NaN or infinite")
        return self.net.preprocessing.in_kind(raw)

    @final
    def fit_router(self, task: Task) -> None:
        """Fit the router on a finished task, so that `route` and `predict` find it without being told. No weight changes.

        Args:
            task: the task, with the data that it was learned from.

        Raises:
            ValueError: if the task has not been learned, or if the method does not guarantee that it stays as it is.

        Example:
            >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
            >>> for task in tasks:
            ...     result = method.learn(task, hr.Trainer(hr.Regime(epochs=2)))
            ...     method.fit_router(task)
            >>> classes = method.predict(x_test)
        """
        fit_router(cast("Method", self), task)

    @final
    def route(self, images: Any, *, kind: Kind = "distance") -> Tensor:
        """Find the tasks of raw images, among all tasks that were learned.

        Args:
            images: as `predict` takes them.
            kind: what decides: the relative "distance" of features, the "energy" or the "entropy" of logits, or "both" of
                the first two.

        Returns:
            The number of the task of each image, a tensor of int64.
        """
        return answers(cast("Method", self), self._raw(images), kind).task

    @final
    @torch.no_grad()
    def for_task(self, task: int) -> ServedTask:
        """Copy what one task needs into a module for serving, which any number of threads may call at the same time.

        Args:
            task: the number of the task.

        Returns:
            A module from images as the network sees them to logits, which equal those of the method up to rounding. It is in
            evaluation mode for good, and nothing that the method learns later changes it.

        Example:
            >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
            >>> result = method.learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
            >>> model = method.for_task(0)
            >>> model(method.net.preprocess(torch.tensor(x_test), 0)).argmax(1).equal(method.predict(x_test, task=0))
            True
        """
        task = whole("a task's number", task)
        self.net.check_task_id(task)
        with evaluation_mode(self):
            self.make_room()
            reached = self.reach(task)
            assert isinstance(reached, int)
            return self.served(reached)

    @final
    def extract(self, task: int, *, raw: Any = None) -> fx.GraphModule:
        """Return the network of one task as plain torch operations, without the channels that the task does not use.

        Gates and norms are folded into weights. The result needs nothing of this package and any number of threads may call
        it. Its logits equal those of the method up to rounding, not to the bit; this is checked on the example of the
        network and on noise. Nothing is cut out of a network whose task uses all of it.

        Args:
            task: the number of the task.
            raw: one raw image or more, channels first: the result takes such images, of this shape and type, and
                pre-processes them; None: it takes images as the network sees them.

        Returns:
            A module from images to logits. Its attribute `extraction` is a dictionary of numbers: "weights",
            "weights_before" (of the whole network with one head) and "zeros_left", the channels that are always 0 but could
            not be cut, such as those of attention heads that are used in part.

        Raises:
            ValueError: if other tasks were learned and this one was not, or if the operations of the network depend on the
                values of images, so that they are no fixed graph.

        Example:
            >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
            >>> result = method.learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
            >>> model = method.extract(0, raw=x_test)
            >>> model(torch.tensor(x_test)).argmax(1).equal(method.predict(x_test, task=0))
            True
        """
        task = whole("a task's number", task)
        self._check_usable(task)
        network = extract(self.for_task(task), self.net.example)
        if raw is None:
            return network
        images = as_tensor("raw images", raw).to(self.net.example.device)
        return with_preprocessing(network, self.net.preprocessing, task, images)

    def masks(self, task: int) -> dict[str, Tensor]:
        """Return what a finished task uses of every layer: bools, one per unit (HAT) or per weight (PMASK, PackNet).

        Args:
            task: the number of the task.

        Returns:
            The masks by the name of the layer or parameter; empty if the method has none.
        """
        self.check_learned(task)
        return self.layer_masks(task)

    @torch.no_grad()
    def dependencies(self) -> dict[int, dict[int, float]]:
        """Return which weights of earlier tasks each finished task uses as well, for methods that have masks of weights.

        Returns:
            For every finished task, in the order of learning, the numbers of the earlier finished ones with which it shares
            weights, and the share of its own weights that these are. It is empty if the method has no masks.
        """
        return shared_with_earlier({task: self.weight_masks(task) for task in self.history})

    def num_bytes(self) -> int:
        """Return how many bytes the method keeps for all tasks together: weights, what it remembers, stored images."""
        return sum(self.kept_bytes().values())

    def kept_bytes(self) -> dict[str, int]:
        """Return the bytes that the method keeps for all tasks together, by kind.

        Returns:
            The bytes of "weights" (parameters), "buffers", "masks" and "images"; `keeps` names those of the last two kinds.
            A tensor that several modules share counts once.
        """
        found, kinds = dict.fromkeys(("weights", "buffers", "masks", "images"), 0), {"stored_images": "images", **self.keeps}
        weights = dict(self.named_parameters(remove_duplicate=False))
        seen: set[int] = set()
        for name, tensor in self.state_dict(keep_vars=True).items():
            kind = kinds.get(name.partition(".")[0], "weights" if name in weights else "buffers")
            found[kind] += 0 if id(tensor) in seen else tensor.nbytes
            seen.add(id(tensor))
        return found

    def certificate(self) -> dict[str, Any]:
        """Return what shows later that the finished tasks are, bit for bit, what they are now, as plain values for JSON.

        Returns:
            Per task the digest of all that it uses and its answers on the example; versions; a digest of it all.
            `hatrack verify` and `compare_certificates` compare two of them.
        """
        with self.lock:
            return certificate(cast("Method", self))

    def _check_usable(self, task: int) -> None:
        """Raise an error in one line unless the network knows this task and, as soon as any is finished, it is."""
        self.net.check_task_id(task)
        if self.history:  # it is empty also if only tensors were loaded, which do not tell what was learned
            self.check_learned(task)

    def check_learned(self, task: int) -> None:
        """Raise an error in one line unless this task is finished."""
        if task not in self.history:
            learned = ", ".join(map(str, self.history)) or "none"
            raise ValueError(f"task {shown(task)} has not been learned; learned are {learned}")
