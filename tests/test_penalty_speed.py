"""`python -m speed.penalty`: the two penalties are the same but for a constant, and all is measured."""

import json
from functools import partial

import torch

from hatrack import EWC, NETWORKS, Method
from hatrack.recipes.timings import read_timings
from speed import penalty

CPU = torch.device("cpu")
small = partial(NETWORKS["mlp"], widths=(16,))


def test_the_naive_penalty_is_the_summed_one_but_for_a_constant():
    task = penalty.noise(64, CPU)
    size = sum(p.numel() for p in penalty.prepare(Method, small, task).parameters())
    springs = [torch.rand(size, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    gradients = []
    for kind in (EWC, penalty.NaiveEWC):
        method = penalty.prepare(kind, small, task, springs, limit=0.0)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(method.penalty(), method.net.parameters())]))
    assert len(method.springs) == 3
    assert gradients[0].norm() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def test_penalties_are_measured(tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        penalty.main(["--quick", "--device", "cpu", "--out", str(tmp_path / "timings" / "penalty.json")])
    finally:
        torch.set_num_threads(threads)
    found = json.loads((tmp_path / "timings" / "penalty.json").read_text())
    times = read_timings(tmp_path)["penalty"]  # as the page of ewc-cnn reads it
    assert [step.naive for step in times.steps] == [row["naive"] for row in found["steps"]]
    assert times.fisher == found["fisher"]["fisher"]
    assert [row["tasks"] for row in found["steps"]] == [1, 2]
    assert all(row[name] > 0 for row in found["steps"] for name in ("sgd", "summed", "naive"))
    assert all(low <= middle <= high for middle, low, high in (row["naive / summed"] for row in found["steps"]))
    assert found["fisher"]["images"] == 256
    assert found["fisher"]["fisher"] > 0 < found["fisher"]["epoch"]
    assert "naive / summed" in capsys.readouterr().out
