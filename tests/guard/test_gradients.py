"""Whose gradients an optimizer and a user see, and how the gates move: clipping, scaling, accumulation, skipped steps."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hatrack as hr
from hatrack.guard.embedding import MARK
from tests.helpers.guarded import BACKBONES, WIDTH, data, differing, make_loop, recorded_steps, state


def test_clipping_sees_masked_gradients_and_not_those_of_the_gates():
    loop = make_loop("mlp")
    loop.learn("a", epochs=6)
    used = loop.guard.method.weight_masks(1)
    assert used["1.weight"].any()
    x, y = loop.batches(1)[0]
    with loop.guard.learn("b", steps=1, own=[loop.heads["b"]]):
        F.cross_entropy(loop.heads["b"](loop.backbone.train()(x)), y).backward()
        for name in ("1.weight", "3.weight", "1.bias"):
            grad = loop.backbone.get_parameter(name).grad
            assert (grad[used[name]] == 0).all()
            assert (grad[~used[name]] != 0).any()
        held = loop.guard.module.held
        assert held.norm() > 0
        norm = nn.utils.clip_grad_norm_(loop.backbone.parameters(), 1e-3)
        weights = [p.grad for n, p in loop.backbone.named_parameters() if "hatrack" not in n]
        own = torch.cat([g.flatten() for g in weights if g is not None]).norm()
        torch.testing.assert_close(own, torch.tensor(1e-3), rtol=1e-3, atol=0)
        assert norm > 1e-3
        assert torch.equal(loop.guard.module.held, held)
        loop.optimizer.step()
    assert loop.changed() == []


def test_gradients_that_are_changed_after_they_arrived_are_masked_again():
    """As by noise, or by an average over processes: no state of the optimizer sees them."""
    loop = make_loop("mlp", torch.optim.SGD, momentum=0.9)
    loop.learn("a", epochs=6)
    used, weight = loop.guard.method.weight_masks(1)["1.weight"], loop.backbone[1].weight
    loop.optimizer.state.clear()
    with loop.guard.learn("b", steps=1, own=[loop.heads["b"]]):
        loss_of(loop).backward()
        weight.grad.fill_(1.0)
        loop.optimizer.step()
        assert torch.equal(loop.optimizer.state[weight]["momentum_buffer"], (~used).float())


def test_the_optimizer_never_moves_the_embedding():
    """It holds the embedding, so that it clears its gradient, but the embedding has no gradient when a step is made."""
    loop = make_loop("mlp", torch.optim.AdamW, weight_decay=0.5)
    e = loop.guard.module.embedding
    assert sum(p is e for group in loop.optimizer.param_groups for p in group["params"]) == 1
    with recorded_steps(loop.optimizer) as steps:
        loop.learn("a")
    assert len(steps) == 12
    places = [place for place, p in enumerate(loop.optimizer.param_groups[0]["params"]) if p is e]
    assert all(step["grads"][places[0]] is None for step in steps)
    assert e not in loop.optimizer.state


def moves(loop, update, steps=4):
    """How the embedding moves in one step of a user's loop."""
    with loop.guard.learn("a", steps=steps, own=[loop.heads["a"]]):
        start = loop.guard.module.embedding.detach().clone()
        loop.backbone.train()
        update(loop)
        moved = loop.guard.module.embedding.detach() - start
        done = loop.guard.lesson.done
        if not done:
            loop.train("a", loop.batches(0))
    return moved, done


def loss_of(loop, part=slice(None)):
    x, y = data(0)
    return F.cross_entropy(loop.heads["a"](loop.backbone(x[part])), y[part])


def plain(loop):
    loop.optimizer.zero_grad()
    loss_of(loop).backward()
    loop.optimizer.step()


@pytest.fixture
def expected():
    with pytest.warns(UserWarning, match="fewer than steps"):
        moved, done = moves(make_loop(), plain)
    assert done == 1
    assert moved.abs().max() > 1e-3
    return moved


def check_move(expected, update, done=1, **given):
    with pytest.warns(UserWarning, match="fewer than steps"):
        moved, count = moves(make_loop(**given), update, steps=6)
    assert count == done
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling(expected, clipped, fused):
    def update(loop):
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0 * 2**10)
        scaler.scale(loss_of(loop)).backward()
        if clipped:
            scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_([*loop.backbone.parameters(), *loop.heads["a"].parameters()], 0.01)
        scaler.step(loop.optimizer)
        scaler.update()

    check_move(expected, update, fused=fused)


