"""Steps of optimizers under a guard: what they may move; optimizers, groups, schedules; stopped and compiled parts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hatrack as hr
from tests.helpers.guarded import BACKBONES, PROBE, WIDTH, data, differing, make_loop, state
from tests.helpers.tiers import quick_and_slow

OPTIMIZERS = {
    "momentum": {"optimizer": torch.optim.SGD, "momentum": 0.9, "weight_decay": 0.1, "lr": 0.05},
    "adamw": {"optimizer": torch.optim.AdamW, "weight_decay": 0.5},
}


# What is sealed


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backbone", ["cnn", "transformer"])
def test_gradients_of_zeros_move_neither_finished_heads_nor_norms(backbone, optimizer):
    """`zero_grad(set_to_none=False)` leaves zeros, with which decay and kept momentum would move them."""
    loop = make_loop(backbone, **OPTIMIZERS[optimizer])
    loop.learn("a", set_to_none=False)
    head, norms = state(loop.heads["a"]), {k: v.clone() for k, v in loop.guard.method.norms.of(1).items()}
    loop.learn("b", 1, set_to_none=False)
    loop.learn("c", 2, set_to_none=False)
    assert differing(head, state(loop.heads["a"])) == []
    assert differing(norms, loop.guard.method.norms.of(1)) == []
    assert norms
    assert loop.changed() == []


@pytest.mark.parametrize("method", ["hat", "pmask"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_finished_tasks_use_has_its_bits_after_every_step(optimizer, method):
    """Not only when the block ends: the new task must learn with the weights that it will have."""
    loop = make_loop("mlp", method=method, **OPTIMIZERS[optimizer])
    loop.learn("a")
    masks = loop.guard.method.weight_masks(1)
    before = {name: loop.backbone.get_parameter(name)[mask].clone() for name, mask in masks.items()}
    assert sum(part.numel() for part in before.values()) > 50
    with loop.guard.learn("b", steps=4, own=[loop.heads["b"]]):
        for batch in loop.batches(1):
            loop.train("b", [batch])
            assert differing(before, {name: loop.backbone.get_parameter(name)[mask] for name, mask in masks.items()}) == []


def test_sealed_modules_take_no_gradients():
    loop = make_loop("cnn")
    loop.learn("a")
    own = [*loop.heads["a"].parameters(), *loop.guard.method.norms.sets[0].parameters()]
    assert len(own) == 6
    assert not any(p.requires_grad for p in own)
    with loop.guard.use("a"):
        loop.heads["a"](loop.backbone(PROBE)).sum().backward()
    assert all(p.grad is None for p in own)


def test_a_head_whose_gradients_the_user_switches_on_again_keeps_its_bits():
    loop = make_loop("mlp", **OPTIMIZERS["momentum"])
    loop.learn("a")
    before = state(loop.heads["a"])
    loop.heads["a"].requires_grad_(True)
    with loop.guard.learn("b", steps=4, own=[loop.heads["b"]]):
        for x, y in loop.batches(1):
            features = loop.backbone.train()(x)
            loss = F.cross_entropy(loop.heads["b"](features), y) + loop.heads["a"](features).square().sum()
            loop.optimizer.zero_grad()
            loss.backward()
            loop.optimizer.step()
            assert differing(before, state(loop.heads["a"])) == []
    assert loop.changed() == []


def test_what_others_move_within_a_block_has_its_bits_back_when_the_block_ends():
    """Another optimizer than the guard's, or weights that are averaged over steps."""
    loop = make_loop("mlp")
    loop.learn("a")
    before, used = state(loop.heads["a"]), loop.guard.method.weight_masks(1)["1.weight"]
    weights = loop.backbone[1].weight[used].clone()
    with loop.guard.learn("b", steps=4, own=[loop.heads["b"]]):
        loop.train("b", loop.batches(1))
        with torch.no_grad():
            loop.heads["a"].weight.add_(1)
            loop.backbone[1].weight.mul_(1.5)
    assert differing(before, state(loop.heads["a"])) == []
    assert torch.equal(weights, loop.backbone[1].weight[used])
    assert loop.changed() == []


