"""Networks cut out of a network for one task: they compute the same, are smaller by what is unused, and need torch only."""

import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import HAT, METHODS, Network, PackNet
from hatrack.methods.extraction.capture import aten, capture
from hatrack.methods.extraction.extract import difference, extract, weights
from hatrack.methods.extraction.layout import channels_last
from hatrack.networks import NETWORKS
from tests.helpers.learning import learn, make
from tests.helpers.nets import Lambda, random_plan
from tests.helpers.tiers import QUICK, quick_and_slow
from tests.helpers.toys import toy_tasks
from tests.helpers.transformers import random_transformer

EXACT = {torch.float32: 1e-5, torch.float64: 1e-10}  # of the largest logit
pytestmark = [
    pytest.mark.filterwarnings("ignore:task .* finds under 5% free"),
    pytest.mark.filterwarnings("ignore:.*of the trunk's weights are held whole"),
]


def gated(trunk, x, share=0.4, seed=0):
    """Return HAT with a network whose first task has gates that are drawn, not learned."""
    net = Network(trunk, [4, 3], example=x[:2])
    method = HAT(net.double() if x.dtype == torch.float64 else net)
    method.gates[0] = torch.rand(method.units.count, generator=torch.Generator().manual_seed(seed)) < share
    method.done[0] = True
    return method


def check(method, x, task=0):
    """Check that an extracted network gives the logits of the masked one, for other images than the example; return it."""
    network, served = method.extract(task), method.for_task(task)
    with torch.no_grad():
        wanted = served(x)
        assert wanted.std() > 0
        assert difference(network(x), wanted) <= EXACT[x.dtype]
        assert difference(network(x[:1]), wanted[:1]) <= EXACT[x.dtype]
    return network


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("alexnet", (3, 32, 32), {}),
        pytest.param("resnet18", (3, 16, 16), {}, marks=pytest.mark.slow),
        pytest.param("vit", (3, 16, 16), {}, marks=pytest.mark.slow),
        ("vit", (3, 16, 16), {"width": 48, "depth": 2}),
    ],
)
def test_the_networks_of_the_package(name, shape, options, dtype):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    network = check(gated(NETWORKS[name](shape, **options).to(dtype), x), x)
    assert network.extraction["weights"] < 0.5 * network.extraction["weights_before"]
    assert weights(network) == network.extraction["weights"]
    targets = {node.target for node in network.graph.nodes}
    assert not targets & {aten.where.ScalarOther, aten.batch_norm.default, aten.dropout.default} or name == "vit"


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [("mlp", (1, 8, 8), {"widths": (400, 300)}), pytest.param("alexnet", (1, 28, 28), {}, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_smaller_by_the_share_of_unused_weights(name, shape, options, share):
    x = torch.randn(3, *shape)
    method = gated(NETWORKS[name](shape, **options), x, share)
    masks = method.weight_masks(0)
    used = sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())
    found = check(method, x).extraction
    assert found["weights"] / found["weights_before"] == pytest.approx(used, rel=0.1)
    assert found["zeros_left"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["densenet40_k12_cifar10", "seresnet20_cifar10", "shufflenetv2_wd2"])
def test_networks_of_a_model_zoo(name):
    provider = pytest.importorskip("pytorchcv.model_provider")
    features = provider.get_model(name).features
    features[-1] = nn.AdaptiveAvgPool2d(1)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    network = check(gated(nn.Sequential(features, nn.Flatten()).double(), x, 0.5), x)
    assert network.extraction["weights"] < 0.6 * network.extraction["weights_before"]


@pytest.mark.parametrize("seed", quick_and_slow(range(12), range(4)))
def test_random_networks(seed):
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    network = check(gated(random_plan(seed).build().double(), x, 0.6, seed), x)
    assert network.extraction["weights"] < network.extraction["weights_before"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 120))
def test_more_random_networks(seed):
    test_random_networks(seed)


@pytest.mark.parametrize("seed", quick_and_slow([0, 4, 5, 7, 10], [4]))
def test_random_transformers(seed):
    plan, source = random_transformer(seed), torch.Generator().manual_seed(seed)
    x = torch.randint(0, 16, (5, 12), generator=source) if plan.tokens else torch.randn(5, 1, 8, 8, generator=source)
    method = gated(plan.build(), x, 0.6, seed)
    network, served = method.extract(0), method.for_task(0)
    assert difference(network(x), served(x)) <= 1e-5
    assert network.extraction["weights"] < network.extraction["weights_before"]
    assert network.extraction["zeros_left"] > 0  # heads that are used in part


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(11, 60))
def test_more_random_transformers(seed):
    plan, source = random_transformer(seed), torch.Generator().manual_seed(seed)
    x = torch.randint(0, 16, (5, 12), generator=source) if plan.tokens else torch.randn(5, 1, 8, 8, generator=source)
    method = gated(plan.build(), x, 0.6, seed)
    assert difference(method.extract(0)(x), method.for_task(0)(x)) <= 1e-5


