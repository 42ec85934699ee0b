"""Trunks whose calls are hard to follow: blocks left out at random, experts without images, operations of the user's own."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from hatrack import METHODS, Network, Regime, Trainer, evaluate
from hatrack.seeds import seeded
from hatrack.tracing.units import Units
from tests.helpers.learning import learn, logits
from tests.helpers.tiers import every_value
from tests.helpers.toys import toy_tasks

FIT = Regime(epochs=10, batch=16, optimizer="adamw", lr=0.01)
pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under")  # these networks are small


def check_three_tasks(trunk, name="hat", shape=(1, 4, 4), **options):
    """Learn three tasks: the answers of finished ones stay the same, bit for bit. Returns the method."""
    tasks = toy_tasks(3, shape=shape)
    method = METHODS[name](Network(trunk, tasks=tasks), **options)
    answers = []
    for task in tasks:
        learn(method, [task], Trainer(FIT))
        answers.append(logits(method, task))
    assert all(torch.equal(logits(method, task), then) for task, then in zip(tasks, answers, strict=True))
    assert evaluate(method, tasks[0].test).accuracy > 0.6
    return method


class Gated(nn.Module):
    """Blocks with a sigmoid that are left out at random in training."""

    def __init__(self, widths):
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(a, b) for a, b in zip((16, *widths), widths, strict=False))
        self.g = nn.ModuleList(nn.Linear(w, w) for w in widths)
        self.left_out = None

    def forward(self, x):
        x = x.flatten(1)
        for k, (layer, gate) in enumerate(zip(self.l, self.g, strict=True)):
            x = torch.relu(layer(x))
            if not (self.training and (torch.rand(()) < 0.5 if self.left_out is None else k == self.left_out)):
                x = x * torch.sigmoid(gate(x))
        return x


@pytest.mark.parametrize("widths", [(24, 32), (24, 24)])
def test_a_block_that_is_left_out_in_training_moves_no_gate(widths):
    torch.manual_seed(0)
    check_three_tasks(Gated(widths), c=0.1)


def test_the_gates_of_one_block_are_not_those_of_another():
    torch.manual_seed(0)
    trunk, x = Gated((24, 24)), torch.randn(5, 16)
    units = Units(trunk, x)
    gates = torch.ones(units.count)
    gates[units.layers["g.0"]] = 0
    trunk.train().left_out = 0
    a = torch.relu(trunk.l[1](torch.relu(trunk.l[0](x))))
    assert torch.equal(units.run(x, gates), a * torch.sigmoid(trunk.g[1](a)))
    trunk.left_out = 1
    assert torch.equal(units.run(x, gates), torch.relu(trunk.l[1](torch.zeros(5, 24))))


class Experts(nn.Module):
    """A mixture of experts: each gets the images that it wins, which may be none."""

    def __init__(self, count=4):
        super().__init__()
        self.e, self.r = nn.Linear(16, 24), nn.Linear(24, count)
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(count))

    def forward(self, x):
        x = torch.relu(self.e(x.flatten(1)))
        p, winner = self.r(x).softmax(1).max(1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            out[winner == k] = p[winner == k, None] * expert(x[winner == k])
        return x + out


@pytest.mark.parametrize(("seed", "name"), every_value(range(3), ["hat", "pmask", "packnet"]))
@pytest.mark.filterwarnings("ignore:the trunk reads values")  # how many images an expert gets
def test_experts_that_see_no_image_of_the_example(name, seed):
    torch.manual_seed(seed)
    check_three_tasks(Experts(), name)


class AlwaysDropout(nn.Module):
    """Dropout that evaluation mode does not switch off."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 24)

    def forward(self, x):
        return self.b(F.dropout(torch.relu(self.a(x.flatten(1))), 0.3, True))


@pytest.mark.parametrize("leave", ["", "a.weight,a.bias"])
def test_a_trunk_whose_answers_are_random_is_followed(leave):
    tasks = toy_tasks(2)
    torch.manual_seed(0)
    method = METHODS["hat"](Network(AlwaysDropout(), tasks=tasks), leave=leave)
    assert len(method.units.frozen_entirely) == (2 if leave else 0)
    learn(method, tasks[:1], Trainer(FIT))
    with seeded(0, "test"):
        before = logits(method, tasks[0])
    learn(method, tasks[1:], Trainer(FIT))
    with seeded(0, "test"):
        assert torch.equal(logits(method, tasks[0]), before)


