"""Networks: builders that return a trunk (images to a feature vector); any other module serves as well."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from hatrack.registry import Entry, Registry, load

if TYPE_CHECKING:
    from torch import nn

    from hatrack.networks.adapters import lora as lora

Init = Literal["default", "xavier"]  # see initial_weights.py
Heads = Literal["multi", "shared", "class"]  # see network.py
NETWORKS: "Registry[Callable[..., nn.Module]]" = Registry("network", {
    "mlp": Entry(
        "hatrack.networks.mlp:mlp",
        "Hidden layers of any widths, ReLU, dropout on the input and after every layer.",
    ),
    "cnn": Entry(
        "hatrack.networks.cnn:cnn",
        "64 filters of 3x3 (same size), 2x2 max-pooling, then 1024 and 1024 units, with ReLU.",
    ),
    "alexnet": Entry(
        "hatrack.networks.alexnet:alexnet",
        "64, 128 and 256 filters of 4x4, 3x3 and 2x2, each followed by 2x2 max-pooling; then 2048 and 2048 units.",
    ),
    "vgg": Entry(
        "hatrack.networks.vgg:vgg",
        "Three blocks of two 3x3 convolutions with 64, 128, 256 filters and 2x2 max-pooling; then 512 and 512 units.",
    ),
    "resnet18": Entry(
        "hatrack.networks.resnet:resnet18",
        "Residual network of 8 blocks: 20 convolutions, each with batch normalisation; 512 features.",
    ),
    "resnet34": Entry(
        "hatrack.networks.resnet:resnet34",
        "Residual network of 16 blocks: 36 convolutions, each with batch normalisation; 512 features.",
    ),
    "resnet50": Entry(
        "hatrack.networks.resnet:resnet50",
        "Residual network of 16 bottlenecks: 53 convolutions, each with batch normalisation; 2048 features.",
    ),
    "vit": Entry(
        "hatrack.networks.vit:vit",
        "Vision transformer: patches of 4x4, learned positions, 6 pre-norm blocks of 4 heads; the mean of 192 channels.",
    ),
    "gru": Entry(
        "hatrack.networks.gru:gru",
        "Two recurrent layers of 256 gated units that read an image row by row; the state after the last row.",
    ),
}, families={
    "timm": "hatrack.networks.foreign:timm_network",
    "transformers": "hatrack.networks.foreign:transformers_network",
})  # fmt: skip
LORA = "hatrack.networks.adapters:lora"


def __getattr__(name: str) -> Any:
    """Import `lora` when it is first used, so that the table needs no torch."""
    if name != "lora":
        raise AttributeError(f"module 'hatrack.networks' has no attribute {name!r}")
    return load(LORA)
