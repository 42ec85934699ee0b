"""Every method on a transformer and on a recurrent network: it learns, in steps that obey the rule, or refuses in a line."""

from dataclasses import replace

import pytest
import torch

from hatrack import METHODS, NETWORKS, Network, Regime, Run, Trainer, evaluate, run
from hatrack.seeds import seeded
from tests.helpers.learning import UNTRAINED, learn
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

SMALL = {"vit": {"width": 16, "depth": 2, "attention_heads": 2, "mlp_ratio": 2}, "gru": {"width": 16}}
LAYER_BY_LAYER = ("den", "pathnet", "pnn")  # they make new layers like those of a plain sequence of layers
pytestmark = [
    pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning"),  # networks so small are soon full
    pytest.mark.filterwarnings("ignore:.*are held whole:UserWarning"),
    pytest.mark.parametrize("network", SMALL),
    pytest.mark.parametrize("name", quick_and_slow(METHODS, ("sgd", "hat"))),
]


def build(name, network, tasks):
    """A method on a small network."""
    with seeded(0, "weights"):
        return METHODS[name](Network(NETWORKS[network](tasks[0].shape, **SMALL[network]), tasks=tasks))


def test_a_method_learns_or_says_why_not(name, network):
    tasks = toy_tasks(2, shape=(1, 8, 8))
    if name in LAYER_BY_LAYER:
        with pytest.raises(ValueError, match="can't be copied layer by layer") as refused:
            build(name, network, tasks)
        assert "\n" not in str(refused.value)
        return
    method = build(name, network, tasks)
    before = {key: p.detach().clone() for key, p in method.net.trunk.named_parameters()}
    regime = Regime(epochs=10, batch=16, optimizer="adam", lr=0.01)
    learn(build(name, network, tasks), tasks, Trainer(replace(regime, epochs=1), watch=True))
    learn(method, tasks, Trainer(regime))
    if name in UNTRAINED:
        return
    assert evaluate(method, tasks[0 if name == "frozen" else 1].test).accuracy > 0.6  # 0.33 by chance
    moved = [key for key, p in method.net.trunk.named_parameters() if not torch.equal(p, before[key])]
    assert moved or name in ("independent", "joint", "random")


@pytest.mark.slow
def test_a_run_on_images_that_come_with_the_package(name, network, tmp_path):
    if name in LAYER_BY_LAYER:
        pytest.skip("it refuses, see above")
    spec = Run(
        "smnist", name, network=network, network_options=SMALL[network], benchmark_options={"data": "sample"},
        regime=Regime(epochs=1), train_examples=50,
    )  # fmt: skip
    record = run(spec, tmp_path)
    assert record.spec.network == network
    assert len(record.accuracy) == len(record.tasks)
