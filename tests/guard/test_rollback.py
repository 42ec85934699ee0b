"""Blocks that fail are rolled back, and changes outside of the guard are named."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers.guarded import PROBE, WIDTH, differing, make_loop, state

MOMENTUM = {"optimizer": torch.optim.SGD, "momentum": 0.9, "weight_decay": 0.1, "lr": 0.05}


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
        return {**state(loop.backbone, *loop.heads.values()), **kept, **rows}

    def fail():
        loop.optimizer.param_groups[0]["lr"] = 7.0
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert len(differing(before, everything())) > 5
        raise error

    before = everything()
    assert "0 hatrack_gates.embedding" in before
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
    """As when the loader was empty: what was changed is rolled back, too."""
    loop = make_loop()
    loop.learn("a")
    before = state(loop.heads["b"])
    with (
        pytest.raises(ValueError, match="no step of an optimizer of the guard"),
        loop.guard.learn("b", steps=4, own=[loop.heads["b"]]),
    ):
        loop.heads["b"].weight.data.fill_(1.0)
    assert differing(before, state(loop.heads["b"])) == []
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


@pytest.mark.parametrize("factor", [2.0, 1.002])
def test_a_backbone_that_hides_a_tensor_is_noticed(factor):
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
        run_block(loop, "b", lambda: loop.backbone.factor.__setitem__(0, factor))
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
