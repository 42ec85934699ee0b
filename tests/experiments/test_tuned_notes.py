"""How a record says that its options were chosen by a search: in parallel runs, and in runs that were stopped."""

import pytest

from hatrack.__main__ import main
from hatrack.experiments.parallel import run_all
from hatrack.experiments.record import Record
from hatrack.experiments.run import Run, run
from hatrack.regime import Regime
from hatrack.training.checkpoint import Stopped


def small(**changes):
    spec = {"regime": Regime(epochs=1, batch=100), "network_options": {"widths": (10,)}, **changes}
    return Run("smnist", "sgd", benchmark_options={"data": "sample"}, train_examples=100, **spec)


NOTES = [{"protocol": name, "trials": 2, "options": ["lr"], "regime": ["lr"], "regime_without": [0.05], "seeds": [0]}
         for name in ("whole-stream", "first-tasks")]  # fmt: skip


@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_run_has_its_own_note(parallel, tmp_path):
    runs = [small(seed=seed) for seed in range(3)]
    notes = {runs[0].name: NOTES[0], runs[1].name: NOTES[1]}
    records = run_all(runs, tmp_path, parallel=parallel, notes=notes)
    assert [record.tuned for record in records] == [*NOTES, {}]
    assert [Record.load(tmp_path / f"{spec.name}.json").tuned for spec in runs] == [*NOTES, {}]


@pytest.mark.parametrize("how", ["resume", "run"])
def test_a_stopped_run_keeps_its_note(how, tmp_path):
    spec = small()

    def stop(rows):
        raise Stopped("now")

    with pytest.raises(Stopped):
        run(spec, tmp_path, after_task=stop, tuned=NOTES[0])
    assert not list(tmp_path.glob("*.json"))
    if how == "resume":
        assert main(["resume", str(tmp_path)]) == 0
    else:
        run(spec, tmp_path, tuned=NOTES[1])
    assert Record.load(tmp_path / f"{spec.name}.json").tuned == NOTES[0]
    assert not list(tmp_path.glob("*.part"))


def test_runs_that_were_to_run_again_keep_their_notes(tmp_path, monkeypatch):
    spec = small()
    run(spec, tmp_path)
    monkeypatch.setattr("hatrack.experiments.parallel.run", lambda *_, **__: (_ for _ in ()).throw(Stopped("now")))
    with pytest.raises(Stopped):
        run_all([spec], tmp_path, again=True, notes={spec.name: NOTES[0]})
    monkeypatch.undo()
    assert main(["resume", str(tmp_path)]) == 0
    assert Record.load(tmp_path / f"{spec.name}.json").tuned == NOTES[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"value": NaN}', '{"seeds": {}}'])
def test_a_damaged_note(text, tmp_path):
    spec = small()
    part = tmp_path / f"{spec.name}.part"
    part.mkdir(parents=True)
    (part / "tuned").write_text(text)
    with pytest.raises(ValueError, match="tuned does not say how the options were chosen"):
        run(spec, tmp_path)


@pytest.mark.parametrize("note", [5, [1], {"value": float("nan")}, {"seeds": {}}])
def test_a_note_that_no_record_can_hold(note, tmp_path):
    with pytest.raises(ValueError, match=r"tuned|JSON"):
        run(small(), tmp_path, tuned=note)
    assert not list(tmp_path.iterdir())