@pytest.mark.parametrize("hidden", [True, False])  # by way of .data, of which torch keeps no version
def test_weights_that_a_loop_clamps_have_their_bits_in_the_next_forward_pass(hidden):
    """As in a WGAN or with a largest norm: what the task sees while it is learned is what it has in the end."""
    loop = make_loop("mlp")
    loop.learn("a", epochs=6)
    used = loop.guard.method.weight_masks(1)["1.weight"]
    kept = loop.backbone[1].weight[used].clone()
    assert kept.abs().max() > 0.05
    with loop.guard.learn("b", steps=4, own=[loop.heads["b"]]):
        for batch in loop.batches(1) * 2:
            loop.train("b", [batch])
            for parameter in loop.backbone[1:].parameters():
                with torch.no_grad():
                    (parameter.data if hidden else parameter).clamp_(-0.05, 0.05)
            assert not torch.equal(kept, loop.backbone[1].weight[used])
            loop.backbone(PROBE)
            assert torch.equal(kept, loop.backbone[1].weight[used])
            assert loop.backbone[1].weight[~used].abs().max() <= 0.05
        seen = loop.backbone.eval()(PROBE)
    with loop.guard.use("b"):
        assert torch.equal(seen, loop.backbone(PROBE))
    assert loop.changed() == []


def test_two_forward_passes_before_a_backward_pass_with_clamped_weights():
    """What restores bits must not look to autograd as a change of weights that it needs."""
    loop = make_loop("mlp")
    loop.learn("a")
    with loop.guard.learn("b", steps=4, own=[loop.heads["b"]]):
        for x, _ in loop.batches(1):
            loop.optimizer.zero_grad()
            loss = loop.heads["b"](loop.backbone(x)).square().mean() + loop.heads["b"](loop.backbone(x + 1)).mean()
            loss.backward()
            loop.optimizer.step()
            for parameter in loop.backbone[1:].parameters():
                parameter.data.clamp_(-0.05, 0.05)
    assert loop.changed() == []


def test_what_is_neither_of_the_backbone_nor_own_is_named():
    loop = make_loop()
    with pytest.warns(UserWarning, match="2 parameters of the optimizer changed while 'a'"):  # noqa: SIM117
        with loop.guard.learn("a", steps=4):
            loop.train("a", loop.batches(0))


# Several optimizers, groups, schedules


def two_tasks(backbone, optimizers, heads, *, settle=True, scheduler=None):
    guard = hr.protect(backbone, optimizers, example=PROBE[:2])
    answers = {}
    for number, (name, head) in enumerate(heads.items()):
        x, y = data(number)
        with guard.learn(name, steps=4, own=[head], settle=[x] if settle else None):
            backbone.train()
            for part in torch.arange(48).split(12):
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=False)
                F.cross_entropy(head(backbone(x[part])), y[part]).backward()
                for optimizer in optimizers:
                    optimizer.step()
                if scheduler is not None:
                    scheduler.step()
            assert guard.lesson.done == 4
        for old in answers:
            with guard.use(old), torch.no_grad():
                assert torch.equal(answers[old], heads[old](backbone(PROBE)))
        with guard.use(name), torch.no_grad():
            answers[name] = head(backbone(PROBE))
    guard.verify()
    return guard


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_several_optimizers(name):
    """One of a part of the backbone, one of the rest, one of the heads."""
    torch.manual_seed(0)
    backbone, heads = BACKBONES[name](), {"a": nn.Linear(WIDTH, 3), "b": nn.Linear(WIDTH, 3)}
    first, *rest = backbone.parameters()
    optimizers = [
        torch.optim.AdamW([p for head in heads.values() for p in head.parameters()], weight_decay=0.5),
        torch.optim.SGD([first], lr=0.1, momentum=0.9),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.5),
    ]
    two_tasks(backbone, optimizers, heads)


def test_two_guards_and_one_optimizer():
    """Neither warns of weights that the other one protects: warnings are errors in tests."""
    torch.manual_seed(0)
    towers, heads = [BACKBONES["mlp"](), BACKBONES["residual"]()], [nn.Linear(2 * WIDTH, 3) for _ in range(2)]
    optimizer = torch.optim.AdamW([p for module in (*towers, *heads) for p in module.parameters()], lr=0.01)
    one, two = (hr.protect(tower, optimizer, example=PROBE[:2]) for tower in towers)

    def both(x):
        return torch.cat([tower(x) for tower in towers], 1)

    answers = []
    for number, (name, head) in enumerate(zip("ab", heads, strict=True)):
        x, y = data(number)
        with one.learn(name, steps=2, own=[head]), two.learn(name, steps=2):
            for _ in range(4):
                optimizer.zero_grad()
                F.cross_entropy(head(both(x)), y).backward()
                optimizer.step()
        with one.use("a"), two.use("a"), torch.no_grad():
            answers.append(heads[0](both(PROBE)))
    assert torch.equal(*answers)
    stranger = nn.Linear(WIDTH, 3)
    optimizer.add_param_group({"params": stranger.parameters()})

    def learn():
        with one.learn("c", steps=1), two.learn("c", steps=1):
            (both(PROBE).sum() + stranger(towers[0](PROBE)).sum()).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="2 parameters of the optimizer changed") as told:
        learn()
    assert len(told) == 2  # both guards see it, and neither counts the weights of the other


