"""A loss that is not finite: where it happened, the likely cause, and a fit that begins again with half the rate."""

import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from hatrack import METHODS, Diverged, Method, Network, Regime, Run, Trainer, run
from hatrack.__main__ import main
from hatrack.experiments.parallel import run_all
from hatrack.files import tensors
from hatrack.methods.parts.vectors import values
from hatrack.reporting.report import report
from hatrack.training.checkpoint import Checkpointer
from hatrack.training.trainer import HALVINGS
from tests.helpers.commands import SHORT
from tests.helpers.killing import OFTEN, Killed, assert_same, killed_at, to_the_end
from tests.helpers.learning import make
from tests.helpers.runs import small
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

RECORDS = Path(__file__).parent.parent.parent / "docs" / "results" / "records"


def mine(kind, tasks=None, **options):
    return kind(make("sgd", tasks or toy_tasks(1)).net, **options)


# Where


class Bursting(Method):
    """Its loss is not finite in one step, counted from 0 over the epochs; the weights never feel it."""

    done: torch.Tensor

    def __init__(self, net, *, at, value=math.inf):
        super().__init__(net)
        self.at, self.value = at, value
        self.register_buffer("done", torch.zeros(()))

    def loss(self, batch):
        return super().loss(batch) + torch.where(self.done == self.at, self.value, 0.0)

    def constrain(self):
        self.done.add_(1)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("at", "epoch", "step"), [(1, 1, 2), (3, 1, 4), (4, 2, 1), (11, 3, 4)])
def test_the_very_step_is_named(at, epoch, step, value):
    (task,) = toy_tasks(1, train=60, valid=0.0)  # batches of 16, 16, 16 and 12
    method = mine(Bursting, at=at, value=value)
    before = {key: tensor.clone() for key, tensor in method.state_dict().items()}
    fit = Trainer(Regime(epochs=5, batch=16))
    with pytest.raises(Diverged, match=rf"'toy 0', epoch {epoch}, step {step} of 4: .*{value}; probably"):
        method.learn(task, fit)
    assert fit.fits == []
    assert all(torch.equal(before[key], tensor) for key, tensor in method.state_dict().items()), "as before the fit"


def test_the_first_loss_of_all_is_no_matter_of_the_rate():
    (task,) = toy_tasks(1)
    for what in ("stop", "halve"):
        with pytest.raises(Diverged, match=r"step 1 of 3: .*inf; no update .*learning rate is not"):
            mine(Bursting, at=0).learn(task, Trainer(Regime(epochs=2, batch=16, on_divergence=what)))


class Blind(Method):
    """Trains well, but its logits in evaluation mode are not numbers."""

    def forward(self, x, task):
        logits = super().forward(x, task)
        return logits if self.training else logits / 0


def test_a_validation_loss_that_is_not_finite_has_no_step():
    with pytest.raises(Diverged, match=r"'toy 0', epoch 1: .*validation.*nan; probably the learning rate"):
        mine(Blind).learn(toy_tasks(1)[0], Trainer(Regime(epochs=2, batch=16)))


def test_the_mean_loss_of_an_epoch_is_exact():
    losses = []

    class Recording(Trainer):
        def start(self, method, task, **how):
            loop = super().start(method, task, **how)
            step = loop.step

            def recorded(index, number):
                found = step(index, number)
                losses.append((found[number].clone(), len(index)))
                return found

            loop.step = recorded
            return loop

    (task,) = toy_tasks(1, train=60, valid=0.0)
    fitted = Recording(Regime(epochs=2, batch=16))(mine(Method), task)
    assert [size for _, size in losses] == [16, 16, 16, 12] * 2
    for epoch, part in zip(fitted.epochs, (losses[:4], losses[4:]), strict=True):
        assert epoch.loss == math.fsum(loss.item() * size for loss, size in part) / 60


def test_a_diverged_state_is_never_saved(tmp_path):
    """Saved after every step, it ends at the step itself; the error is the one that the end of the epoch would give."""
    said = []
    for minutes in (5.0, OFTEN):
        fit = Trainer(Regime(epochs=5, batch=16))
        fit.checkpointer = Checkpointer(tmp_path / f"{minutes}.part", {}, minutes=minutes)
        method = mine(Bursting, at=5)
        with pytest.raises(Diverged) as caught:
            method.learn(toy_tasks(1)[0], fit)
        fit.checkpointer.wait()
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "epoch 2, step 3 of 3" in said[0]
    states = [tensors.load(path) for path in sorted((tmp_path / f"{OFTEN}.part").glob("fit-*"))]
    assert sorted(words["place"] for _, words in states) == [1, 2]
    assert all(kept["losses"].isfinite().all() for kept, _ in states)