@pytest.mark.parametrize("name", quick_and_slow(METHODS, (*QUICK, "er", "packnet", "pmask", "pnn")))
def test_every_method(name):
    tasks = toy_tasks(2)
    method = make(name, tasks)
    learn(method, tasks)
    if name == "random":
        with pytest.raises(ValueError, match="uses a Generator"):
            method.extract(0)
        return
    x = method.net.preprocess(tasks[1].test.x[:7], 1)
    assert difference(method.extract(1)(x), method.for_task(1)(x)) <= 1e-5
    raw = method.extract(1, raw=tasks[1].test.x[:1])
    assert difference(raw(tasks[1].test.x[:7]), method.for_task(1)(x)) <= 1e-5


def test_raw_images_of_another_type_are_refused():
    tasks = toy_tasks(1)
    method = make("hat", tasks)
    learn(method, tasks)
    images = torch.randint(0, 256, tasks[0].test.x[:3].shape, dtype=torch.uint8)
    network = method.extract(0, raw=images)
    assert difference(network(images), method.for_task(0)(method.net.preprocess(images, 0))) <= 1e-5
    with pytest.raises(RuntimeError):
        network(images.float())
    with pytest.raises(ValueError, match="raw images of this task have 16 values each, not 15"):
        method.extract(0, raw=images.flatten(1)[:, 1:])


def chain():
    """Return two linear layers with a norm between them, as PackNet could leave them."""
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU())


@torch.no_grad()
def test_a_unit_without_weights_is_cut_and_its_constant_goes_into_the_next_bias():
    """Unit 2 of the first layer has no weights: after the norm it is the same for all images, and not 0."""
    trunk, x = chain().double().eval(), torch.randn(5, 6, dtype=torch.float64)
    trunk[0].weight[2] = 0
    trunk[1].bias[2] = 3.0
    network = extract(trunk, x)
    assert sorted(tuple(t.shape) for t in network.buffers()) == [(4,), (4,), (4, 4), (4, 6)]
    constant = trunk[2](trunk[1](trunk[0](x)))[0, 2]
    biases = [t for t in network.buffers() if t.dim() == 1]
    wanted = trunk[3].bias + trunk[3].weight[:, 2] * constant
    assert any(torch.allclose(bias, wanted, rtol=1e-12) for bias in biases)
    assert difference(network(x), trunk(x)) < 1e-12


@torch.no_grad()
def test_a_constant_that_is_padded_is_not_cut():
    """At the border of a padded image a constant channel contributes less, which no bias can express."""
    trunk = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1), nn.Flatten()).double().eval()
    trunk[0].weight[1], trunk[0].bias[1] = 0, 2.0
    trunk[0].weight[3], trunk[0].bias[3] = 0, 0
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    network = extract(trunk, x)
    assert (3, 2, 3, 3) in {tuple(t.shape) for t in network.buffers()}  # channel 1 stays, channel 3 does not
    assert difference(network(x), trunk(x)) < 1e-12


@torch.no_grad()
def test_a_unit_that_nothing_reads_is_cut_with_what_only_it_reads():
    trunk, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double().eval(), torch.randn(5, 4, dtype=torch.float64)
    trunk[2].weight[:, 1] = 0
    trunk[1].weight[[0, 2, 3], 2] = 0  # unit 2 of the first layer feeds unit 1 of the second only
    network = extract(trunk, x)
    assert {tuple(t.shape) for t in network.buffers() if t.dim() == 2} == {(3, 4), (3, 3), (4, 3)}
    assert difference(network(x), trunk(x)) < 1e-12


@pytest.mark.parametrize("closed", ["one side", "both sides"])
@torch.no_grad()
def test_a_residual_sum_is_cut_where_both_sides_are_closed(closed):
    trunk = Lambda(
        lambda own, x: own.last(own.one(x) + own.two(x)),
        one=nn.Linear(6, 5), two=nn.Linear(6, 5), last=nn.Linear(5, 3),
    ).double().eval()  # fmt: skip
    trunk.one.weight[1], trunk.one.bias[1] = 0, 0
    if closed == "both sides":
        trunk.two.weight[1], trunk.two.bias[1] = 0, 0
    x = torch.randn(5, 6, dtype=torch.float64)
    network = extract(trunk, x)
    kept = 4 if closed == "both sides" else 5
    assert [tuple(t.shape) for t in network.buffers() if t.dim() == 2].count((kept, 6)) == 2
    assert difference(network(x), trunk(x)) < 1e-12