def test_several_groups():
    torch.manual_seed(0)
    backbone, heads = BACKBONES["cnn"](), {"a": nn.Linear(WIDTH, 3), "b": nn.Linear(WIDTH, 3)}
    first, *rest = backbone.parameters()
    own = [{"params": head.parameters(), "lr": 0.1} for head in heads.values()]
    groups = [{"params": [first], "weight_decay": 0.0}, {"params": rest, "lr": 0.02}, *own]
    two_tasks(backbone, [torch.optim.AdamW(groups, lr=0.01, weight_decay=0.5)], heads)


@pytest.mark.parametrize(
    "kind", [torch.optim.lr_scheduler.OneCycleLR, torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.StepLR]
)
def test_schedulers_made_before_or_after(kind):
    given = {"OneCycleLR": {"max_lr": 0.1, "total_steps": 8}, "StepLR": {"step_size": 2}}
    for early in (True, False):
        torch.manual_seed(0)
        backbone, heads = BACKBONES["mlp"](), {"a": nn.Linear(WIDTH, 3), "b": nn.Linear(WIDTH, 3)}
        held = [*backbone.parameters(), *(p for head in heads.values() for p in head.parameters())]
        optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
        options = given.get(kind.__name__, {"lr_lambda": lambda step: 0.9**step})
        if early:
            scheduler = kind(optimizer, **options)
            two_tasks(backbone, [optimizer], heads, scheduler=scheduler)
        else:
            guard = hr.protect(backbone, optimizer, example=PROBE[:2])
            scheduler = kind(optimizer, **options)
            with guard.learn("a", steps=1, own=[heads["a"]]):
                heads["a"](backbone(PROBE)).sum().backward()
                optimizer.step()
                scheduler.step()


def test_a_new_optimizer_for_every_task():
    loop = make_loop("cnn")
    loop.learn("a")
    loop.optimizer = torch.optim.SGD([*loop.backbone.parameters(), *loop.heads["b"].parameters()], lr=0.1, momentum=0.9)
    loop.guard.add_optimizer(loop.optimizer)
    with pytest.raises(ValueError, match="this SGD already"):
        loop.guard.add_optimizer(loop.optimizer)
    loop.learn("b", 1)
    assert loop.changed() == []


