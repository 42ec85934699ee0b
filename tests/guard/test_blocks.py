"""Blocks of learning and of use: what is refused, what is rolled back, what is sealed, and several threads."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest
import torch
from torch import nn

import hatrack as hr
from tests.helpers.guarded import PROBE, WIDTH, differing, make_loop, state

MOMENTUM = {"optimizer": torch.optim.SGD, "momentum": 0.9, "weight_decay": 0.1, "lr": 0.05}


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


# What is refused


def test_blocks_can_not_be_nested():
    loop = make_loop()
    loop.learn("a")
    with loop.guard.use("a"):
        for inner in (loop.guard.use("a"), loop.guard.learn("b", steps=1)):
            with pytest.raises(ValueError, match="a task is in use"), inner:
                pass
        for call in (loop.guard.verify, loop.guard.remove, lambda: loop.guard.release("a"), lambda: loop.guard.save("x")):
            with pytest.raises(ValueError, match="a task is in use"):
                call()
    batches = loop.batches(1)
    with loop.guard.learn("b", steps=len(batches), own=[loop.heads["b"]]):
        loop.train("b", batches)
        for inner in (loop.guard.use("a"), loop.guard.learn("c", steps=1)):
            with pytest.raises(ValueError, match="'b' is being learned"), inner:
                pass
        with pytest.raises(ValueError, match="'b' is being learned"):
            loop.guard.verify()
    assert loop.changed() == []
    assert list(loop.guard.tasks) == ["a", "b"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "a"}, "'a' has been learned"),
        ({"name": ""}, "must be a text, not ''"),
        ({"name": 3}, "must be a text, not 3"),
        ({"steps": 0}, "at least 1.* not 0"),
        ({"steps": 2.5}, "whole number, not 2.5"),
        ({"own": 3}, "list of modules"),
        ({"own": [torch.zeros(2)]}, "list of modules"),
    ],
)
def test_wrong_arguments_of_learn(wrong, message):
    loop = make_loop()
    loop.learn("a")
    given = {"name": "b", "steps": 4, **wrong}
    with pytest.raises(ValueError, match=message) as error, loop.guard.learn(given.pop("name"), **given):
        pass
    assert "\n" not in str(error.value)
    assert list(loop.guard.tasks) == ["a"]


def test_modules_of_a_task_are_of_one_task():
    loop = make_loop()
    loop.learn("a")
    with pytest.raises(ValueError, match="belongs to the task 'a'"), loop.guard.learn("b", steps=1, own=[loop.heads["a"]]):
        pass
    with pytest.raises(ValueError, match="of the backbone"), loop.guard.learn("b", steps=1, own=[loop.backbone[1]]):
        pass


def test_an_unknown_name_is_answered_with_the_nearest():
    loop = make_loop(names=("digits", "signs"))
    loop.learn("digits")
    for call in (loop.guard.use("digit").__enter__, lambda: loop.guard.release("digit")):
        with pytest.raises(ValueError, match="no learned task 'digit'; did you mean 'digits'"):
            call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"example": [1.0]}, "tensor of one or more inputs"),
        ({"example": PROBE[:0]}, "tensor of one or more inputs"),
        ({"example": PROBE.byte()}, "not uint8"),
        ({"example": torch.rand(2, 7)}, "can't be run on an example"),
        ({"method": "ewc"}, "no method of a guard 'ewc'; there are: hat, pmask"),
        ({"smaxx": 3.0}, "no option 'smaxx'; did you mean 'smax'"),
        ({"masks": "soft"}, "guarantees nothing"),
        ({"probes": 3}, "stores no images"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"optimizer": []}, "empty list"),
        ({"optimizer": 3}, "one of torch.optim"),
        ({"optimizer": [1, 1]}, r"one \(SGD\) twice"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "holds no parameter of the backbone"),
        ({"backbone": 3}, "must be a module"),
        ({"backbone": nn.Flatten()}, "no parameter that requires a gradient"),
        ({"backbone": nn.LazyLinear(3)}, "no shape yet"),
    ],
)
def test_wrong_arguments_of_protect(change, message):
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
    own = torch.optim.SGD(backbone.parameters())
    given = {"backbone": backbone, "optimizer": own, "example": PROBE[:2], **change}
    if isinstance(given["optimizer"], list):
        given["optimizer"] = [own for _ in given["optimizer"]]
    with pytest.raises(ValueError, match=message) as error:
        hr.protect(given.pop("backbone"), given.pop("optimizer"), **given)
    assert "\n" not in str(error.value)
    hr.protect(backbone, torch.optim.SGD(backbone.parameters()), example=PROBE[:2])  # nothing was left in it


def test_norms_that_tasks_share_guarantee_nothing():
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8))
    with pytest.raises(ValueError, match="norms='shared' guarantees nothing"):
        hr.protect(backbone, torch.optim.SGD(backbone.parameters()), example=PROBE[:2], norms="shared")


def test_lbfgs_is_refused():
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
    with pytest.raises(ValueError, match="LBFGS"):
        hr.protect(backbone, torch.optim.LBFGS(backbone.parameters()), example=PROBE[:2])


def test_a_backbone_is_protected_once_and_can_be_freed():
    loop = make_loop("cnn")
    plain = copy.deepcopy(loop.backbone).__class__  # the class is as it was
    assert plain is nn.Sequential
    with pytest.raises(ValueError, match="protected already"):
        hr.protect(loop.backbone, loop.optimizer, example=PROBE[:2])
    with pytest.raises(ValueError, match="protected already"):
        hr.protect(nn.Sequential(loop.backbone, nn.ReLU()), loop.optimizer, example=PROBE[:2])
    loop.learn("a")
    held = len(loop.optimizer.param_groups[0]["params"])
    loop.guard.remove()
    assert len(loop.optimizer.param_groups[0]["params"]) == held - 1
    assert "forward" not in vars(loop.backbone)
    assert "hatrack_gates.embedding" not in loop.backbone.state_dict()
    assert loop.heads["a"].weight.requires_grad
    loop.backbone(PROBE).sum().backward()
    loop.optimizer.step()
    with pytest.raises(ValueError, match="the guard was removed"):
        loop.guard.verify()
    hr.protect(loop.backbone, loop.optimizer, example=PROBE[:2])


def test_compiled_and_replicated_backbones_are_refused_by_name():
    for wrap, name in ((lambda m: torch.compile(m, backend="eager"), "torch.compile"), (nn.DataParallel, "DataParallel")):
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
        with pytest.raises(ValueError, match=name):
            hr.protect(wrap(backbone), torch.optim.SGD(backbone.parameters()), example=PROBE[:2])


class DTensor(torch.Tensor):
    """Stands for the sharded tensors of torch.distributed, by their name."""


def test_sharded_parameters_are_refused_by_name():
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
    backbone[1].weight = nn.Parameter(torch.rand(8, 16).as_subclass(DTensor))
    with pytest.raises(ValueError, match=r"'1\.weight' is sharded \(DTensor\)"):
        hr.protect(backbone, torch.optim.SGD(backbone.parameters()), example=PROBE[:2])


def test_copies_and_pickles():
    """A copy of the backbone refuses to run without gates; weights can be copied both ways."""
    loop = make_loop()
    loop.learn("a")
    twin = copy.deepcopy(loop.backbone)
    with pytest.raises(ValueError, match="a copy of a protected backbone"):
        twin(PROBE)
    assert differing(state(twin), state(loop.backbone)) == []
    for call in (lambda: copy.deepcopy(loop.guard), lambda: pickle.dumps(loop.guard), lambda: pickle.dumps(loop.backbone)):
        with pytest.raises(ValueError, match=r"guard\.save\(path\)"):
            call()
    assert loop.changed() == []


# Rolling back


def run_block(loop, name, body, **options):
    """Train one epoch of a task, and then do something in its block."""
    with loop.guard.learn(name, steps=4, own=[loop.heads[name]], **options):
        loop.train(name, loop.batches(ord(name)))
        body()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["hat", "pmask"])
def test_an_exception_in_a_block_rolls_everything_back(error, method):
    loop = make_loop("cnn", method=method, **MOMENTUM)
    loop.learn("a")

    def everything():
        kept = {f"{k} {key}": v.clone() for k, s in enumerate(loop.optimizer.state.values()) for key, v in s.items()}
        method_state = {name: t.clone() for name, t in loop.guard.method.state_dict().items()}
        rows = {name: t[:2] for name, t in method_state.items() if name in ("done", "gates", "packed_masks")}
        own = {name: t for name, t in state(loop.backbone, *loop.heads.values()).items() if "hatrack" not in name}
        return {**own, **kept, **rows}

    def fail():
        loop.optimizer.param_groups[0]["lr"] = 7.0
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert len(differing(before, everything())) > 5
        raise error

    before = everything()
    with pytest.raises(error):
        run_block(loop, "b", fail, settle=loop.batches(1))
    assert differing(before, everything()) == []
    assert loop.optimizer.param_groups[0]["lr"] == 0.05
    assert len(loop.optimizer.param_groups) == 1
    assert all(p.grad is None for p in loop.backbone.parameters())
    assert list(loop.guard.tasks) == ["a"]
    loop.learn("b", 1)
    assert loop.changed() == []


def test_a_block_without_steps_is_refused():
    """As when another optimizer than the guard's was used: its changes are rolled back, too."""
    loop = make_loop()
    loop.learn("a")
    other = torch.optim.SGD(loop.backbone.parameters(), lr=1.0)
    loop.optimizer = other
    with pytest.raises(ValueError, match="no step of an optimizer of the guard"):
        run_block(loop, "b", lambda: None)
    assert loop.changed() == []