# The likely cause


def test_the_usual_suspect():
    method = mine(Method)
    assert method.explain_divergence(Regime(lr=0.3)) == (
        "probably the learning rate is too large: try one under 0.3, or --on-divergence halve"
    )
    assert method.explain_divergence(Regime(lr=0.3, clip=0.0, on_divergence="halve")) == (
        "probably the learning rate is too large: try one under 0.3, or clip gradients (--clip)"
    )


SPRINGS = {  # options, buffers, and the largest curvature of the penalty, worked out by hand
    "ewc": ({"strength": 10.0, "limit": 0.0}, "fisher", 10 * 3),  # 10 / 2 F d^2
    "si": ({"c": 10.0}, "importance", 2 * 10 * 3),  # 10 Omega d^2
    "mas": ({"strength": 10.0}, "importance", 2 * 10 * 3),
    "imm-mean": ({"strength": 10.0}, "learned", 10),  # 10 / 2 d^2
    "imm-mode": ({"strength": 10.0}, "learned", 10),
}


def pulled(name, monkeypatch, regime, **changes):
    """Fit a method that feels its penalty alone, from weights that are one away from the anchor, with importances from 0
    to 3; what is left of the penalty."""
    monkeypatch.setattr(Method, "loss", lambda self, batch: 0 * self(batch.x, batch.task).sum())
    options, buffer, _ = SPRINGS[name]
    tasks = toy_tasks(1, train=60)
    method = METHODS[name](make("sgd", tasks).net, **{**options, **changes})
    stiff = getattr(method, buffer)
    stiff.copy_(torch.linspace(0, 3, stiff.numel()) if stiff.dim() else torch.tensor(1.0))
    method.anchor.add_(1)
    Trainer(regime)(method, tasks[0])
    away = (values(method.net.shared_parameters()) - method.anchor).square()
    return ((stiff * away).mean() / stiff.mean()).item()


def springy(lr, optimizer="sgd"):
    return Regime(epochs=6, batch=1, lr=lr, optimizer=optimizer, clip=0.0, schedule="constant", restore=False)


@pytest.mark.parametrize("name", quick_and_slow(SPRINGS, ["ewc", "si"]))
def test_a_penalty_is_suspected_when_it_is_to_blame(name, monkeypatch):
    """Just over the bound it diverges, and says so in numbers; just under it, or with what these suggest, it does not."""
    options, _, curvature = SPRINGS[name]
    lr = 1.2 * 2 / curvature
    with pytest.raises(Diverged) as caught:
        pulled(name, monkeypatch, springy(lr))
    said = str(caught.value)
    assert "probably the learning rate times the penalty is too large" in said
    assert f"largest curvature {curvature:.3g} is 2.4, and sgd needs less than 2: try" in said
    assert pulled(name, monkeypatch, springy(0.9 * 2 / curvature)) < 0.01
    tries = re.findall(r"(a learning rate|--\w+) under ([\d.e+-]+\d)", said)
    assert {"a learning rate", f"--{next(iter(options))}"} <= {what for what, _ in tries}
    for what, under in tries:
        less = 0.9 * float(under)
        regime, changes = (springy(less), {}) if what == "a learning rate" else (springy(lr), {what[2:]: less})
        assert pulled(name, monkeypatch, regime, **changes) < 0.01


@pytest.mark.parametrize("share", [0.95, 1.05])
def test_momentum_bears_a_stiffer_spring(share, monkeypatch):
    """2 (1 + 0.9) / lr: the characteristic polynomial z^2 - (1 + m - lr k) z + m has a root outside the circle beyond it."""
    regime = springy(share * 3.8 / 30, "momentum")
    assert regime.steepest == pytest.approx(30 / share)
    if share < 1:
        assert pulled("ewc", monkeypatch, regime) < 0.01
    else:
        with pytest.raises(Diverged, match=r"3\.99.*3\.8"):
            pulled("ewc", monkeypatch, regime)


def test_a_spring_that_is_not_to_blame_is_not_suspected(monkeypatch):
    method = make("ewc", toy_tasks(1))
    assert "too large: try one under 0.05" in method.explain_divergence(Regime()), "the first task has no springs"
    method.fisher.fill_(1000.0)
    assert "times the penalty" not in method.explain_divergence(Regime()), "the limit of 10 holds them"
    assert "times the penalty" in method.explain_divergence(Regime(lr=0.3))
    assert "times the penalty" not in method.explain_divergence(Regime(lr=0.3, optimizer="adam")), (
        "its steps don't grow with a slope"
    )
    method.limit = 0.0
    method.fisher[3] = math.inf
    assert method.explain_divergence(Regime()).startswith("the penalty")


