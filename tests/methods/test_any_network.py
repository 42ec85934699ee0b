"""Nothing is forgotten, not a bit, on networks that the package does not know: random ones, and those of a model zoo."""

import importlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor

from hatrack import METHODS, Network, Regime, Task, Trainer
from hatrack.seeds import derive, seeded
from tests.helpers.learning import OPTIMIZERS, logits
from tests.helpers.nets import Plan, check_units, plans
from tests.helpers.tiers import cases, quick_and_slow
from tests.helpers.toys import toy_tasks
from tests.helpers.tracing import FOLLOWED, UNTRACEABLE, trunk_around

pytestmark = [
    pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning"),  # networks so small are soon full
    pytest.mark.filterwarnings("ignore:.* held whole after the first task:UserWarning"),
]
QUICK = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def learn_three(name: str, net: Network, tasks: list[Task], optimizer: str, **regime: Any) -> list[tuple[Tensor, Tensor]]:
    """Three tasks, the last of them added later: the logits of the first two when they were learned, and at the end."""
    method = METHODS[name](net)
    fit = Trainer(Regime(**{"epochs": 2, "batch": 8, **OPTIMIZERS[optimizer], **regime}))
    learned = []
    for task in tasks:
        if task.index == 2:
            net.add_task(task.classes)
        method.learn(task, fit)
        learned.append(logits(method, task))
    return list(zip(learned, [logits(method, task) for task in tasks[:2]], strict=False))


def unchanged(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(learned, now) for learned, now in pairs)