@torch.no_grad()
def test_whole_heads_are_cut_and_parts_of_heads_stay():
    """Four heads of width 2: all values of head 1 are closed, and half of those of head 2."""

    def attend(own, x):
        parts = (layer(x).view(len(x), 7, 4, 2).transpose(1, 2) for layer in (own.queries, own.keys, own.values))
        return own.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(len(x), 7, 8)).mean(1)

    layers = {name: nn.Linear(6, 8) for name in ("queries", "keys", "values")}
    trunk = Lambda(attend, **layers, out=nn.Linear(8, 5)).double().eval()
    trunk.values.weight[[2, 3, 4]], trunk.values.bias[[2, 3, 4]] = 0, 0
    x = torch.randn(5, 7, 6, dtype=torch.float64)
    network = extract(trunk, x)
    assert sorted(tuple(t.shape) for t in network.buffers() if t.dim() == 2) == [(5, 6), (6, 6), (6, 6), (6, 6)]
    assert difference(network(x), trunk(x)) < 1e-12


@torch.no_grad()
def test_a_head_of_packed_queries_keys_and_values_is_cut_if_all_three_are_closed():
    def attend(own, x):
        parts = own.project(x).view(len(x), 7, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
        return own.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(len(x), 7, 8)).mean(1)

    trunk = Lambda(attend, project=nn.Linear(6, 24), out=nn.Linear(8, 5)).double().eval()
    closed = torch.tensor([2, 3, 8 + 2, 8 + 3, 16 + 2, 16 + 3])  # of head 1
    trunk.project.weight[closed], trunk.project.bias[closed] = 0, 0
    x = torch.randn(5, 7, 6, dtype=torch.float64)
    network = extract(trunk, x)
    assert {tuple(t.shape) for t in network.buffers() if t.dim() == 2} == {(18, 6), (5, 6)}
    assert difference(network(x), trunk(x)) < 1e-12


@torch.no_grad()
def test_all_units_closed_leaves_one():
    method = gated(NETWORKS["mlp"]((1, 4, 4), widths=(9, 9)), torch.randn(3, 1, 4, 4), share=0.0)
    network = method.extract(0)
    x = torch.randn(4, 1, 4, 4)
    assert difference(network(x), method.for_task(0)(x)) <= 1e-5
    assert max(t.shape[0] for t in network.buffers() if t.dim() == 2) <= 4


def test_the_network_is_a_copy_and_threads_may_call_it():
    x = torch.randn(64, 1, 8, 8)
    method = gated(NETWORKS["mlp"]((1, 8, 8), widths=(50, 50)), x)
    network = method.extract(0)
    before = network(x)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(1)
    with ThreadPoolExecutor(4) as threads:
        assert all(part.equal(before) for part in threads.map(network, [x] * 20))
    assert copy.deepcopy(network)(x).equal(before)


@pytest.mark.slow
def test_a_pickle_is_read_by_a_process_without_this_package(tmp_path):
    x = torch.randn(3, 1, 28, 28)
    network = gated(NETWORKS["alexnet"]((1, 28, 28)), x, 0.1).extract(0)
    (tmp_path / "network.pickle").write_bytes(pickle.dumps(network))
    torch.save(x, tmp_path / "x.pt")
    torch.save(network(x), tmp_path / "logits.pt")
    code = (
        "import sys; sys.modules['hatrack'] = None\n"
        "import pickle, torch; from pathlib import Path\n"
        "network = pickle.loads(Path('network.pickle').read_bytes())\n"
        "assert torch.equal(network(torch.load('x.pt')), torch.load('logits.pt'))\n"
        "assert network.extraction['zeros_left'] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert b"hatrack" not in (tmp_path / "network.pickle").read_bytes()


def test_operations_that_depend_on_values_are_refused_in_a_line():
    trunk = Lambda(lambda own, x: own.one(x) if x.sum() > 0 else own.one(-x), one=nn.Linear(6, 5)).eval()
    with pytest.raises(ValueError, match="cannot be captured as a graph") as caught:
        extract(trunk, torch.randn(3, 6))
    assert "\n" not in str(caught.value)


def test_a_number_of_images_that_is_written_as_a_plain_number_may_change():
    trunk = Lambda(lambda own, x: own.one(x.reshape(len(x), -1)) + torch.zeros(len(x), 1), one=nn.Linear(6, 5)).eval()
    graph = capture(trunk, torch.randn(1, 2, 3))
    for count in (1, 2, 5, 9):
        x = torch.randn(count, 2, 3)
        assert graph(x).equal(trunk(x))


def test_changes_in_place_are_followed():
    trunk = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4)).eval()
    x = torch.randn(4, 6)
    graph = capture(trunk, x)
    assert not any(str(node.target).endswith("_.default") for node in graph.graph.nodes)
    assert graph(x).equal(trunk(x))


