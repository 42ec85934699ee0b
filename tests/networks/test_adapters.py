"""Adapters on frozen trunks: they start as the trunk, HAT and PMASK gate them and forget nothing, and files hold them."""

import copy
import warnings

import pytest
import torch
from torch import nn

import hatrack as hr
from hatrack import METHODS, NETWORKS, Network, Regime, Trainer, evaluate
from hatrack.networks import lora
from hatrack.networks.adapters import Adapter
from hatrack.seeds import seeded
from hatrack.tracing.units import Units
from tests.helpers.learning import OPTIMIZERS, learn, logits
from tests.helpers.tiers import every_value
from tests.helpers.toys import toy_tasks


class Patches(nn.Module):
    """A small transformer of torch's own layers, with a class token and positions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(1, 8, 2, stride=2)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.block(x)[:, 0]


def convolutions():
    shared = nn.Conv2d(6, 6, 3, padding=1)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, stride=1, padding_mode="reflect"), nn.BatchNorm2d(6), nn.ReLU(),
        shared, nn.ReLU(), shared, nn.ReLU(), nn.Conv2d(6, 6, 3, groups=2), nn.Dropout(0.1), nn.Flatten(),
        nn.Linear(24, 10), nn.LayerNorm(10), nn.ReLU(),
    )  # fmt: skip


TRUNKS = {
    "convolutions": convolutions,
    "transformer": Patches,
    "vit": lambda: NETWORKS["vit"]((1, 4, 4), width=8, depth=2, attention_heads=2, patch=2),
    "resnet": lambda: nn.Sequential(nn.Upsample(8), NETWORKS["resnet18"]((1, 8, 8), width=2)),
    "gru": lambda: nn.Sequential(NETWORKS["gru"]((1, 4, 4), width=8, layers=1), nn.Linear(8, 8)),
}
every_trunk = pytest.mark.parametrize("kind", TRUNKS)


def trunk_of(kind):
    with seeded(3, "weights"):
        return TRUNKS[kind]()


def trained(kind, tasks):
    """A trunk that has seen a task of its own, so that its norms have statistics."""
    trunk = trunk_of(kind)
    learn(METHODS["sgd"](Network(trunk, tasks=tasks[:1])), tasks[:1])
    return trunk


@every_trunk
def test_answers_start_equal_to_those_of_the_trunk(kind):
    trunk, x = trunk_of(kind).eval(), torch.randn(5, 1, 4, 4)
    before = copy.deepcopy(trunk.state_dict())
    adapted = lora(trunk, 2).eval()
    with torch.no_grad():
        assert torch.equal(adapted(x), trunk(x))
        for module in adapted.modules():
            if isinstance(module, Adapter):
                nn.init.normal_(module.up.weight)
        assert not torch.allclose(adapted(x), trunk(x)), "the adapters are used"
    assert all(torch.equal(value, before[name]) for name, value in trunk.state_dict().items())
    assert all(p.requires_grad for p in trunk.parameters())


def test_an_adapter_adds_the_product_of_two_matrices():
    with seeded(0, "weights"):
        conv, linear = nn.Conv2d(3, 4, 3, stride=2, padding=1).double(), nn.Linear(5, 6).double()
    for layer, x in ((conv, torch.randn(2, 3, 7, 7).double()), (linear, torch.randn(2, 5).double())):
        adapter = Adapter(copy.deepcopy(layer), 2, 0.5)
        nn.init.normal_(adapter.up.weight)
        a, b = adapter.down.weight.flatten(1), adapter.up.weight.flatten(1)
        assert a.shape[0] == b.shape[1] == 2
        with torch.no_grad():
            layer.weight += 0.5 * (b @ a).view_as(layer.weight)
            torch.testing.assert_close(adapter(x), layer(x))


def test_only_adapters_of_the_chosen_layers_are_trained():
    adapted = lora(trunk_of("vit"), 2, "2.0.*.layer.query, 2.1.1")
    names = {name for name, p in adapted.named_parameters() if p.requires_grad}
    layers = ("2.0.0.layer.query", "2.1.1.layer.wide", "2.1.1.layer.out")
    assert names == {f"trunk.{layer}.{part}.weight" for layer in layers for part in ("down", "up")}


def test_norms_keep_their_statistics_and_dropout_stays_on():
    adapted = lora(trunk_of("convolutions"), 2)
    before = copy.deepcopy(dict(adapted.named_buffers()))
    adapted.train()
    adapted(torch.randn(9, 1, 4, 4))
    assert all(torch.equal(value, before[name]) for name, value in adapted.named_buffers())
    assert adapted.trunk[8].training
    assert not adapted.trunk[1].training


def test_a_layer_that_is_registered_twice_has_one_adapter():
    adapted = lora(trunk_of("convolutions"), 2)
    assert adapted.trunk[3] is adapted.trunk[5]
    assert isinstance(adapted.trunk[3], Adapter)
    assert isinstance(adapted.trunk[7], nn.Conv2d), "a convolution in groups has none"


# HAT and PMASK on adapters


@every_trunk
def test_units_are_the_rank_channels_alone(kind):
    adapted = lora(trunk_of(kind), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        units = Units(adapted, torch.randn(2, 1, 4, 4))
    downs = {name: m.down.weight.shape[0] for name, m in adapted.named_modules() if isinstance(m, Adapter)}
    assert units.layers.keys() == {f"{name}.down" for name in downs}
    assert units.count == sum(downs.values())
    assert not units.held_whole()
    assert not units.frozen().any()
    layer = next(name for name, rank in downs.items() if rank > 1)
    one = torch.zeros(units.count)
    one[units.layers[f"{layer}.down"].start + 1] = 1
    masks = {name: mask for name, mask in units.weight_masks(one).items() if name.endswith(("down.weight", "up.weight"))}
    down, up = masks[f"{layer}.down.weight"], masks[f"{layer}.up.weight"]
    assert down[1].eq(1).all()
    assert up[:, 1].eq(1).all()
    assert sum(float(mask.sum()) for mask in masks.values()) == down[1].numel() + len(up), "and nothing else"


@pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")
@pytest.mark.parametrize(
    ("kind", "name", "optimizer"),
    every_value(
        ["convolutions", "transformer", "vit", "gru"],
        ["hat", "pmask", "independent", "packnet", "lora"],
        ["kept momentum", "kept adamw with decay"],
    ),
)
def test_finished_tasks_keep_every_bit(kind, name, optimizer):
    tasks = toy_tasks(3)
    trunk = trained(kind, tasks)
    adapted = trunk.requires_grad_(False) if name == "lora" else lora(trunk, 6)
    method = METHODS[name](Network(adapted, tasks=tasks))
    frozen = {key: p.detach().clone() for key, p in adapted.named_parameters() if not p.requires_grad}
    frozen |= {key: b.clone() for key, b in adapted.named_buffers()}
    fit, after = Trainer(Regime(epochs=6, batch=8, **OPTIMIZERS[optimizer])), []
    for task in tasks:
        before = copy.deepcopy(method.state_dict())
        method.learn(task, fit)
        for earlier, kept in zip(tasks, after, strict=False):
            assert torch.equal(logits(method, earlier), kept)
        after.append(logits(method, task))
        moved = [key for key, value in method.state_dict().items() if not torch.equal(value, before[key])]
        trained_part = {"lora": "adapters.", "independent": f"trunks.{task.index}."}.get(name, "net.trunk.")
        assert [key for key in moved if key.startswith(trained_part)], "the task trained its adapters"
    state = {**dict(method.net.trunk.named_parameters()), **dict(method.net.trunk.named_buffers())}
    assert all(torch.equal(state[key], value) for key, value in frozen.items())


@pytest.mark.slow
def test_hat_learns_by_adapters_what_frozen_features_do_not_allow():
    tasks = toy_tasks(3, train=80)
    trunk = trained("convolutions", tasks)
    accuracy = {}
    for name, net in {"hat": lora(trunk, 6), "sgd": copy.deepcopy(trunk).requires_grad_(False)}.items():
        method = METHODS[name](Network(net, tasks=tasks, freeze="" if name == "hat" else "*"))
        learn(method, tasks[1:], Trainer(Regime(epochs=40, batch=8, optimizer="adam", lr=0.01)))
        accuracy[name] = sum(evaluate(method, task.test).accuracy for task in tasks[1:]) / 2
    assert accuracy["hat"] > accuracy["sgd"]
    assert accuracy["hat"] > 0.8


def test_a_trunk_without_adapters_has_the_units_that_it_had():
    """Frozen layers have always-open units there, because files and records of earlier versions count them."""
    trunk = trunk_of("convolutions")
    trunk[0].requires_grad_(False)
    units = Units(trunk, torch.randn(2, 1, 4, 4))
    assert units.frozen()[units.layers["0"]].all()
    assert units.count == Units(trunk_of("convolutions"), torch.randn(2, 1, 4, 4)).count


@pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")
@pytest.mark.parametrize("name", ["hat", "pmask", "lora"])
def test_saved_loaded_and_gone_on_with(name, tmp_path):
    tasks = toy_tasks(3)

    def make():
        trunk = trained("convolutions", tasks)
        return trunk.requires_grad_(False) if name == "lora" else lora(trunk, 4)

    method = METHODS[name](Network(make(), tasks=tasks))
    learn(method, tasks[:2])
    hr.save(method, tmp_path / "model.safetensors")
    other = lora(trunk_of("convolutions"), 4, seed=9) if name != "lora" else trunk_of("convolutions")
    loaded = hr.load(tmp_path / "model.safetensors", other)
    for task in tasks[:2]:
        assert torch.equal(logits(loaded, task), logits(method, task))
    for one in (method, loaded):
        learn(one, tasks[2:], Trainer(Regime(epochs=3, batch=16, lr=0.1), seed=5))
    assert torch.equal(logits(loaded, tasks[2]), logits(method, tasks[2]))
    assert torch.equal(logits(loaded, tasks[0]), logits(method, tasks[0]))


def test_what_is_refused():
    trunk = trunk_of("convolutions")
    for wrong, said in (
        (lambda: lora(trunk, 0), "rank must be at least 1, not 0"),
        (lambda: lora(trunk, 2, "11*"), r"layers='11\*' matches no layer that can have an adapter; .*10"),
        (lambda: lora(lora(trunk, 2), 2), "has adapters already"),
        (lambda: lora(nn.Flatten(), 2), "no layer that can have an adapter"),
        (lambda: lora("resnet", 2), "the trunk must be a module"),
        (lambda: lora(trunk, 2, scale=0.0), "scale must be greater than 0"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            wrong()
        assert "\n" not in str(error.value)