def test_pmask_on_weights_that_are_divided_by_their_norm():
    tasks = toy_tasks(1)
    trunk = nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(16, 12)), nn.ReLU())
    method = METHODS["pmask"](Network(trunk, [3], tasks[0].train.inputs(torch.arange(2))), c=20.0)
    with pytest.raises(Diverged, match=r"trunk\.1\.\S+original1 .*without weight norm"):
        method.learn(tasks[0], Trainer(Regime(epochs=60, batch=8)))
    assert "learning rate is too large" in make("pmask", tasks).explain_divergence(Regime())


# Half the learning rate


class Steep(Method):
    """A bowl of curvature 100 for the weights, and one of curvature 40 for a parameter with a rate of its own."""

    def __init__(self, net):
        super().__init__(net)
        self.own = nn.Parameter(torch.ones(3))

    def learn_task(self, task, fit):
        fit(self, task, plain={self.own: 0.1})

    def loss(self, batch):
        weights = sum(p.square().sum() for p in self.net.parameters())
        return 50 * weights + 20 * self.own.square().sum() + 0 * super().loss(batch)


HALVE = {"epochs": 20, "batch": 4, "schedule": "constant", "clip": 0.0}


@pytest.mark.parametrize(
    "how",
    quick_and_slow(
        [{"optimizer": "sgd"}, {"optimizer": "momentum", "momentum": 0.1, "keep_state": True}], [{"optimizer": "sgd"}]
    ),
)
def test_halving_ends_where_the_smaller_rate_would(how):
    """0.05 times 100 is 5 and 2.5 after one halving; 1.25 after two is under 2."""
    (task,) = toy_tasks(1)
    with pytest.raises(Diverged):
        mine(Steep).learn(task, Trainer(Regime(lr=0.05, **HALVE, **how)))
    method, fit = mine(Steep), Trainer(Regime(lr=0.05, **HALVE, **how, on_divergence="halve"))
    with pytest.warns(UserWarning, match=r"'toy 0', epoch \d+, step \d+ of 12: .*(inf|nan)") as told:
        method.learn(task, fit)
    assert [re.search(r"lr (\S+) \(seed 0\)", str(w.message))[1] for w in told] == ["0.025", "0.0125"]
    assert [(f.halved, len(f.epochs), f.epochs[0].lr) for f in fit.fits] == [(2, 20, 0.0125)]
    twin = mine(Steep)
    Trainer(Regime(lr=0.0125, **HALVE, **how))(twin, task, plain={twin.own: 0.025})
    assert twin.own.abs().max() < 1e-3
    assert all(torch.equal(a, b) for a, b in zip(method.state_dict().values(), twin.state_dict().values(), strict=True))
    assert fit.carried[method].fits == {0: 1}, "one fit, whatever came before"


def test_a_resumed_fit_continues_with_the_halved_rate(tmp_path, monkeypatch):
    (task,) = toy_tasks(1)

    def deadly(self, course):
        if course.result.halved == 2 and len(course.result.epochs) == 3 and course.step_index == 5:
            self.save_fit(course)
            self.wait()
            raise Killed

    def fresh():
        fit = Trainer(Regime(lr=0.05, **HALVE, on_divergence="halve"))
        fit.checkpointer = Checkpointer(tmp_path / "steep.part", {})
        return mine(Steep), fit

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "after_step", deadly)
        method, fit = fresh()
        with pytest.warns(UserWarning, match="begins again"), pytest.raises(Killed):
            method.learn(task, fit)
    method, fit = fresh()
    method.learn(task, fit)  # a warning would be an error
    twin = mine(Steep)
    whole = Trainer(Regime(lr=0.0125, **HALVE))(twin, task, plain={twin.own: 0.025})
    assert fit.fits == [replace(whole, halved=2)]
    assert all(torch.equal(a, b) for a, b in zip(method.state_dict().values(), twin.state_dict().values(), strict=True))


def test_halving_has_an_end():
    (task,) = toy_tasks(1)
    method = mine(Bursting, at=2)
    fit = Trainer(Regime(epochs=2, batch=16, lr=1.0, on_divergence="halve"))
    with (
        pytest.warns(UserWarning, match="begins again") as told,
        pytest.raises(Diverged, match=r": 1, 0\.5, 0\.25, .*, 0\.000976562$"),
    ):
        method.learn(task, fit)
    assert len(told) == HALVINGS
    assert method.done == 0


# Runs


