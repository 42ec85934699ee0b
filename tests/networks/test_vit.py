"""The vision transformer: its blocks against loops in float64, its dropout and stochastic depth, its initial weights."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import NETWORKS, Network
from hatrack.networks.vit import Branch
from hatrack.seeds import seeded
from tests.helpers.counting import count
from tests.helpers.learning import METHODS, Regime, Trainer, learn, logits
from tests.helpers.toys import toy_tasks

SMALL = {"width": 12, "depth": 2, "attention_heads": 3, "mlp_ratio": 2}


def by_hand(shape, width, depth, patch, mlp_ratio):
    """The number of parameters: patches, positions, blocks and the last norm."""
    attention, perceptron = 4 * (width + 1) * width, (width + 1) * mlp_ratio * width + (mlp_ratio * width + 1) * width
    patches = (shape[0] * patch**2 + 1) * width + shape[1] * shape[2] // patch**2 * width
    return patches + depth * (attention + perceptron + 4 * width) + 2 * width


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 32, 32), {}),
        ((1, 28, 28), {"depth": 2}),
        ((3, 32, 48), SMALL),
        ((2, 6, 6), {**SMALL, "patch": 3, "attention_heads": 1}),
    ],
)
def test_parameters_and_shape(shape, options):
    values = {"width": 192, "depth": 6, "attention_heads": 4, "patch": 4, "mlp_ratio": 4, **options}
    heads = values.pop("attention_heads")
    trunk = NETWORKS["vit"](shape, **values, attention_heads=heads)
    assert count(trunk) == by_hand(shape, **values)
    assert trunk(torch.zeros(2, *shape)).shape == (2, values["width"])
    if not options:
        assert count(trunk) == 2_691_264


def attention_by_loops(x, layer, heads):
    """One image (patches, channels), head by head and patch by patch."""
    size, rows = x.shape[1] // heads, []
    query, key, value = (x @ part.weight.T + part.bias for part in (layer.query, layer.key, layer.value))
    for i in range(len(x)):
        parts = []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            scores = torch.stack([query[i, own] @ key[j, own] / math.sqrt(size) for j in range(len(x))])
            weights = scores.exp() / scores.exp().sum()
            parts.append(sum(weights[j] * value[j, own] for j in range(len(x))))
        rows.append(torch.cat(parts))
    return torch.stack(rows) @ layer.out.weight.T + layer.out.bias


def normed(x, norm):
    """A layer norm over the channels."""
    spread = ((x - x.mean(1, keepdim=True)) ** 2).mean(1, keepdim=True)
    return (x - x.mean(1, keepdim=True)) / (spread + norm.eps).sqrt() * norm.weight + norm.bias


@torch.no_grad()
def test_it_computes_what_its_layers_say():
    draw = torch.Generator().manual_seed(0)
    trunk = NETWORKS["vit"]((2, 8, 12), **SMALL).double().eval()
    for parameter in trunk.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw))
    images = torch.randn(3, 2, 8, 12, generator=draw).double()
    for image, features in zip(images, trunk(images), strict=True):
        corners = [(top, left) for top in (0, 4) for left in (0, 4, 8)]
        patches = torch.stack([image[:, top : top + 4, left : left + 4].flatten() for top, left in corners])
        x = patches @ trunk[0].conv.weight.flatten(1).T + trunk[0].conv.bias + trunk[0].positions
        for attention, perceptron in trunk[2]:
            x = x + attention_by_loops(normed(x, attention.norm), attention.layer, SMALL["attention_heads"])
            hidden = normed(x, perceptron.norm) @ perceptron.layer.wide.weight.T + perceptron.layer.wide.bias
            hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
            x = x + hidden @ perceptron.layer.out.weight.T + perceptron.layer.out.bias
        torch.testing.assert_close(features, normed(x, trunk[3]).mean(0))


def test_initial_weights():
    with seeded(0, "weights"):
        trunk = NETWORKS["vit"]((3, 32, 32), depth=2)
    for name, parameter in trunk.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:  # the scale of a norm
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name


def test_dropout_and_stochastic_depth_are_where_they_should_be():
    trunk = NETWORKS["vit"]((3, 32, 32), width=8, depth=4, dropout=0.3, stochastic_depth=0.2)
    branches = [part for part in trunk.modules() if isinstance(part, Branch)]
    assert [branch.skip for branch in branches] == pytest.approx([0.05, 0.05, 0.1, 0.1, 0.15, 0.15, 0.2, 0.2])
    drops = [part.p for part in trunk.modules() if isinstance(part, nn.Dropout)]
    assert drops == [0.3] * (1 + 4 * 3)  # behind the patches; in a block behind both branches and within the perceptron


def test_a_branch_is_left_out_for_whole_images():
    with seeded(0, "weights"):
        branch = Branch(6, nn.Linear(6, 6), dropout=0.0, skip=0.25)
    x = torch.randn(4000, 5, 6, generator=torch.Generator().manual_seed(0))
    with seeded(0, "skip"), torch.no_grad():
        added, whole = branch(x) - x, branch.eval()(x) - x
    skipped = (added == 0).flatten(1).all(1)
    assert skipped.float().mean().item() == pytest.approx(0.25, abs=0.03)
    torch.testing.assert_close(added[~skipped], whole[~skipped] / 0.75, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((784,), {}, r"not \(784,\)"),
        ((3, 30, 32), {}, r"multiples of 4, the size of a patch, not \(3, 30, 32\)"),
        ((3, 32, 32), {"patch": 5}, r"multiples of 5"),
        ((3, 32, 32), {"attention_heads": 5}, "192 channels can't be divided among 5"),
        ((3, 32, 32), {"depth": 0}, "depth must be at least 1, not 0"),
        ((3, 32, 32), {"stochastic_depth": 1.0}, "stochastic_depth must be at most 0.99, not 1.0"),
    ],
)
def test_what_it_cannot_do(shape, options, message):
    with pytest.raises(ValueError, match=message):
        NETWORKS["vit"](shape, **options)


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet", "independent"])
@pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")  # a network so small is soon full
@pytest.mark.filterwarnings("ignore:.*are held whole:UserWarning")
def test_nothing_is_forgotten(name):
    tasks = toy_tasks(2, shape=(1, 8, 8))
    with seeded(1, "weights"):
        method = METHODS[name](Network(NETWORKS["vit"]((1, 8, 8), **SMALL), tasks=tasks))
    fit = Trainer(Regime(epochs=5, batch=16, lr=0.1))
    method.learn(tasks[0], fit)
    learned = logits(method, tasks[0])
    learn(method, tasks[1:], fit)
    assert torch.equal(learned, logits(method, tasks[0]))
    assert (learned.std(0) > 0).any(), "constant logits would prove nothing"


def test_images_do_not_influence_each_other():
    with seeded(0, "weights"):
        trunk = NETWORKS["vit"]((1, 8, 8), **SMALL).eval()
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(trunk(x)[:1], trunk(x[:1]))
    assert not torch.allclose(trunk(x[:1]), trunk(F.pad(x[:1, :, 4:], (0, 0, 0, 4)))), "patches have positions"
