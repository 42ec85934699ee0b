"""A sequential trunk cut into stages, one per layer: what methods build on that make copies of a network's layers."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hatrack.networks.network import Network

LAYERS = {nn.Linear: 2, nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}  # with the dimensions of the batch they take


class Stage(nn.Module):
    """One layer and the modules without parameters around it: after(layer(before(x)) + more)."""

    def __init__(self, name: str, before: nn.Sequential, layer: nn.Module, after: nn.Sequential) -> None:
        super().__init__()
        self.name, self.before, self.layer, self.after = name, before, layer, after

    @property
    def width(self) -> int:
        """The units or filters of its layer."""
        return self.layer.get_parameter("weight").shape[0]

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """`more` is added before the activation."""
        x = self.layer(self.before(x))
        return self.after(x if more is None else x + more)  # type: ignore[no-any-return]

    def fresh(self, x: Tensor, width: int) -> "Stage":
        """A stage like this one with new weights and so many units, for inputs like x, which lie on the CPU."""
        before, after = copy.deepcopy((self.before, self.after))
        inputs = before.eval()(x).shape[1]  # without dropout, which would draw random numbers
        stage = Stage(self.name, before, layer_like(self.layer, inputs, width), after).to(x.dtype).eval()
        try:
            stage(x)
        except RuntimeError as error:
            raise ValueError(f"{self.name} and what follows it do not work with {width} units: {error}") from None
        return stage


def layer_like(layer: Any, inputs: int, outputs: int) -> nn.Module:
    """A new layer of the same kind, kernel and stride with other widths."""
    bias = layer.bias is not None
    if type(layer) is nn.Linear:
        return nn.Linear(inputs, outputs, bias)
    how = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "padding_mode": layer.padding_mode}
    new: nn.Module = type(layer)(inputs, outputs, layer.kernel_size, bias=bias, **how)
    return new


def stages(net: Network) -> list[Stage]:
    """The stages of a network's trunk, with the trunk's own modules in them, or an error that names what is in the way."""
    if net.frozen or not all(p.requires_grad for p in net.trunk.parameters()):
        raise ValueError("parts of the trunk are frozen, which a method that makes new copies of its layers can't keep to")
    groups: list[tuple[str, list[nn.Module]]] = [("", [])]  # what precedes the first layer, then one per layer
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
    if not _agrees(net, found):
        raise _refuse("", "it computes something that its modules, one after the other, do not")
    return found


def _leaves(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules that a sequential trunk runs, in order; named_children() would leave out the second use of one."""
    if type(module).forward is not nn.Sequential.forward:
        return [(name, module)]
    inner = [(f"{name}.{key}".lstrip("."), child) for key, child in module._modules.items() if child is not None]
    return [leaf for key, child in inner for leaf in _leaves(child, key)]


def _check(stage: Stage, inputs: Tensor, seen: set[int]) -> None:
    """Is this a layer of which copies can be made? `seen` are the parameters of the layers before it."""
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
def _agrees(net: Network, found: list[Stage]) -> bool:
    """Does one stage after the other compute what the trunk computes?"""
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
    """Within it nothing of the module but these parameters takes gradients, so that no optimizer is given the others."""
    before = [(p, p.requires_grad) for p in module.parameters()]
    wanted = {id(p) for p in parameters}
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in wanted)
    try:
        yield
    finally:
        for parameter, takes in before:
            parameter.requires_grad_(takes)