def stiff(seed=0, **regime):
    """The springs of the second task need a rate of a few halvings."""
    how = {
        "epochs": 3,
        "batch": 100,
        "clip": 0.0,
        "schedule": "cosine",
        "optimizer": "momentum",
        "momentum": 0.5,
        "keep_state": True,
        **regime,
    }
    options = {"strength": 1e5, "limit": 0.0}
    return Run(
        "smnist",
        "ewc",
        seed,
        benchmark_options={"data": "sample"},
        network_options={"widths": (12,)},
        train_examples=100,
        method_options=options,
        regime=Regime(**how),
    )


@pytest.mark.slow
def test_a_killed_run_that_halved_the_rate_ends_with_the_same_record(tmp_path, monkeypatch):
    spec = stiff(on_divergence="halve")
    with pytest.warns(UserWarning, match=r"task 'digits 5-9', epoch \d"):
        whole = run(spec, tmp_path / "whole")
    first, second = whole.curves
    assert first.halved == 0
    assert second.halved >= 2
    assert second.epochs[0].lr == 0.05 / 2**second.halved
    assert whole.halvings == f"diverged, so that the learning rate was halved: 'digits 5-9' {second.halved} x"
    kills = killed_at(monkeypatch, 0.07, seed=3, most=12)
    tick, seen = Checkpointer.after_step, []

    def noted(self, course):
        count = len(kills)
        try:
            tick(self, course)
        finally:
            seen.extend([course.result.halved] * (len(kills) - count))

    monkeypatch.setattr(Checkpointer, "after_step", noted)
    with pytest.warns(UserWarning, match="begins again"):
        again = to_the_end(spec, tmp_path / "again", save_every=OFTEN)
    assert len(set(seen)) > 2, "killed before and after halvings"
    assert_same(whole, again)
    assert [path.suffix for path in (tmp_path / "again").iterdir()] == [".json"]
    assert f"ewc seed 0 {whole.halvings}" in html.unescape(report(tmp_path / "whole").read_text())


def test_a_diverged_run_is_one_line_and_keeps_its_last_good_state(tmp_path, capsys):
    words = ["run", "smnist", "ewc", "--strength", "1e6", "--limit", "0", "--clip", "0", "--out", str(tmp_path), *SHORT]
    said = []
    for _ in range(2):
        assert main(words) == 2
        shown = capsys.readouterr()
        said.append(shown.err)
        assert shown.out == ""
    assert said[0] == said[1]
    (part,) = tmp_path.glob("*.part")
    assert said[0].count("\n") == 1
    assert re.match(r"hatrack: ewc seed 0, task 'digits 5-9', epoch 1, step \d+ of 17: the loss is inf; probably", said[0])
    assert f"last good state stays in {part}; the same command would end so again\n" in said[0]
    assert [path.name for path in part.glob("task-1*")] == ["task-1.safetensors"]
    assert not list(tmp_path.glob("*.json"))
    with pytest.warns(UserWarning, match="begins again with lr"):
        assert main([*words, "--on-divergence", "halve"]) == 0
    shown = capsys.readouterr()
    assert "ewc seed 0: diverged, so that the learning rate was halved: 'digits 5-9' " in shown.out
    assert len(list(tmp_path.glob("*.json"))) == 1


@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_runs_go_on_to_their_records(tmp_path, parallel):
    wild = [small(seed=seed, regime=Regime(epochs=1, batch=100, lr=1e30, clip=0.0)) for seed in (0, 1)]
    with pytest.raises(Diverged) as caught:
        run_all([wild[0], small(seed=0), wild[1]], tmp_path, parallel=parallel)
    lines = str(caught.value).split("\n")
    assert [line[:10] for line in lines[:2]] == ["sgd seed 0", "sgd seed 1"]
    assert lines[2:] == [f"1 of 3 runs have their records in {tmp_path}"]
    assert [path.stem for path in tmp_path.glob("*.json")] == [small(seed=0).name]


def test_records_keep_their_names():
    paths = sorted(RECORDS.glob("*.json"))
    assert paths
    for path in paths:
        spec = json.loads(path.read_text())["spec"]
        assert Run.from_spec(spec).name == path.stem
    assert "on_divergence" not in stiff().spec["regime"]
    halving = stiff(on_divergence="halve")
    assert halving.name != stiff().name
    assert Run.from_spec(json.loads(json.dumps(halving.spec))) == halving


def test_a_choice_that_is_none(capsys, tmp_path):
    assert main(["run", "smnist", "sgd", "--on-divergence", "pray", "--out", str(tmp_path)]) == 2
    assert "--on-divergence must be one of 'stop', 'halve', not 'pray'" in capsys.readouterr().err
