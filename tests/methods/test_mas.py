"""MAS against its formulas: the gradient of every single image, by a plain loop in float64."""

import copy
import statistics
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from hatrack import MAS, Network, Task
from hatrack.methods.parts import single_gradients
from hatrack.networks.mlp import mlp
from hatrack.seeds import generator, seeded
from tests.helpers.learning import learn, logits, make
from tests.helpers.toys import toy_tasks


class Twice(nn.Module):
    """One layer used twice, and a way through that depends on the image, which can't be followed for many at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x.flatten(1)))
        return torch.tanh(self.layer(x)) if x.sum() > 0 else x * 2


TRUNKS = {
    "mlp": lambda: mlp((1, 4, 4), widths=(6, 5), dropout=0.5, input_dropout=0.2),
    "convolutions and norms": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.Flatten()
    ),
    "looks at the image": Twice,
}


def double(task: Task) -> Task:
    """The same task, its images in float64."""
    view = replace(task.train.transform, mean=task.train.transform.mean.double(), std=task.train.transform.std.double())
    return replace(task, train=replace(task.train, transform=view))


def make_mas(task: Task, trunk: str = "mlp", heads: str = "multi", **options) -> MAS:
    """Untrained, in float64; norms with statistics of their own."""
    with seeded(0, "weights"):
        net = Network(TRUNKS[trunk](), [3, 3], task.train.inputs(torch.arange(2)).float(), heads=heads)
        net.trunk(torch.randn(20, *task.shape))
    return MAS(net, **options).double().train()


def plain_loop(method: MAS, task: Task, groups: list[Tensor]) -> Tensor:
    """The sizes of the gradients of the groups' squared logits, summed and divided by the number of images."""
    net = copy.deepcopy(method.net).eval()
    held = [*net.trunk.parameters(), *(net.heads.parameters() if net.shared else ())]
    total = [torch.zeros_like(p) for p in held]
    for group in groups:
        net.zero_grad()
        for image in group:
            (net(task.train.inputs(image[None]), task.index) ** 2).sum().backward()
        for t, p in zip(total, held, strict=True):
            t += 0 if p.grad is None else p.grad.abs()
    return torch.cat([t.flatten() for t in total]) / sum(len(group) for group in groups)


def singles(task: Task) -> list[Tensor]:
    return list(torch.arange(len(task.train))[:, None])


@pytest.mark.parametrize("heads", ["multi", "shared"])
@pytest.mark.parametrize("trunk", TRUNKS)
def test_importance_is_that_of_a_plain_loop(trunk, heads):
    task = double(toy_tasks(2)[1])
    method = make_mas(task, trunk, heads)
    expected = plain_loop(method, task, singles(task))
    found = method.measure(task)
    assert found.dtype == torch.float64
    assert found.max() > 0
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_memory_is_bounded(trunk, monkeypatch):
    """However few gradients are computed at a time, they come to the same."""
    task = double(toy_tasks(1)[0])
    method = make_mas(task, trunk)
    expected = method.measure(task)
    for numbers in (0, 5 * len(method.importance)):
        monkeypatch.setattr(single_gradients, "MEMORY", numbers)
        torch.testing.assert_close(method.measure(task), expected)


def test_importance_by_hand():
    """F = (w x, 2 w x), so d ||F||^2 / dw = 10 w x^2, negative for w = -0.5; the images are 1, -2 and 3."""
    x, y = torch.tensor([[1.0], [-2.0], [3.0]]), torch.tensor([0, 1, 0])
    task = Task.from_arrays(0, "three", x, y, x, y, valid=0.0)
    net = Network(nn.Linear(1, 1, bias=False), [2], x[:2])
    method = MAS(net)
    with torch.no_grad():
        net.trunk.weight.fill_(-0.5)
        net.heads[0].weight.copy_(torch.tensor([[1.0], [2.0]]))
        net.heads[0].bias.zero_()
    assert method.measure(task).tolist() == pytest.approx([5 * (1 + 4 + 9) / 3])


@pytest.mark.parametrize("group", [7, 64, 1000])
def test_groups_add_up_before_the_size_is_taken(group):
    """The authors' estimate, |sum| in place of sum | |: 48 images in groups, the last of them smaller."""
    task = double(toy_tasks(1)[0])
    method = make_mas(task, group=group)
    order = torch.randperm(48, generator=generator(method.net.seed, "importance", 0))
    found = method.measure(task)
    torch.testing.assert_close(found, plain_loop(method, task, list(torch.split(order, group))))
    single = make_mas(task).measure(task)
    assert (found <= single + 1e-12).all()
    assert found.sum() < 0.95 * single.sum()


def test_samples():
    task = double(toy_tasks(1)[0])
    chosen = torch.randperm(48, generator=generator(0, "importance", 0))[:10]
    method = make_mas(task, samples=10)
    torch.testing.assert_close(method.measure(task), plain_loop(method, task, list(chosen[:, None])))
    everything = make_mas(task).measure(task)
    assert not torch.allclose(method.measure(task), everything)
    torch.testing.assert_close(make_mas(task, samples=1000).measure(task), everything)


