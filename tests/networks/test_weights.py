"""Weights of a trunk from files of every kind, trunks of other libraries, and what is said about those that do not fit."""

import sys
import types

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hatrack as hr
from hatrack import METHODS, NETWORKS, Network
from hatrack.networks.adapters import lora
from hatrack.networks.weights import load_weights
from hatrack.seeds import seeded
from tests.helpers.learning import learn, logits
from tests.helpers.toys import toy_tasks


def resnet(seed):
    with seeded(seed, "weights"):
        return NETWORKS["resnet18"]((1, 8, 8), width=2)


def same(one, other):
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def with_head(trunk):
    return {**{f"module.{name}": t for name, t in trunk.state_dict().items()}, "fc.weight": torch.ones(3, 16)}


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("plain.pt", lambda trunk, path: torch.save(trunk.state_dict(), path)),
        ("wrapped.pth", lambda trunk, path: torch.save({"epoch": 3, "state_dict": trunk.state_dict()}, path)),
        ("plain.safetensors", lambda trunk, path: save_file(trunk.state_dict(), path)),
        ("half.safetensors", lambda trunk, path: save_file(trunk.half().state_dict(), path)),
        ("saved.safetensors", lambda trunk, path: hr.save(METHODS["hat"](network(trunk)), path)),
    ],
)
def test_a_trunk_gets_the_weights_in_a_file(name, write, tmp_path):
    source, trunk = resnet(1), resnet(2)
    assert not same(source, trunk)
    write(source, tmp_path / name)
    load_weights(trunk, tmp_path / name)
    assert same(source.float(), trunk)


def network(trunk):
    return Network(trunk, [3], torch.randn(2, 1, 8, 8))


def test_a_prefix_and_the_head_of_a_classifier_are_left_out(tmp_path):
    source, trunk = resnet(1), resnet(2)
    torch.save({**source.state_dict(), "fc.weight": torch.ones(3, 16)}, tmp_path / "classifier.pt")
    with pytest.warns(UserWarning, match=r"classifier\.pt: the trunk has no fc\.weight: not used") as told:
        load_weights(trunk, tmp_path / "classifier.pt")
    assert len(told) == 1
    assert same(source, trunk)
    trunk = resnet(3)
    torch.save(with_head(source), tmp_path / "module.pt")
    load_weights(trunk, tmp_path / "module.pt")
    assert same(source, trunk)


def test_files_that_do_not_fit(tmp_path):
    trunk, before = resnet(1), resnet(1)
    torch.save(NETWORKS["resnet18"]((1, 8, 8), width=3).state_dict(), tmp_path / "wide.pt")
    save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")
    torch.save({"x": 3}, tmp_path / "numbers.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "text.pt").write_text("hello")
    hr.save(METHODS["sgd"](network(resnet(2))), tmp_path / "damaged.safetensors")
    data = bytearray((tmp_path / "damaged.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(data)
    for name, said in {
        "wide.pt": r"does not fit the trunk: .*is \(3, 1, 3, 3\) instead of \(2, 1, 3, 3\)",
        "other.safetensors": "does not fit the trunk: it lacks 0.0.weight",
        "numbers.pt": "holds no state_dict",
        "module.pt": "holds no state_dict of plain tensors",
        "text.safetensors": "holds no safetensors",
        "text.pt": "holds no state_dict: torch.save did not write it",
        "damaged.safetensors": "damaged: its digest differs",
        "nowhere.pt": "there is no such file",
    }.items():
        with pytest.raises(ValueError, match=said) as error:
            load_weights(trunk, tmp_path / name)
        assert "\n" not in str(error.value)
        assert name in str(error.value)
    assert same(trunk, before), "nothing was changed"


# Other libraries


class Stub(nn.Module):
    """What a model of timm is here: pooled features of images of 8x8."""

    def __init__(self, channels):
        super().__init__()
        self.patch = nn.Conv2d(channels, 6, 4, stride=4)

    def forward(self, x):
        assert x.shape[2:] == (8, 8)
        return self.patch(x).flatten(2).mean(2)


@pytest.fixture
def timm(monkeypatch):
    asked = []

    def create_model(name, **options):
        asked.append((name, options))
        if name != "stub_8":
            raise RuntimeError(f"Unknown model\n({name})")
        return Stub(options["in_chans"])

    module = types.ModuleType("timm")
    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)
    return asked


def test_a_model_of_timm_is_a_trunk(timm, tmp_path):
    build = NETWORKS.find("timm:stub_8")
    assert NETWORKS.name_of(build) == "timm:stub_8"
    trunk, source, tasks = build((1, 4, 4), image_size=8), Stub(1), toy_tasks(2)
    assert timm == [("stub_8", {"pretrained": False, "num_classes": 0, "in_chans": 1})]
    torch.save(source.state_dict(), tmp_path / "stub.pt")
    load_weights(trunk, tmp_path / "stub.pt")
    assert torch.equal(trunk.model.patch.weight, source.patch.weight)
    method = METHODS["hat"](Network(lora(trunk, 4), tasks=tasks))
    learn(method, tasks[:1])
    before = logits(method, tasks[0])
    learn(method, tasks[1:])
    assert torch.equal(logits(method, tasks[0]), before)
    for name, said in {
        "timm:stub_9": r"network timm:stub_9 can't be built: RuntimeError: Unknown model \(stub_9\)",
        "timm:hf-hub:someone/model": "is no name of a model of timm",
        "timn:stub_8": "no network 'timn:stub_8'",
    }.items():
        with pytest.raises(ValueError, match=said) as error:
            NETWORKS.find(name)((1, 4, 4))
        assert "\n" not in str(error.value)


def test_a_library_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"the library timm can't be imported .*: pip install timm"):
        NETWORKS.find("timm:resnet18")((3, 8, 8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_of_transformers_are_trunks(tmp_path):
    library = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = library.ViTConfig(**small, image_size=8, patch_size=4, num_channels=1)
    config.save_pretrained(tmp_path / "tiny")
    classifier = library.ViTForImageClassification(config)
    classifier.save_pretrained(tmp_path / "classifier")
    trunk, tasks = NETWORKS.find(f"transformers:{tmp_path}/tiny")((1, 4, 4), image_size=8), toy_tasks(2)
    load_weights(trunk, tmp_path / "classifier" / "model.safetensors")
    assert same(trunk.model, classifier.vit)
    save_file({"nothing": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors does not fit the trunk: it lacks model\.") as error:
        load_weights(trunk, tmp_path / "other.safetensors")
    assert "\n" not in str(error.value)
    assert trunk(torch.randn(3, 1, 4, 4)).shape == (3, 8)
    for name, net in {"hat": lora(trunk, 2, "*.attention"), "lora": trunk}.items():
        method = METHODS[name](Network(net, tasks=tasks))
        learn(method, tasks[:1])
        before = logits(method, tasks[0])
        learn(method, tasks[1:])
        assert torch.equal(logits(method, tasks[0]), before)
    words = library.BertConfig(**small, vocab_size=20, max_position_embeddings=12)
    words.save_pretrained(tmp_path / "words")
    reader = NETWORKS.find(f"transformers:{tmp_path}/words")((10,))
    assert reader(torch.randint(0, 20, (3, 10))).shape == (3, 8)
    with pytest.raises(ValueError, match=r"network transformers:nowhere can't be built") as error:
        NETWORKS.find("transformers:nowhere")((1, 4, 4))
    assert "\n" not in str(error.value)