def test_a_scaler_that_is_switched_off(expected):
    def update(loop):
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(loss_of(loop)).backward()
        scaler.step(loop.optimizer)

    check_move(expected, update)


def test_scaling_by_hand(expected):
    def update(loop):
        (loss_of(loop) * 1024).backward()
        for parameter in loop.backbone.parameters():
            parameter.grad /= 1024
        loop.optimizer.step()

    check_move(expected, update)


@pytest.mark.parametrize("number", [3, 10, 48, 4097, 2.0**20])
def test_gradients_that_are_divided_by_hand(expected, number):
    """As by the number of examples or tokens, if the loss is a sum."""

    def update(loop):
        (loss_of(loop) * number).backward()
        for parameter in (*loop.backbone.parameters(), *loop.heads["a"].parameters()):
            parameter.grad.div_(number)
        loop.optimizer.step()

    check_move(expected, update)


def test_gradients_that_are_divided_by_the_number_of_batches(expected):
    def update(loop):
        for rows in torch.arange(48).split(16):
            loss_of(loop, rows).backward()
        for parameter in (*loop.backbone.parameters(), *loop.heads["a"].parameters()):
            parameter.grad /= 3
        loop.optimizer.step()

    check_move(expected, update)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_are_scaled_and_divided_by_hand(expected, fused):
    def update(loop):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        scaler.scale(loss_of(loop) * 7).backward()
        for parameter in (*loop.backbone.parameters(), *loop.heads["a"].parameters()):
            parameter.grad /= 7
        scaler.step(loop.optimizer)

    check_move(expected, update, fused=fused)


def test_the_factor_of_clipping_is_not_that_of_the_gates(expected):
    def update(loop):
        loss_of(loop).backward()
        assert nn.utils.clip_grad_norm_(loop.backbone.parameters(), 0.0123) > 0.1
        loop.optimizer.step()

    check_move(expected, update)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_maximizes(expected, kind):
    """The capacity term is a cost all the same."""

    def update(loop):
        (-loss_of(loop)).backward()
        loop.optimizer.step()

    check_move(expected, update, optimizer=kind, maximize=True)


def test_gradients_that_are_negated_by_hand(expected):
    def update(loop):
        (-loss_of(loop)).backward()
        for parameter in (*loop.backbone.parameters(), *loop.heads["a"].parameters()):
            parameter.grad.neg_()
        loop.optimizer.step()

    check_move(expected, update)


