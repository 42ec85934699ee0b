"""One run on two ranks: the results of one process that computes its batches in two parts, bit for bit, on both."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

from hatrack import Record, Regime, run
from hatrack.clusters.rank_group import RankGroup
from hatrack.clusters.ranks import for_ranks, run_on_ranks
from hatrack.experiments.sameness import differences
from tests.helpers.runs import small

WORDS = ("--data", "sample", "--widths", "30", "--dropout", "0", "--batch", "33", "--device", "cpu", "--tasks", "5")


def test_parts_are_added_up_in_the_order_of_the_ranks():
    """In float32 the order decides the sum. A rank without a gradient, or without a part, adds nothing, not even a zero."""
    parts = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, -0.0]), torch.tensor([-1e8, 3.0])]
    group = RankGroup.__new__(RankGroup)
    group.rank, group.size = 0, 3
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = parts[0].clone(), torch.tensor([5.0])

    def gather(tensor):
        if tensor.dtype == torch.float64:  # the second rank has no gradient of the second, nobody has one of the third
            rows = [[1, 0, 1, 1, 0], [1, 0, 1, 0, 0], [0, 0, 1, 1, 0]]
            return [torch.tensor(row, dtype=torch.float64) for row in rows]
        if len(tensor) == 1:
            return [tensor, torch.tensor([0.25]), torch.tensor([9.0])]
        return [torch.cat([part, torch.tensor([value])]) for part, value in zip(parts, (5.0, 9.0, -5.0), strict=True)]

    group._gather = gather
    loss = group.sum_parts(parameters, torch.tensor(0.5))
    assert loss == 0.75, "the third rank has no part"
    forward = (np.float32(1e8) + np.float32(1.0)) + np.float32(-1e8)
    assert forward != np.float32(1.0) + (np.float32(1e8) + np.float32(-1e8)), "the order would not matter"
    assert parameters[0].grad.tolist() == [forward, 4.0]
    assert parameters[1].grad.tolist() == [0.0]
    assert parameters[2].grad is None


def assert_no_forgetting(record: Record) -> None:
    for task in range(len(record.tasks)):
        assert len({row[task] for row in record.accuracy[task:]}) == 1, record.accuracy


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hat", "joint"])
def test_two_ranks_have_the_bits_of_one_process(method, tmp_path):
    """The last batch of an epoch of HAT has one example: the second rank has no part of it. Joint training packs heads."""
    network = {"widths": (20,), "dropout": 0.0, "input_dropout": 0.0}
    five = {"data": "sample", "tasks": 5}
    spec = small(method, benchmark_options=five, network_options=network, regime=Regime(epochs=2, batch=33))
    (record,) = run_on_ranks([spec], tmp_path, 2, device="cpu", precision="tf32", save_every=5.0)
    alone = run(for_ranks(spec, 2), engine="eager")
    assert record.spec.regime["accumulate"] == 2
    assert record.versions["ranks"] == 2
    assert differences(alone, record) == []
    assert len(record.tasks) == 5
    if method == "hat":
        assert_no_forgetting(record)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"]


def test_what_can_not_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--ranks 2 is not for er, whose loss needs whole batches"):
        run_on_ranks([small("er")], tmp_path, 2, device="cpu")
    with pytest.raises(ValueError, match="in 2 parts, but --accumulate says 3"):
        run_on_ranks([small(regime=Regime(accumulate=3))], tmp_path, 2, device="cpu")
    with pytest.raises(ValueError, match="--engine eager only, not with compiled"):
        run_on_ranks([small()], tmp_path, 2, device="cpu", engine="compiled")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_network_with_batch_norm_is_refused(tmp_path):
    spec = small("sgd", network="resnet18", network_options={"width": 4})
    with pytest.raises(ValueError, match="--ranks 2 is not for a network with batch norm"):
        run_on_ranks([spec], tmp_path, 2, device="cpu", precision="tf32", save_every=5.0)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.slow
def test_ranks_that_are_stopped_go_on_to_the_same_bits(tmp_path):
    """With dropout, each part of each step draws from a generator of its own: nothing depends on where it stopped."""
    words = ("run", "smnist", "hat", *WORDS[:4], "--batch", "20", "--device", "cpu", "--epochs", "6", "--ranks", "2")
    command = [sys.executable, "-m", "hatrack", *words, "--save-every", "0.01", "--out"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, str(tmp_path / "stopped")], env=env, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 200
    while not list((tmp_path / "stopped").glob("*.part/fit-*")):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 130, said
    assert "goes on from there" in said
    assert not list((tmp_path / "stopped").glob("*.json"))
    for name in ("stopped", "whole"):
        subprocess.run([*command, str(tmp_path / name)], env=env, check=True, capture_output=True)
    one, two = (next((tmp_path / name).glob("*.json")) for name in ("stopped", "whole"))
    assert differences(Record.load(one), Record.load(two)) == []
    assert json.loads(one.read_text())["versions"]["ranks"] == 2
