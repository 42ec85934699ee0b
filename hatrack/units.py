"""Which units feed which weights: read off a trunk once, so that no method lists the layers of a network by hand.

The units of a trunk (linear units and convolution filters) are numbered through, layer after layer. Every weight is known
by the unit it writes and the unit it reads, so unit masks give weight masks; and the trunk can be run with a gate on
every unit. Trunks are followed here when they are sequential; others are refused with an error that names the module.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

LAYERS = {nn.Linear: 2, nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}  # with the dimensions of the batch they take
# Modules without parameters that treat every channel by itself, so that a channel's unit stays known behind them.
ELEMENTWISE = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
)  # fmt: skip
POOLING = {
    nn.MaxPool1d: 3, nn.MaxPool2d: 4, nn.MaxPool3d: 5, nn.AvgPool1d: 3, nn.AvgPool2d: 4, nn.AvgPool3d: 5,
    nn.AdaptiveAvgPool1d: 3, nn.AdaptiveAvgPool2d: 4, nn.AdaptiveAvgPool3d: 5,
    nn.AdaptiveMaxPool1d: 3, nn.AdaptiveMaxPool2d: 4, nn.AdaptiveMaxPool3d: 5,
}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A parameter of the trunk: the units that its outputs are, and the units that its inputs read (None: a bias)."""

    name: str
    parameter: nn.Parameter
    writes: Tensor  # (outputs,) numbers of units
    reads: Tensor | None  # (inputs,) numbers of units; -1 stands for the images, which are always on

    def spread(self, units: Tensor) -> Tensor:
        """The smaller of the values of the two units of every weight, in the parameter's shape."""
        values = torch.cat([units, units.new_ones(1)])
        writes = values[self.writes]
        if self.reads is None:
            return writes
        least = torch.minimum(writes[:, None], values[self.reads][None])
        return least.view(*least.shape, *[1] * (self.parameter.dim() - 2)).expand_as(self.parameter)


class Units:
    """The units of a trunk, and its forward pass with a gate on each of them."""

    def __init__(self, trunk: nn.Module, example: Tensor) -> None:
        self.layers: dict[str, slice] = {}  # the numbers of the units of every layer
        self.weights: list[Weight] = []
        self.count = 0
        # The modules in order; with each, the units to gate in front of it: None, or one per channel of its input.
        self._chain: list[tuple[nn.Module, Tensor | None]] = []
        mode = trunk.training
        trunk.eval()
        labels: Tensor | None = None  # the unit of every channel; None: the images
        x = example
        with torch.no_grad():
            for name, module in _leaves(trunk, ""):
                self._chain.append((module, labels if type(module) in LAYERS else None))
                labels = self._behind(name, module, x, labels)
                x = module(x)
        trunk.train(mode)
        if labels is None:
            raise ValueError("the trunk has no linear or convolutional layer whose units could be gated")
        self.features = labels  # the unit of every feature
        self._agrees(trunk, example)

    @torch.no_grad()
    def _agrees(self, trunk: nn.Module, example: Tensor) -> None:
        """With every gate open the network must be the user's: a last check that nothing was passed over."""
        mode = trunk.training
        trunk.eval()
        same = torch.equal(
            self.run(example, torch.ones(self.count, dtype=torch.bool, device=example.device)), trunk(example)
        )
        trunk.train(mode)
        covered = {id(weight.parameter) for weight in self.weights}
        if not same or any(id(parameter) not in covered for parameter in trunk.parameters()):
            raise ValueError(
                "the trunk computes something that its layers, one after the other, do not; it can't be followed yet"
            )

    def _behind(self, name: str, module: nn.Module, x: Tensor, labels: Tensor | None) -> Tensor | None:
        """The unit of every channel behind a module, given those in front (types are exact: a subclass may differ)."""
        kind = type(module)
        if kind in LAYERS:
            if x.dim() != LAYERS[kind]:
                raise _refuse(name, f"{kind.__name__} on inputs of {x.dim()} dimensions")
            if getattr(module, "groups", 1) != 1:
                raise _refuse(name, "a grouped convolution")
            return self._layer(name, module, labels)
        if kind is nn.Flatten and module.start_dim == 1 and module.end_dim == -1:
            return None if labels is None else labels.repeat_interleave(x[0].numel() // x.shape[1])
        if kind in ELEMENTWISE or POOLING.get(kind) == x.dim():
            return labels
        raise _refuse(name, kind.__name__)

    def _layer(self, name: str, layer: nn.Module, reads: Tensor | None) -> Tensor:
        weight, bias = layer.weight, layer.bias
        if not isinstance(weight, nn.Parameter):
            raise _refuse(name, f"{type(layer).__name__} with a computed weight")
        self.layers[name] = slice(self.count, self.count + weight.shape[0])
        writes = torch.arange(self.count, self.count + weight.shape[0], device=weight.device)
        self.count += weight.shape[0]
        images = torch.full((weight.shape[1],), -1, device=weight.device)
        self.weights.append(Weight(f"{name}.weight", weight, writes, images if reads is None else reads))
        if isinstance(bias, nn.Parameter):
            self.weights.append(Weight(f"{name}.bias", bias, writes, None))
        return writes

    def run(self, x: Tensor, gates: Tensor) -> Tensor:
        """The features of a batch with a gate on every unit: gates (units,), or (batch, units) for one row per example.

        Gates of type bool select, so that not even an infinity passes a closed one; others multiply.
        """
        for module, units in self._chain:
            x = module(x if units is None else _gate(x, gates[..., units]))
        return _gate(x, gates[..., self.features])


def _gate(x: Tensor, gates: Tensor) -> Tensor:
    gates = gates.view(-1, gates.shape[-1], *[1] * (x.dim() - 2))
    return torch.where(gates, x, 0) if gates.dtype == torch.bool else x * gates


def _leaves(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    if type(module).forward is nn.Sequential.forward:
        inner = module._modules.items()  # named_children() would leave out the second use of a module
        return [leaf for key, child in inner if child for leaf in _leaves(child, f"{name}.{key}" if name else key)]
    return [(name, module)]


def _refuse(name: str, what: str) -> ValueError:
    return ValueError(
        f"the units of {name or 'the trunk'} ({what}) can't be followed yet: a trunk must be an nn.Sequential of linear and "
        "convolutional layers, activations, dropout, pooling and Flatten"
    )
