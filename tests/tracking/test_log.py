"""The log of a run: its file after kills, what it changes (nothing), what it costs, and trackers that fail."""

import json
import os
import time

import pytest

from hatrack import HAT, Method, Network, Regime, Run, Trainer, run
from hatrack.experiments.run import folder_of
from hatrack.experiments.run_folder import RunFolder
from hatrack.methods.fit import EpochResult, FitResult
from hatrack.tracking.lines import RunLines, parse
from hatrack.tracking.log import EpochLog
from hatrack.tracking.reader import FILE
from hatrack.tracking.trackers import make_trackers
from hatrack.training.checkpoint import Checkpointer
from tests.helpers.killing import OFTEN, Killed, assert_same, killed_at, spec, to_the_end
from tests.helpers.learning import make
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


@pytest.fixture
def kept(monkeypatch):
    """The text of the lines of every run that ends, when its files are removed."""
    found, remove = [], RunFolder.remove_states

    def read_and_remove(self):
        if self.lines.exists():
            found.append(self.lines.read_text())
        remove(self)

    monkeypatch.setattr(RunFolder, "remove_states", read_and_remove)
    return found


def lines_in(text):
    return RunLines(line for part in text.splitlines() if (line := parse(part.encode())))


def compare_with_record(lines, record):
    """The lines hold exactly what the record holds: every epoch of every fit, once and in order."""
    fits = [own for _, own in lines.kept_fits()]
    assert [len(own) for own in fits] == [len(curve.epochs) for curve in record.curves]
    for own, curve in zip(fits, record.curves, strict=True):
        assert [line["epoch"] for line in own] == list(range(len(own)))
        for line, point in zip(own, curve.epochs, strict=True):
            assert (line["task"], line["halved"]) == (curve.task, curve.halved)
            assert all(line[name] == getattr(point, name) for name in ("lr", "loss", "valid_loss", "valid_accuracy"))
    assert [lines.scores[task]["accuracy"] for task in range(len(record.tasks))] == record.accuracy
    if record.curves:
        assert [lines.tasks[task]["usage"] for task in range(len(record.tasks))] == record.usage


@pytest.mark.parametrize("method", ["hat", "sgd", "packnet", "random"])
def test_the_lines_of_a_run_are_its_record(method, tmp_path, kept):
    record = run(spec(method), tmp_path)
    lines = lines_in(kept[-1])
    compare_with_record(lines, record)
    assert lines.about["name"] == record.name
    assert lines.about["spec"] == record.spec.written
    assert lines.ended["why"] == "finished"
    seconds = [line["seconds"] for line in lines.curve()]
    assert seconds == sorted(seconds)
    assert [path.name for path in tmp_path.iterdir()] == [f"{record.name}.json"], "nothing else is left"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hat", "packnet", "pathnet"])
@pytest.mark.parametrize("minutes", [OFTEN, 5.0], ids=["saved-often", "saved-per-task"])
def test_a_run_that_is_killed_many_times_has_the_same_lines(method, minutes, tmp_path, kept, monkeypatch):
    one = spec(method, epochs=3)
    whole = run(one, tmp_path / "whole")
    kills = killed_at(monkeypatch, 0.08, seed=3, most=6)
    record = to_the_end(one, tmp_path / "killed", save_every=minutes)
    assert kills, "the control: it was killed"
    assert_same(whole, record)
    text = kept[-1]
    compare_with_record(lines_in(text), record)
    assert sum(parse(part.encode())["kind"] == "run" for part in text.splitlines() if part) == 1 + len(kills)