def varied(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Constant logits would prove nothing."""
    return all(bool((learned.std(0) > 0).any()) for learned, _ in pairs)


# Random networks


def random_pairs(name: str, plan: Plan, optimizer: str) -> list[tuple[Tensor, Tensor]]:
    tasks = toy_tasks(3, shape=(3, 8, 8), train=20, test=8)
    return learn_three(name, Network(plan.build(), [3, 3], tasks[0].train.inputs(torch.arange(2))), tasks, optimizer)


def check_random(plan: Plan, optimizers: list[str]) -> None:
    """Of a network whose closed gates or norms make its logits constant nothing is counted."""
    for name in ("hat", "pmask"):
        for optimizer in optimizers:
            pairs = random_pairs(name, plan, optimizer)
            assert unchanged(pairs), f"{name} with {optimizer}"
            assume(varied(pairs))


@settings(QUICK, max_examples=5)
@given(plan=plans)
def test_random_networks_forget_nothing(plan):
    check_random(plan, [list(OPTIMIZERS)[derive(plan.seed, "optimizer") % len(OPTIMIZERS)]])


@pytest.mark.slow
@settings(QUICK, max_examples=cases(60, 200))
@given(plan=plans)
def test_many_random_networks_forget_nothing(plan):
    check_random(plan, list(OPTIMIZERS))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_plain_sgd_does_forget_on_them(optimizer):
    """The control: the same training moves the logits of a method that guarantees nothing."""
    for block, norm in (("residual", "batch"), ("excited", "none"), ("concatenated", "group")):
        pairs = random_pairs("sgd", Plan((block,), norm, "relu", 8, "flat", 0), optimizer)
        assert varied(pairs)
        assert not any(torch.equal(learned, now) for learned, now in pairs)


@settings(QUICK, max_examples=5)
@given(plan=plans)
def test_units_of_random_networks(plan):
    check_units(plan.build(), torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(plan.seed)))


@pytest.mark.slow
@settings(QUICK, max_examples=cases(60, 200))
@given(plan=plans)
def test_units_of_many_random_networks(plan):
    check_units(plan.build(), torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(plan.seed)))


@pytest.mark.parametrize("name", ["attention", "a transformer's layer", "weight norm", "spectral norm", "positions"])
def test_networks_with_a_part_that_is_hard_to_follow_forget_nothing(name):
    tasks = toy_tasks(3, shape=(1, 3, 5))
    for method in ["hat", "pmask"][: 1 if name == "weight norm" else 2]:  # a row that is masked whole has no direction
        with seeded(0, name):
            trunk = torch.nn.Sequential(torch.nn.Flatten(1, 2), trunk_around((UNTRACEABLE | FOLLOWED)[name][0]))
        net = Network(trunk, [3, 3], tasks[0].train.inputs(torch.arange(2)), seed=2)  # whose gates leave logits that vary
        pairs = learn_three(method, net, tasks, "kept adamw with decay")
        assert unchanged(pairs)
        assert varied(pairs)


# A model zoo: its module and class, the size of images that its last pool asks for, and widths that make it small

TWO = {"channels": [[16, 16], [32]], "init_block_channels": 8}
THREE = {"channels": [[8], [12, 12], [16]], "init_block_channels": 8, "final_block_channels": 32}
ZOO: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "bottleneck ResNet": ("resnet", "ResNet", 52, TWO | {"bottleneck": True, "conv1_stride": True}),
    "DenseNet": ("densenet", "DenseNet", 56, {"channels": [[16, 24], [20, 28]], "init_block_channels": 8}),
    "MobileNetV2": ("mobilenetv2", "MobileNetV2", 52, THREE | {"remove_exp_conv": False}),
    "VGG with batch norm": ("vgg", "VGG", 28, {"channels": [[8], [8]], "use_bn": True, "bias": False}),
    "SqueezeNet": ("squeezenet", "SqueezeNet", 106, {
        "channels": [[64, 64], [96, 96]], "residuals": [[0, 1], [0, 1]], "init_block_kernel_size": 3,
        "init_block_channels": 16,
    }),
    "Inception with batch norm": ("bninception", "BNInception", 112, {
        "channels": [[28], [40, 32]], "init_block_channels_list": [8, 16],
        "mid1_channels_list": [[[4, 4]], [[8, 4], [8, 8]]],
        "mid2_channels_list": [[[8, 8, 8, 4]], [[0, 8, 4, 0], [8, 8, 8, 8]]],
    }),
    "InceptionV3": ("inceptionv3", "InceptionV3", 85, {
        "channels": [[256]], "init_block_channels": 192, "b_mid_channels": [],
    }),
    "squeeze-and-excitation ResNet": ("seresnet", "SEResNet", 52, TWO | {"bottleneck": False, "conv1_stride": True}),
    "SENet": ("senet", "SENet", 52, TWO | {"cardinality": 2, "bottleneck_width": 64}),
    "ShuffleNetV2": ("shufflenetv2", "ShuffleNetV2", 52, {
        "channels": [[16, 16]], "init_block_channels": 8, "final_block_channels": 32,
    }),
    "pre-activation ResNet": ("preresnet", "PreResNet", 52, TWO | {"bottleneck": True, "conv1_stride": True}),
    "Xception": ("xception", "Xception", 80, {"channels": [[32], [1024]]}),
    "EfficientNet": ("efficientnet", "EfficientNet", 16, THREE | {
        "kernel_sizes": [[3], [3, 5], [5]], "strides_per_stage": [1, 2, 2], "expansion_factors": [[1], [4, 4], [4]],
    }),
    "MobileNetV3": ("mobilenetv3", "MobileNetV3", 52, THREE | {
        "exp_channels": [[16], [24, 24], [32]], "classifier_mid_channels": 32, "kernels3": [[1], [1, 0], [0]],
        "use_relu": [[1], [0, 0], [0]], "use_se": [[1], [0, 1], [1]], "first_stride": False, "final_use_se": True,
    }),
    "IGCV3": ("igcv3", "IGCV3", 52, THREE),
    "ResNeXt": ("resnext", "ResNeXt", 52, TWO | {"channels": [[32], [64]], "cardinality": 4, "bottleneck_width": 16}),
    "CBAM ResNet": ("cbamresnet", "CbamResNet", 52, TWO | {"init_block_channels": 16, "bottleneck": False}),
}  # fmt: skip
SMALLEST = ("bottleneck ResNet", "DenseNet", "MobileNetV2")


def classifier(name: str) -> tuple[torch.nn.Module, int]:
    module, kind, size, widths = ZOO[name]
    with seeded(0, name):
        return getattr(importlib.import_module(f"pytorchcv.models.{module}"), kind)(**widths, num_classes=10), size


def check_classifier(name: str, optimizers: list[str]) -> None:
    model, size = classifier(name)
    tasks = toy_tasks(3, shape=(3, size, size), train=12, test=4)
    for method in ("hat", "pmask"):
        for optimizer in optimizers:
            net = Network.from_classifier(model, [3, 3], tasks[0].train.inputs(torch.arange(2)))
            pairs = learn_three(method, net, tasks, optimizer, epochs=1, lr=0.002)
            assert unchanged(pairs), f"{method} with {optimizer}"
            assert varied(pairs), f"{method} with {optimizer}"


@pytest.mark.parametrize("name", quick_and_slow(SMALLEST, ["DenseNet"]))
def test_classifiers_of_a_zoo_forget_nothing(name):
    check_classifier(name, ["kept adamw with decay"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_all_classifiers_of_a_zoo_forget_nothing(name):
    check_classifier(name, list(OPTIMIZERS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_units_of_classifiers_of_a_zoo(name):
    model, size = classifier(name)
    units = check_units(model, torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0)))
    assert not units.frozen_entirely