def test_values_that_are_not_finite_are_rolled_back():
    loop = make_loop()
    with pytest.raises(ValueError, match="not finite"):
        run_block(loop, "a", lambda: loop.heads["a"].weight.data.fill_(float("nan")))
    assert loop.heads["a"].weight.isfinite().all()
    assert not loop.guard.tasks


@pytest.mark.parametrize("where", ["weight", "head", "statistics"])
def test_a_change_outside_of_the_guard_is_named(where):
    loop = make_loop("cnn")
    loop.learn("a")
    mask = loop.guard.method.weight_masks(1)["0.weight"]
    tensor, place = {
        "weight": (loop.backbone[0].weight, mask.nonzero()[0]),
        "head": (loop.heads["a"].weight, torch.tensor([0, 0])),
        "statistics": (loop.guard.method.norms.of(1)["1.running_mean"], torch.tensor([0])),
    }[where]
    with torch.no_grad():
        tensor[tuple(place)] += 1e-3
    with pytest.raises(ValueError, match="task 'a' is not what it was"):
        loop.guard.verify()
    with pytest.raises(ValueError, match="task 'a' is not what it was"), loop.guard.learn("b", steps=1, settle=[PROBE]):
        pass
    assert loop.guard.lesson is None


def test_a_backbone_that_hides_a_tensor_is_noticed():
    """A factor that is neither parameter nor buffer: the answers of the finished task show it, and the block fails."""

    class Hiding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.factor = nn.Linear(16, WIDTH), [1.0]

        def forward(self, x):
            return self.layer(x.flatten(1)) * self.factor[0]

    loop = make_loop(Hiding())
    loop.learn("a")
    with pytest.raises(ValueError, match=r"would no longer answer as it did|answers differently"):
        run_block(loop, "b", lambda: loop.backbone.factor.__setitem__(0, 2.0))
    assert loop.backbone.factor == [1.0]
    assert loop.changed() == []


def test_loading_the_best_state_within_a_block():
    loop = make_loop("cnn")
    loop.learn("a")
    batches = loop.batches(1)
    with loop.guard.learn("b", steps=len(batches), own=[loop.heads["b"]], settle=batches):
        loop.train("b", batches)
        best = copy.deepcopy(loop.backbone.state_dict())
        embedding = loop.guard.module.embedding.detach().clone()
        loop.train("b", batches)
        loop.backbone.load_state_dict(best)
    assert torch.equal(loop.guard.method.gates[2], embedding > 0)
    assert not torch.equal(embedding, torch.zeros_like(embedding))
    assert loop.changed() == []


def test_the_weights_of_before_another_task_can_not_undo_it():
    """A loop that loads weights from before: the bits of finished tasks are restored when the block ends."""
    loop = make_loop()
    old = copy.deepcopy({k: v for k, v in loop.backbone.state_dict().items() if "hatrack" not in k})
    loop.learn("a", epochs=6)
    with loop.guard.learn("b", steps=4, own=[loop.heads["b"]]):
        loop.train("b", loop.batches(1))
        loop.backbone.load_state_dict(old)  # it has no embedding, which is kept
    assert loop.changed() == []


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