def test_groups_of_the_backbone_that_go_opposite_ways_are_refused():
    """A group of a head alone may go the other way."""
    torch.manual_seed(0)
    backbone, head = BACKBONES["mlp"](), nn.Linear(WIDTH, 3)
    groups = [
        {"params": head.parameters(), "maximize": True},
        {"params": backbone[1].parameters()},
        {"params": backbone[3].parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    guard = hr.protect(backbone, optimizer, example=data(0)[0][:2])
    with guard.learn("a", steps=1, own=[head]):
        head(backbone(data(0)[0])).sum().backward()
        optimizer.step()
        assert guard.lesson.done == 1
    optimizer.param_groups[2]["maximize"] = True

    def learn():
        with guard.learn("b", steps=1):
            backbone(data(0)[0]).sum().backward()
            optimizer.step()

    with pytest.raises(ValueError, match="SGD has maximize=True for some weights"):
        learn()
    assert list(guard.tasks) == ["a"]


@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_an_optimizer_of_the_head_alone_neither_count_nor_move_gates(expected, fused):
    """It makes a step after every part of the batch, the backbone's after all of them."""

    def update(loop):
        backbone = torch.optim.AdamW(loop.backbone.parameters(), lr=0.01, fused=fused)
        head = torch.optim.SGD(loop.heads["a"].parameters(), lr=0.0, momentum=0.9)
        loop.guard.add_optimizer(backbone)
        loop.guard.add_optimizer(head)
        for rows in torch.arange(48).split(12):
            (loss_of(loop, rows) / 4).backward()
            head.step()
            head.zero_grad()
            assert loop.guard.lesson.done == 0
        backbone.step()

    check_move(expected, update)


@pytest.mark.parametrize("parts", [2, 3])
def test_gradients_of_several_batches_add_up(expected, parts):
    def update(loop):
        for rows in torch.arange(48).tensor_split(parts):
            (loss_of(loop, rows) / parts).backward()
        loop.optimizer.step()

    check_move(expected, update)


@pytest.mark.parametrize("fused", [False, True])
def test_infinite_gradients_are_skipped(expected, fused):
    """The scaler skips the step: nothing moves and no step is counted, and the next one is as if nothing had been."""

    def update(loop):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = state(loop.backbone)
        scaler.scale(loss_of(loop) * float("inf")).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        assert differing(before, state(loop.backbone)) == []
        assert loop.guard.lesson.done == 0
        loop.optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss_of(loop)).backward()
        scaler.step(loop.optimizer)

    check_move(expected, update, fused=fused)


@pytest.mark.parametrize("clear", ["optimizer", "zeros", "backbone"])
def test_a_step_that_the_user_skips(expected, clear):
    """A gradient that was cleared, in whatever way, is not held."""

    def update(loop):
        (loss_of(loop) * 1e6).backward()
        {
            "optimizer": loop.optimizer.zero_grad,
            "zeros": lambda: loop.optimizer.zero_grad(set_to_none=False),
            "backbone": loop.backbone.zero_grad,
        }[clear]()
        loop.heads["a"].zero_grad()
        loss_of(loop).backward()
        loop.optimizer.step()

    check_move(expected, update)


def test_a_closure(expected):
    def update(loop):
        def closure():
            loop.optimizer.zero_grad()
            loss = loss_of(loop)
            loss.backward()
            return loss

        assert loop.optimizer.step(closure) > 0

    check_move(expected, update)


def test_gradients_that_are_assigned(expected):
    """As with torch.autograd.grad: gradients that nobody assigns are not held."""

    def update(loop):
        held = [*loop.backbone.parameters(), *loop.heads["a"].parameters()]
        torch.autograd.grad(loss_of(loop) * 1e6, held)
        for parameter, grad in zip(held, torch.autograd.grad(loss_of(loop), held), strict=True):
            parameter.grad = grad
        loop.optimizer.step()

    check_move(expected, update)


def test_a_step_without_a_backward_pass_through_the_backbone_is_not_counted(expected):
    def update(loop):
        loop.heads["a"](torch.zeros(2, WIDTH)).sum().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.heads["a"].reset_parameters()
        torch.manual_seed(0)
        fresh = make_loop()
        loop.heads["a"].load_state_dict(fresh.heads["a"].state_dict())
        loss_of(loop).backward()
        loop.optimizer.step()

    with pytest.warns(UserWarning, match="fewer than steps"):
        moved, done = moves(make_loop(), update)
    assert done == 1
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-5)


def test_an_infinite_gradient_of_the_gates_alone_is_seen_by_a_scaler():
    loop = make_loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
        before = state(loop.backbone)
        held = loop.guard.module
        held.embedding.grad = held._arrive(torch.full_like(held.embedding, float("inf")))
        loop.heads["a"](torch.ones(2, WIDTH)).sum().backward()
        scaler.scale(torch.zeros(()))
        scaler.step(loop.optimizer)
        assert differing(before, state(loop.backbone)) == []
        assert loop.guard.lesson.done == 0
        loop.optimizer.zero_grad()
        loop.train("a", loop.batches(0))
    loop.guard.verify()


def test_the_mark_of_a_gradient_is_tiny():
    loop = make_loop()
    with loop.guard.learn("a", steps=1, own=[loop.heads["a"]]):
        loss_of(loop).backward()
        assert loop.guard.module.embedding.grad.unique().tolist() == [MARK]
        loop.optimizer.step()
        assert loop.guard.module.embedding.grad is None


def test_the_rate_of_the_gates_falls_with_that_of_the_weights():
    """A rate of a tenth moves the gates a tenth as far; a rate that grows at first does not slow them down."""
    far = {}
    for factor in (1.0, 0.1):
        loop = make_loop("mlp", torch.optim.SGD, lr=0.01)
        with loop.guard.learn("a", steps=3, own=[loop.heads["a"]]):
            for rate in (1e-9, 1e-8):  # a warm-up
                loop.optimizer.param_groups[0]["lr"] = rate
                plain(loop)
            start = loop.guard.module.embedding.detach().clone()
            loop.optimizer.param_groups[0]["lr"] = 1e-8 * factor
            plain(loop)
            far[factor] = loop.guard.module.embedding.detach() - start
    moved = (far[1.0].abs() > 1e-4) & (far[1.0].abs() < 1)
    assert moved.any()
    torch.testing.assert_close(far[0.1][moved], 0.1 * far[1.0][moved], rtol=0.05, atol=1e-5)
