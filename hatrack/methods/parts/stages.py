"""Split a sequential trunk into stages, one per layer, for methods that make more layers like those of the network."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hatrack.networks.network import Network

LAYERS = {nn.Linear: 2, nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}  # and the number of dimensions of their inputs


class Stage(nn.Module):
    """One layer and the modules without parameters around it: it computes after(layer(before(x)) + more)."""

    def __init__(self, name: str, before: nn.Sequential, layer: nn.Module, after: nn.Sequential) -> None:
        super().__init__()
        self.name, self.before, self.layer, self.after = name, before, layer, after

    @property
    def width(self) -> int:
        """The number of units or filters of its layer."""
        return self.layer.get_parameter("weight").shape[0]

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """Run the stage; `more` is added to the layer's output, before the activation."""
        x = self.layer(self.before(x))
        return self.after(x if more is None else x + more)  # type: ignore[no-any-return]

    def fresh(self, x: Tensor, width: int) -> "Stage":
        """Return a stage like this one with new weights.

        Args:
            x: an input, on the CPU.
            width: the number of units of the new layer.
        """
        before, after = copy.deepcopy((self.before, self.after))
        inputs = before.eval()(x).shape[1]  # in evaluation mode, so that dropout draws no random numbers
        stage = Stage(self.name, before, layer_like(self.layer, inputs, width), after).to(x.dtype).eval()
        try:
            stage(x)
        except RuntimeError as error:
            raise ValueError(f"{self.name} and what follows it do not work with {width} units: {error}") from None
        return stage


def layer_like(layer: Any, inputs: int, outputs: int) -> nn.Module:
    """Return a new layer of the same kind, kernel and stride with other widths."""
    bias = layer.bias is not None
    if type(layer) is nn.Linear:
        return nn.Linear(inputs, outputs, bias)
    how = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "padding_mode": layer.padding_mode}
    new: nn.Module = type(layer)(inputs, outputs, layer.kernel_size, bias=bias, **how)
    return new


def stages(net: Network) -> list[Stage]:
    """Split the trunk of a network into stages, which contain the trunk's own modules.

    Raises:
        ValueError: the trunk is not such a sequence; the message names the module that prevents it.
    """
    if net.frozen or not all(p.requires_grad for p in net.trunk.parameters()):
        raise ValueError("parts of the trunk are frozen, which a method that makes new copies of its layers can't keep to")
    groups: list[tuple[str, list[nn.Module]]] = [("", [])]  # the modules before the first layer, then one group per layer
    for name, module in _leaves(net.trunk, ""):
        if type(module) in LAYERS:
            groups.append((name, [module]))
        elif next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            raise _refuse(name, type(module).__name__)
        else:
            groups[-1][1].append(module)
    found = []
    for number, (name, (layer, *after)) in enumerate(groups[1:]):
        before = groups[0][1] if number == 0 else []
        found.append(Stage(name, nn.Sequential(*before), layer, nn.Sequential(*after)))
    if not found:
        raise ValueError("the trunk has no linear or convolutional layer")
    if not _compute_the_same(net, found):
        raise _refuse("", "it computes something that its modules, one after the other, do not")
    return found


def _leaves(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that a sequential trunk runs, in order. (named_children() omits the second use of a module.)"""
    if type(module).forward is not nn.Sequential.forward:
        return [(name, module)]
    inner = [(f"{name}.{key}".lstrip("."), child) for key, child in module._modules.items() if child is not None]
    return [leaf for key, child in inner for leaf in _leaves(child, key)]


def _check(stage: Stage, inputs: Tensor, seen: set[int]) -> None:
    """Raise an error if no layers like this one can be made. `seen` has the parameters of the layers before it."""
    layer, kind = stage.layer, type(stage.layer)
    if inputs.dim() != LAYERS[kind]:
        raise _refuse(stage.name, f"{kind.__name__} on inputs of {inputs.dim()} dimensions")
    if getattr(layer, "groups", 1) != 1:
        raise _refuse(stage.name, "a grouped convolution")
    if not isinstance(layer.weight, nn.Parameter):
        raise _refuse(stage.name, f"{kind.__name__} with a computed weight")
    if seen & {id(p) for p in layer.parameters()}:
        raise _refuse(stage.name, f"{kind.__name__} that shares its weights with another layer")


@torch.no_grad()
def _compute_the_same(net: Network, found: list[Stage]) -> bool:
    """Return whether the stages, one after the other, compute the same as the trunk."""
    mode, x = net.trunk.training, net.example
    seen: set[int] = set()
    net.trunk.eval()
    try:
        for stage in found:
            _check(stage, stage.before(x), seen)
            seen |= {id(p) for p in stage.layer.parameters()}
            x = stage(x)
        return torch.equal(x, net.trunk(net.example))
    finally:
        net.trunk.train(mode)


def _refuse(name: str, what: str) -> ValueError:
    return ValueError(
        f"{name or 'the trunk'} ({what}) can't be copied layer by layer: the trunk must be an nn.Sequential of linear and "
        "convolutional layers and of modules without parameters or buffers"
    )


@contextmanager
def training_only(module: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let only these parameters of a module require gradients within the block, so that only they are trained."""
    before = [(p, p.requires_grad) for p in module.parameters()]
    trained = {id(p) for p in parameters}
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in trained)
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
