"""`hatrack run --keep-each` and `hatrack flatness`: the models after each task, also of runs that were stopped; results."""

import json

import pytest
import torch

from hatrack import Record, Regime, flatness, load, records, run
from hatrack.__main__ import main
from hatrack.experiments.build import build_tasks
from hatrack.experiments.run import folder_of, stopped_runs
from tests.helpers.killing import OFTEN, Killed, assert_same, killed_at, spec, to_the_end
from tests.helpers.runs import small
from tests.helpers.tiers import quick_and_slow

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


def models(folder):
    return sorted(folder.glob("*.task-*.safetensors"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        run(small("sgd", seed), folder, keep_each=True)
    run(small("sgd", regime=Regime(epochs=2, batch=50)), folder, keep_each=True)
    return folder


def of(folder, **changes):
    return folder_of(small("sgd", **changes), folder).record


@pytest.mark.parametrize("method", ["hat", "ewc"])
def test_models_change_nothing_in_the_record(method, tmp_path):
    one, kept = (run(small(method), tmp_path / name, keep_each=each) for name, each in (("a", False), ("b", True)))
    assert_same(one, kept)
    assert one.name == kept.name
    loaded = [load(path) for path in models(tmp_path / "b")]
    assert [len(model.history) for model in loaded] == list(range(1, len(one.tasks) + 1))
    assert not models(tmp_path / "a")


@pytest.mark.parametrize("method", quick_and_slow(["hat", "ewc"], ["hat"]))
def test_a_run_that_was_killed_has_the_same_models(method, tmp_path, monkeypatch):
    run(spec(method), tmp_path / "whole", keep_each=True)
    kills = killed_at(monkeypatch, 0.1, seed=3, most=4)
    with pytest.raises(Killed):
        run(spec(method), tmp_path / "again", save_every=OFTEN, keep_each=True)
    assert len(stopped_runs(tmp_path / "again")[0]) == 1
    to_the_end(spec(method), tmp_path / "again", save_every=OFTEN)  # as `hatrack resume`, which is not told what to keep
    assert kills
    pairs = list(zip(models(tmp_path / "whole"), models(tmp_path / "again"), strict=True))
    assert len(pairs) == 2
    for one, two in pairs:
        assert one.name == two.name
        states = load(one).state_dict(), load(two).state_dict()
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert {path.suffix for path in (tmp_path / "again").iterdir()} == {".json", ".safetensors"}


def test_a_run_that_is_killed_before_it_saved_a_state_keeps_its_models_when_it_goes_on(tmp_path):
    with folder_of(small(), tmp_path) as folder:
        folder.remember_kept(True, True)
    (found,), others = stopped_runs(tmp_path)
    assert (found, others) == (small(), [])
    run(found, tmp_path)
    assert folder.model.exists()
    assert len(models(tmp_path)) == 2
    assert not folder.path.exists()


def test_a_run_that_was_begun_without_them_is_not_continued_with_them(tmp_path, monkeypatch):
    def stop(rows):
        raise Killed

    with pytest.raises(Killed):
        run(small(), tmp_path, after_task=lambda rows: stop(rows) if rows[1:] else None)
    with pytest.raises(ValueError, match=r"task-1\.safetensors is missing.*--again"):
        run(small(), tmp_path, keep_each=True)
    run(small(), tmp_path, keep_each=True, again=True)
    assert len(models(tmp_path)) == 2
    models(tmp_path)[1].unlink()
    run(small(), tmp_path, keep_each=True)
    assert len(models(tmp_path)) == 2, "it was run again for them"


def test_results_and_tables(kept, capsys):
    path = of(kept)
    assert main(("flatness", str(path), "--images", "100", "--points", "4", "--eigenvalues", "2", "--device", "cpu")) == 0
    said = capsys.readouterr().out
    folder = path.with_name(f"{path.stem}.flatness")
    assert (folder / "flatness.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((folder / "flatness.json").read_text())
    tasks = build_tasks(small("sgd"), "cpu")
    loaded = [load(path.with_name(f"{path.stem}.task-{k + 1}.safetensors")) for k in range(len(tasks))]
    found = flatness(loaded, tasks, images=100, points=4, eigenvalues=2)
    assert {name: written[name] for name in found.to_dict()} == found.to_dict()
    assert written["record"] == Record.load(path).name
    assert all(f"{k + 1} {task.name}" in said for k, task in enumerate(tasks))
    assert f"{found.top[0]:.3g}" in said
    assert f"{found.bounds[0][1]:.3g}" in said
    assert len(list(records(kept))) == 3, "the results are not taken for records"


def test_seeds_are_one_run_and_regimes_are_several(kept, tmp_path, capsys):
    paths = [str(of(kept)), str(of(kept, regime=Regime(epochs=2, batch=50))), str(of(kept, seed=1))]
    words = ("flatness", *paths, "--images", "50", "--points", "2", "--device", "cpu", "--figure", str(tmp_path / "f.png"))
    assert main((*words, "--names", "large,small")) == 0
    said = capsys.readouterr().out
    assert "large, mean over 2 seeds" in said
    assert said.count("(3 pairs)") == 4, "of three runs one task and its distance, the next one and its own"
    assert (tmp_path / "f.png").exists()
    assert main((*words, "--names", "large")) == 2
    assert "2 names" in capsys.readouterr().err
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "sgd 1, mean over 2 seeds" in said
    assert "sgd 2" in said


def test_a_method_of_the_users_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "ourmethod.py").write_text('from hatrack import Method\nclass Plain(Method):\n    """Plain."""\n')
    monkeypatch.chdir(tmp_path)
    words = ("--data", "sample", "--widths", "8", "--epochs", "1", "--out", "runs", "--device", "cpu", "--keep-each")
    assert main(("run", "smnist", "ourmethod:Plain", *words)) == 0
    (record,) = (tmp_path / "runs").glob("*.json")
    asked = ("flatness", str(record), "--images", "20", "--points", "2", "--device", "cpu")
    assert main(asked) == 2
    assert "--method ourmethod:Plain" in capsys.readouterr().err
    assert main((*asked, "--method", "ourmethod:Plain")) == 0
    assert record.with_name(f"{record.stem}.flatness").is_dir()


def test_mistakes(kept, tmp_path, capsys):
    alone = tmp_path / of(kept).name
    alone.write_bytes(of(kept).read_bytes())
    run(small("independent"), tmp_path, keep_each=True)
    (refused,) = tmp_path.glob("*independent*.json")
    for words, text in (
        ((str(alone),), "--keep-each"),
        ((str(tmp_path / "none.json"),), "none.json"),
        ((), "RECORD"),
        ((str(refused), "--device", "cpu"), "Independent has no parameters that its tasks share"),
        ((str(of(kept)), "--points", "1"), "--points"),
        ((str(of(kept)), "--figure", str(alone / "f.png")), str(alone)),
    ):
        assert main(("flatness", *words)) == 2
        said = capsys.readouterr().err
        assert text in said
        assert "Traceback" not in said
