"""A method is one class in one file, and this is the base of all: plain sequential SGD, with five places to change it.

The rule of the step. `loss`, `edit_grads` and `constrain` run inside the training step. There, Python may depend on the
task but never on a tensor's value, nothing is rebound, and no tensor is made from Python numbers (`torch.tensor(...)`).
Then the same step runs eagerly, compiled, or recorded as a CUDA graph. `rules.watch_step` checks it on any machine.
"""

import functools
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods import guarantees as promises
from hatrack.methods.divergence import rate
from hatrack.methods.fit import Fit
from hatrack.networks.network import Network
from hatrack.regime import Regime
from hatrack.tasks.arrays import channels_first
from hatrack.tasks.split import Batch, TaskId
from hatrack.tasks.task import Task
from hatrack.text import SCARCE

FAR = 50.0  # standard deviations: no image is so far off those that a task was learned from


def _noted(learn: Callable[[Any, Task, Fit], None]) -> Callable[[Any, Task, Fit], None]:
    """When `learn` has ended well, the method notes the task, and what earlier tasks use and answer is seen to be as it was.
    If not, or if `learn` fails at whatever point, the state is what it was before."""

    @functools.wraps(learn)
    def noted(self: "Method", task: Task, fit: Fit) -> None:
        if not isinstance(task, Task) or not callable(fit):
            raise ValueError("learn takes a Task and a Trainer: method.learn(task, Trainer(regime))")
        if self.history.get(task.index, task.name) != task.name:
            raise ValueError(
                f"task {task.index} is {self.history[task.index]!r}, which has been learned, and {task.name!r} would take "
                f"its place: net.add_task gives it a number of its own; forget_name({task.index}) gives up the old one"
            )
        before = {key: value.clone() for key, value in self.state_dict().items()}
        answers, outer = promises.answers(self, task), self.asked  # `learn` may call that of the class above
        self.asked = answers
        try:
            learn(self, task, fit)
            promises.check(self, but=task.index)
            answers.check(self)
        except BaseException:
            with torch.no_grad():
                for key, value in self.state_dict().items():
                    if key in before and before[key].shape == value.shape:
                        value.copy_(before[key])
            raise
        finally:
            self.asked = outer
        self.forget_name(task.index)
        self.history[task.index] = task.name

    return noted


def _outside_inference(grow: Callable[..., Any]) -> Callable[..., Any]:
    """What a method grows by while it predicts is to be learned later, which tensors of the inference mode can't be."""

    @functools.wraps(grow)
    def grown(*args: Any, **keywords: Any) -> Any:
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            return grow(*args, **keywords)

    return grown


