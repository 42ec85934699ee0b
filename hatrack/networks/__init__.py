"""Networks: builders that return a trunk (images to a feature vector); any other module serves as well."""

from collections.abc import Callable

from torch import nn

from hatrack.networks.alexnet import alexnet
from hatrack.networks.cnn import cnn
from hatrack.networks.mlp import mlp

NETWORKS: dict[str, Callable[..., nn.Module]] = {"alexnet": alexnet, "cnn": cnn, "mlp": mlp}
