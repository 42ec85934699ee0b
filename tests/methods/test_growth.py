"""Growing: finished tasks keep their bits on networks of many kinds, and what can't grow is refused in one line."""

import pytest
import torch
from torch import nn

from hatrack import METHODS, NETWORKS, Method, Network, compare_certificates, load, lora, protect, save
from hatrack.seeds import seeded
from tests.helpers.growing import (
    IMAGES,
    SHAPE,
    TRUNKS,
    WrittenOut,
    answers,
    assert_answers,
    build,
    changed,
    convolutions,
    make,
    trainer,
)
from tests.helpers.learning import OPTIMIZERS
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under .* free", "ignore:with some units closed")
both = pytest.mark.parametrize("name", ["hat", "pmask"])


CASES = [(name, trunk) for trunk in TRUNKS for name in ("hat", "pmask")]
QUICK = [("pmask", "mlp"), ("hat", "convolutions"), ("hat", "norms")]


@pytest.mark.parametrize("case", quick_and_slow(CASES, QUICK))
def test_finished_tasks_keep_their_bits(case, tmp_path):
    """Through two growths, the tasks after them, and a file that is loaded with the trunk as it was first."""
    (name, trunk), tasks, before = case, toy_tasks(4, shape=SHAPE), {}
    method, fit = make(name, tasks, trunk), trainer(optimizer="adam", lr=0.02, weight_decay=0.01, keep_state=True)
    for task in tasks:
        method.learn(task, fit)
        assert_answers(method, before)
        before[task.index], certificate = answers(method, task.index), method.certificate()
        if task.index in (0, 2):
            grown = method.grow(0.5)
            assert grown
            assert all(new > old for old, new in grown.values())
            assert_answers(method, before)
            assert compare_certificates(method.certificate(), certificate).same == list(method.history.values())
    save(method, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors", build(trunk))
    assert_answers(again, before)
    assert compare_certificates(again.certificate(), method.certificate()).kept
    for task in tasks:
        served, cut = method.for_task(task.index), method.extract(task.index)
        torch.testing.assert_close(served(IMAGES[3]), before[task.index][3], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cut(IMAGES[3]), before[task.index][3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("optimizer", quick_and_slow(OPTIMIZERS, ["kept momentum"]))
@both
def test_no_optimizer_moves_a_finished_task(name, optimizer):
    tasks, before = toy_tasks(4, shape=SHAPE), {}
    method, fit = make(name, tasks), trainer(epochs=3, **OPTIMIZERS[optimizer])
    for task in tasks:
        method.learn(task, fit)
        assert_answers(method, before)
        before[task.index] = answers(method, task.index)
        method.grow({"2": 3})


@pytest.mark.parametrize("trunk", ["mlp", "convolutions", "resnet18", "branches", "packed attention", "gru", "lstm", "loop"])
def test_old_units_compute_the_same_within_the_wider_trunk(trunk):
    """Weights and units lie in the right places: with all new units closed, the wide trunk computes what the narrow one
    did, up to rounding."""
    tasks, module = toy_tasks(2, shape=SHAPE), build(trunk)
    if trunk == "branches":
        # New channels between old ones, as of a concatenation, change groups of several channels.
        module.norm, module.up = nn.Identity(), nn.ConvTranspose2d(20, 8, 2, stride=2)
    method = make("hat", tasks, module)
    gates = torch.rand(method.units.count, generator=torch.Generator().manual_seed(1)) < 0.7
    narrow, norms = method.units, [*method.norms.names]
    method.eval()
    with torch.no_grad():
        before = narrow.run(IMAGES[3], gates)
        method.grow(0.5)
        generation = method.growth.generations[0]
        wide = torch.zeros(method.units.count, dtype=torch.bool)
        wide[generation.places.units] = gates
        after = method.units.run(IMAGES[3], wide)
    old = torch.stack([f for f in after.T if f.any()]) if before.any() else after.T
    expected = torch.stack([f for f in before.T if f.any()])
    assert method.norms.names == norms
    torch.testing.assert_close(old, expected, atol=1e-5, rtol=1e-4)


def test_places_of_flattened_filters_by_hand():
    """2 filters of 2x2 pixels are flattened to 8 inputs; after growth to 3 filters, to 12. The old ones come first."""
    trunk = nn.Sequential(nn.Conv2d(1, 2, 7), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))
    kernel, weight, bias = (p.detach().clone() for p in (trunk[0].weight, trunk[3].weight, trunk[3].bias))
    method = make("hat", toy_tasks(1, shape=SHAPE), trunk)
    assert method.grow({"0": 1, "3": 0.25}) == {"0": (2, 3), "3": (4, 5)}
    wide = method.net.trunk
    assert wide[0].weight.shape == (3, 1, 7, 7)
    assert wide[3].weight.shape == (5, 12)
    assert (wide[0].out_channels, wide[3].in_features, wide[3].out_features, method.net.features) == (3, 12, 5, 5)
    assert torch.equal(wide[0].weight[:2], kernel)
    assert torch.equal(wide[3].weight[:4, :8], weight)
    assert torch.equal(wide[3].bias[:4], bias)
    fresh = torch.cat([wide[3].weight[4], wide[3].weight[:4, 8:].flatten()])
    assert 0 < fresh.abs().max() <= 12**-0.5
    assert trunk[3].weight.shape == (4, 8), "the trunk that was given is left alone"


@both
def test_layers_that_are_added_grow_together(name):
    method = make(name, toy_tasks(1, shape=SHAPE), "resnet18")
    grown = method.grow({"0.0": 2} if name == "hat" else {"0.0.weight": 2})
    assert set(grown) == {"0.0", "1.0.conv2", "1.1.conv2"}
    assert set(grown.values()) == {(2, 4)}


def test_heads_and_groups_keep_their_sizes():
    method = make("hat", toy_tasks(1, shape=SHAPE), "packed attention")
    method.grow(0.5)
    assert (method.net.trunk.heads, method.net.trunk.packed.out_features) == (6, 72)
    method = make("hat", toy_tasks(1, shape=SHAPE), "branches")
    method.grow(0.5)
    trunk = method.net.trunk
    assert trunk.norm.num_channels // trunk.norm.num_groups == 5
    assert trunk.depthwise.groups == trunk.norm.num_channels
    assert trunk.up.in_channels // trunk.up.groups == 5
    method = make("hat", toy_tasks(1, shape=SHAPE), "encoder")
    method.grow(0.5)
    attention = method.net.trunk.layer.self_attn
    assert (attention.num_heads, attention.head_dim, attention.embed_dim) == (6, 4, 24)


@both
def test_a_width_that_is_written_out_is_refused_with_its_line(name):
    tasks = toy_tasks(2, shape=SHAPE)
    with pytest.raises(ValueError, match=r"growing\.py, line \d+: x = x\.view\(-1, 1024\)"):
        make(name, tasks, WrittenOut(), grow="auto")
    method = make(name, tasks, WrittenOut())
    method.learn(tasks[0], trainer())
    before, state = {0: answers(method, 0)}, {key: value.clone() for key, value in method.state_dict().items()}
    with pytest.raises(ValueError, match=r"view\(-1, 1024\)") as error:
        method.grow(0.5)
    assert "\n" not in str(error.value)
    assert changed(method, state) == []
    assert_answers(method, before)
    method.learn(tasks[1], trainer())
    assert_answers(method, before)


@both
def test_what_cannot_grow_says_so(name):
    tasks = toy_tasks(2, shape=SHAPE)
    with pytest.raises(ValueError, match="Method can't grow; hat and pmask can"):
        Method(Network(build("mlp"), tasks=tasks)).grow()
    with pytest.raises(ValueError, match="masks='soft'"):
        make(name, tasks, masks="soft").grow()
    with pytest.raises(ValueError, match="norms='shared'"):
        make("hat", tasks, "norms", norms="shared").grow()
    with pytest.raises(ValueError, match="heads='shared'"):
        METHODS["pmask"](Network(build("mlp"), tasks=tasks, heads="shared")).grow()
    with pytest.raises(ValueError, match="reuse='never' can't grow"):
        make(name, tasks, reuse="never").grow()
    with pytest.raises(ValueError, match="reuse='never' can't grow"):
        make(name, tasks, reuse="never", grow="auto")
    frozen = METHODS["hat"](Network(build("mlp"), tasks=tasks, freeze="2"))
    with pytest.raises(ValueError, match="no layer can grow: 2"):
        frozen.grow({"2": 1})
    assert frozen.grow(1.0) == {"5": (7, 14)}


@pytest.mark.parametrize(
    ("by", "words"),
    [
        (0, "must be a share above 0"), (-0.5, "-0.5"), (float("nan"), "nan"), ("much", "'much'"), (True, "True"),
        (1000.0, "1000"), ({"2": 0}, "from 1 to"), ({"2": -1}, "-1"), ({"7": 1}, "no layer '7'.*there are: 2, 5"),
        ({"2": 1.5j}, "1.5j"),
    ],
)  # fmt: skip
def test_wrong_amounts_are_refused(by, words):
    method = make("hat", toy_tasks(1, shape=SHAPE))
    with pytest.raises(ValueError, match=words):
        method.grow(by)


def test_convolutions_in_order_of_channels_last():
    tasks = toy_tasks(2, shape=SHAPE)
    with seeded(0, "trunk"):
        trunk = convolutions().to(memory_format=torch.channels_last)
    method = make("hat", tasks, trunk)
    method.learn(tasks[0], trainer())
    before = {0: answers(method, 0)}
    method.grow(0.5)
    assert method.net.trunk[4].weight.is_contiguous(memory_format=torch.channels_last)
    method.learn(tasks[1], trainer())
    assert_answers(method, before)


@both
def test_a_protected_backbone_does_not_grow(name):
    """The user's loop and optimizer hold its modules, which growing would replace."""
    backbone = build("mlp")
    guard = protect(backbone, torch.optim.SGD(backbone.parameters()), example=IMAGES[3], method=name)
    with guard.attachment.bare(), pytest.raises(ValueError, match="a protected backbone can't grow") as error:
        guard.method.grow(0.5)
    assert "\n" not in str(error.value)
    assert guard.method.net.trunk is backbone


@pytest.mark.slow
@pytest.mark.parametrize("network", ["alexnet", "cnn"])
@both
def test_the_large_networks_of_the_library(name, network):
    tasks, before = toy_tasks(2, shape=(3, 32, 32), train=32, test=8), {}
    method = make(name, tasks, NETWORKS[network]((3, 32, 32)))
    images = tasks[0].test.inputs(torch.arange(8))
    for task in tasks:
        method.learn(task, trainer(optimizer="adam", lr=0.001))
        for k, then in before.items():
            assert torch.equal(method.eval()(images, k), then)
        before[task.index] = method.eval()(images, task.index)
        method.grow(0.1)
        assert all(torch.equal(method(images, k), then) for k, then in before.items())


def test_a_trunk_with_adapters_is_refused():
    trunk = lora(nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8)), rank=3)
    method = METHODS["hat"](Network(trunk, classes=[2, 2], example=torch.randn(4, 1, 4, 4)))
    before = {name: value.clone() for name, value in method.state_dict().items()}
    with pytest.raises(ValueError, match="a trunk with adapters can't grow"):
        method.grow(0.5)
    assert all(torch.equal(before[name], value) for name, value in method.state_dict().items())
