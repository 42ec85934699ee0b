"""The names of a trunk's tensors: those that torch's own lists give."""

import torch
from torch import nn

from hatrack.tracing.gates import tensor_names


def test_every_tensor_has_the_name_that_torch_gives_it():
    shared = nn.Linear(3, 3)
    tied = nn.Linear(3, 3)
    tied.weight = shared.weight
    trunk = nn.Sequential(nn.BatchNorm1d(3), shared, nn.Sequential(shared, tied, nn.BatchNorm1d(3, affine=False)), tied)
    trunk.register_buffer("none", None)
    trunk.register_parameter("own", nn.Parameter(torch.zeros(2)))
    expected = {id(t): name for name, t in [*trunk.named_buffers(), *trunk.named_parameters()]}
    assert tensor_names(trunk) == expected
    assert tensor_names(trunk)[id(shared.weight)] == "1.weight"