def test_memory_in_channels_last_is_followed():
    torch.manual_seed(0)
    trunk = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).to(memory_format=torch.channels_last)
    method = check_three_tasks(trunk, shape=(1, 8, 8))
    assert method.units.frozen_entirely == {}


class Product(torch.autograd.Function):
    """A product with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 12)

    def forward(self, x):
        return self.c(Product.apply(torch.relu(self.a(x.flatten(1))), self.b.weight))


class Mapped(nn.Module):
    """A trunk that uses weights within `torch.vmap`."""

    def __init__(self):
        super().__init__()
        self.a, self.w, self.c = nn.Linear(16, 24), nn.Parameter(torch.randn(3, 8, 24) / 5), nn.Linear(8, 12)

    def forward(self, x):
        h = self.a(x.flatten(1))
        return self.c(torch.vmap(lambda w: h @ w.t())(self.w).mean(0))


@pytest.mark.filterwarnings("ignore:.* held whole after the first task")
@pytest.mark.parametrize(("trunk", "held"), [(Own, "b.weight"), (Mapped, "w")])
@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_weights_in_operations_that_hide_them_are_held_whole(trunk, held, name):
    torch.manual_seed(0)
    method = check_three_tasks(trunk(), name)
    if name == "hat":
        assert held in method.units.frozen_entirely
        assert "a.weight" not in method.units.frozen_entirely
        assert set(method.units.layers) == {"a", "c"}


class Statistics(nn.Module):
    """A product under `no_grad` that only training computes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 24)
        self.register_buffer("seen", torch.zeros(24, 24))

    def forward(self, x):
        h = self.a(x.flatten(1))
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(h.t() @ h)
        return self.b(torch.relu(h))


def test_statistics_by_a_product_that_only_training_computes():
    torch.manual_seed(0)
    check_three_tasks(Statistics())


class Extra(nn.Module):
    """A layer that only training calls, with a gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 24)

    def forward(self, x):
        h = torch.relu(self.a(x.flatten(1)))
        return h + h @ h.t() @ h if self.training else self.b(h)


def test_any_other_call_that_only_training_makes_is_refused():
    tasks = toy_tasks(1)
    with pytest.raises(ValueError, match=r"calls .*matmul.* but it did not when it was traced"):
        learn(METHODS["hat"](Network(Extra(), tasks=tasks)), tasks)


# Refusals that say why


class DropConnect(nn.Module):
    """Dropout on a weight, which makes another one in training only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 24)

    def forward(self, x):
        h = torch.relu(F.linear(x.flatten(1), F.dropout(self.a.weight, 0.5, self.training), self.a.bias))
        return self.b(h)


def test_dropout_on_weights_is_refused_by_hat_with_its_reason_and_taken_by_the_methods_that_it_names():
    torch.manual_seed(0)
    tasks = toy_tasks(1)
    with pytest.raises(ValueError, match=r"in training mode .*linear.*dropout on a weight.*pmask and packnet"):
        learn(METHODS["hat"](Network(DropConnect(), tasks=tasks)), tasks)
    for name in ("pmask", "packnet"):
        check_three_tasks(DropConnect(), name)


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_computed_weights_throughout_are_refused_by_hat_and_taken_by_pmask(norm):
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Flatten(), norm(nn.Linear(16, 48)), nn.ReLU(), norm(nn.Linear(48, 48)), nn.ReLU())
    tasks = toy_tasks(3)
    with pytest.raises(ValueError, match=r"1\.parametrizations.* pmask"):
        METHODS["hat"](Network(trunk, tasks=tasks))
    check_three_tasks(trunk, "pmask")


class Hooked(nn.Module):
    """Features that hooks collect: methods of the module, or functions that hold it."""

    def __init__(self, hook):
        super().__init__()
        self.blocks, self.found = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()), []
        for k in (1, 3):
            self.blocks[k].register_forward_hook(hook(self))

    def keep(self, module, given, out):
        self.found.append(out)

    def forward(self, x):
        self.found.clear()
        self.blocks(x.flatten(1))
        return torch.cat(self.found, 1)


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_functions_that_hold_the_trunk_are_refused_where_a_copy_needs_another(name):
    tasks = toy_tasks(3)
    held = Hooked(lambda trunk: lambda module, given, out: trunk.found.append(out))
    with pytest.raises(ValueError, match=r"copy of the trunk can't be run .*self\.keep"):
        METHODS[name](Network(held, tasks=tasks))
    check_three_tasks(Hooked(lambda trunk: trunk.keep), name)


