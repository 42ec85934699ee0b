"""Normalisation per task: which tensors it takes, that tasks do not touch each other's, and statistics by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from hatrack import Method, Network, Task
from hatrack.methods.parts.task_norms import BATCH, TaskNorms, own_tensors
from hatrack.networks.resnet import resnet18
from hatrack.seeds import seeded

IMAGE = (2, 4, 4)
STATISTICS = ["running_mean", "running_var", "num_batches_tracked"]


@pytest.fixture(autouse=True)
def _one_seed():
    with seeded(0, "test of norms"):
        yield


class PerTask(Method):
    """Plain SGD whose norms are per task."""

    def __init__(self, net, **how):
        super().__init__(net)
        self.norms = TaskNorms(net, **how)

    def forward(self, x, task):
        return self.net.head(functional_call(self.net.trunk, self.norms.of(task), (x,)), task)


def network(*parts, classes=(3, 3, 3), example=None, **changes):
    return Network(nn.Sequential(*parts), classes, torch.randn(2, *IMAGE) if example is None else example, **changes)


def convolutional(norm=None, **changes):
    return network(nn.Conv2d(2, 4, 3), norm or nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), **changes)


def some_task(count, shape=IMAGE):
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, *shape, generator=draw) * 2 + 1, torch.arange(count) % 3
    return Task.from_arrays(0, "some", x, y, x, y, valid=0.0)


def named(*names, at="1"):
    return [f"{at}.{name}" for name in names]


# Which tensors


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (nn.BatchNorm2d(4), named("weight", "bias", *STATISTICS)),
        (nn.BatchNorm2d(4, affine=False), named(*STATISTICS)),
        (nn.BatchNorm2d(4, track_running_stats=False), named("weight", "bias")),
        (nn.InstanceNorm2d(4), []),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), named("weight", "bias", *STATISTICS[:2])),
        (nn.GroupNorm(2, 4), named("weight", "bias")),
        (nn.LayerNorm((4, 2, 2)), named("weight", "bias")),
        (nn.LayerNorm((4, 2, 2), bias=False), named("weight")),
        (nn.RMSNorm((4, 2, 2)), named("weight")),
        (nn.LocalResponseNorm(2), []),
        (nn.Dropout(0.5), []),
        (nn.PReLU(), []),
    ],
)
def test_every_kind_of_norm(norm, expected):
    assert own_tensors(convolutional(norm)) == expected


def test_a_residual_network():
    net = network(resnet18((3, 8, 8), width=2), example=torch.randn(2, 3, 8, 8))
    names = own_tensors(net)
    assert len(names) == 20 * 5
    assert {n for n, p in net.trunk.named_parameters() if p.dim() == 1} == {
        n for n in names if n.endswith(("weight", "bias"))
    }


class Handmade(nn.Module):
    """Norms without a norm module: a functional one, and statistics written by hand."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.mix = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        if self.training:
            self.seen.lerp_(x.mean((0, 2, 3)), 0.5)
        x = F.batch_norm(x, None, None, self.scale, bias=self.shift, training=True)
        return (x - self.seen[:, None, None]) * self.mix + self.table[:, None, None]


def test_norms_without_a_module():
    assert own_tensors(convolutional(Handmade())) == named("scale", "shift", "seen")


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_the_vectors_of_a_spectral_norm(wrap):
    """They are written in training, so a later task would change the weights of an earlier one."""
    net = network(nn.Flatten(), wrap(nn.Linear(32, 5)))
    names = own_tensors(net)
    assert len(names) == 2
    assert all(name.endswith(("_u", "_v", ".0._u", ".0._v")) for name in names)


def test_a_norm_that_is_used_twice_is_named_once():
    norm = nn.BatchNorm2d(4)
    net = network(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), norm, nn.Flatten())
    assert own_tensors(net) == named("weight", "bias", *STATISTICS)


