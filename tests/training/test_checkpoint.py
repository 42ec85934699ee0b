"""A run that is stopped anywhere goes on to the same record."""

import json
import math
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hatrack import METHODS, Record, Regime, Run, run
from hatrack.__main__ import main
from hatrack.experiments.build import build_tasks
from hatrack.experiments.run import folder_of, stopped_runs
from hatrack.files import tensors
from hatrack.training.checkpoint import FORMAT, Checkpointer, Stopped, stopping
from hatrack.training.fit_loop import FitLoop
from speed.checkpoints import timed
from tests.helpers.killing import OFTEN, Killed, assert_same, here, killed_at, spec, start, to_the_end, wait_for
from tests.helpers.tiers import quick_and_slow

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


@pytest.mark.parametrize("method", quick_and_slow(METHODS))
def test_stopped_anywhere_every_method_goes_on_to_the_same_record(method, tmp_path, monkeypatch):
    whole = run(spec(method), tmp_path / "whole")
    kills = killed_at(monkeypatch, 0.1, seed=sum(map(ord, method)), most=4)
    again = to_the_end(spec(method), tmp_path / "again", save_every=OFTEN)
    assert kills or method == "random"
    assert_same(whole, again)
    assert [path.suffix for path in (tmp_path / "again").iterdir()] == [".json"], "nothing but the record is left"


def test_warm_up_and_early_stopping_go_on_where_they_were(tmp_path, monkeypatch):
    one = spec("hat", epochs=4, warmup=9, accumulate=2, smoothing=0.1, best_by="accuracy", stop_after=2)
    whole = run(one, tmp_path / "whole")
    kills = killed_at(monkeypatch, 0.15, seed=5, most=6)
    assert_same(whole, to_the_end(one, tmp_path / "again", save_every=OFTEN))
    assert len(kills) > 3
    plain = run(spec("hat", epochs=4), tmp_path / "plain")
    assert plain.accuracy != whole.accuracy


def test_scores_below_zero_are_kept_in_a_state(tmp_path, monkeypatch):
    """R² is below zero for an untrained network, and any number where a task is not learned."""
    x, seed = np.random.default_rng(0).normal(size=(300, 6)).astype(np.float32), np.arange(300) % 3
    for name, y in {"number": 5 * x[:, 0], "classes": seed}.items():
        np.savez(tmp_path / f"{name}.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    lines = [
        '[[task]]\nname = "r"\ndata = "number.npz"\ntarget = "regression"',
        '[[task]]\nname = "c"\ndata = "classes.npz"',
    ]
    (tmp_path / "tasks.toml").write_text("\n".join(lines))
    plain = {
        "benchmark_options": {"tasks": str(tmp_path / "tasks.toml")},
        "network_options": {"widths": (8,), "dropout": 0.0},
    }
    one = Run("own", "hat", regime=Regime(epochs=2, batch=16, lr=1e-4), watch_tasks=True, **plain)
    whole = run(one, tmp_path / "whole")
    assert whole.before[0] < 0
    kills = killed_at(monkeypatch, 0.15, seed=5, most=6)
    assert_same(whole, to_the_end(one, tmp_path / "again", save_every=OFTEN))
    assert len(kills) > 1