def test_no_label_is_needed():
    task = toy_tasks(1)[0]
    other = replace(task, train=replace(task.train, y=(task.train.y + 1) % 3))
    assert torch.equal(make_mas(double(task)).measure(double(task)), make_mas(double(task)).measure(double(other)))


def test_measuring_changes_nothing():
    task = double(toy_tasks(1)[0])
    method = make_mas(task, "convolutions and norms")
    before = copy.deepcopy(method.state_dict())
    method.measure(task)
    assert all(torch.equal(before[key], value) for key, value in method.state_dict().items())
    assert all(p.grad is None for p in method.parameters())


@pytest.mark.parametrize("over_tasks", ["sum", "mean"])
def test_importances_of_tasks_are_put_together(over_tasks):
    tasks = toy_tasks(3)
    method = MAS(make("sgd", tasks).net, over_tasks=over_tasks, strength=0.1)
    each = []
    for task in tasks:
        learn(method, [task])
        each.append(plain_loop(copy.deepcopy(method).double(), double(task), singles(task)))
        torch.testing.assert_close(method.anchor, torch.cat([p.flatten() for p in method.net.trunk.parameters()]))
    expected = torch.stack(each).sum(0) / (3 if over_tasks == "mean" else 1)
    torch.testing.assert_close(method.importance.double(), expected, rtol=1e-4, atol=1e-6)


def test_the_penalty_is_that_of_a_plain_loop():
    task = double(toy_tasks(1)[0])
    method = make_mas(task, strength=0.3, trunk="convolutions and norms").eval()
    batch = task.train.take(torch.arange(6), torch.tensor(0), torch.tensor(1), 6)
    plain = F.cross_entropy(method(batch.x, 0), batch.y)
    assert torch.equal(method.loss(batch), plain), "there is no penalty before the first task is learned"
    method.importance.uniform_()
    method.anchor.normal_()
    weights = [v for p in method.net.trunk.parameters() for v in p.flatten().tolist()]
    held = zip(method.importance.tolist(), weights, method.anchor.tolist(), strict=True)
    assert (method.loss(batch) - plain).item() == pytest.approx(0.3 * sum(s * (w - a) ** 2 for s, w, a in held))


def test_which_weights_are_penalised():
    example = toy_tasks(1)[0].train.inputs(torch.arange(2))
    trunk = mlp((1, 4, 4), widths=(6, 5), dropout=0.0, input_dropout=0.0)  # layers 1 and 3 are linear
    count = sum(p.numel() for p in trunk.parameters())
    assert len(MAS(Network(trunk, [3, 3], example)).importance) == count
    assert len(MAS(Network(trunk, [3, 3], example, heads="shared")).importance) == count + 5 * 3 + 3
    assert len(MAS(Network(trunk, [3, 3], example, freeze="1")).importance) == count - (16 * 6 + 6)


def test_what_matters_moves_less():
    tasks = toy_tasks(2)
    moved = {}
    for strength in (0.0, 3.0):
        method = MAS(make("sgd", tasks).net, strength=strength)
        learn(method, tasks[:1])
        anchor, importance = method.anchor.clone(), method.importance.clone()
        learn(method, tasks[1:])
        moved[strength] = (importance * (method.anchor - anchor).square()).sum()
    assert moved[3.0] < moved[0.0] / 2


def test_a_loaded_method_continues_in_the_same_way():
    tasks = toy_tasks(3)
    method, twin = make("mas", tasks), make("mas", tasks, seed=1)
    learn(method, tasks[:2])
    twin.net.seed = method.net.seed
    twin.load_state_dict(copy.deepcopy(method.state_dict()))
    for one in (method, twin):
        learn(one, tasks[2:])
    assert all(torch.equal(a, b) for a, b in zip(method.state_dict().values(), twin.state_dict().values(), strict=True))
    assert torch.equal(logits(method, tasks[0]), logits(twin, tasks[0]))


@pytest.mark.slow
def test_it_is_ten_times_as_fast_as_single_gradients():
    """The way before it: `vmap` makes the gradient of every single image. The median was about 30."""
    task = toy_tasks(1, classes=10, shape=(1, 28, 28), train=2048, test=10, valid=0.0)[0]
    trunk = mlp((1, 28, 28), widths=(300, 300), dropout=0.0, input_dropout=0.0)
    method = MAS(Network(trunk, [10], task.train.inputs(torch.arange(2))))
    weights = {f"trunk.{name}": p.detach() for name, p in trunk.named_parameters()}
    few = task.train.inputs(torch.arange(256))[:, None]

    def squared_norm(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(method.net, weights, (x, 0)).square().sum()

    ratios = []
    for _ in range(5):
        start = time.perf_counter()
        method.measure(task)
        middle = time.perf_counter()
        for part in few.split(64):
            assert all(g.abs().sum(0).any() for g in vmap(grad(squared_norm), (None, 0))(weights, part).values())
        ratios.append((time.perf_counter() - middle) / len(few) / ((middle - start) / len(task.train)))
    assert statistics.median(ratios) > 10, ratios
