"""The diagonal of the Fisher information: how much the loss of a task cares about every parameter.

F_i = (1/n) sum_j (d loss(x_j, y_j) / d theta_i)^2 needs the gradient of every example by itself, but no loop over examples:
one batched pass keeps what every layer reads and the gradient of what it puts out, and from these two follow the gradients
of the examples. For a linear layer that reads one row per example not even these are needed, only squares:
sum_j (delta_j x_j^T)^2 = (delta^2)^T (x^2). Parameters that are used in another way go through `vmap` of the whole network.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hatrack.methods.method import Method
from hatrack.methods.parts.vectors import values
from hatrack.seeds import generator, seeded
from hatrack.tasks.batches import split_batches
from hatrack.tasks.split import Split

Estimator = Literal["samples", "expected", "batches"]
LAYERS = {  # functions of (input, parameters, ...) that treat every row of the input by itself
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    F.batch_norm, F.group_norm, F.layer_norm, F.instance_norm, F.embedding,
}  # fmt: skip
ROWS = 1024  # examples in one pass, at most
ROOM = 2**26  # numbers that their outputs of all layers, or their gradients of the largest parameter, may take in a pass
BATCH = 20  # of the HAT authors' estimate


def fisher_diagonal(
    method: Method,
    split: Split,
    task: int,
    parameters: Sequence[nn.Parameter],
    *,
    samples: int | None = None,
    estimator: Estimator = "samples",
) -> Tensor:
    """The Fisher diagonal of the cross-entropy of `method(x, task)`, as one vector in the order of the parameters.

    `samples` examples, drawn by the network's seed, stand for the split (None or 0: all of it). The estimators:
    "samples": the squared gradients of single examples with their true labels, exactly, in evaluation mode;
    "expected": the same with every label, each as often as the method expects it;
    "batches": what the HAT authors use: squared gradients of the mean losses of batches of 20, with dropout.
    """
    index = torch.arange(len(split), device=split.y.device)
    if samples and samples < len(split):
        index = torch.randperm(len(split), generator=generator(method.net.seed, "fisher", task))[:samples].to(index.device)
    mode = method.training
    with torch.enable_grad(), seeded(method.net.seed, "fisher dropout", task):
        part = split.part(index)
        found = _batches(method, part, task, parameters)
        if estimator != "batches":
            found = _passes(method, part, task, parameters, expected=estimator == "expected")
        totals = [torch.zeros_like(p) for p in parameters]
        for squares in found:
            for total, square in zip(totals, squares, strict=True):
                total += square
    method.train(mode)
    return values(totals).div_(len(index))


def _batches(method: Method, split: Split, task: int, parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Of every batch: its size times the squared gradient of its mean loss. Norms keep the statistics that they have."""
    kept = [(buffer, buffer.clone()) for buffer in method.net.buffers()]
    method.train()
    try:
        for part in split_batches(torch.arange(len(split), device=split.y.device), BATCH):
            loss = F.cross_entropy(method(split.inputs(part), task), split.y[part])
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            yield [gradient.square() * len(part) for gradient in gradients]
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def _passes(
    method: Method, split: Split, task: int, parameters: Sequence[nn.Parameter], *, expected: bool
) -> Iterator[list[Tensor]]:
    """Of every pass over some examples: the sums of their squared gradients."""
    every = torch.arange(len(split), device=split.y.device)
    squares = Squares(method.eval(), task, parameters, split.inputs(every[[0, len(split) // 2, -1]]))
    for part in torch.split(every, squares.rows):
        x, y = split.inputs(part), split.y[part]
        if not expected:
            yield squares(x, y, torch.ones_like(y, dtype=x.dtype))
            continue
        with torch.no_grad():
            shares = F.softmax(method(x, task), 1)
        for label in range(shares.shape[1]):
            yield squares(x, torch.full_like(y, label), shares[:, label])


class Use(NamedTuple):
    """One call of a layer, for one of its parameters."""

    function: Callable[..., Tensor]
    given: dict[int | str, Any]  # the arguments by place or name, the input at place 0, parameters as constants
    key: int | str  # where this parameter stands
    probe: Tensor  # zeros added to the output: their gradient is that of the output

    @property
    def plain(self) -> bool:
        """A linear layer that reads one row per example."""
        return self.function is F.linear and self.given[0].dim() == 2 and self.probe.dim() == 2

    @property
    def rows(self) -> set[int]:
        return {len(self.given[0]), len(self.probe)}

    def per_example(self, delta: Tensor) -> Tensor:
        """The parameter's gradients (examples, *shape), from those of the output."""

        def single(row: Tensor, delta: Tensor) -> Any:
            def layer(own: Tensor) -> Tensor:
                return _call(self.function, {**self.given, 0: row[None], self.key: own})

            return vjp(layer, self.given[self.key])[1](delta[None])[0]

        gradients: Tensor = vmap(single)(self.given[0], delta)
        return gradients


def _call(function: Callable[..., Tensor], given: dict[int | str, Any]) -> Tensor:
    named = {key: value for key, value in given.items() if isinstance(key, str)}
    return function(*(given[place] for place in range(len(given) - len(named))), **named)


class Watch(TorchFunctionMode):
    """Within it, layers take these parameters as constants, and how they use each of them is kept."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.uses: dict[Tensor, list[Use]] = {p: [] for p in parameters}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[int | str, Any] = {**dict(enumerate(args)), **(kwargs or {})}
        own = {key: value for key, value in given.items() if isinstance(value, nn.Parameter) and value in self.uses}
        if func not in LAYERS or not own or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        given.update({key: parameter.detach() for key, parameter in own.items()})
        given = {0: given.pop("input"), **given} if "input" in given else given
        output = _call(func, given)
        probe = torch.zeros_like(output, requires_grad=True)
        for key, parameter in own.items():
            self.uses[parameter].append(Use(func, given, key, probe))
        return output + probe


class Squares:
    """The sums over some examples of their squared gradients: `squares(x, y, weights)`, one tensor per parameter.

    Parameters that nothing but layers use are `followed`; for the `others` the whole network is differentiated. Three images
    show which is which, and `rows` is how many examples a pass may take.
    """

    def __init__(self, method: Method, task: int, parameters: Sequence[nn.Parameter], x: Tensor) -> None:
        self.method, self.task, self.parameters = method, task, parameters
        self.followed: list[Tensor] = list(parameters)
        self.others: dict[str, Tensor] = {}
        self.three = x, torch.zeros(len(x), dtype=torch.int64, device=x.device), torch.ones(len(x), device=x.device)
        (uses, lost), (_, also) = (self._follow(*(t[:count] for t in self.three)) for count in (2, 3))
        self._set_aside(set(parameters) if self._mixes_examples() else lost | also)
        apart = [p.numel() for p in self.followed if [use.plain for use, _ in uses[p]] != [True]]
        outputs = {use.probe: use.probe.numel() // 2 for calls in uses.values() for use, _ in calls}
        numbers = max(1, *apart, sum(outputs.values()), sum(p.numel() for p in self.others.values()))
        self.rows = max(1, min(ROWS, ROOM // numbers))

    def __call__(self, x: Tensor, y: Tensor, weights: Tensor) -> list[Tensor]:
        roots = weights.sqrt()  # the loss times the root has the squared gradient times the weight
        uses, lost = self._follow(x, y, roots)
        if lost:  # these images take another way through the network than the three
            self._set_aside(lost)
            return self(x, y, weights)
        with torch.no_grad():
            found = {p: _squared(p, uses[p]) for p in self.followed}
        found |= self._of_others(x, y, roots)
        return [found[p] for p in self.parameters]

    def _follow(self, x: Tensor, y: Tensor, roots: Tensor) -> tuple[dict[Tensor, list[tuple[Use, Tensor]]], set[Tensor]]:
        """The uses of every parameter with the gradients of their outputs; and the parameters that can't be followed, since
        they are used elsewhere (the loss depends on them, though all layers take them as constants) or in layers whose rows
        are not the examples."""
        with Watch(self.followed) as watch:
            loss = (F.cross_entropy(self.method(x, self.task), y, reduction="none") * roots).sum()
        probes = list({use.probe: None for calls in watch.uses.values() for use in calls})
        inputs = [*probes, *self.followed]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True) if inputs and loss.requires_grad else ()
        known = {t: gradient for t, gradient in zip(inputs, gradients, strict=False) if gradient is not None}
        lost = {p for p, calls in watch.uses.items() if p in known or any(use.rows != {len(x)} for use in calls)}
        uses = {p: [(u, known[u.probe]) for u in calls if u.probe in known] for p, calls in watch.uses.items()}
        return uses, lost

    def _mixes_examples(self) -> bool:
        """Whether an image's logits depend on the others in the batch, as where a norm uses the batch's statistics."""
        with torch.no_grad():
            three, two = (self.method(self.three[0][:count], self.task) for count in (3, 2))
        return not torch.allclose(three[:2], two, rtol=1e-3, atol=1e-4)

    def _set_aside(self, lost: set[Tensor]) -> None:
        """These can't be followed: differentiate the network by them with vmap, or in a loop where vmap can't take it."""
        self.followed = [p for p in self.followed if p not in lost]
        self.others |= {name: p for name, p in self.method.named_parameters() if p in lost}
        self._of_others = self._by_vmap
        try:
            self._of_others(*self.three)
        except (RuntimeError, ValueError):  # it works in place, draws numbers or reads values
            self._of_others = self._by_loop

    @torch.no_grad()
    def _by_vmap(self, x: Tensor, y: Tensor, roots: Tensor) -> dict[Tensor, Tensor]:
        def loss(own: dict[str, Tensor], x: Tensor, y: Tensor, root: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.method, own, (x[None], self.task)), y[None]) * root

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # for some operations vmap itself has a loop
            gradients = vmap(grad(loss), (None, 0, 0, 0))(self.others, x, y, roots) if self.others else {}
        return {p: gradients[name].square().sum(0) for name, p in self.others.items()}

    def _by_loop(self, x: Tensor, y: Tensor, roots: Tensor) -> dict[Tensor, Tensor]:
        totals = {p: torch.zeros_like(p) for p in self.others.values()}
        for row, label, root in zip(x, y, roots, strict=True):
            loss = F.cross_entropy(self.method(row[None], self.task), label[None]) * root
            gradients = torch.autograd.grad(loss, list(totals), allow_unused=True, materialize_grads=True)
            for total, gradient in zip(totals.values(), gradients, strict=True):
                total += gradient.square()
        return totals


def _squared(parameter: Tensor, uses: list[tuple[Use, Tensor]]) -> Tensor:
    """The sum over the examples of the parameter's squared gradients, which add up over its uses."""
    if not uses:
        return torch.zeros_like(parameter)
    if len(uses) == 1 and uses[0][0].plain:
        use, delta = uses[0]
        return delta.square().t() @ use.given[0].square() if parameter.dim() == 2 else delta.square().sum(0)
    total, *more = (use.per_example(delta) for use, delta in uses)
    for gradients in more:
        total = total + gradients
    return total.square().sum(0)
