"""What loops of other libraries do to a guarded backbone: optimizers of their own, loaded states, wrappers, moves."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hatrack as hr
from tests.helpers.guarded import BACKBONES, PROBE, WIDTH, data, differing, make_loop, state

# Optimizers that a library makes within a block


def step(loop, optimizer, name, number=1):
    x, y = data(number)
    loop.backbone.train()
    for part in torch.arange(48).split(12):
        optimizer.zero_grad()
        F.cross_entropy(loop.heads[name](loop.backbone(x[part])), y[part]).backward()
        optimizer.step()


def test_a_step_of_another_optimizer_is_refused_at_once():
    """As soon as it is made, not when the block ends; what was learned before stays."""
    loop = make_loop()
    loop.learn("a")
    before, steps = state(loop.backbone, *loop.heads.values()), []

    def learn():
        with loop.guard.learn("b", steps=4, own=[loop.heads["b"]]):
            other = torch.optim.SGD(loop.backbone.parameters(), lr=1.0, momentum=0.9)
            other.register_step_post_hook(lambda *_: steps.append(1))
            step(loop, other, "b")

    with pytest.raises(ValueError, match=r"optimizer \(SGD\).*guard\.add_optimizer"):
        learn()
    assert steps == []
    after = state(loop.backbone, *loop.heads.values())
    assert [name for name in differing(before, after) if "hatrack" not in name] == []
    assert loop.changed() == []


def test_optimizers_of_other_modules_are_left_alone():
    loop, other = make_loop(), nn.Linear(2, 2)
    apart = torch.optim.SGD(other.parameters(), lr=0.1)
    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
        other(torch.ones(1, 2)).sum().backward()
        apart.step()
        loop.train("a", loop.batches(0))
    assert loop.changed() == []


@pytest.mark.parametrize("method", ["hat", "pmask"])
def test_an_optimizer_can_be_added_within_a_block(method):
    loop = make_loop("cnn", method=method)
    loop.learn("a")
    x, _ = data(1)
    with loop.guard.learn("b", steps=4, own=[loop.heads["b"]], settle=[x]):
        held = [*loop.backbone.parameters(), *loop.heads["b"].parameters()]
        other = torch.optim.SGD(held, lr=0.1, momentum=0.9, weight_decay=0.1)
        loop.guard.add_optimizer(other)
        step(loop, other, "b")
        assert loop.guard.lesson.done == 4
    loop.answers["b"] = loop.answer("b")
    loop.learn("c", 2)
    assert loop.changed() == []


def test_what_an_added_optimizer_moved_is_rolled_back():
    loop, apart = make_loop(), nn.Linear(2, 2)
    before = state(apart, loop.heads["a"])

    def learn():
        with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
            held = [*loop.backbone.parameters(), *loop.heads["a"].parameters(), *apart.parameters()]
            optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
            loop.guard.add_optimizer(optimizer)
            apart(torch.ones(1, 2)).sum().backward()
            F.cross_entropy(loop.heads["a"](loop.backbone(PROBE)), torch.zeros(8, dtype=torch.int64)).backward()
            optimizer.step()
            assert len(differing(before, state(apart, loop.heads["a"]))) == 4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        learn()
    assert differing(before, state(apart, loop.heads["a"])) == []


def test_an_optimizer_that_nobody_holds_is_forgotten():
    """A new one per task would otherwise keep the state of all earlier ones in memory."""
    loop = make_loop()
    kept = loop.optimizer
    for _ in range(2):
        loop.guard.add_optimizer(torch.optim.AdamW(loop.backbone.parameters()))
    gc.collect()
    assert loop.guard.steps.optimizers == [kept]


def test_an_optimizer_without_a_learning_rate_of_its_own():
    """Some find their rate themselves, and have None in its place: the gates have theirs."""

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] = 0.1
            super().step(closure)
            for group in self.param_groups:
                group["lr"] = None

    loop = make_loop("mlp", Own)
    loop.optimizer.param_groups[0]["lr"] = None
    start = []
    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
        start.append(loop.guard.module.embedding.detach().clone())
        loop.train("a", loop.batches(0))
        assert (loop.guard.module.embedding - start[0]).abs().max() > 1e-3
    assert loop.guard.verify().keys() == {"a"}


def test_a_step_that_calls_the_step_of_its_base_class():
    """torch runs the hooks of both: the gates move once."""

    class Derived(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    moved = []
    for kind in (torch.optim.SGD, Derived):
        loop = make_loop("mlp", kind, lr=0.1)
        with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
            loop.train("a", loop.batches(0))
            assert loop.guard.lesson.done == 4
            moved.append(loop.guard.module.embedding.detach().clone())
    assert torch.equal(*moved)


# States that are loaded outside of a block


@pytest.mark.parametrize("method", ["hat", "pmask"])
def test_a_state_that_would_change_a_finished_task_is_refused(method):
    """As a library that loads the best state of a task after its block."""
    loop = make_loop("cnn", method=method)
    batches = loop.batches(0)
    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]], settle=batches):
        loop.train("a", batches)
        early = copy.deepcopy(loop.backbone.state_dict())
        loop.train("a", batches)
    loop.answers["a"] = loop.answer("a")
    head = {f"head.{key}": value + 1 for key, value in loop.heads["a"].state_dict().items()}
    whole = nn.ModuleDict({"head": loop.heads["a"], "trunk": loop.backbone})
    for module, given in ((loop.backbone, early), (whole, head | {f"trunk.{key}": value for key, value in early.items()})):
        with pytest.raises(ValueError, match=r"load_state_dict would change.*'a'.*guard\.learn") as error:
            module.load_state_dict(given)
        assert "\n" not in str(error.value)
    assert loop.changed() == []
    loop.backbone.load_state_dict(copy.deepcopy(loop.backbone.state_dict()))  # its own state
    assert loop.changed() == []
    loop.learn("b")
    assert loop.changed() == []


@pytest.mark.parametrize("method", ["hat", "pmask"])
def test_weights_that_no_task_uses_may_be_loaded(method):
    loop = make_loop("mlp", method=method)
    loop.learn("a")
    mask = loop.guard.method.weight_masks(1)["1.weight"]
    assert not mask.all()
    given = {key: value.clone() for key, value in loop.backbone.state_dict().items()}
    given["1.weight"] = torch.where(mask, given["1.weight"], 7.0)
    loop.backbone.load_state_dict(given)
    assert (loop.backbone[1].weight[~mask] == 7.0).all()
    assert loop.changed() == []
    given["1.weight"] = torch.where(mask, 7.0, given["1.weight"])
    with pytest.raises(ValueError, match="'a'"):
        loop.backbone.load_state_dict(given)


def test_states_that_replace_parameters_are_refused():
    loop = make_loop("mlp")
    with pytest.raises(ValueError, match="assign"):
        loop.backbone.load_state_dict(loop.backbone.state_dict(), assign=True)


def test_a_copy_and_a_plain_backbone_take_any_state():
    loop = make_loop("mlp")
    other = {key: torch.ones_like(value) for key, value in BACKBONES["mlp"]().state_dict().items()}
    loop.learn("a")
    copied = copy.deepcopy(loop.backbone)
    copied.load_state_dict(other)
    assert (copied[1].weight == 1).all()
    loop.guard.remove()
    loop.backbone.load_state_dict(other)
    assert (loop.backbone[1].weight == 1).all()


# A forward pass that is wrapped after protect


def wrap(backbone):
    """As libraries do that cast what a module returns."""
    inner = backbone.forward
    backbone.forward = lambda *args, **keywords: inner(*args, **keywords).double()


def test_a_wrapped_forward_pass_is_kept():
    loop = make_loop("cnn")
    wrap(loop.backbone)
    loop.heads = {name: head.double() for name, head in loop.heads.items()}
    loop.learn("a")
    loop.learn("b", 1)
    assert loop.changed() == []
    assert loop.answers["a"].dtype is torch.float64


def test_a_wrapped_backbone_is_known_to_be_protected(tmp_path):
    loop = make_loop("mlp")
    loop.learn("a")
    loop.guard.save(tmp_path / "a.safetensors")
    wrap(loop.backbone)
    with pytest.raises(ValueError, match="protected already"):
        hr.protect(loop.backbone, loop.optimizer, example=PROBE[:2])
    with pytest.raises(ValueError, match="protected already"):
        hr.load_guard(tmp_path / "a.safetensors", loop.backbone, loop.optimizer)


def test_the_copies_of_data_parallel_are_refused():
    loop = make_loop("mlp")
    replica = loop.backbone._replicate_for_data_parallel()  # as nn.DataParallel does for every GPU but the first
    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
        with pytest.raises(ValueError, match="DistributedDataParallel"):
            replica(PROBE)
        loop.train("a", loop.batches(0))
    loop.guard.remove()
    assert not loop.backbone._forward_pre_hooks


# A backbone that is moved within a block


def tensors_within(thing):
    """All tensors in the attributes of an object, and in lists and tuples there."""
    found = []
    for value in vars(thing).values():
        for one in value if isinstance(value, list | tuple) else [value]:
            found += [one] if isinstance(one, torch.Tensor) else []
    return found


@pytest.mark.parametrize("method", ["hat", "pmask"])
def test_everything_follows_a_backbone_that_is_moved_within_a_block(method):
    """As Lightning moves it to a GPU and back. Here it moves to a device without memory, so that no GPU is needed."""
    loop = make_loop("cnn", method=method)
    loop.learn("a")
    seen = []

    def learn():
        with loop.guard.learn("b", steps=4, own=[loop.heads["b"]], settle=[PROBE]):
            loop.train("b", loop.batches(1))
            loop.backbone.to("meta")
            loop.guard.lesson.follow_device()
            lesson, kept = loop.guard.lesson, loop.guard.method
            seen.extend([lesson.s, lesson.module.held, lesson.module.arrivals, *lesson.probes.images.values()])
            seen.extend([kept.net.example, *kept.parameters(), *kept.buffers(), *tensors_within(kept)])
            assert any(freeze.free.numel() for freeze in kept.frozen_weights())
            for freeze in kept.frozen_weights():
                seen.extend([freeze.free, freeze.frozen_bits])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        learn()
    assert len(seen) > 20
    assert {tensor.device.type for tensor in seen} == {"meta"}


def test_a_head_that_is_moved_is_rolled_back():
    """Its buffers are new tensors then."""
    loop = make_loop("mlp")
    loop.heads["a"] = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
    loop.guard.add_optimizer(optimizer := torch.optim.SGD(loop.heads["a"].parameters(), lr=0.1))
    before = state(loop.heads["a"])

    def learn():
        with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
            loop.train("a", loop.batches(0))
            optimizer.step()
            norm = loop.heads["a"][0]
            for name, buffer in norm.named_buffers():
                setattr(norm, name, buffer.clone())  # as Module.to does
            assert len(differing(before, state(loop.heads["a"]))) > 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        learn()
    assert differing(before, state(loop.heads["a"])) == []