@pytest.mark.parametrize("damage", ["lost", "torn", "old"])
def test_lines_that_are_lost_are_written_again_from_the_state(damage, tmp_path, kept, monkeypatch):
    """A power cut may take lines that were not flushed, and runs of earlier versions have none: no curve has a gap."""
    one = spec("hat", epochs=4)
    kills = killed_at(monkeypatch, 0.02, seed=1, most=1)
    while not kills:
        with pytest.raises(Killed):
            run(one, tmp_path, save_every=OFTEN)
    file = tmp_path / f"{one.name}.part" / FILE
    text = file.read_bytes()
    assert text.count(b'"epoch"') >= 2
    if damage == "old":
        file.unlink()
    else:
        file.write_bytes(text[: len(text) // 2] if damage == "torn" else text.split(b"\n")[0] + b"\n")
    record = run(one, tmp_path)
    compare_with_record(lines_in(kept[-1]), record)


@pytest.mark.parametrize("damage", ["first", "middle", "all"])
def test_lines_of_finished_tasks_that_are_lost(damage, tmp_path, kept, monkeypatch):
    """The run goes on in its last task; epochs, capacity and test accuracies of those before come from the state."""
    one = Run.from_spec({**spec("hat", epochs=2).spec, "benchmark_options": {"data": "sample", "tasks": 5}})
    begin = Checkpointer.begin_task

    def last(self, number, *how):
        begin(self, number, *how)
        if number == 3:
            self.wait()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "begin_task", last)
        with pytest.raises(Killed):
            run(one, tmp_path)
    file = tmp_path / f"{one.name}.part" / FILE
    lines = file.read_text().splitlines()
    assert sum('"kind":"scores"' in line for line in lines) == 3, "three tasks are finished"
    gone = {"first": range(1, 2), "middle": range(4, 7), "all": range(len(lines))}[damage]
    file.write_text("".join(f"{line}\n" for k, line in enumerate(lines) if k not in gone))
    record = run(one, tmp_path)
    compare_with_record(lines_in(kept[-1]), record)


def test_a_fit_that_begins_again_with_half_the_rate(tmp_path, kept):
    one = spec("sgd", epochs=2, optimizer="sgd", lr=1e5, on_divergence="halve", clip=0.0)
    with pytest.warns(UserWarning, match="begins again"):
        record = run(one, tmp_path)
    assert any(curve.halved for curve in record.curves), "the control: it did"
    compare_with_record(lines_in(kept[-1]), record)


def test_the_log_is_no_part_of_the_run(tmp_path):
    """Neither the name nor the record changes."""
    one, seen = spec("hat"), []
    plain, logged = run(one), run(one, tmp_path, log=seen.append)
    assert_same(plain, logged)
    assert plain.name == logged.name
    assert plain.to_dict().keys() == logged.to_dict().keys()
    assert [line["kind"] for line in seen][:2] == ["run", "epoch"]
    assert seen[-1]["why"] == "finished"
    json.dumps(seen)


def test_a_run_that_fails_says_why(tmp_path):
    one = spec("sgd", lr=1e30, optimizer="sgd")
    with pytest.raises(Exception, match="loss is"):
        run(one, tmp_path)
    lines = lines_in((tmp_path / f"{one.name}.part" / FILE).read_text())
    assert lines.ended["why"].startswith("Diverged: ")
    assert not lines.scores


def test_lines_that_cannot_be_written_end_no_run(tmp_path):
    one = spec("sgd")
    folder = folder_of(one, tmp_path)
    folder.lines.mkdir(parents=True)  # a folder in its place
    with pytest.warns(UserWarning, match=f"{FILE} can't be written .* goes on without it"):
        record = run(one, tmp_path)
    assert_same(record, run(one))


def test_a_pipe_in_place_of_the_lines_is_not_waited_for(tmp_path):
    one = spec("sgd")
    folder = folder_of(one, tmp_path)
    folder.path.mkdir(parents=True)
    os.mkfifo(folder.lines)
    with pytest.warns(UserWarning, match="can't be written"):
        run(one, tmp_path)


def test_a_link_in_place_of_the_lines_is_not_followed(tmp_path):
    one, other = spec("sgd"), tmp_path / "other"
    folder = folder_of(one, tmp_path / "runs")
    folder.path.mkdir(parents=True)
    other.write_text("mine")
    folder.lines.symlink_to(other)
    with pytest.warns(UserWarning, match="can't be written"):
        run(one, tmp_path / "runs")
    assert other.read_text() == "mine"


class Broken:
    """A tracker whose network is gone after the first line."""

    def __init__(self):
        self.lines = 0

    def begin(self, lines):
        pass

    def add(self, line, lines):
        self.lines += 1
        raise ConnectionError("no network")

    def end(self):
        raise AssertionError("it was given up")


def test_a_tracker_that_fails_ends_no_run():
    broken, seen = Broken(), []
    with pytest.warns(UserWarning, match="ConnectionError: no network.* goes on without it"):
        record = run(spec("sgd"), log=[broken, seen.append])
    assert broken.lines == 1
    assert sum(line["kind"] == "epoch" for line in seen) == sum(len(curve.epochs) for curve in record.curves)


# From Python


def test_a_trainer_logs_epochs_and_tasks():
    seen, tasks = [], toy_tasks(2)
    fit = Trainer(Regime(epochs=3), log=seen.append, progress=False)
    method = HAT(make("hat", tasks).net)
    for task in tasks:
        method.learn(task, fit)
    assert [(line["task"], line["epoch"]) for line in seen if line["kind"] == "epoch"] == [
        (task, epoch) for task in range(2) for epoch in range(3)
    ]
    assert [line["step"] for line in seen if line["kind"] == "epoch"] == [1, 2, 3, 4, 5, 6]
    assert [line["usage"] for line in seen if line["kind"] == "task"][-1] == method.usage()
    assert [line["loss"] for line in seen if line["kind"] == "epoch"] == [e.loss for r in fit.fits for e in r.epochs]


def test_what_is_no_log_is_refused():
    with pytest.raises(ValueError, match=r"no log 'tensorbord'.*tensorboard"):
        Trainer(log="tensorbord")
    for wrong in (7, object(), HAT):
        with pytest.raises(ValueError, match="log must be 'tensorboard'"):
            make_trackers(wrong)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_said_at_the_beginning(name, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ValueError, match=rf"--log {name} needs .*pip install 'hatrack\[{name}\]'"):
        run(spec("sgd"), tmp_path, log=name)
    assert not list(tmp_path.iterdir())


# Costs


def test_a_line_costs_one_write(tmp_path, monkeypatch):
    writes, write = [], os.write
    log = EpochLog(tmp_path / "lines")
    log.open(tasks=["a"])
    monkeypatch.setattr(os, "write", lambda *args: writes.append(args) or write(*args))
    result = FitResult(0)
    began = time.perf_counter()
    for _ in range(1000):
        result.epochs.append(EpochResult(0.1, 1.0, 1.0, 0.5))
        log.epoch(0, 0, 1000, result)
    seconds = time.perf_counter() - began
    log.end("finished")
    assert len(writes) == 1001
    assert seconds < 2, "a millisecond would be little, it is a twentieth"


def test_no_tensor_is_read_for_a_line(tmp_path, monkeypatch):
    """A line is made of numbers that are on the host already: no GPU is waited for."""
    log = EpochLog(tmp_path / "lines")
    log.open(tasks=["a"])
    result = FitResult(0, [EpochResult(0.1, 1.0, None, None)])
    assert all(type(value) in (float, type(None)) for value in result.epochs[0])
    method = Method(Network(make("sgd", toy_tasks(1)).net.trunk, tasks=toy_tasks(1)))
    fit = Trainer(Regime(epochs=2), log=lambda line: None, progress=False)
    found = fit(method, toy_tasks(1)[0])
    assert all(type(value) is float for epoch in found.epochs for value in epoch)


def test_a_run_is_named_as_before():
    """The spec has no key for the log."""
    assert "log" not in Run("smnist", "hat").spec


def test_a_function_that_changes_its_line_changes_nothing_else():
    def log(line):
        line.pop("epoch", None)
        line.setdefault("watched", []).append(7.0)

    tasks = toy_tasks()
    method = make("sgd", tasks)
    trainer = Trainer(Regime(epochs=2), log=log, progress=False, watch_tasks=tasks)
    method.learn(tasks[0], trainer)
    assert [len(row) for row in trainer.fits[0].watched] == [len(tasks)] * 2
