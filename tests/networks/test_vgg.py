"""The VGG-like network: its layers against plain operations, its named parts, and methods that must follow its units."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import METHODS, NETWORKS, Network, Regime, Run, Trainer
from hatrack.experiments.build import build
from hatrack.seeds import seeded
from tests.helpers.counting import count
from tests.helpers.learning import learn, logits
from tests.helpers.toys import toy_tasks

SMALL = {"filters": (4, 6), "convolutions": 1, "widths": (10,)}
pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")  # networks so small are soon full


def by_hand(channels, side, filters, convolutions, widths):
    """The number of parameters: 3x3 convolutions and linear layers with biases."""
    total, inputs = 0, channels
    for outputs in filters:
        for _ in range(convolutions):
            total, inputs = total + (9 * inputs + 1) * outputs, outputs
        side //= 2
    inputs *= side * side
    for width in widths:
        total, inputs = total + (inputs + 1) * width, width
    return total


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 32, 32), {}),
        ((1, 28, 28), {}),
        ((3, 32, 32), {"filters": (8, 8, 16, 16), "convolutions": 3, "widths": (40,)}),
        ((1, 8, 8), SMALL),
    ],
)
def test_parameters_and_shape(shape, options):
    all_options = {"filters": (64, 128, 256), "convolutions": 2, "widths": (512, 512), **options}
    trunk = NETWORKS["vgg"](shape, **options)
    assert count(trunk) == by_hand(shape[0], shape[1], **all_options)
    assert trunk(torch.zeros(2, *shape)).shape == (2, all_options["widths"][-1])
    if not options and shape[0] == 3:
        assert count(trunk) == 3_505_728


def test_it_computes_what_its_layers_say():
    with seeded(0, "weights"):
        trunk = NETWORKS["vgg"]((3, 9, 8), filters=(4, 6), convolutions=2, widths=(10, 7)).eval()
    weights = [p.detach() for p in trunk.parameters()]
    x = torch.randn(5, 3, 9, 8, generator=torch.Generator().manual_seed(0))
    y = x
    for block in (0, 1):
        for layer in (0, 1):
            place = 2 * (2 * block + layer)
            y = F.relu(F.conv2d(y, weights[place], weights[place + 1], padding=1))
        y = F.max_pool2d(y, 2)
    y = y.flatten(1)
    for place in (8, 10):
        y = F.relu(y @ weights[place].T + weights[place + 1])
    torch.testing.assert_close(trunk(x), y)
    drops = [(name, m.p) for name, m in trunk.named_modules() if isinstance(m, nn.Dropout)]
    assert [(name.split(".")[0], share) for name, share in drops] == [("classifier", 0.5)] * 2


def test_the_convolutions_can_be_frozen():
    tasks = toy_tasks(2, shape=(3, 8, 8))
    with seeded(0, "weights"):
        trunk = NETWORKS["vgg"]((3, 8, 8), **SMALL)
    net = Network(trunk, tasks=tasks, freeze="features")
    before = {name: p.detach().clone() for name, p in trunk.named_parameters()}
    learn(METHODS["ewc"](net), tasks, Trainer(Regime(epochs=2, batch=16, lr=0.1)))
    changed = {name.split(".")[0] for name, p in trunk.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"classifier"}


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((784,), {}, r"not \(784,\)"),
        ((3, 7, 32), {}, r"8x8 pixels, not \(3, 7, 32\)"),
        ((3, 32, 32), {"filters": ()}, "filters must name at least one"),
        ((3, 32, 32), {"widths": ()}, "widths at least one"),
        ((3, 32, 32), {"filters": (0,)}, "filters must be at least 1, not 0"),
        ((3, 32, 32), {"convolutions": 0}, "convolutions must be at least 1, not 0"),
    ],
)
def test_what_it_cannot_do(shape, options, message):
    with pytest.raises(ValueError, match=message):
        NETWORKS["vgg"](shape, **options)


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet", "pnn", "pathnet"])
def test_nothing_is_forgotten(name):
    tasks = toy_tasks(2, shape=(3, 8, 8))
    with seeded(1, "weights"):
        method = METHODS[name](Network(NETWORKS["vgg"]((3, 8, 8), **SMALL), tasks=tasks))
    fit = Trainer(Regime(epochs=3, batch=16, lr=0.1))
    method.learn(tasks[0], fit)
    learned = logits(method, tasks[0])
    method.learn(tasks[1], fit)
    assert torch.equal(learned, logits(method, tasks[0]))
    assert (learned.std(0) > 0).any(), "constant logits would prove nothing"


def test_a_run_names_it():
    spec = Run(
        "smnist", "sgd", network="vgg", freeze="features", benchmark_options={"data": "sample"}, network_options=SMALL
    )
    net = build(spec)[1].net
    assert {name.split(".")[0] for name, p in net.trunk.named_parameters() if p.requires_grad} == {"classifier"}