class Wrapper(torch.optim.Optimizer):
    """As the wrappers of other libraries: it is an optimizer and has one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_a_wrapper_around_an_optimizer_is_looked_through():
    backbone = BACKBONES["mlp"]()
    inner = torch.optim.SGD(backbone.parameters(), lr=0.1)
    guard = hr.protect(backbone, Wrapper(inner), example=PROBE[:2])
    assert guard.steps.optimizers == [inner]


# Parameters that are stopped, sparse, compiled


def test_parts_may_be_stopped_and_let_go_again_within_a_block():
    """What is frozen for finished tasks does not depend on what requires a gradient when the block begins."""
    loop = make_loop("mlp", **OPTIMIZERS["momentum"])
    loop.learn("a")
    loop.backbone[1].requires_grad_(False)
    with loop.guard.learn("b", steps=4, own=[loop.heads["b"]]):
        loop.train("b", loop.batches(1), set_to_none=False)
        loop.backbone[1].requires_grad_(True)
        before = loop.backbone[1].weight.detach().clone()
        loop.train("b", loop.batches(1), set_to_none=False)
        assert not torch.equal(before, loop.backbone[1].weight)
    assert loop.changed() == []


@pytest.mark.parametrize("whole", [True, False])
def test_the_backbone_may_be_stopped_before_a_block(whole):
    """The new head is trained first, then the backbone or a part of it: also the gates go on then, and steps count."""
    loop = make_loop("mlp", **OPTIMIZERS["momentum"])
    loop.learn("a")
    loop.backbone.requires_grad_(False)
    used = loop.guard.method.weight_masks(1)["3.weight"]
    with loop.guard.learn("b", steps=4, own=[loop.heads["b"]]):
        before, head = state(loop.backbone), loop.heads["b"].weight.detach().clone()
        loop.train("b", loop.batches(1))
        assert differing(before, state(loop.backbone)) == []
        assert not torch.equal(head, loop.heads["b"].weight)
        assert loop.guard.lesson.done == 0
        (loop.backbone if whole else loop.backbone[3]).requires_grad_(True)
        loss = F.cross_entropy(loop.heads["b"](loop.backbone(PROBE)), torch.arange(8) % 3)
        loss.backward()
        assert (loop.backbone[3].weight.grad[used] == 0).all()  # masked as it arrived, so that clipping sees it so
        loop.optimizer.zero_grad()
        loop.train("b", loop.batches(1))
        assert loop.guard.lesson.done == 4
        assert "0 hatrack_gates.embedding" in differing(before, state(loop.backbone))
    assert loop.changed() == []


def test_what_was_stopped_from_the_beginning_stays_as_it_is():
    torch.manual_seed(0)
    backbone = BACKBONES["mlp"]()
    backbone[1].requires_grad_(False)
    loop = make_loop(backbone)
    before = state(backbone[1])
    loop.learn("a")
    loop.learn("b", 1)
    assert differing(before, state(backbone[1])) == []
    backbone[1].requires_grad_(True)
    with (
        pytest.raises(ValueError, match="required none when it was protected"),
        loop.guard.learn("c", steps=4, own=[loop.heads["c"]]),
    ):
        loop.train("c", loop.batches(2))
    backbone[1].requires_grad_(False)
    assert loop.changed() == []


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.layer, self.sparse = nn.Embedding(9, 8), nn.Linear(8, WIDTH), sparse

    def forward(self, x):
        return self.layer(F.embedding(x, self.table.weight, sparse=self.sparse).mean(1))


def words(sparse):
    """A guard on a backbone of token ids, and a function that learns a task."""
    torch.manual_seed(0)
    backbone, heads = Words(sparse), {"a": nn.Linear(WIDTH, 2), "b": nn.Linear(WIDTH, 2)}
    x, y = torch.randint(9, (20, 5)), torch.arange(20) % 2
    optimizer = torch.optim.SGD([*backbone.parameters(), *(p for h in heads.values() for p in h.parameters())], lr=0.5)
    guard = hr.protect(backbone, optimizer, example=x[:2])

    def learn(name):
        with guard.learn(name, steps=3, own=[heads[name]]):
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(heads[name](backbone(x)), y).backward()
                optimizer.step()

    return guard, learn, x


def test_token_ids():
    guard, learn, x = words(False)
    learn("a")
    with guard.use("a"):
        before = guard.backbone(x)
    learn("b")
    with guard.use("a"):
        assert torch.equal(before, guard.backbone(x))
    guard.verify()


def test_sparse_gradients_are_refused():
    guard, learn, _ = words(True)
    before = state(guard.backbone.table)
    with pytest.raises(ValueError, match=r"sparse gradient.*sparse=False"):
        learn("a")
    assert differing(before, state(guard.backbone.table)) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*is deprecated")  # of torch.compile itself
@pytest.mark.parametrize("what", quick_and_slow(["backbone", "in place", "step"], ["step"]))
def test_compiled_backbones_and_steps(what):
    """What torch.compile makes of them runs the guard's code as it is, and every step is guarded."""
    loop = make_loop("mlp", weight_decay=0.5)
    run = torch.compile(loop.backbone, backend="eager") if what == "backbone" else loop.backbone
    if what == "in place":
        loop.backbone.compile(backend="eager")

    def step(head, x, y):
        loss = F.cross_entropy(head(run(x)), y)
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()

    step = torch.compile(step, backend="eager") if what == "step" else step
    for number, name in enumerate("ab"):
        batches = loop.batches(number)
        with loop.guard.learn(name, steps=len(batches), own=[loop.heads[name]]):
            loop.backbone.train()
            for x, y in batches:
                step(loop.heads[name], x, y)
            assert loop.guard.lesson.done == len(batches)
        loop.answers[name] = loop.answer(name)
        assert loop.changed() == []
    torch._dynamo.reset()
