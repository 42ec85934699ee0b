"""A network of linear layers with room for more units: what a method builds on whose network grows.

The room is there from the start and a table says since when each of its units exists, so that no shape ever changes: a
product of another width would have other last bits, and a loaded state or a kept optimizer state would not fit.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.methods.parts.stages import Stage, stages
from hatrack.networks.network import Network

UNBORN = 32767  # the birth of a unit that does not exist
POINTWISE = (
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh,
    nn.Sigmoid, nn.Hardtanh,
)  # fmt: skip


class Layer(NamedTuple):
    """A linear layer with all its room: its values, or a mask of them."""

    weight: Tensor  # (units and room, inputs and the room of the layer below)
    bias: Tensor


class ExpandableLayer(NamedTuple):
    """The parameters of a layer: its own and those of its room (the first layer gets no new inputs, a head no outputs)."""

    weight: nn.Parameter  # (units, inputs)
    bias: nn.Parameter
    columns: nn.Parameter | None  # what its units read of new units: (units, room)
    rows: nn.Parameter | None  # what its new units read: (room, inputs and room)
    biases: nn.Parameter | None  # of its new units

    def whole(self) -> Layer:
        weight = self.weight if self.columns is None else torch.cat([self.weight, self.columns], 1)
        if self.rows is None or self.biases is None:
            return Layer(weight, self.bias)
        return Layer(torch.cat([weight, self.rows]), torch.cat([self.bias, self.biases]))

    def cut(self, layer: Layer) -> list[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its share of a whole layer."""
        (units, inputs), (weight, bias) = self.weight.shape, layer
        new = [(self.columns, weight[:units, inputs:]), (self.rows, weight[units:]), (self.biases, bias[units:])]
        own = [(self.weight, weight[:units, :inputs]), (self.bias, bias[:units])]
        return own + [(parameter, share) for parameter, share in new if parameter is not None]


class ExpandableLayers(nn.Module):
    """Room for `size` more units in every hidden layer of a network, empty at first."""

    born: Tensor  # (hidden layers, size): when a unit was added, in whatever the method counts

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
        self.register_buffer("born", zeros(len(shapes), size, dtype=torch.int16).fill_(UNBORN))
        self.grow(net)

    def grow(self, net: Network) -> None:
        """Room in every head that the network has."""
        for head in list(net.heads)[len(self.tops) :]:
            weight = head.get_parameter("weight")
            self.tops.append(nn.Parameter(weight.new_zeros(len(weight), self.size)))

    def wide(self, net: Network, task: int) -> list[ExpandableLayer]:
        """The hidden layers and the head of a task."""
        head = 0 if net.shared else task
        own = [*(stage.layer for stage in self.stages), net.heads[head]]
        new = zip([None, *self.columns, self.tops[head]], [*self.rows, None], [*self.biases, None], strict=True)
        return [
            ExpandableLayer(m.get_parameter("weight"), m.get_parameter("bias"), *n) for m, n in zip(own, new, strict=True)
        ]

    def seen(self, time: Tensor) -> list[Tensor]:
        """The units of every layer that exist at this time: (units and room,)."""
        exists = (self.born <= time).unbind()
        return [torch.cat([e.new_ones(stage.width), e]) for stage, e in zip(self.stages, exists, strict=True)]

    def added(self, time: int) -> list[Tensor]:
        """The units of every layer that were added at this time: (units and room,)."""
        added = (self.born == time).unbind()
        return [torch.cat([a.new_zeros(stage.width), a]) for stage, a in zip(self.stages, added, strict=True)]

    def run(self, net: Network, x: Tensor, task: int, seen: list[Tensor]) -> Tensor:
        """The logits of a task; units that it has not seen are 0, selected, so that not even an infinity passes."""
        *hidden, head = [wide.whole() for wide in self.wide(net, task)]
        for stage, layer, units in zip(self.stages, hidden, seen, strict=True):
            x = torch.where(units, stage.after(F.linear(stage.before(x), *layer)), 0)
        return F.linear(x, *head)

    def copy(self, net: Network, task: int) -> list[Layer]:
        """The values of all layers, for reading and editing."""
        return [Layer(*(values.detach().clone() for values in wide.whole())) for wide in self.wide(net, task)]

    @torch.no_grad()
    def write(self, net: Network, task: int, layers: list[Layer]) -> None:
        for wide, layer in zip(self.wide(net, task), layers, strict=True):
            for parameter, values in wide.cut(layer):
                parameter.copy_(values)

    def take(self, level: int, count: int, time: int) -> Tensor:
        """Units of a layer's room that exist from now on, by their numbers; fewer if the room is full."""
        places = (self.born[level] == UNBORN).nonzero().flatten()[:count]
        self.born[level, places] = time
        return places + self.stages[level].width


def between(units: list[Tensor], like: list[Layer]) -> list[Layer]:
    """Masks of the weights between these units, of their biases, and of the head that reads them."""
    images = torch.ones_like(like[0].weight[0], dtype=torch.bool)
    classes = torch.ones_like(like[-1].bias, dtype=torch.bool)
    pairs = zip([*units, classes], [images, *units], strict=True)
    return [Layer(writes[:, None] & reads, writes) for writes, reads in pairs]


def beyond(masks: list[Layer], old: list[Layer]) -> list[Layer]:
    """Of these masks what is not in the old ones; the head stays whole."""
    pairs = list(zip(masks, old, strict=True))[:-1]
    return [*(Layer(m.weight & ~o.weight, m.bias & ~o.bias) for m, o in pairs), masks[-1]]


def _linear_stages(net: Network) -> list[Stage]:
    """The layers of the trunk, or an error that names what can't grow."""
    found = stages(net)
    for stage in found:
        wrong = [module for module in stage.after if type(module) not in POINTWISE]
        if type(stage.layer) is not nn.Linear or stage.layer.bias is None or wrong:
            what = wrong[0] if type(stage.layer) is nn.Linear and wrong else stage.layer
            raise ValueError(f"{stage.name} ({what}) can't grow: only linear layers with biases and activations can")
    return found
