"""Linear layers to which units can be added, for methods whose network grows.

Memory for all units that a layer can get, its spare units, is allocated at the start, and a table says when each of them
was added. So no shape ever changes: a matrix product of another width would round differently in its last bits, and neither
a checkpoint nor the state of an optimizer would fit.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.parts.stages import Stage, stages
from hatrack.networks.network import Network

NOT_ADDED = 32767  # in `born`: a spare unit that has not been added yet
POINTWISE = (
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh,
    nn.Sigmoid, nn.Hardtanh,
)  # fmt: skip


class Layer(NamedTuple):
    """The weight and the bias of a linear layer with all its spare units; or two masks of these shapes."""

    weight: Tensor  # (units + spare, inputs + spare units of the layer below)
    bias: Tensor  # (units + spare,)


class ExpandableLayer(NamedTuple):
    """The parameters of a layer: its original ones and those of its spare units.

    The first layer has no new inputs, and a head has no new outputs.
    """

    weight: nn.Parameter  # (units, inputs)
    bias: nn.Parameter  # (units,)
    columns: nn.Parameter | None  # from the spare units of the layer below to the original units: (units, spare)
    rows: nn.Parameter | None  # into the spare units: (spare, inputs + spare)
    biases: nn.Parameter | None  # of the spare units: (spare,)

    def join(self) -> Layer:
        """Put all parameters together into one weight and one bias."""
        weight = self.weight if self.columns is None else torch.cat([self.weight, self.columns], 1)
        if self.rows is None or self.biases is None:
            return Layer(weight, self.bias)
        return Layer(torch.cat([weight, self.rows]), torch.cat([self.bias, self.biases]))

    def split(self, layer: Layer) -> list[tuple[nn.Parameter, Tensor]]:
        """Return every parameter with its part of a joined layer: the inverse of `join`."""
        (units, inputs), (weight, bias) = self.weight.shape, layer
        new = [(self.columns, weight[:units, inputs:]), (self.rows, weight[units:]), (self.biases, bias[units:])]
        own = [(self.weight, weight[:units, :inputs]), (self.bias, bias[:units])]
        return own + [(parameter, part) for parameter, part in new if parameter is not None]


class ExpandableLayers(nn.Module):
    """The hidden layers and heads of a network, with spare units in every hidden layer.

    Args:
        net: the network; its trunk must be a sequence of linear layers.
        size: how many spare units every hidden layer gets.
    """

    born: Tensor  # (hidden layers, size): the time at which a spare unit was added; the method defines what time is

    def __init__(self, net: Network, size: int) -> None:
        super().__init__()
        self.size = size
        self.stages = _linear_stages(net)
        shapes = [stage.layer.get_parameter("weight").shape for stage in self.stages]  # (units, inputs)
        zeros = self.stages[0].layer.get_parameter("weight").new_zeros
        self.columns = nn.ParameterList(zeros(units, size) for units, _ in shapes[1:])
        self.rows = nn.ParameterList(zeros(size, inputs + size * (level > 0)) for level, (_, inputs) in enumerate(shapes))
        self.biases = nn.ParameterList(zeros(size) for _ in shapes)
        self.tops = nn.ParameterList()  # the columns of the heads: (classes, size)
        self.register_buffer("born", zeros(len(shapes), size, dtype=torch.int16).fill_(NOT_ADDED))
        self.grow(net)

    def grow(self, net: Network) -> None:
        """Add inputs from the spare units to every head that has none yet."""
        for head in list(net.heads)[len(self.tops) :]:
            weight = head.get_parameter("weight")
            self.tops.append(nn.Parameter(weight.new_zeros(len(weight), self.size)))

    def layers(self, net: Network, task: int) -> list[ExpandableLayer]:
        """Return the parameters of the hidden layers and of the head of a task."""
        head = 0 if net.shared else task
        own = [*(stage.layer for stage in self.stages), net.heads[head]]
        new = zip([None, *self.columns, self.tops[head]], [*self.rows, None], [*self.biases, None], strict=True)
        return [
            ExpandableLayer(m.get_parameter("weight"), m.get_parameter("bias"), *n) for m, n in zip(own, new, strict=True)
        ]

    def units_until(self, time: Tensor) -> list[Tensor]:
        """Return a mask of the units of every layer that exist at this time: (units + spare,)."""
        exists = (self.born <= time).unbind()
        return [torch.cat([e.new_ones(stage.width), e]) for stage, e in zip(self.stages, exists, strict=True)]

    def units_added_at(self, time: int) -> list[Tensor]:
        """Return a mask of the units of every layer that were added at this time: (units + spare,)."""
        added = (self.born == time).unbind()
        return [torch.cat([a.new_zeros(stage.width), a]) for stage, a in zip(self.stages, added, strict=True)]

    def run(self, net: Network, x: Tensor, task: int, units: list[Tensor]) -> Tensor:
        """Compute the logits of a task with these units. The others are set to 0 by `where`, which also stops infinities."""
        *hidden, head = [layer.join() for layer in self.layers(net, task)]
        for stage, layer, mask in zip(self.stages, hidden, units, strict=True):
            x = torch.where(mask, stage.after(F.linear(stage.before(x), *layer)), 0)
        return F.linear(x, *head)

    def read(self, net: Network, task: int) -> list[Layer]:
        """Return a copy of the values of all layers, which may be edited and written back."""
        return [Layer(*(values.detach().clone() for values in layer.join())) for layer in self.layers(net, task)]

    @torch.no_grad()
    def write(self, net: Network, task: int, values: list[Layer]) -> None:
        """Write values of all layers into the parameters."""
        for layer, value in zip(self.layers(net, task), values, strict=True):
            for parameter, part in layer.split(value):
                parameter.copy_(part)

    def add_units(self, level: int, count: int, time: int) -> Tensor:
        """Add units to a layer, or fewer if not enough spare units are left, and return their numbers."""
        spare = (self.born[level] == NOT_ADDED).nonzero().flatten()[:count]
        self.born[level, spare] = time
        return spare + self.stages[level].width


def masks_between(units: list[Tensor], like: list[Layer]) -> list[Layer]:
    """Return masks of the weights between these units, of their biases, and of the head that reads them.

    Args:
        units: a mask of the units of every hidden layer.
        like: layers that have the shapes of the masks.
    """
    images = torch.ones_like(like[0].weight[0], dtype=torch.bool)
    classes = torch.ones_like(like[-1].bias, dtype=torch.bool)
    pairs = zip([*units, classes], [images, *units], strict=True)
    return [Layer(outputs[:, None] & inputs, outputs) for outputs, inputs in pairs]


def masks_without(masks: list[Layer], old: list[Layer]) -> list[Layer]:
    """Return the part of these masks that is not in the old ones; the mask of the head stays complete."""
    pairs = list(zip(masks, old, strict=True))[:-1]
    return [*(Layer(m.weight & ~o.weight, m.bias & ~o.bias) for m, o in pairs), masks[-1]]


def _linear_stages(net: Network) -> list[Stage]:
    """Return the layers of the trunk, or raise an error that names a module to which no units can be added."""
    found = stages(net)
    for stage in found:
        wrong = [module for module in stage.after if type(module) not in POINTWISE]
        if type(stage.layer) is not nn.Linear or stage.layer.bias is None or wrong:
            what = wrong[0] if type(stage.layer) is nn.Linear and wrong else stage.layer
            raise ValueError(f"{stage.name} ({what}) can't grow: only linear layers with biases and activations can")
    return found
