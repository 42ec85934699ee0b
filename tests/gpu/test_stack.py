"""Stacked runs on a GPU: the same to rounding as each alone, also the numbers of dropout, and nothing forgotten."""

import pytest
import torch

from hatrack import Regime, Trainer
from hatrack.engine.interleaving import run_interleaved
from hatrack.engine.philox import draw, find_masks
from hatrack.engine.stacked_graph import Draw
from tests.helpers.learning import make
from tests.helpers.pictures import convolutional, pictures
from tests.helpers.stacking import Learned, alone_and_stacked, assert_close
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.gpu
REGIME = Regime(epochs=6, batch=16, lr=0.1)


def maker(name, engine):
    def build(seed):
        tasks = toy_tasks(2, seed=seed, train=100)
        return make(name, tasks, seed=seed), tasks, Trainer(REGIME, seed=seed, engine=engine)

    return build


@pytest.mark.parametrize("engine", ["eager", "recorded", "compiled"])
@pytest.mark.parametrize("name", ["sgd", "hat", "ewc", "packnet", "pmask", "si"])
def test_stacked_runs_learn_what_each_learns_alone(name, engine):
    """With dropout; recorded steps draw from generators of their own."""
    alone, stacked = alone_and_stacked(maker(name, engine), device="cuda")
    assert_close(alone, stacked, 2e-3)
    if name in ("hat", "packnet", "pmask"):
        assert not any(run.forgets() for run in stacked)


@pytest.mark.parametrize("engine", ["recorded", "compiled"])
def test_convolutions(engine):
    """Compiled alone, steps draw dropout with the channels last as well."""

    def build(seed):
        tasks = pictures(3)
        hard = Regime(epochs=6, batch=16, optimizer="adamw", lr=0.003, weight_decay=0.1, keep_state=True)
        return convolutional(tasks), tasks, Trainer(hard, seed=seed, engine=engine)

    stacked = run_interleaved([lambda s=s: Learned(build, s, "cuda") for s in range(3)], torch.device("cuda"), 3, stack=True)
    assert all("stacked" in e for run in stacked for e in run.engines)
    assert not any(run.forgets() for run in stacked)
    if engine == "compiled":
        alone = [Learned(build, seed, "cuda") for seed in range(3)]
        for one, two in zip(alone, stacked, strict=True):
            torch.testing.assert_close(torch.tensor(one.losses[:6]), torch.tensor(two.losses[:6]), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 29, 29, 64), (64, 2048), (3, 4)])
def test_masks_of_all_lanes_are_those_that_torch_draws(dtype, shape):
    device, share = torch.device("cuda"), 0.2
    stride = torch.empty(shape).stride()
    each = Draw(torch.ops.aten.native_dropout.default, shape, stride, torch.bool, dtype, (share, True), {})
    masks = find_masks([each, each], device)
    assert masks is not None
    own = [torch.zeros(3, *shape, dtype=torch.bool, device=device) for _ in masks]
    seeds, offsets = (torch.tensor(values, device=device) for values in ([1, 2**62, 7], [0, 4, 400]))
    before = offsets.clone()
    draw(masks, own, seeds, offsets)
    generator = torch.cuda.default_generators[0]
    for lane in range(3):
        generator.manual_seed(int(seeds[lane]))
        generator.set_offset(int(before[lane]))
        for mask in own:
            assert torch.equal(mask[lane], each(device))
        assert generator.get_offset() == int(offsets[lane])


def test_other_draws_are_left_to_torch():
    normal = Draw(torch.ops.aten.randn.default, (8,), (1,), torch.float32, None, ([8],), {"device": "cuda"})
    odd = Draw(torch.ops.aten.native_dropout.default, (3,), (1,), torch.bool, torch.float32, (0.5, True), {})
    assert find_masks([normal], torch.device("cuda")) is None
    assert find_masks([odd], torch.device("cuda")) is None
