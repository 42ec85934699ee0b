"""Copies of a module's state, and small tables that Python reads again only when they have changed."""

import copy
import pickle

import torch
from torch import nn

from hatrack.methods.parts.on_host import OnHost
from hatrack.methods.parts.snapshot import Snapshot, copy_trained


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_a_snapshot_restores_everything():
    module = net()
    before = copy.deepcopy(module.state_dict())
    kept = Snapshot(module)
    with torch.no_grad():
        for value in module.state_dict().values():
            value.add_(1)
    kept.restore(module)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_what_a_fit_may_change_is_copied():
    module = net()
    module[0].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    copies = copy_trained(module)
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert copies.keys() == buffers | {"1.weight", "1.bias", "2.bias"}
    with torch.no_grad():
        module[2].bias.add_(1)
    assert not torch.equal(copies["2.bias"], module[2].bias), "a copy is no view"
    assert not any(value.requires_grad for value in copies.values())


def test_a_parameter_with_two_names_is_copied_under_both():
    module = net()
    module.again = module[2]
    assert {"2.weight", "again.weight"} <= copy_trained(module).keys()


def test_a_table_is_read_again_only_when_it_was_written(monkeypatch):
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(1) or tolist(tensor))
    read, table = OnHost(), torch.tensor([1, 2])
    assert read(table) == read(table) == [1, 2]
    assert len(reads) == 1
    table[0] = 5
    assert read(table) == [5, 2]
    table.detach().copy_(torch.tensor([7, 8]))  # as a state is loaded or rolled back
    assert read(table) == [7, 8]
    assert read(torch.tensor([7, 9])) == [7, 9]
    assert len(reads) == 4


def test_tables_of_the_inference_mode():
    read = OnHost()
    with torch.inference_mode():
        table = torch.tensor([1, 2])
        assert read(table) == [1, 2]
        table[0] = 3
        assert read(table) == [3, 2]


def test_a_copy_reads_its_own_table():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = OnHost()
            self.register_buffer("table", torch.tensor([0]))

    holder = Holder()
    for value in range(1, 4):
        holder.table[0] = value
        assert holder.read(holder.table) == [value]
        for twin in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder.read))):
            if isinstance(twin, Holder):
                for other in range(10, 14):
                    twin.table[0] = other
                    assert twin.read(twin.table) == [other]
            else:
                assert twin.tensor is None