@pytest.mark.slow
def test_a_killed_process_goes_on(tmp_path, capsys):
    """SIGKILL while it writes; a second process is kept out while it lives, and takes over when it is dead."""
    out = tmp_path / "killed"
    process = start(out, "--save-every", "0.0001")
    wait_for(out, "fit")
    process.send_signal(signal.SIGSTOP)  # it lives, but does not come to its end before the others have tried
    second = start(out)
    assert main(["resume", str(out), "--device", "cpu"]) == 2
    assert "is being run by another process" in capsys.readouterr().err
    assert "is being run by another process" in second.communicate()[1]
    assert second.returncode == 2
    process.kill()
    process.communicate()
    assert list(out.glob("*.lock")), "of a dead process"
    assert [run.seed for run in stopped_runs(out)[0]] == [0]
    assert main(["resume", str(out), "--device", "cpu"]) == 0
    assert_same(*here(out), *here(tmp_path / "whole"))
    assert [path.suffix for path in out.iterdir()] == [".json"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_saves_and_says_how_to_go_on(number, tmp_path):
    process = start(tmp_path, "--save-every", "0.001")
    wait_for(tmp_path, "fit")
    process.send_signal(number)
    said = process.communicate()[1]
    assert re.fullmatch(
        r"hatrack: stopped in task 'digits 0-4', epoch \d+, and saved; the same command goes on from there\n", said
    )
    assert process.returncode == 130
    assert list(tmp_path.glob("*.part/fit-*"))


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run that was killed in its second task, after several saves."""
    one = spec("hat", epochs=3)
    with monkeypatch.context() as patch:
        tick, steps = Checkpointer.after_step, []

        def deadly(self, course):
            tick(self, course)
            steps.append(course.task.index)
            if steps.count(1) == 5:
                raise Killed

        patch.setattr(Checkpointer, "after_step", deadly)
        with pytest.raises(Killed):
            run(one, tmp_path, save_every=OFTEN)
    return one, next(tmp_path.glob("*.part"))


def test_a_damaged_state_gives_way_to_the_one_before(stopped, tmp_path):
    one, part = stopped
    for path in sorted(part.glob("fit-1-*")):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        assert_same(run(one), run(one, tmp_path))
        break


@pytest.mark.parametrize("which", quick_and_slow(["task-1", "fit-1-0-0", "fit-1-0-1"], ["fit-1-0-0"]))
def test_a_state_that_was_cut_off(stopped, tmp_path, which):
    one, part = stopped
    path = part / f"{which}.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_same(run(one, tmp_path), run(one))


def test_nothing_usable_is_said_and_nothing_is_lost(stopped, tmp_path):
    one, part = stopped
    for path in part.glob("task-*"):
        path.write_bytes(b"not a state")
    before = {path: path.read_bytes() for path in part.iterdir()}
    with pytest.raises(ValueError, match="holds no state that can be used"):
        run(one, tmp_path)
    lines = part / "epochs.jsonl"  # which only grow
    assert lines.read_bytes().startswith(before.pop(lines))
    assert before == {path: path.read_bytes() for path in part.iterdir() if path != lines}
    assert run(one, tmp_path, again=True).accuracy == run(one).accuracy, "--again starts anew"


def change(path: Path, **words: object) -> None:
    kept, old = tensors.load(path)
    tensors.save(path, kept, {**old, **words})


def test_a_state_of_another_run_or_a_newer_version(stopped, tmp_path):
    one, part = stopped
    change(part / "task-1.safetensors", format=FORMAT + 1)
    with pytest.raises(ValueError, match="newer than this version can read"):
        run(one, tmp_path)
    change(part / "task-1.safetensors", format=FORMAT, spec={**one.spec, "seed": 5})
    with pytest.raises(ValueError, match="belongs to another run"):
        run(one, tmp_path)


def test_a_full_disk_is_said_and_the_last_state_stays(stopped, tmp_path, monkeypatch):
    one, part = stopped
    before = sorted(path.name for path in part.iterdir())

    def full(path, content, **how):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "write", full)
        with pytest.raises(ValueError, match="No space left on device; what was saved before is still there"):
            run(one, tmp_path, save_every=OFTEN)
    assert sorted(path.name for path in part.iterdir()) == before
    assert_same(run(one, tmp_path), run(one))


# One run, many commands


def test_a_lock_that_was_left_on_the_disk_locks_nothing(tmp_path):
    (tmp_path / f"{spec('sgd').name}.lock").write_text("of 2019")
    run(spec("sgd"), tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_what_is_left_of_a_finished_run_is_removed(stopped, tmp_path):
    """Killed behind the last step, when it had its record."""
    one, part = stopped
    record = run(one)
    record.save(tmp_path)
    assert part.exists()
    assert stopped_runs(tmp_path) == ([], []), "there is nothing to go on with"
    with folder_of(one, tmp_path):
        run(one, tmp_path)
    assert part.exists(), "somebody works on it"
    assert run(one, tmp_path).seconds == record.seconds
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_record_that_appears_while_a_second_process_gets_ready_is_not_made_twice(tmp_path, monkeypatch):
    record = run(spec("sgd"))

    def slowly(one, device):
        record.save(tmp_path)
        return build_tasks(one, device)

    monkeypatch.setattr(sys.modules["hatrack.experiments.run"], "build_tasks", slowly)
    assert run(spec("sgd"), tmp_path).seconds == record.seconds
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_run_that_replaces_its_record_goes_on_as_well(tmp_path, monkeypatch):
    one = spec("hat", epochs=3)
    old = run(one, tmp_path)
    kills = killed_at(monkeypatch, 0.2, seed=3, most=3)
    for again in (True, True, False):  # with the same command, or without --again
        with pytest.raises(Killed):
            run(one, tmp_path, again=again, save_every=OFTEN)
        assert Record.load(tmp_path / f"{one.name}.json").seconds == old.seconds, "until the new one is there"
        assert stopped_runs(tmp_path)[0] == [one]
    new = run(one, tmp_path)
    assert len(kills) == 3
    assert new.seconds != old.seconds
    assert_same(new, old)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    assert run(one, tmp_path).seconds == new.seconds


def test_a_stop_is_noticed_between_tasks_and_runs_too(tmp_path, monkeypatch):
    monkeypatch.setattr(METHODS["random"], "learn", lambda *_: stopping.set())
    try:
        with pytest.raises(Stopped, match="stopped before task 'digits 5-9', and saved"):
            run(spec("random"), tmp_path)
        with pytest.raises(Stopped, match="stopped before the next run"):
            run(spec("sgd"), tmp_path)
    finally:
        stopping.clear()
    monkeypatch.undo()
    assert_same(run(spec("random"), tmp_path), run(spec("random")))
    assert list(tmp_path.iterdir()) == [tmp_path / f"{spec('random').name}.json"]


def test_a_stop_is_noticed_before_a_first_step_that_may_have_to_be_compiled(tmp_path, monkeypatch):
    """Before a fit, between its epochs, and by a run that goes on within an epoch: there its state is saved already, and the
    generators are not yet where they were."""
    one, out, steps = spec("hat"), tmp_path / "again", []
    whole = run(one, tmp_path / "whole")
    plain = {"epoch": FitLoop.epoch, "_counted_step": FitLoop._counted_step, "next_fit": Checkpointer.next_fit}

    def stopped_in(owner, name, when=1):
        """How many steps a run does that is asked to stop in this function, when it is called so often."""
        calls = []

        def asked(*given):
            calls.append(name)
            found = plain[name](*given)
            if len(calls) == when:
                stopping.set()
            return found

        before = len(steps)
        with monkeypatch.context() as patch:
            patch.setattr(FitLoop, "_counted_step", lambda *given: steps.append(plain["_counted_step"](*given)))
            if name == "_counted_step":
                patch.setattr(FitLoop, name, lambda *given: steps.append(asked(*given)))
            else:
                patch.setattr(owner, name, asked)
            try:
                with pytest.raises(Stopped):
                    run(one, out)
            finally:
                stopping.clear()
        return len(steps) - before

    assert stopped_in(Checkpointer, "next_fit") == 0
    assert stopped_in(FitLoop, "_counted_step", when=2) == 2
    assert stopped_in(Checkpointer, "next_fit") == 0
    in_epoch = stopped_in(FitLoop, "epoch")
    assert in_epoch + 2 == one_epoch(one)
    assert_same(whole, run(one, out))


def one_epoch(one):
    """The number of steps of an epoch of the first task."""
    return math.ceil(len(build_tasks(one, "cpu")[0].train) / one.regime.batch)


def test_resume_takes_all_or_one(stopped, tmp_path, capsys):
    one, part = stopped
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert main(["resume", str(tmp_path / "copy" / part.name), "--device", "cpu"]) == 0
    assert main(["resume", str(tmp_path), "--device", "cpu"]) == 0
    assert_same(*(Record.load(folder / f"{one.name}.json") for folder in (tmp_path, tmp_path / "copy")))
    capsys.readouterr()
    assert main(["resume", str(tmp_path), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(f"nothing in {tmp_path} ")


def test_a_run_of_another_version_is_told_of(stopped, tmp_path, capsys):
    """Its specification has, say, an option that this version does not know, or lacks one."""
    one, part = stopped
    for number, other in enumerate(({**one.spec, "novelty": 1}, {k: v for k, v in one.spec.items() if k != "regime"})):
        for path in part.glob("*.safetensors"):
            change(path, spec=other)
        assert main(["resume", str(tmp_path)]) == 2, number
        assert "was begun by another version or with other data" in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["-1", "nan"])
def test_save_every_is_checked(minutes, tmp_path, capsys):
    assert main(["run", "smnist", "sgd", "--data", "sample", "--out", str(tmp_path / "out"), "--save-every", minutes]) == 2
    assert "--save-every" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_time_in_saves_is_counted(tmp_path):
    """For `python -m speed.checkpoints`."""
    assert timed(spec("sgd"), None)[1] == 0
    assert 0 < timed(spec("sgd"), tmp_path)[1] < 1


def test_a_spec_makes_its_run_again():
    one = spec("hat", 3)
    assert Run.from_spec(json.loads(json.dumps(one.spec))) == one


def test_tensors_come_back_as_they_were(tmp_path):
    kept = {
        "matrix": torch.arange(6.0).view(2, 3).t(),
        "bits": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "number": torch.tensor(7, dtype=torch.int16),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    tensors.save(tmp_path / "x", kept, {"words": [1, None, 0.1, float("inf")]})
    found, words = tensors.load(tmp_path / "x")
    assert words == {"words": [1, None, 0.1, float("inf")]}
    assert found.keys() == kept.keys()
    for name, tensor in kept.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