def test_parts_that_are_frozen_stay_with_all_tasks():
    net = network(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Flatten(), freeze="1")
    assert own_tensors(net) == named("weight", "bias", *STATISTICS, at="2")
    net.trunk[2].weight.requires_grad_(False)  # by hand: its statistics still move
    assert own_tensors(net) == named("bias", *STATISTICS, at="2")


def test_a_buffer_that_is_replaced_is_refused():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return x

    with pytest.raises(ValueError, match=r"replaces its buffer '1.calls'.*in place"):
        own_tensors(convolutional(Counter()))


def test_looking_changes_nothing():
    net = network(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
    net.trunk[2].eval()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    own_tensors(net)
    assert [m.training for m in net.trunk] == [True, True, False, True]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_an_example_of_one_image_will_do():
    assert len(own_tensors(convolutional(example=torch.randn(1, *IMAGE)))) == 5
    flat = network(nn.Flatten(), nn.BatchNorm1d(32), example=torch.randn(1, *IMAGE))
    assert len(own_tensors(flat)) == 5


# Sets


def pretrained():
    """A network whose norm has values that no new norm has."""
    net = convolutional()
    with torch.no_grad():
        for number, tensor in enumerate((net.trunk[1].weight, net.trunk[1].bias, net.trunk[1].running_mean)):
            tensor.fill_(2.0 + number)
    return net


def test_every_set_starts_from_what_the_trunk_has():
    net = pretrained()
    norms = TaskNorms(net)
    assert norms.of(0) == {}
    first, second = norms.of(1), norms.of(2)
    for name in norms.names:
        tensor = dict([*net.trunk.named_parameters(), *net.trunk.named_buffers()])[name]
        assert torch.equal(first[name], tensor)
        assert len({t.data_ptr() for t in (first[name], second[name], tensor)}) == 3
        assert isinstance(first[name], nn.Parameter) == isinstance(tensor, nn.Parameter)


def test_a_task_that_comes_later_starts_from_the_beginning_too():
    net = pretrained()
    norms, all_known = TaskNorms(convolutional(classes=[3])), TaskNorms(net)
    assert len(norms.sets) == 0
    norms = TaskNorms(net)
    with torch.no_grad():
        for tensor in [*net.trunk[1].parameters(), *net.trunk[1].buffers(), *norms.of(1).values()]:
            tensor.zero_()  # what other tasks learn since
    norms.grow(4)
    norms.grow(2)
    assert len(norms.sets) == 3
    for name, tensor in norms.of(3).items():
        assert torch.equal(tensor, all_known.of(2)[name])


def test_shared_norms_are_the_trunks_own():
    net = pretrained()
    norms = TaskNorms(net, shared=True)
    assert norms.names == named("weight", "bias", *STATISTICS)
    assert norms.of(2) == {}
    assert norms.state_dict() == {}
    norms.reset(net, 2)
    assert net.trunk[1].weight[0] == 2


def test_a_trunk_without_norms():
    net = network(nn.Flatten(), nn.Linear(32, 4))
    norms = TaskNorms(net)
    norms.reset(net, 1)
    norms.recompute(PerTask(net), 1, some_task(10).train)
    assert norms.of(1) == {}
    assert norms.state_dict() == {}


@pytest.mark.parametrize("task", [0, 1, 2])
def test_a_training_pass_touches_the_norms_of_its_task_alone(task):
    method = PerTask(convolutional())
    before = copy.deepcopy(method.state_dict())
    method.train()(torch.randn(8, *IMAGE) + 3, task).square().sum().backward()
    tensors = dict([*method.named_parameters(), *method.named_buffers()])
    moved = {
        key for key, value in tensors.items() if value.grad is not None or not torch.equal(value, before.get(key, value))
    }
    own = {"net.trunk.1." if task == 0 else f"norms.sets.{task - 1}."}
    shared = {"net.trunk.0.weight", "net.trunk.0.bias", f"net.heads.{task}.weight", f"net.heads.{task}.bias"}
    assert {key for key in moved - shared if not key.startswith(tuple(own))} == set()
    assert len(moved - shared) == 5
    assert shared < moved


@pytest.mark.parametrize("task", [0, 2])
def test_reset_gives_a_task_the_values_of_the_beginning(task):
    method = PerTask(pretrained())
    before = copy.deepcopy(method.state_dict())
    with torch.no_grad():
        for tensor in [*method.net.trunk[1].parameters(), *method.net.trunk[1].buffers(), *method.norms.sets.parameters()]:
            tensor.add_(1)
    method.norms.reset(method.net, task)
    after = method.state_dict()
    own = "net.trunk.1." if task == 0 else f"norms.sets.{task - 1}."
    for key in after:
        if key.startswith(own):
            assert torch.equal(after[key], before[key]), key
    other = "norms.sets.0.n0" if task == 0 else "net.trunk.1.weight"
    assert not torch.equal(after[other], before[other])


def test_the_state_goes_into_another_one_of_its_kind():
    one, other = PerTask(pretrained()), PerTask(convolutional())
    with torch.no_grad():
        for tensor in one.norms.sets.parameters():
            tensor.normal_()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    x = torch.randn(3, *IMAGE)
    for task in range(3):
        assert torch.equal(one.eval()(x, task), other.eval()(x, task))
    other.norms.reset(other.net, 1)
    assert torch.equal(other.norms.of(1)["1.weight"], torch.full((4,), 2.0))


# Statistics


def test_recomputed_statistics_are_those_of_the_data():
    """One batch: exactly the mean and the unbiased variance."""
    method, task = PerTask(convolutional()), some_task(BATCH)
    method.norms.recompute(method, 1, task.train)
    h = method.net.trunk[0].double()(task.train.inputs(torch.arange(BATCH)).double()).transpose(0, 1).flatten(1).detach()
    found = method.norms.of(1)
    torch.testing.assert_close(found["1.running_mean"].double(), h.mean(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["1.running_var"].double(), h.var(1), rtol=1e-5, atol=1e-5)
    assert found["1.num_batches_tracked"] == 0


@pytest.mark.parametrize("count", [2, 3 * BATCH, BATCH + 1])
def test_several_batches_count_alike(count):
    """With batches of one size, the mean over them is the mean over the data; variances differ by a little only."""
    method, task = PerTask(convolutional()), some_task(count)
    method.norms.recompute(method, 2, task.train)
    h = method.net.trunk[0].double()(task.train.inputs(torch.arange(count)).double()).transpose(0, 1).flatten(1).detach()
    found = method.norms.of(2)
    close = 1e-5 if count % BATCH == 0 or count == 2 else 0.02  # 129 + 128 images
    torch.testing.assert_close(found["1.running_mean"].double(), h.mean(1), rtol=close, atol=close)
    torch.testing.assert_close(found["1.running_var"].double(), h.var(1), rtol=0.01, atol=1e-5)


def test_every_example_counts_once():
    """A single image far away moves the mean by its share."""
    seen = []

    class Witness(PerTask):
        def forward(self, x, task):
            seen.append(x)
            return super().forward(x, task)

    task = some_task(700)
    method = Witness(convolutional())
    method.norms.recompute(method, 0, task.train)
    assert [len(x) for x in seen] == [234, 233, 233]
    found, given = torch.cat(seen), task.train.inputs(torch.arange(700))
    assert torch.equal(found.flatten(1).sum(1).sort().values, given.flatten(1).sum(1).sort().values)
    assert not torch.equal(found, given), "in random order"


def test_recomputed_statistics_depend_on_the_weights_only():
    """Not on earlier statistics, nor on the global generator, which is not changed."""
    task, method, found = some_task(300), PerTask(convolutional()), []
    for start in (0.0, 5.0):
        method.norms.of(1)["1.running_mean"].fill_(start)
        torch.manual_seed(int(start))
        state = torch.get_rng_state()
        method.norms.recompute(method, 1, task.train)
        assert torch.equal(state, torch.get_rng_state())
        found.append(method.norms.of(1)["1.running_mean"].clone())
    assert torch.equal(*found)


def test_a_later_norm_sees_what_an_earlier_one_makes_of_the_batch():
    net = network(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3), nn.Flatten())
    method, task = PerTask(net), some_task(BATCH)
    method.norms.recompute(method, 1, task.train)
    twin = copy.deepcopy(net.trunk).double().train()
    twin[3].momentum = 1.0
    twin(task.train.inputs(torch.arange(BATCH)).double())
    found = method.norms.of(1)
    torch.testing.assert_close(found["3.running_mean"].double(), twin[3].running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["3.running_var"].double(), twin[3].running_var, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", [0, 1])
def test_recomputing_changes_nothing_else(task):
    """The statistics of other tasks, of frozen norms, all weights and the mode."""
    parts = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
    method = PerTask(network(*parts, freeze="1"))
    before = copy.deepcopy(method.state_dict())
    for mode in (True, False):
        method.train(mode)
        method.norms.recompute(method, task, some_task(60).train)
        assert method.training == mode
        assert not method.net.trunk[1].training
    moved = {key for key, value in method.state_dict().items() if not torch.equal(value, before[key])}
    own = ["net.trunk.2.running_mean", "net.trunk.2.running_var"] if task == 0 else ["norms.sets.0.n2", "norms.sets.0.n3"]
    assert moved == set(own)


def test_shared_statistics_are_recomputed_as_well():
    method = PerTask(convolutional(), shared=True)
    method.norms.recompute(method, 2, some_task(60).train)
    assert not torch.equal(method.net.trunk[1].running_mean, torch.zeros(4))


def test_statistics_of_a_norm_that_is_used_twice_are_of_both_uses():
    norm = nn.BatchNorm2d(2, affine=False)
    method = PerTask(network(norm, nn.Conv2d(2, 2, 1), norm, nn.Flatten()))
    task = some_task(3 * BATCH)
    method.norms.recompute(method, 1, task.train)
    x = task.train.inputs(torch.arange(3 * BATCH)).double()
    h = method.net.trunk[1].double()((x - x.mean((0, 2, 3), keepdim=True)) / x.var((0, 2, 3), keepdim=True).sqrt()).detach()
    expected = (x.mean((0, 2, 3)) + h.mean((0, 2, 3))) / 2
    torch.testing.assert_close(method.norms.of(1)["0.running_mean"].double(), expected, rtol=1e-3, atol=1e-3)


def test_statistics_of_instance_norms_are_recomputed_too():
    method, task = PerTask(convolutional(nn.InstanceNorm2d(4, track_running_stats=True))), some_task(BATCH)
    method.norms.recompute(method, 1, task.train)
    h = method.net.trunk[0].double()(task.train.inputs(torch.arange(BATCH)).double()).detach()
    found = method.norms.of(1)
    torch.testing.assert_close(found["1.running_mean"].double(), h.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["1.running_var"].double(), h.var((2, 3)).mean(0), rtol=1e-4, atol=1e-5)


def test_one_image_has_no_statistics():
    method = PerTask(convolutional())
    method.norms.recompute(method, 1, some_task(1).train)
    assert torch.equal(method.norms.of(1)["1.running_var"], torch.ones(4))


def test_predictions_after_gathering_are_those_of_the_batch():
    """In evaluation mode a whole data set is normalised as in training mode it would be, up to the unbiased variance."""
    method, task = PerTask(convolutional()), some_task(BATCH)
    x = task.train.inputs(torch.arange(BATCH))
    with torch.no_grad():
        wanted = method.train()(x, 1)
        method.norms.recompute(method, 1, task.train)
        torch.testing.assert_close(method.eval()(x, 1), wanted, rtol=0.01, atol=0.01)