class Method(nn.Module):
    """Plain sequential SGD: each task is trained in turn and nothing protects the earlier ones.

    `forward` predicts, the parameters are what is learned, the buffers what is remembered, `state_dict()` holds both.
    """

    paper: ClassVar[str] = "the baseline of all five"  # three facts for `hatrack list`: who wrote it and when,
    needs: ClassVar[str] = "task id at test, unless the head is shared"  # what it needs beyond the data of the task,
    costs: ClassVar[str] = "nothing"  # what it adds to the network: parameters, bits per task, stored images
    instead: ClassVar[Mapping[str, str]] = {}  # options of the regime that it has others for
    passing: ClassVar[tuple[str, ...]] = ()  # parameters that it has only while it learns: no file holds them

    def __init__(self, net: Network) -> None:
        super().__init__()
        if not isinstance(net, Network):
            raise ValueError(
                f"a method is made of a Network, such as Network(trunk, classes, example), not {type(net).__name__}"
            )
        self.net = net
        self.options: dict[str, Any] = {}  # a method that has options writes self.options = check(Class, locals())
        self.built = len(net.classes), [name for name, p in net.trunk.named_parameters() if not p.requires_grad]
        self.history: dict[int, str] = {}  # the finished tasks and their names, in the order of learning
        self.asked: promises.Answers | None = None  # while a task is learned: what the finished ones answered before
        self.digests: dict[int, str] = {}  # of what tasks use, once the method was saved or loaded: see promises.py
        self.register_forward_pre_hook(_see_raw_images, with_kwargs=True)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "learn" in vars(cls):
            cls.learn = _noted(cls.learn)  # type: ignore[method-assign]
        if inspect.isfunction(grow := vars(cls).get("_grow")):  # what many have, for tasks that come later
            cls._grow = _outside_inference(grow)  # type: ignore[attr-defined]

    def forward(self, x: Tensor, task: TaskId) -> Tensor:
        """The logits of that task. Images of type float are as the network sees them, of type uint8 raw."""
        return self.net(x, task)  # type: ignore[no-any-return]

    @_noted
    def learn(self, task: Task, fit: Fit) -> None:
        """Once per task, plain Python: the paper's algorithm box."""
        fit(self, task)

    def loss(self, batch: Batch) -> Tensor:
        """What a step makes smaller."""
        return F.cross_entropy(self.forward(batch.x, batch.task), batch.y)  # raw images never come here

    def edit_grads(self, batch: Batch) -> None:
        """Between backward and the optimizer: change `.grad` in place."""

    def constrain(self) -> None:
        """After the optimizer: change the parameters in place."""

    def revisit(self, task: Task) -> None:
        """A run goes on that had learned this task before it was stopped; for a method that keeps what no state can hold."""

    def size(self) -> int:
        """How many weights it keeps, those of all tasks together."""
        return sum(p.numel() for p in self.parameters())

    def usage(self) -> dict[str, float]:
        """The share of every layer that finished tasks have taken for good; empty if a method takes nothing."""
        return {}

    def used_by(self, task: int) -> dict[str, Tensor]:
        """All that a finished task uses and that no later task may change, not a bit; empty if a method promises nothing."""
        return {}

    def suspect(self, regime: Regime) -> str:
        """A loss is not finite in a fit by this regime: the likely cause, and what to try."""
        return rate(regime)

    def used_of_network(self, task: int, exchanged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The trunk and the head of a task with some tensors exchanged: the bulk of `used_by`."""
        parts = ("trunk.", "heads.0." if self.net.shared else f"heads.{task}.")
        tensors = [*self.net.named_parameters(), *self.net.named_buffers()]
        return {name: exchanged.get(name, tensor) for name, tensor in tensors if name.startswith(parts)}

    def forget_name(self, task: int) -> None:
        """A task is given up, or learned again: what it uses may change."""
        self.history.pop(task, None)
        self.digests.pop(task, None)

    def say_what_is_free(self, task: Task) -> None:
        """A warning if the task finds hardly anything free in some layers; it learns all the same."""
        taken = self.usage()
        scarce = [f"{layer} ({1 - share:.0%})" for layer, share in taken.items() if 1 - share < SCARCE]
        if scarce:
            which = ", ".join(scarce[:3]) + (" ..." if len(scarce) > 3 else "")
            counts = f"{len(scarce)} of {len(taken)} layers: {which}"
            warnings.warn(f"task {task.name!r} finds under {SCARCE:.0%} free in {counts}", stacklevel=4)

    @torch.no_grad()
    def predict(self, images: Any, task: TaskId) -> Tensor:
        """The classes of raw images of a task: uint8, or float in the units of the task's own data; not normalised."""
        task = number_of(task)
        if isinstance(task, int) and self.history and task not in self.history:
            self.net.known(task)
            raise ValueError(f"task {task} has not been learned; learned are {', '.join(map(str, self.history))}")
        mode = self.training
        raw = channels_first("images", torch.as_tensor(images, device=self.net.example.device))
        seen = self.net.see(raw, task)
        off = seen.abs().max().item() if raw.numel() and raw.dtype != torch.uint8 else 0.0
        if not math.isfinite(off):
            raise ValueError("images hold values that are NaN or infinite")
        if off > FAR:
            warnings.warn(
                f"images are up to {off:.0f} standard deviations off those that were learned: all but bytes (uint8) are "
                "taken in the units of a task's own data, which are 0 to 1 if that was given as bytes",
                stacklevel=2,
            )
        classes: Tensor = self.eval()(seen, task).argmax(1)
        self.train(mode)
        return classes


def _see_raw_images(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before `forward`: images of type uint8 are raw, and are brought to what the task's network sees."""
    try:
        x, task = (*args, *(kwargs[name] for name in ("x", "task")[len(args) :]))
    except KeyError as missing:
        raise TypeError(f"{missing} is missing: a method is called with images and the number of their task") from None
    task = number_of(task)
    return ((method.net.see(channels_first("images", x), task) if x.dtype == torch.uint8 else x), task), {}


def number_of(task: Any) -> TaskId:
    """A task's number as Python's; numbers of many, one per image, as they are."""
    if isinstance(task, int) or (isinstance(task, Tensor) and task.dim()):
        return task
    try:
        return operator.index(task)
    except TypeError:
        raise ValueError(f"a task is given by its number, or a tensor of them, one per image, not {task!r}") from None


def used_modules(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """All tensors of some modules, for `used_by` of a method whose tasks have modules of their own."""
    return {f"{key}.{name}": tensor for key, module in modules.items() for name, tensor in module.state_dict().items()}