def test_a_smaller_network_that_fails_its_check_is_not_returned(monkeypatch):
    """The rule of relu is replaced by one that claims all channels to be 0."""
    wrong = {
        aten.relu.default: lambda own, node: (c := own.channels(node.args[0]))._replace(values=torch.zeros_like(c.values))
    }
    monkeypatch.setitem(sys.modules["hatrack.methods.extraction.extract"].RULES, aten.relu.default, wrong[aten.relu.default])
    trunk, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).eval(), torch.randn(4, 6)
    with pytest.warns(UserWarning, match="nothing was cut out"):
        network = extract(trunk, x)
    assert network(x).equal(trunk(x))
    assert network.extraction["weights"] == network.extraction["weights_before"]


@pytest.mark.filterwarnings("ignore")
def test_packnet_is_cut_where_whole_units_are_unused():
    torch.manual_seed(0)  # with some weights pruning closes more units
    tasks = toy_tasks(1)
    method = PackNet(Network(NETWORKS["mlp"](tasks[0].shape, widths=(20, 20)), tasks=tasks))
    learn(method, tasks)
    with torch.no_grad():
        first = next(p for p in method.net.trunk.parameters() if p.dim() == 2)
        first[:7] = 0
        first_bias = next(p for p in method.net.trunk.parameters() if p.dim() == 1)
        first_bias[:7] = -1.0  # closed by the relu that follows, whatever the image
    network = method.extract(0)
    x = method.net.preprocess(tasks[0].test.x[:9], 0)
    assert difference(network(x), method.for_task(0)(x)) <= 1e-5
    assert {t.shape[0] for t in network.buffers() if t.dim() == 2} >= {13}


def test_wrong_tasks_are_refused():
    method = gated(NETWORKS["mlp"]((1, 4, 4), widths=(9, 9)), torch.randn(3, 1, 4, 4))
    for task in (None, "x", -1, 5, 1.5):
        with pytest.raises((ValueError, IndexError)):
            method.extract(task)


def test_a_task_that_was_not_learned_is_refused_once_others_were():
    """As `predict` refuses it: what its gates are by chance has no meaning."""
    tasks = toy_tasks(3)
    method = make("hat", tasks)
    assert method.extract(1).extraction["weights"], "it knows of no task, as after tensors alone were loaded"
    learn(method, tasks[:1])
    learn(method, tasks[2:])
    for raw in (None, tasks[1].test.x[:1]):
        with pytest.raises(ValueError, match=r"^task 1 has not been learned; learned are 0, 2$"):
            method.extract(1, raw=raw)
    assert method.extract(2).extraction["weights"]
    method.release(2)
    with pytest.raises(ValueError, match=r"^task 2 has not been learned; learned are 0$"):
        method.extract(2)


@pytest.mark.parametrize("fits", [True, False])
def test_convolutions_lie_with_channels_last_where_that_fits(fits, monkeypatch):
    def refuse(graph):
        channels_last(graph)
        raise RuntimeError("view size is not compatible")

    if not fits:
        monkeypatch.setattr("hatrack.methods.extraction.extract.channels_last", refuse)
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 2), nn.ReLU(), nn.Flatten())
    x = torch.randn(4, 3, 8, 8)
    method = HAT(Network(trunk, [3], x[:2])).eval()
    small = method.extract(0)
    found = [t for t in small.state_dict().values() if t.dim() == 4]
    assert len(found) == 2
    assert small.extraction["weights"] < small.extraction["weights_before"]
    assert [t.is_contiguous(memory_format=torch.channels_last) for t in found] == [fits, fits]
    with torch.no_grad():
        wanted = method(x, 0)
        for images in (x, x.contiguous(memory_format=torch.channels_last), x[:1]):
            assert torch.allclose(small(images), wanted[: len(images)], rtol=1e-5, atol=1e-6)
