"""What docs/guarantees.md guarantees on a GPU, cell by cell."""

import pytest
import torch

from hatrack import Regime, Run, Trainer, run
from hatrack.engine.choice import PAYS
from hatrack.engine.precision import precision_scope
from hatrack.experiments.parallel import run_all
from hatrack.tasks.device import all_to_device
from tests.helpers.killing import Killed, assert_same, killed_at, to_the_end
from tests.helpers.pictures import assert_same_bits, convolutional, learned, pictures

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("engine", "precision"),
    [(e, p) for e in ("eager", "recorded", "compiled") for p in ("float32", "tf32", "bfloat16")],
)
def test_nothing_is_forgotten_and_the_same_run_gives_the_same_bits(engine, precision):
    with precision_scope(precision, GPU):
        (one, unchanged), (two, _) = learned(engine, "cuda"), learned(engine, "cuda")
    assert unchanged
    assert_same_bits(one, two)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_a_recorded_run_is_the_eager_run(precision):
    with precision_scope(precision, GPU):
        assert_same_bits(learned("eager", "cuda")[0], learned("recorded", "cuda")[0])


def test_a_compiled_run_without_dropout_is_the_eager_run_but_for_rounding():
    """A short run, and plain SGD: what is rounded otherwise grows with every step."""
    states = []
    for engine in ("eager", "compiled"):
        method = convolutional(pictures(1), "cuda", dropout=0.0)
        with precision_scope("float32", GPU):
            method.learn(all_to_device(pictures(1), "cuda")[0], Trainer(Regime(epochs=2, batch=16, lr=0.02), engine=engine))
        states.append(method.state_dict())
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-3, atol=1e-3)


def spec(seed: int = 0) -> Run:
    return Run(
        "smnist", "hat", seed, benchmark_options={"data": "sample"}, network_options={"widths": (50, 50)},
        train_examples=100, regime=Regime(epochs=2, batch=64, optimizer="adam", lr=0.003, keep_state=True),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "precision"), [("eager", "tf32"), ("recorded", "tf32"), ("compiled", "tf32"), ("recorded", "bfloat16")]
)
def test_killed_and_resumed(engine, precision, tmp_path, monkeypatch):
    how = {"device": "cuda", "engine": engine, "precision": precision}
    whole = run(spec(), tmp_path / "whole", **how)
    kills = killed_at(monkeypatch, 0.05, seed=0, most=3)
    again = to_the_end(spec(), tmp_path / "again", save_every=1e-5, **how)
    assert kills
    assert_same(whole, again)


def test_killed_and_resumed_with_auto(tmp_path, monkeypatch):
    """Compiled, because the tasks have enough steps together, though none has alone."""
    monkeypatch.setitem(PAYS, "cuda", 2 * 2 * (1700 // 64))
    whole = run(spec(), tmp_path / "whole", device="cuda")
    kills = killed_at(monkeypatch, 0.05, seed=0, most=3)
    again = to_the_end(spec(), tmp_path / "again", save_every=1e-5, device="cuda")
    assert kills
    assert whole.versions["engine"] == again.versions["engine"] == "compiled"
    assert_same(whole, again)


def test_killed_and_resumed_side_by_side(tmp_path, monkeypatch):
    specs = [spec(seed) for seed in (0, 1)]
    how = {"device": "cuda", "engine": "recorded", "parallel": 2, "save_every": 1e-5}
    whole = run_all(specs, tmp_path / "whole", **how)
    kills = killed_at(monkeypatch, 0.02, seed=0, most=2)
    while True:
        try:
            again = run_all(specs, tmp_path / "again", **how)
            break
        except Killed:
            continue
    assert kills
    for one, two in zip(whole, again, strict=True):
        assert_same(one, two)


def test_compiled_runs_side_by_side(tmp_path):
    specs = [spec(seed) for seed in (0, 1, 2)]
    alone = run_all(specs, tmp_path / "alone", device="cuda", engine="compiled")
    together = run_all(specs, tmp_path / "together", device="cuda", engine="compiled", parallel=3)
    for one, two in zip(alone, together, strict=True):
        assert_same(one, two)
