"""Initial weights: PyTorch's default, or Xavier uniform with zero biases, as in the text of the HAT paper."""

from torch import nn

from hatrack.networks import Init


def initialise(module: nn.Module, how: Init) -> None:
    """Draw new weights for every linear and convolutional layer.

    Args:
        module: the network; it is changed in place.
        how: "xavier" for Xavier uniform and zero biases; "default" leaves the weights as PyTorch has drawn them.
    """
    if how not in ("default", "xavier"):
        raise ValueError(f"init must be 'default' or 'xavier', not {how!r}")
    if how == "xavier":
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
