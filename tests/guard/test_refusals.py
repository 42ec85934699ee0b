"""What a guard refuses, each in one line that names the value: nested blocks, wrong arguments, backbones and optimizers."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import hatrack as hr
from tests.helpers.guarded import PROBE, differing, make_loop, state


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
        ({"own": [nn.LazyLinear(3)]}, r"'weight' of the module in own \(LazyLinear\) has no shape yet"),
        ({"settle": 5}, "a loader or .* not 5"),
        ({"settle": PROBE}, "a loader or .* not "),
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


def test_a_backbone_that_was_cast_afterwards():
    loop = make_loop()
    loop.backbone.to(torch.bfloat16)
    with pytest.raises(ValueError, match="was cast to bfloat16 after"), loop.guard.learn("a", steps=1):
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
        ({"example": PROBE * math.nan}, "NaN or infinite"),
        ({"example": torch.rand(2, 7)}, "can't be run on an example"),
        ({"method": "ewc"}, "no method of a guard 'ewc'; there are: hat, pmask"),
        ({"smaxx": 3.0}, "no option 'smaxx'; did you mean 'smax'"),
        ({"masks": "soft"}, "guarantees nothing"),
        ({"method": "pmask", "masks": "soft"}, "guarantees nothing"),
        ({"probes": 3}, "stores no images"),
        ({"grow": "auto"}, "'auto': a guard does not grow"),
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
