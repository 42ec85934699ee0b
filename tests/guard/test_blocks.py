"""Blocks of learning and of use: what the backbone does in them, release, and several threads."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest
import torch
from torch import nn

import hatrack as hr
from tests.helpers.guarded import PROBE, WIDTH, data, differing, make_loop, mlp, state

# What the backbone does where


def test_outside_of_a_block_the_backbone_and_the_optimizer_refuse():
    loop = make_loop()
    with pytest.raises(ValueError, match=r"guard\.learn\(name, \.\.\.\).*guard\.use"):
        loop.backbone(PROBE)
    loop.learn("a")
    before = state(loop.backbone, *loop.heads.values())
    for parameter in loop.backbone.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="a step of AdamW outside"):
        loop.optimizer.step()
    with loop.guard.use("a"), pytest.raises(ValueError, match="a step of AdamW outside"):
        loop.optimizer.step()
    assert differing(before, state(loop.backbone, *loop.heads.values())) == []


def test_in_evaluation_mode_a_block_of_learning_has_binary_gates():
    loop = make_loop("mlp")
    x, _ = loop.batches(0)[0]
    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
        loop.train("a", loop.batches(0))
        hidden = []
        hook = loop.backbone[4].register_forward_hook(lambda module, inputs, out: hidden.append(inputs[0]))
        loop.backbone.eval()
        loop.backbone(x)
        loop.backbone.train()
        loop.backbone(x)
        hook.remove()
        e = loop.guard.module.embedding[WIDTH:]  # of the second layer
        assert ((hidden[0] == 0).all(0) == (e <= 0)).all()
        assert not (hidden[1] == 0).all(0).any()  # soft gates at s = 1/400 are about 0.5
        final = loop.backbone.eval()(PROBE)
    with loop.guard.use("a"):
        assert torch.equal(final, loop.backbone(PROBE))


def test_use_leaves_modes_as_they_were_and_runs_in_evaluation_mode():
    loop = make_loop("cnn")
    loop.learn("a")
    loop.backbone.train()
    loop.backbone[1].eval()
    modes = [part.training for part in loop.backbone.modules()]
    with loop.guard.use("a"):
        assert not any(part.training for part in loop.backbone.modules())
    assert [part.training for part in loop.backbone.modules()] == modes


def test_training_mode_in_a_block_of_use_changes_nothing():
    """Also the statistics of a norm in a module that the task has for itself."""
    loop = make_loop("cnn")
    loop.heads["a"] = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
    loop.guard.add_optimizer(torch.optim.SGD(loop.heads["a"].parameters(), lr=0.1))
    loop.learn("a")
    with loop.guard.use("a"):
        loop.backbone.train()
        loop.heads["a"].train()
        loop.heads["a"](loop.backbone(PROBE))
    assert loop.changed() == []


def with_a_norm(loop, name="a"):
    """Give a task a head with a batch norm and dropout."""
    loop.heads[name] = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 3))
    loop.guard.add_optimizer(torch.optim.SGD(loop.heads[name].parameters(), lr=0.1))
    return loop


def test_the_head_of_a_finished_task_stays_in_evaluation_mode():
    """Also after a block of use: dropout would change its answers, and a norm its statistics."""
    loop = with_a_norm(make_loop("mlp"))
    loop.learn("a")
    with loop.guard.use("a"):
        features = loop.backbone(PROBE).detach()
    assert not any(part.training for part in loop.heads["a"].modules())
    assert torch.equal(loop.heads["a"](features), loop.answers["a"])
    assert torch.equal(loop.answer("a"), loop.answers["a"])


@pytest.mark.parametrize("then", ["use", "verify", "learn", "save"])
def test_statistics_that_were_changed_outside_of_a_block_are_restored(then, tmp_path):
    """The user sets training mode, as `model.train()` does for all heads at once, and calls the head of a finished task."""
    loop = with_a_norm(make_loop("mlp"))
    loop.learn("a")
    before = state(loop.heads["a"])
    loop.heads["a"].train()
    loop.heads["a"](torch.full((4, WIDTH), 7.0) + torch.randn(4, WIDTH))
    assert "0 0.running_mean" in differing(before, state(loop.heads["a"]))
    if then == "use":
        assert torch.equal(loop.answer("a"), loop.answers["a"])
    elif then == "verify":
        loop.guard.verify()
    elif then == "save":
        loop.guard.save(tmp_path / "guard.safetensors")
    else:
        loop.learn("b", 1)
    assert differing(before, state(loop.heads["a"])) == []
    assert not loop.heads["a"][0].training
    assert loop.changed() == []


def test_a_released_head_has_the_mode_that_it_had():
    loop = with_a_norm(make_loop("mlp"))
    loop.heads["a"][1].eval()
    loop.learn("a")
    loop.guard.release("a")
    assert [part.training for part in loop.heads["a"]] == [True, False, True]


def test_hooks_of_the_backbone_run_once_per_call():
    loop, calls = make_loop(), []
    loop.backbone.register_forward_hook(lambda *_: calls.append("after"))
    loop.backbone.register_forward_pre_hook(lambda *_: calls.append("before"))
    loop.learn("a", epochs=1)
    del calls[:]
    loop.answer("a")
    assert calls == ["before", "after"]


def test_a_backbone_takes_one_tensor():
    loop = make_loop()
    loop.learn("a")
    with loop.guard.use("a"):
        for wrong in (((PROBE, PROBE), {}), ((), {"x": PROBE}), (([1.0],), {})):
            with pytest.raises(ValueError, match="takes one tensor"):
                loop.backbone(*wrong[0], **wrong[1])


@pytest.mark.parametrize("shape", [(5, 4, 4), (4, WIDTH)])
def test_features_of_any_shape(shape):
    """Maps of features, as a detector needs them, and sequences."""
    maps = [nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 5, 3, padding=1)]
    backbone = nn.Sequential(*maps) if len(shape) == 3 else nn.Sequential(nn.Flatten(1, 2), nn.Linear(4, WIDTH))
    torch.manual_seed(0)
    heads = [nn.Sequential(nn.Flatten(), nn.LazyLinear(2)) for _ in range(2)]
    for head in heads:
        head(torch.zeros(2, *shape))
    held = [*backbone.parameters(), *(p for head in heads for p in head.parameters())]
    optimizer = torch.optim.AdamW(held, lr=0.01)
    guard = hr.protect(backbone, optimizer, example=PROBE[:2])
    answers = []
    for name, head in zip("ab", heads, strict=True):
        with guard.learn(name, steps=2, own=[head]):
            for _ in range(4):
                optimizer.zero_grad()
                head(backbone(PROBE)).square().mean().backward()
                optimizer.step()
        with guard.use("a"):
            answers.append(backbone(PROBE))
    assert answers[0].shape == (8, *shape)
    assert torch.equal(*answers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_backbones_of_any_precision(dtype):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    heads = {name: nn.Linear(WIDTH, 2).to(dtype) for name in "abc"}
    held = [*backbone.to(dtype).parameters(), *(p for head in heads.values() for p in head.parameters())]
    optimizer, x = torch.optim.SGD(held, lr=0.1, momentum=0.9, weight_decay=0.1), PROBE.to(dtype)
    guard = hr.protect(backbone, optimizer, example=x[:2])
    answers = []
    for number, (name, head) in enumerate(heads.items()):
        with guard.learn(name, steps=4, own=[head]):
            for _ in range(8):
                optimizer.zero_grad(set_to_none=False)
                (head(backbone(x)) - number).square().mean().backward()
                optimizer.step()
        with guard.use("a"):
            answers.append(heads["a"](backbone(x)))
    assert answers[0].dtype == dtype
    assert answers[0].std() > 0
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_answers_in_inference_mode_are_the_same():
    loop = make_loop("gru")
    loop.learn("a")
    with torch.inference_mode():
        inferred = loop.answer("a")
    loop.learn("b", 1)
    assert loop.changed() == []
    assert torch.equal(inferred, loop.answers["a"])


def test_a_guard_that_is_made_in_the_inference_mode_learns():
    x, y = data(0)
    backbone, head = mlp(), torch.nn.Linear(WIDTH, 3)
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=0.01)
    before = backbone[1].weight.detach().clone()
    with torch.inference_mode():
        guard = hr.protect(backbone, optimizer, example=x[:2])
        born = mlp()
    with guard.learn("a", steps=2, own=[head]):
        for _ in range(2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(backbone(x)), y).backward()
            optimizer.step()
    assert not torch.equal(backbone[1].weight, before)
    with pytest.raises(ValueError, match=r"'1\.weight'.*inference_mode"):
        hr.protect(born, torch.optim.SGD(born.parameters(), lr=0.1), example=x[:2])


# Release


@pytest.mark.parametrize("method", ["hat", "pmask"])
def test_a_released_task_gives_its_capacity_back(method):
    loop = make_loop("cnn", method=method)
    loop.learn("a")
    alone = loop.guard.usage()
    loop.learn("b", 1)
    loop.guard.release("b")
    del loop.answers["b"]
    assert loop.guard.usage() == alone
    assert loop.heads["b"].weight.requires_grad
    assert list(loop.guard.tasks) == ["a"]
    loop.learn("b", 2)
    loop.learn("c", 3)
    assert loop.changed() == []
    assert [task.number for task in loop.guard.tasks.values()] == [1, 2, 3]


# Threads


def test_threads_use_different_tasks_at_the_same_time():
    loop = make_loop("cnn")
    loop.learn("a")
    loop.learn("b", 1)
    loop.backbone.train()

    def ask(number):
        name = "ab"[number % 2]
        return torch.equal(loop.answer(name), loop.answers[name])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(200)))
    assert loop.backbone.training
    assert loop.changed() == []


def test_a_thread_can_not_use_a_task_while_another_learns():
    loop, begun, go_on = make_loop(), Event(), Event()
    loop.learn("a")

    def learn():
        with loop.guard.learn("b", steps=4, own=[loop.heads["b"]]):
            begun.set()
            go_on.wait(10)
            loop.train("b", loop.batches(1))

    thread = Thread(target=learn)
    thread.start()
    begun.wait(10)
    with pytest.raises(ValueError, match="'b' is being learned"):
        loop.answer("a")
    go_on.set()
    thread.join()
    assert list(loop.guard.tasks) == ["a", "b"]
    assert loop.changed() == []


@pytest.mark.parametrize("method", ["hat", "pmask"])
def test_a_backbone_that_is_moved_within_a_block_of_use(method):
    """As Lightning does around `predict`. The device "meta", which holds no values, stands for a GPU."""
    loop = make_loop("cnn", method=method)
    loop.learn("a", 0)
    with loop.guard.use("a"):
        loop.backbone.to("meta")
        assert loop.backbone(PROBE.to("meta")).device.type == "meta"
