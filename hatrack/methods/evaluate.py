"""The loss and the accuracy of a method on a data set, with and without a task id."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hatrack.methods.method import Method
from hatrack.methods.modes import evaluation_mode
from hatrack.networks.network import Network
from hatrack.options import expect
from hatrack.tasks.device import split_to_device
from hatrack.tasks.split import Split

BATCH = 1000  # images per forward pass
LARGE = 2**25  # bytes of images per forward pass on a GPU: 10,699 of 28 x 28 pixels, 2,730 of 3 x 32 x 32

Wrap = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]


class Score(NamedTuple):
    """What `evaluate` returns.

    Attributes:
        loss: the mean loss: the cross-entropy, unless the task asks for another. With class weights it is divided by the sum
            of the weights of the examples, as in training and in `torch.nn.functional.cross_entropy(weight=...)`.
        accuracy: the share of the images that are classified correctly; of another target, its score.
    """

    loss: float
    accuracy: float


class Evaluation:
    """Evaluates a method on a data set, as often as it is called.

    Args:
        method: the method.
        split: the data set, on the device of the method.
        wrap: applied once to the function that adds up a batch; a trainer records it here.
        wait: called before the result is read from the device.
        batch: images per forward pass.
        total: where loss and correct answers are added up, (2,) in float64; None: a new tensor.
    """

    def __init__(
        self,
        method: Method,
        split: Split,
        *,
        wrap: Wrap | None = None,
        wait: Callable[[], None] | None = None,
        batch: int = BATCH,
        total: Tensor | None = None,
    ) -> None:
        self.method, self.split, self.wait = method, split, wait
        self.total = torch.zeros(2, dtype=torch.float64, device=split.y.device) if total is None else total
        self.batches = torch.split(torch.arange(len(split), device=split.y.device), batch)
        self.divisors = split.target.divisor(split.y) or 1, max(1, len(split))  # of the losses, and of the scores
        self.add: Callable[[Tensor], Tensor] = wrap(self._add) if wrap and split.target.recordable else self._add

    def _add(self, index: Tensor) -> Tensor:
        """Add the loss and the number of correct answers of a batch to the total."""
        return self._add_images(self.split.inputs(index), index)

    def _add_images(self, x: Tensor, index: Tensor) -> Tensor:
        """Add those of a batch whose images are given, as the network sees them."""
        task = self.split.task if isinstance(self.split.task, int) else self.split.task[index]
        logits, y = self.method(x, task), self.split.y[index]
        self.total[0] += self.split.target.total_loss(logits, y)
        self.total[1] += self.split.target.total_score(logits, y)
        return self.total

    @torch.no_grad()
    def __call__(self) -> Score:
        """Return mean cross-entropy and accuracy, in evaluation mode; the device is waited for once."""
        self.total.zero_()
        with evaluation_mode(self.method):
            self.add_all()
        if self.wait:
            self.wait()
        return self.score(self.total.tolist())

    def score(self, total: Sequence[float]) -> Score:
        """Return the means that belong to a total of losses and scores."""
        return Score(*(value / count for value, count in zip(total, self.divisors, strict=True)))

    def add_all(self) -> None:
        """Add all batches to the total. Nothing is read from the device."""
        if self.split.stream is not None:
            for index, x in self.split.read(self.batches):
                self._add_images(x, index)
            return
        for index in self.batches:
            self.add(index)

    def forget_recording(self) -> None:
        """Free the memory of what `wrap` recorded."""
        self.add = self._add


class Evaluations:
    """Evaluates a method on several data sets, as often as it is called. All totals are read from the device at once.

    On a CPU the scores are those of `evaluate`, bit for bit; on a GPU they are the same but for rounding, since more images
    make a batch (`images_per_batch`).

    Args:
        method: the method.
        splits: the data sets, on the device of the method.
        wrap: applied once per data set to the function that adds up a batch, to record it. That pays if the object is called
            many times; for one call the first, eager calls and the recording cost more than they save.
        wait: called before the results are read from the device.
    """

    def __init__(
        self,
        method: Method,
        splits: Sequence[Split],
        *,
        wrap: Wrap | None = None,
        wait: Callable[[], None] | None = None,
    ) -> None:
        self.method, self.wait = method, wait
        self.totals = torch.zeros(len(splits), 2, dtype=torch.float64, device=method.net.example.device)
        self.parts = []
        for split, total in zip(splits, self.totals, strict=True):
            own = None if split.on_host else wrap  # a recording can't gather images in the host's memory
            self.parts.append(Evaluation(method, split, wrap=own, batch=images_per_batch(split), total=total))

    @torch.no_grad()
    def __call__(self) -> list[Score]:
        """Return mean cross-entropy and accuracy on every data set, in evaluation mode."""
        self.totals.zero_()
        with evaluation_mode(self.method):
            for part in self.parts:
                part.add_all()
        if self.wait:
            self.wait()
        found = zip(self.totals.tolist(), self.parts, strict=True)
        return [part.score(total) for total, part in found]


def images_per_batch(split: Split) -> int:
    """Return how many images of a data set make one forward pass of an evaluation.

    On a GPU small batches would leave it waiting for Python, so that there a batch has up to LARGE bytes of images, and all
    batches of the data set have about the same size. On a CPU larger batches are no faster.
    """
    if split.y.device.type != "cuda":
        return BATCH
    most = max(BATCH, LARGE // (4 * math.prod(split.transform.shape)))
    return max(1, math.ceil(len(split) / math.ceil(max(1, len(split)) / most)))


def evaluate(method: Method, split: Split) -> Score:
    """Evaluate a method on a data set.

    Args:
        method: the method; it is evaluated in evaluation mode and left in the mode it was in.
        split: the `test`, `valid` or `train` part of a task; it is brought to the device of the method.

    Returns:
        The mean cross-entropy and the accuracy, as `loss` and `accuracy`.

    Example:
        >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
        >>> result = method.learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
        >>> score = hr.evaluate(method, tasks[0].test)
        >>> 0 <= score.accuracy <= 1
        True
    """
    expect("method", method, Method, "a method, such as HAT(net)")
    expect("split", split, Split, "a part of a task: its .test, .valid or .train")
    if not len(split):
        raise ValueError("there are no images to evaluate on; a task made with valid=0 has no validation data")
    return Evaluation(method, split_to_device(split, method.net.example.device))()


def without_task_id(method: Method, split: Split, tasks: Sequence[int]) -> float:
    """Return the accuracy if it is unknown which of `tasks` an example belongs to: the class with the largest logit wins.

    With a shared head the outputs of all tasks mean the same classes, so only the class has to be right.

    Args:
        method: the method.
        split: the data set of one task; it is brought to the device of the method.
        tasks: the numbers of the tasks to choose from.

    Returns:
        The share of the examples whose task and class are both found.
    """
    return without_task_ids(method, [split], tasks)[0]


@torch.no_grad()
def without_task_ids(
    method: Method, splits: Sequence[Split], tasks: Sequence[int], *, wait: Callable[[], None] | None = None
) -> list[float]:
    """Return what `without_task_id` returns, for several data sets; the results are read from the device at once.

    Args:
        method: the method.
        splits: a data set per task; they are brought to the device of the method.
        tasks: the numbers of the tasks to choose from.
        wait: called before the results are read from the device.

    Returns:
        One accuracy per data set; not numbers if a data set has other targets than classes.
    """
    if any(split.target.kind != "classes" for split in splits):
        return [math.nan] * len(splits)  # outputs that mean different things can't be compared
    device = method.net.example.device
    right = torch.zeros(len(splits), dtype=torch.int64, device=device)
    with evaluation_mode(method):
        for count, split in zip(right, splits, strict=True):
            split = split_to_device(split, device)
            batches = torch.split(torch.arange(len(split), device=device), images_per_batch(split))
            for index, x in split.read(batches):
                count += _found_both(method, split, index, x, tasks).sum()
    if wait:
        wait()
    return [count / len(split) for count, split in zip(right.tolist(), splits, strict=True)]


def _found_both(method: Method, split: Split, index: Tensor, x: Tensor, tasks: Sequence[int]) -> Tensor:
    """Return for each of some examples, with images x, whether the largest logit of all tasks is that of its own task and
    class."""
    assert isinstance(split.task, int)
    if method.net.incremental:  # one head of all classes needs no task id, and each class belongs to one task
        return method(x, split.task).argmax(1) == split.y[index]
    best = [logits.max(1) for logits in _logits(method, x, tasks)]  # (value, class) per task
    winner = torch.stack([value for value, _ in best]).argmax(0)
    answer = torch.stack([label for _, label in best]).gather(0, winner[None])[0]
    same = answer == split.y[index]
    return same if method.net.shared else same & (winner == list(tasks).index(split.task))


def _logits(method: Method, x: Tensor, tasks: Sequence[int]) -> Iterator[Tensor]:
    """Yield the logits of several tasks. The trunk runs once if the features do not depend on the task."""
    if not _has_common_features(method):
        yield from (method(x, task) for task in tasks)
        return
    method.make_room()
    features = method.net.trunk(x)
    yield from (method.net.head(features, task) for task in tasks)


def _has_common_features(method: Method) -> bool:
    """Return whether a method's forward is `Method.forward`, on a `Network` as it is: a head of the trunk's features."""
    changed = any("forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks for part in (method, method.net))
    kind, net = type(method), type(method.net)
    return not changed and kind.forward is Method.forward and kind.__call__ is Method.__call__ and net is Network
