"""`python -m speed.guard`: steps under guards are measured against bare ones, while the second task is learned."""

import pytest
import torch

from speed import guard

pytestmark = pytest.mark.slow  # the speed harness


def test_costs_are_measured_against_the_bare_loop():
    bare, hat, pmask = guard.costs("mlp", ["hat", "pmask"], 8, 2, torch.device("cpu"))
    assert (bare.name, bare.ratio, hat.name, pmask.name) == ("bare", 1.0, "hat", "pmask")
    assert all(cost.step > 0 and cost.ratio > 0 and cost.batch == 8 for cost in (bare, hat, pmask))


def test_the_second_task_is_measured_when_the_first_holds_weights():
    loop = guard.Loop("mlp", "hat", torch.randn(8, *guard.SHAPE))
    assert list(loop.guard.tasks) == ["first"]
    assert max(loop.guard.usage().values()) > 0


def test_ratios_are_printed(capsys):
    threads = torch.get_num_threads()
    try:
        guard.main(["--network", "mlp", "--batches", "4,8", "--rounds", "1", "--methods", "hat"])
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[1:3] for line in said] == [["4", "bare"], ["4", "hat"], ["8", "bare"], ["8", "hat"]]
    assert all("times bare" in line for line in said)
