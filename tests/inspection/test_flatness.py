"""Flatness: the Hessian against the whole matrix of a tiny network, and what is measured against other computations."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hatrack import HAT, METHODS, Flatness, Method, Network, Regime, Trainer, evaluate, flatness
from hatrack.inspection.flatness import Line, correlation, correlations
from hatrack.inspection.flatness_measuring import between
from hatrack.inspection.hessian import TaskLoss, even_sample
from hatrack.inspection.lanczos import largest_eigenvalues
from hatrack.networks import NETWORKS
from tests.helpers.toys import toy_tasks

REGIME = Regime(epochs=6, batch=16, lr=0.1)


def trunk():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 5), nn.ReLU())


def learned(kind=Method, count=3, heads="multi", **options):
    """The tasks, and the method after each of them."""
    tasks, methods = toy_tasks(count), []
    method = kind(Network(trunk(), tasks=tasks, heads=heads), **options)
    for task in tasks:
        method.learn(task, Trainer(REGIME))
        methods.append(copy.deepcopy(method))
    return tasks, methods


def whole_hessian(method, split):
    """The Hessian with respect to the parameters of the trunk and of a shared head, by torch's own functions."""
    names = [f"trunk.{name}" for name, _ in method.net.trunk.named_parameters()]
    names += [f"heads.{name}" for name, _ in method.net.heads.named_parameters()] if method.net.shared else []
    state = {name: value.detach() for name, value in method.net.state_dict().items()}
    sizes = [state[name].shape for name in names]
    x = split.inputs(torch.arange(len(split))).double()

    def loss(vector):
        parts = torch.split(vector, [size.numel() for size in sizes])
        own = {name: part.view(size) for name, part, size in zip(names, parts, sizes, strict=True)}
        return F.cross_entropy(functional_call(method.net, {**state, **own}, (x, split.task)), split.y)

    method.eval()
    return torch.autograd.functional.hessian(loss, torch.cat([state[name].reshape(-1) for name in names]))