def test_a_function_that_computes_with_the_trunk_itself_is_refused_by_hat():
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24))
    trunk[1].register_forward_hook(lambda module, given, out: trunk[3](out))
    with pytest.raises(ValueError, match=r"'3\.weight' of the trunk itself.*self\.keep"):
        METHODS["hat"](Network(trunk, tasks=toy_tasks(1)))
    check_three_tasks(trunk, "pmask")


def compiled():
    return torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU()), backend="eager")


def scripted():
    return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU()))


def parallel():
    return nn.Sequential(nn.Flatten(), nn.DataParallel(nn.Linear(16, 24)), nn.ReLU())


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
@pytest.mark.parametrize(("build", "said"), [(compiled, "_orig_mod"), (scripted, "torch.jit"), (parallel, r"'1'.*\.module")])
@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_modules_that_hide_their_calls_are_refused(build, said, name):
    with pytest.raises(ValueError, match=said):
        METHODS[name](Network(build(), tasks=toy_tasks(1)))


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_features_of_another_type_are_an_error_in_one_line(name, kind):
    tasks = toy_tasks(1)
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU()).to(kind)
    with pytest.raises(ValueError, match=f"{str(kind).removeprefix('torch.')}.*float32"):
        learn(METHODS[name](Network(trunk, tasks=tasks)), tasks)


