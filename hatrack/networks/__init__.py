"""Networks: builders that return a trunk (images to a feature vector); any other module serves as well."""

from collections.abc import Callable

from torch import nn

from hatrack.networks.alexnet import alexnet
from hatrack.networks.cnn import cnn
from hatrack.networks.mlp import mlp
from hatrack.networks.resnet import resnet18, resnet34, resnet50

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "alexnet": alexnet,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
}