@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_products_and_the_largest_eigenvalue_are_those_of_the_whole_hessian(heads):
    tasks, methods = learned(heads=heads)
    for task, method in zip(tasks, methods, strict=True):
        matrix = whole_hessian(copy.deepcopy(method).double(), task.train)
        end = TaskLoss(copy.deepcopy(method).double(), task.train)
        draw = torch.Generator().manual_seed(4)
        vector = torch.randn(len(matrix), generator=draw, dtype=torch.float64)
        assert torch.allclose(end.product(vector), matrix @ vector, rtol=1e-9, atol=1e-12)
        true = torch.linalg.eigvalsh(matrix).flip(0)[:3].tolist()
        assert largest_eigenvalues(end.product, vector).values == pytest.approx(true, rel=0.01)
    found = flatness(methods, tasks, images=0)  # in float32
    assert found.parameters == len(matrix)
    assert found.eigenvalues[-1] == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize(("name", "options"), [
    ("vit", {"width": 16, "depth": 1, "attention_heads": 2}), ("resnet18", {"width": 2}), ("gru", {"width": 8}),
])  # fmt: skip
def test_products_of_other_networks_are_differences_of_gradients(name, options):
    (task,) = toy_tasks(1, shape=(3, 32, 32), train=12)
    torch.manual_seed(1)
    method = Method(Network(NETWORKS[name](task.shape, **options), tasks=[task])).double()
    end = TaskLoss(method, even_sample(task.train, 4))
    vector = torch.randn(len(end.weights()), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    vector /= vector.norm()
    gradients = []
    for sign in (1, -1):
        moved = copy.deepcopy(method)
        at = 0
        for parameter in moved.net.shared_parameters():
            parameter.data += sign * 1e-5 * vector[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        gradients.append(TaskLoss(moved, end.split).gradient())
    difference = (gradients[0] - gradients[1]) / 2e-5
    assert (end.product(vector) - difference).norm() < 1e-3 * difference.norm()


class Attention(nn.Module):
    """Attention by torch's own function, whose quick kernels can't be differentiated twice."""

    def __init__(self):
        super().__init__()
        self.maps = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.maps(x.flatten(1, 2))[:, None].chunk(3, -1)  # (images, 1, rows, 4)
        return F.scaled_dot_product_attention(q, k, v).flatten(1)


def test_attention_is_differentiated_twice():
    (task,) = toy_tasks(1)
    torch.manual_seed(0)
    method = Method(Network(Attention(), tasks=[task]))
    with sdpa_kernel(SDPBackend.MATH):
        matrix = whole_hessian(copy.deepcopy(method).double(), task.train)
    end = TaskLoss(method, task.train)
    vector = torch.randn(len(matrix), generator=torch.Generator().manual_seed(2))
    assert torch.allclose(end.product(vector), (matrix @ vector.double()).float(), atol=1e-5)


def test_distances_losses_and_bounds():
    tasks, methods = learned(heads="shared")
    found = flatness(methods, tasks, images=0)
    for i in range(3):
        for k, j in enumerate(range(i, 3)):
            pairs = zip(methods[i].net.parameters(), methods[j].net.parameters(), strict=True)
            square = sum(float(((a - b).detach().double() ** 2).sum()) for a, b in pairs)
            assert found.distances[i][k] == pytest.approx(math.sqrt(square), rel=1e-5)
            now, then = (evaluate(methods[m], tasks[i].train).loss for m in (j, i))
            assert found.forgetting[i][k] == pytest.approx(now - then, abs=1e-5)
            assert found.bounds[i][k] == pytest.approx(found.top[i] * square / 2, rel=1e-4)
            assert found.quadratic[i][k] <= found.bounds[i][k] * 1.01 + 1e-9
    assert found.moved == [found.distances[0][1], found.distances[1][1]]
    assert [len(task.train) for task in tasks] == found.images


def test_first_and_second_order_predict_the_forgetting_of_a_small_step():
    tasks, methods = learned(count=2)
    near = copy.deepcopy(methods[1])
    with between(methods[0], methods[1], methods[0], 0.02):
        near.net.trunk.load_state_dict(methods[0].net.trunk.state_dict())
    found = flatness([methods[0].double(), near.double()], tasks, images=0)
    assert abs(found.forgetting[0][1]) > 1e-6
    assert found.linear[0][1] + found.quadratic[0][1] == pytest.approx(found.forgetting[0][1], rel=0.02)
    step = TaskLoss(near, tasks[0].train).weights() - TaskLoss(methods[0], tasks[0].train).weights()
    matrix = whole_hessian(methods[0], tasks[0].train)
    assert found.quadratic[0][1] == pytest.approx(float(step @ matrix @ step) / 2, rel=1e-6)


def test_the_line_ends_at_both_tasks_and_nothing_is_changed():
    tasks, methods = learned(heads="shared")
    before = [{name: value.clone() for name, value in method.state_dict().items()} for method in methods]
    found = flatness(methods, tasks, points=5)
    for k, line in enumerate(found.lines):
        assert line.at == [0, 0.25, 0.5, 0.75, 1]
        assert line.first[0] == found.losses[k][0]
        assert line.first[-1] == found.losses[k][1]
        assert line.second[-1] == found.losses[k + 1][0]
        assert len(set(line.first)) == 5
    for method, state in zip(methods, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in method.state_dict().items())
        assert method.training == methods[0].training
    assert flatness(methods, tasks, points=5) == found


@pytest.mark.filterwarnings("ignore:task .* finds under 5% free")
def test_a_method_that_forgets_nothing():
    tasks, methods = learned(HAT)
    found = flatness(methods, tasks, points=3)
    assert all(value == 0 for row in found.forgetting for value in row)
    assert all(len(set(line.first)) == 1 for line in found.lines)
    assert max(found.top) > 0
    assert all(moved > 0 for moved in found.moved), "free weights have moved"


@pytest.mark.parametrize("name", ["independent", "random", "pathnet"])
def test_methods_whose_tasks_share_no_parameters_are_refused(name):
    tasks, methods = learned(METHODS[name], count=2)
    with pytest.raises(ValueError, match=f"{METHODS[name].__name__} has no parameters that its tasks share"):
        flatness(methods, tasks)


def test_wrong_arguments():
    tasks, methods = learned(count=2)
    for given, text in (
        ((methods[:1], tasks), "1 methods for 2 tasks"),
        ((methods[1:] * 2, tasks), "a copy per task"),
        ((methods[::-1], tasks), "toy 0"),
        ((["x"], tasks[:1]), "methods must be"),
        (([], []), "0 methods"),
    ):
        with pytest.raises(ValueError, match=text):
            flatness(*given)
    for name, value in (("images", -1), ("eigenvalues", 0), ("points", 1), ("points", 2.5)):
        with pytest.raises(ValueError, match=name):
            flatness(methods, tasks, **{name: value})


def test_an_even_sample():
    (task,) = toy_tasks(1)
    count = len(task.train)
    assert len(even_sample(task.train, 0)) == count
    some = even_sample(task.train, 10)
    steps = some.rows.new_tensor([int((task.train.rows == row).nonzero()) for row in some.rows]).diff()
    assert len(some) == 10
    assert steps.min() >= count // 10
    assert steps.max() <= -(-count // 10)


def test_correlations_by_hand():
    assert correlation([(1, 2), (2, 4), (3, 6)]) == (3, pytest.approx(1), pytest.approx(1))
    found = correlation([(1, 1), (2, 8), (3, 27), (4, -1000)])
    assert found.spearman == pytest.approx(-0.2)
    assert math.isnan(correlation([(1, 2), (2, 1)]).pearson)
    assert math.isnan(correlation([(1, 2), (1, 1), (1, 3)]).pearson)
    assert correlation([(1, 5), (1, 5), (2, 9)]).spearman == pytest.approx(1)


def test_which_pairs_are_correlated():
    def one(scale):
        distances = [[0, scale, 2 * scale], [0, 3 * scale], [0]]
        losses = [[1, 1 + scale, 1 + 7 * scale], [1, 1 + 9 * scale], [1]]
        return Flatness(["a", "b", "c"], 4, [5] * 3, [[7 * scale], [9 * scale], [-100]], distances=distances, losses=losses)

    found = correlations([one(1), one(2), one(4)])
    assert found["eigenvalue"] == (6, pytest.approx(1), pytest.approx(1))
    assert found["distance"] == (3, pytest.approx(1), pytest.approx(1))
    assert found["second"] == (3, pytest.approx(1), pytest.approx(1))
    assert correlations([one(1)])["distance"].pairs == 1


def test_curvature_for_a_fixed_distance_and_that_of_the_next_task():
    def one(tops, moved, lost):
        distances = [[0, moved[0], 9], [0, moved[1]], [0]]
        losses = [[1, 1 + lost[0], 1], [1, 1 + lost[1]], [1]]
        return Flatness(["a", "b", "c"], 4, [5] * 3, [[top] for top in tops], distances=distances, losses=losses)

    runs = [one((1, 4, 2), (2, 3), (8, 18)), one((3, 6, 8), (1, 0), (1, 5))]
    found = correlations(runs)
    # forgotten over squared distance: 8 / 4, 18 / 9, 1 / 1, and in the last nothing moved; eigenvalues 1, 4, 3
    # from their means: -5/3, 4/3, 1/3 and 1/3, 1/3, -2/3, so that it is (-1/3) / sqrt(14/3 * 2/3); of ranks it is 0
    assert found["fixed"] == (3, pytest.approx(-1 / math.sqrt(28)), pytest.approx(0))
    # eigenvalues of the second and third tasks 4, 2, 6, 8, and 2, 3, 1, 0 moved in them, which is 4 less half of them
    assert found["next"] == (4, pytest.approx(-1), pytest.approx(-1))


def test_a_flatness_is_read_from_what_it_writes():
    tasks, methods = learned(count=2)
    found = flatness(methods, tasks, points=2)
    assert Flatness.from_dict(found.to_dict()) == found
    assert isinstance(found.lines[0], Line)
    assert found.to_dict()["bounds"] == found.bounds
