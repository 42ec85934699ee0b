"""Growing on a GPU: finished tasks keep their bits through growth, later tasks, files and a record of steps."""

import pytest
import torch

from hatrack import HAT, NETWORKS, PMASK, Network, Regime, Trainer, load, save
from hatrack.engine.precision import precision_scope
from hatrack.seeds import seeded
from hatrack.tasks.device import all_to_device
from tests.helpers.toys import toy_tasks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:task .* finds under")]
SHAPE = (3, 16, 16)


def resnet():
    with seeded(0, "trunk"):
        return NETWORKS["resnet18"](SHAPE, width=8).to("cuda")


@torch.no_grad()
def answers(method, task):
    method.eval()
    draw = torch.Generator().manual_seed(1)
    return [method(torch.randn(size, *SHAPE, generator=draw).to("cuda"), task) for size in (1, 3, 64, 200)]


def assert_answers(method, before):
    for task, then in before.items():
        for k, now in enumerate(answers(method, task)):
            assert torch.equal(now, then[k]), (task, k)


@pytest.mark.parametrize("kind", [HAT, PMASK])
@pytest.mark.parametrize(("engine", "precision"), [("eager", "float32"), ("recorded", "tf32"), ("recorded", "bfloat16")])
def test_finished_tasks_keep_their_bits(kind, engine, precision, tmp_path):
    device = torch.device("cuda")
    tasks = all_to_device(toy_tasks(4, shape=SHAPE), "cuda")
    method, before = kind(Network(resnet(), tasks=tasks), grow="auto", grow_below=1.0).to("cuda"), {}
    regime = Regime(epochs=3, batch=16, optimizer="adamw", lr=0.01, weight_decay=0.1, keep_state=True)
    fit = Trainer(regime, engine=engine)
    with precision_scope(precision, device):
        for task in tasks:
            method.learn(task, fit)
            assert_answers(method, before)
            before[task.index] = answers(method, task.index)
        assert len(method.growth.steps) >= 2
        save(method, tmp_path / "model")
        assert_answers(load(tmp_path / "model", resnet()), before)