class Half(nn.Module):
    """A trunk that returns features of 16 bits, in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 24)

    def forward(self, x):
        return torch.relu(self.a(x.flatten(1))).to(torch.bfloat16)


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_features_of_16_bits_reach_a_head_of_32(name):
    torch.manual_seed(0)
    method = check_three_tasks(Half(), name)
    assert method(torch.zeros(2, 1, 4, 4), 0).dtype == torch.float32


# Values that are read into Python


class Ragged(nn.Module):
    """Keeps the first k hidden values of an image, with zeros behind; k is read off the image."""

    def __init__(self, read):
        super().__init__()
        self.a, self.b, self.c, self.read = nn.Linear(15, 24), nn.Linear(24, 24), nn.Linear(24, 24), read

    def forward(self, x):
        x = x.flatten(1)
        h = torch.relu(self.a(x[:, 1:]))
        rows = [F.pad(row[:k], (0, 24 - k)) for row, k in zip(h, self.read(x[:, 0]), strict=True)]
        return torch.relu(self.c(torch.relu(self.b(torch.stack(rows)))))


def by_list(lengths):
    return lengths.long().tolist()


def by_item(lengths):
    return [int(length) for length in lengths]


def by_index(lengths):
    return [range(25)[length] for length in lengths.long()]


def by_shape(lengths):
    return [len((torch.arange(24) < length).nonzero()) for length in lengths]


def with_lengths(task, lengths):
    for split in (task.train, task.valid, task.test):
        split.x[:, 0, 0, 0] = lengths[torch.arange(len(split.x)) % len(lengths)].to(split.x.dtype)
    return task


@pytest.mark.parametrize("read", [by_list, by_item, by_index, by_shape])
def test_what_is_computed_by_values_of_the_input_is_not_taken_for_granted(read):
    torch.manual_seed(0)
    tasks = toy_tasks(2)
    tasks = [with_lengths(tasks[0], torch.tensor([12, 24])), with_lengths(tasks[1], torch.tensor([12, 8]))]
    example = torch.cat([torch.full((2, 1), 12.0), torch.randn(2, 15)], 1).view(2, 1, 4, 4)
    with pytest.warns(UserWarning, match=r"reads values of its input into Python \(test_promise_calls.py, line \d+"):
        method = METHODS["hat"](Network(Ragged(read), [3, 3], example))
    fit = Regime(epochs=10, batch=16, optimizer="adamw", lr=0.01, weight_decay=0.1)
    learn(method, tasks[:1], Trainer(fit))
    before = logits(method, tasks[0])
    learn(method, tasks[1:], Trainer(fit))
    assert torch.equal(logits(method, tasks[0]), before)


class EarlyExit(nn.Module):
    """Leaves out its second layer for images of which `read` finds a value above 6."""

    def __init__(self, read):
        super().__init__()
        self.a, self.b, self.c, self.read = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 16), read

    def forward(self, x):
        x = x.flatten(1)
        h = torch.relu(self.a(x))
        return torch.relu(self.c(h if self.read(x) else torch.relu(self.b(h))))


@torch.library.custom_op("hatrack_tests::has_large", mutates_args=())
def has_large(x: torch.Tensor) -> bool:
    return bool((x > 6).any())


EARLY = {
    "allclose": lambda x: not torch.allclose(x, x.clamp(max=6)),
    "Tensor.allclose": lambda x: not x.allclose(other=x.clamp(max=6)),
    "equal": lambda x: not torch.equal(input=x, other=x.clamp(max=6)),
    "is_nonzero": lambda x: torch.is_nonzero((x > 6).any()),
    "mask": lambda x: len(x[x > 6]) > 0,
    "mask of rows": lambda x: x[x.amax(1) > 6].shape[0] > 0,
    "masked_select": lambda x: x.masked_select(x > 6).numel() > 0,
    "mask on a constant": lambda x: len(torch.ones(16)[x.amax(0) > 6]) > 0,
    "masked_select on a constant": lambda x: len(torch.ones(16).masked_select(x.amax(0) > 6)) > 0,
    "unique": lambda x: len((x > 6).unique()) > 1,
    "repeat_interleave": lambda x: len(torch.ones(16).repeat_interleave((x.amax(0) > 6).long())) > 0,
    "tensor_split": lambda x: len(torch.ones(16).tensor_split((x > 6).any().long()[None])[0]) > 0,
    "operation of one's own": lambda x: has_large(x),
    "storage": lambda x: max(x.storage().tolist()) > 6,
    "bytes of the storage": lambda x: max(torch.frombuffer(bytearray(x.untyped_storage()), dtype=torch.float32)) > 6,
    "deepcopy": lambda x: (copy.deepcopy(x) > 6).any(),
    "pickle": lambda x: pickle.loads(pickle.dumps((x > 6).any())).item(),
    "apply_": lambda x: max_of(x.clone().apply_) > 6,
}


def max_of(apply):
    values = [0.0]
    apply(lambda value: values.append(value) or value)
    return max(values)


@pytest.mark.parametrize("kind", EARLY)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_an_early_exit_that_is_taken_by_values_changes_no_old_answer(kind):
    torch.manual_seed(0)
    tasks = toy_tasks(3)
    with pytest.warns(UserWarning, match=r"reads values of its input into Python \(test_promise_calls.py, line \d+"):
        method = METHODS["hat"](Network(EarlyExit(EARLY[kind]), tasks=tasks))
    inputs = [torch.randn(8, 1, 4, 4).clamp(-5, 5), torch.randn(8, 1, 4, 4) + 9]  # of which the second ones leave early
    answers = {}
    for task in tasks:
        learn(method, [task], Trainer(Regime(epochs=2, batch=16, optimizer="adamw", lr=0.02, weight_decay=0.1)))
        answers[task.index] = [answers_of(method, x, task.index) for x in inputs]
    for index, then in answers.items():
        assert all(torch.equal(answers_of(method, x, index), a) for x, a in zip(inputs, then, strict=True))


@torch.no_grad()
def answers_of(method, x, index):
    return method.eval()(x, index).clone()


class Harmless(nn.Module):
    """Reads buffers, a shape and a constant, none of which depends on the input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(16, 12)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("kept", torch.arange(24) % 3 > 0)

    def forward(self, x):
        steps = self.count.item() + torch.arange(2).tolist()[1] + x.shape[0]
        h = torch.relu(self.a(x.flatten(1) * self.scale.item()))[:, self.kept]
        h = torch.where(h > 1, h, h / 2).masked_fill(h > 3, 0.0)  # masks that decide no shape
        early, late = h[:, torch.arange(16)].tensor_split(2, dim=1)
        return self.b(torch.cat([early, late], 1)) / steps


def test_reads_that_do_not_depend_on_the_input_change_nothing():
    units = Units(Harmless(), torch.randn(2, 1, 4, 4))
    assert units.reads == []
    gates = torch.ones(units.count)
    gates[units.layers["a"].start + 1] = 0  # the first that is kept
    assert units.weight_masks(gates)["b.weight"][:, 0].eq(0).all()


def test_a_classifier_that_reads_values_still_has_a_last_layer():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.last = nn.Linear(16, 24), nn.Linear(24, 10)

        def forward(self, x):
            x = x.flatten(1)
            if x.isnan().any():
                raise ValueError("not a number")
            return self.last(torch.relu(self.a(x)))

    assert Network.from_classifier(Classifier(), tasks=toy_tasks(2)).features == 24
