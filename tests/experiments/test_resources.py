"""The costs in a record: the same after kills, without any effect on results, and blank where a device does not tell."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hatrack import BENCHMARKS, METHODS, Independent, Joint, Method, Network, Record, run
from hatrack.experiments import resources
from hatrack.experiments.record_parts import Costs
from hatrack.experiments.resources import EnergyMeter, costs_of
from hatrack.experiments.sameness import differences
from hatrack.methods.fit import FitResult
from hatrack.training.trainer import Trainer
from tests.helpers.killing import OFTEN, assert_same, killed_at, spec, to_the_end
from tests.helpers.records import make
from tests.helpers.tiers import QUICK, quick_and_slow

KINDS = ["weights", "buffers", "masks", "images"]
KEPT = {"hat": "masks", "pmask": "masks", "packnet": "masks", "pathnet": "masks", "er": "images", "agem": "images",
        "derpp": "images", "joint": "images"}  # fmt: skip


@pytest.mark.parametrize("method", quick_and_slow(sorted(METHODS), (*QUICK, "er", "packnet", "pnn")))
def test_every_method_has_costs_and_counting_changes_no_bit(method, monkeypatch):
    record = run(spec(method))
    costs = record.costs
    assert list(costs.bytes) == KINDS
    assert costs.bytes["weights"] + costs.bytes["masks"] >= 4 * record.parameters
    assert [kind for kind in ("masks", "images") if costs.bytes[kind]] == ([KEPT[method]] if method in KEPT else [])
    examples = sum(len(curve.epochs) * record.tasks[curve.task].train for curve in record.curves)
    more = 2 * record.tasks[0].train if method == "joint" else 0  # the first task again, with the second
    assert costs.examples == examples + more
    assert (costs.flops > 0) == (costs.steps > 0) == bool(record.curves)
    assert costs.joules is None
    monkeypatch.setattr(Trainer, "count_costs", property(lambda self: False, lambda self, value: None), raising=False)
    plain = run(spec(method))
    assert plain.costs.flops in (None, 0)
    assert_same(record, plain)


@pytest.mark.parametrize("method", quick_and_slow(["sgd", "packnet", "er", "joint", "pathnet"], ["er"]))
def test_a_killed_run_has_the_same_costs(method, tmp_path, monkeypatch):
    whole = run(spec(method, batch=150))
    kills = killed_at(monkeypatch, 0.15, 1, 4)
    again = to_the_end(spec(method, batch=150), tmp_path, save_every=OFTEN)
    assert kills
    assert again.costs == whole.costs


def test_a_run_that_is_killed_at_the_last_step_of_the_last_epoch_has_the_same_costs(tmp_path, monkeypatch):
    """Then no step with a whole batch is done after the kill, and its operations come from the saved state."""
    whole = run(spec("sgd", epochs=1, batch=150))
    kills = killed_at(monkeypatch, 1.0, 0, 1000)
    again = to_the_end(spec("sgd", epochs=1, batch=150), tmp_path, save_every=OFTEN)
    assert len(kills) == whole.costs.steps, "at every step"
    assert again.costs == whole.costs


@pytest.mark.slow
def test_compiled_steps_have_the_same_costs():
    eager = run(spec("hat"), engine="eager")
    compiled = run(spec("hat"), engine="compiled")
    assert compiled.versions["engine"] == "compiled"
    assert replace(compiled.costs, peak_bytes=None) == replace(eager.costs, peak_bytes=None)


def test_operations_by_hand():
    record = run(spec("sgd"))
    (one, two), classes = record.tasks, 5
    forward = 2 * (784 * 12 + 12 * 12 + 12 * classes)  # of one image
    backward = forward + 2 * (12 * 12 + 12 * classes)  # weights; inputs of all layers but the first
    assert (one.classes, two.classes) == (classes, classes)
    assert record.costs.flops == 2 * (one.train + two.train) * (forward + backward)


def test_kept_bytes_by_hand():
    net = Network(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), [2, 2], torch.zeros(1, 1, 2, 2))
    kept = Method(net).kept_bytes()
    assert kept["weights"] == 4 * (4 * 3 + 3 + 2 * (3 * 2 + 2))
    assert kept["masks"] == kept["images"] == 0
    assert Method(Network(nn.Flatten(), [2], torch.zeros(1, 1, 2, 2))).kept_bytes()["weights"] == 4 * (4 * 2 + 2)


def test_a_trunk_that_is_registered_twice_counts_once():
    net = Network(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), [2, 2], torch.zeros(1, 1, 2, 2))
    method = Independent(net)
    assert method.trunks[0] is net.trunk
    assert method.kept_bytes()["weights"] == 4 * 2 * (4 * 3 + 3 + 3 * 2 + 2)
    assert method.num_bytes() == sum(method.kept_bytes().values())


def test_joint_keeps_the_data_of_all_tasks():
    tasks = BENCHMARKS["smnist"](data="sample")
    method = Joint(Network(nn.Flatten(), tasks=tasks))
    assert method.kept_bytes()["images"] == 0
    for task in tasks:
        method.restore_data(task)
    count = sum(len(task.train) + len(task.valid) for task in tasks)
    assert method.kept_bytes()["images"] == count * (784 + 8)  # bytes of an image, and its label


def test_a_fit_of_an_older_version_has_no_costs():
    method = Method(Network(nn.Flatten(), [2], torch.zeros(1, 1, 2, 2)))
    new, old = FitResult(0, steps=3, examples=30, flops=300, peak_bytes=10), FitResult(1)
    both = costs_of(method, [new, old], None)
    assert (both.steps, both.examples, both.flops, both.peak_bytes) == (None, None, None, 10)
    assert costs_of(method, [new, new], 2.5) == Costs(method.kept_bytes(), 10, 6, 60, 600, 2.5)


# Energy


def fake_nvml(monkeypatch, readings):
    """Replace pynvml and the GPU by ones that give these readings, in millijoules."""
    left = iter(readings)
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID={"GPU-abc": "handle"}.__getitem__,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(left),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))


def test_energy_is_the_difference_of_two_readings(monkeypatch):
    fake_nvml(monkeypatch, [5000, 7500, 9000])
    meter = EnergyMeter(torch.device("cuda"), 10.0)
    assert meter.joules() == 10.0 + 2.5
    assert meter.joules() == 10.0 + 4.0


def test_energy_is_blank_where_the_device_does_not_tell(monkeypatch):
    assert EnergyMeter(torch.device("cpu")).joules() is None
    fake_nvml(monkeypatch, [])
    assert EnergyMeter(torch.device("cuda")).joules() is None, "an error of the library"
    fake_nvml(monkeypatch, [1000, 2000])
    assert EnergyMeter(torch.device("cuda"), None).joules() is None, "the first part of the run did not tell"
    fake_nvml(monkeypatch, [1000, 2000])
    monkeypatch.setattr(resources, "is_interleaved", lambda: True)
    assert EnergyMeter(torch.device("cuda")).joules() is None, "other runs share the device"


# In records


def test_costs_are_saved_and_loaded(tmp_path):
    record = replace(make(), costs=Costs({"weights": 3, "buffers": 2}, 10, 6, 60, 2**70, 2.5))
    assert Record.load(record.save(tmp_path)) == record
    summary = record.costs.summary
    assert (summary["bytes"], summary["bytes_weights"], summary["flops"]) == (5, 3, 2**70)
    assert summary["bytes_masks"] != summary["bytes_masks"], "nan: not known"
    assert "costs" not in make().to_dict(), "a record without costs is written as before"


@pytest.mark.parametrize(
    ("place", "costs"),
    [
        ("costs.steps", {"steps": -1}),
        ("costs.bytes", {"bytes": [1]}),
        ("costs.flops", {"flops": 1.5}),
        ("costs.joules", {"joules": "many"}),
    ],
)
def test_costs_of_the_wrong_kind_are_refused(tmp_path, place, costs):
    with pytest.raises(ValueError, match=place):
        Record.load(replace(make(), costs=Costs(**costs)).save(tmp_path))


def test_sameness_ignores_the_costs_of_the_machine():
    one = replace(make(), costs=Costs({"weights": 3}, 10, 6, 60, 600, 2.5))
    assert differences(one, replace(one, costs=replace(one.costs, peak_bytes=11, joules=3.0))) == []
    (line,) = differences(one, replace(one, costs=replace(one.costs, steps=7)))
    assert line.startswith("costs")
    assert "by 1 " in line
    assert differences(one, make()) == [], "a record of an older version has none"
