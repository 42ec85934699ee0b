"""Initial weights: PyTorch's own, or Xavier uniform with zero biases (what the HAT paper's text says)."""

from torch import nn

from hatrack.networks import Init


def initialise(module: nn.Module, how: Init) -> None:
    """Draw the weights of every linear and convolutional layer anew; "default" leaves them as PyTorch drew them."""
    if how not in ("default", "xavier"):
        raise ValueError(f"init must be 'default' or 'xavier', not {how!r}")
    if how == "xavier":
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
