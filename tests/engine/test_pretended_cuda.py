"""Most tests of tests/gpu on a GPU that is not there: code for GPUs runs on any machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hatrack import Method, Regime, Trainer
from hatrack.tasks.device import all_to_device
from tests.helpers.elsewhere import LeavesBehind
from tests.helpers.learning import learn, make
from tests.helpers.pretended_cuda import GPU, pretended_cuda
from tests.helpers.toys import toy_tasks

ROOT = Path(__file__).parent.parent.parent
LEFT_OUT = {  # what `pytest -k` selects, and why it does not run here
    "compiled or captured_once or kernels_are_launched or helper_leaves or with_auto": "Triton compiles for real GPUs only",
    "test_stack": "stacked steps are traced with tensors without memory, and it is memory that says where a tensor is",
    "gru": "its layers are cuDNN's",
    "script_of_lightning or script_of_hugging_face": "these libraries ask the driver",
    "test_growth or killed_and_resumed_side_by_side or a_run_on_the_gpu": "10 to 20 seconds each",
    "(vit and not hat) or (measures_what and not sgd)": "several seconds each",
    "unchanged_bit_for_bit and not adamw": "ten seconds for all; the CPU's tests have the other optimizers",
}
ENOUGH = 200  # tests; 208 when this was written


@pytest.mark.slow
def test_most_tests_of_a_gpu_pass_without_one():
    options = ["-m", "gpu", "-n", "0", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short"]
    chosen = ["-k", f"not ({' or '.join(f'({names})' for names in LEFT_OUT)})", "tests/gpu"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.helpers.pretended_cuda", *options, *chosen]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}  # those of xdist
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert passed is not None
    assert int(passed[1]) >= ENOUGH, passed[0]


class Reads(Method):
    """Reads a value in each step."""

    def loss(self, batch):
        loss = super().loss(batch)
        return loss if loss.item() > 0 else 2 * loss


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [(LeavesBehind, RuntimeError, "two devices"), (Reads, UserWarning, "_local_scalar_dense"), (Method, None, "")],
)
def test_what_a_gpu_would_refuse_is_noticed(kind, error, message):
    """And a plain method is not refused."""
    with pretended_cuda():
        tasks = all_to_device(toy_tasks(1), "cuda")
        method, fit = kind(make("sgd", tasks).to("cuda").net), Trainer(Regime(epochs=2, batch=16), engine="recorded")
        if error is None:
            learn(method, tasks, fit)
            assert {parameter.device for parameter in method.parameters()} == {GPU}
            assert [result.engine for result in fit.fits] == ["recorded"]
        else:
            with pytest.raises(error, match=message):
                learn(method, tasks, fit)
    assert not torch.ones(2).is_cuda


def test_the_gpu_that_is_not_there():
    """Its graphs change nothing when they are captured, and draw new numbers each time; its waits are errors as torch's."""
    with pretended_cuda():
        x, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
        before = torch.get_rng_state()
        with torch.cuda.graph(graph):
            x.add_(1)
            noise = torch.rand(3, device="cuda")
            with pytest.raises(RuntimeError, match="capturing"):
                x.cpu()
        assert x.tolist() == [0, 0, 0]
        drawn = []
        for count in (1, 2):
            graph.replay()
            assert x.tolist() == [count] * 3
            drawn.append(noise.clone())
        assert not torch.equal(*drawn)
        torch.cuda.manual_seed_all(0)
        graph.replay()
        again = noise.clone()
        torch.cuda.manual_seed_all(0)
        assert torch.equal(torch.rand(3, device="cuda"), again)
        assert torch.equal(torch.get_rng_state(), before), "the numbers of the CPU are others"
        pinned, index, mask = torch.ones(3).pin_memory(), torch.tensor([0, 2]), x > 5
        torch.cuda.set_sync_debug_mode("error")
        pinned.to("cuda", non_blocking=True)
        x[mask] = 0
        for waits in (
            *(x.sum().item, x.tolist, mask.nonzero),
            *(lambda: x[mask], lambda: x[index], lambda: torch.ones(3).to("cuda")),
        ):
            with pytest.raises(RuntimeError, match="synchronizing"):
                waits()
        torch.cuda.set_sync_debug_mode("default")
