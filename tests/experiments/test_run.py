"""Runs and their records."""

import errno
import json
import os
from dataclasses import replace

import pytest
import torch
from filelock import FileLock

from hatrack import Record, Regime, Run, Trainer, run
from hatrack.experiments.build import build
from hatrack.experiments.record_parts import TaskInfo
from hatrack.methods.evaluate import evaluate
from tests.helpers.runs import small


def test_the_same_spec_gives_the_same_record(tmp_path):
    files = []
    for place in ("one", "two"):
        torch.manual_seed(len(files))
        run(small("hat"), tmp_path / place)
        (path,) = (tmp_path / place).glob("*.json")
        files.append(path)
    assert files[0].name == files[1].name
    records = [json.loads(path.read_text()) for path in files]
    for record in records:
        assert record.pop("seconds")["total"] > 0
        assert record.pop("versions")["torch"] == torch.__version__
        assert len(record.pop("digest")) == 64  # of those two as well
    assert records[0] == records[1]


def test_what_a_record_holds(tmp_path):
    spec = small(seed=3)
    record = run(spec, tmp_path)
    assert record == Record.load(tmp_path / f"{spec.name}.json")
    assert record.spec.regime["lr"] == 0.05, "defaults are written out"
    assert record.spec.method_options == {}
    assert [task.name for task in record.tasks] == ["digits 0-4", "digits 5-9"]
    assert record.tasks[0] == TaskInfo("digits 0-4", classes=5, train=1700, valid=300, test=500)
    assert [len(curve.epochs) for curve in record.curves] == [1, 1]
    written = json.loads((tmp_path / f"{spec.name}.json").read_text())
    assert set(written["curves"][0]["epochs"][0]) == {"lr", "loss", "valid_loss", "valid_accuracy"}
    assert record.curves[0].epochs[0].lr == 0.05
    assert 0 < record.curves[0].epochs[0].valid_accuracy <= 1
    tasks, method = build(spec)
    assert record.before == [evaluate(method, task.test).accuracy for task in tasks]
    assert record.parameters == 784 * 20 + 20 + 2 * (20 * 5 + 5)


def test_training_and_validation_data_of_every_task_learned_so_far(tmp_path):
    spec = replace(small(seed=3), train_examples=100)
    record = run(spec, tmp_path)
    assert record == Record.load(tmp_path / f"{spec.name}.json")
    tasks, method = build(spec)
    trainer = Trainer(spec.regime, seed=spec.seed, progress=False)
    for t, task in enumerate(tasks):
        method.learn(task, trainer)
        scores = [evaluate(method, seen.valid) for seen in tasks[: t + 1]]
        unknown = [None] * (len(tasks) - t - 1)
        assert record.valid_accuracy[t] == [score.accuracy for score in scores] + unknown
        assert record.valid_loss[t] == [score.loss for score in scores] + unknown
        first = [seen.train.part(torch.arange(100)) for seen in tasks[: t + 1]]
        assert record.train_loss[t] == [evaluate(method, split).loss for split in first] + unknown


def test_tasks_without_validation_data_have_no_values_on_it():
    record = run(small(benchmark_options={"data": "sample", "valid": 0.0}))
    assert record.valid_accuracy == record.valid_loss == [[None, None], [None, None]]


def test_a_record_of_an_older_version_has_no_validation_matrices(tmp_path):
    spec = small()
    record = replace(run(spec), valid_accuracy=[], valid_loss=[])
    written = json.loads(record.save(tmp_path).read_text())
    assert not {"valid_accuracy", "valid_loss"} & set(written)
    assert Record.load(tmp_path / f"{spec.name}.json") == record


def test_a_run_with_a_record_is_not_run_again(tmp_path):
    first = run(small(), tmp_path)
    path = tmp_path / f"{small().name}.json"
    before = path.stat().st_mtime_ns
    assert run(small(), tmp_path).seconds == first.seconds
    assert path.stat().st_mtime_ns == before
    assert run(small(), tmp_path, again=True).seconds != first.seconds
    assert path.stat().st_mtime_ns > before


def test_a_broken_record_is_not_overwritten(tmp_path):
    path = tmp_path / f"{small().name}.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        run(small(), tmp_path)
    assert path.read_text() == "{"


def test_names_tell_specs_apart():
    runs = [
        small(),
        small(seed=1),
        small("frozen"),
        small(regime=Regime(epochs=2)),
        small(network_options={"widths": (21,)}),
        small(benchmark_options={"data": "sample", "tasks": 5}),
        small(heads="shared"),
        small(init="xavier"),
        small("hat"),
        small("hat", method_options={"c": 0.8}),
    ]
    assert len({spec.name for spec in runs}) == len(runs)
    assert small("hat").name == small("hat", method_options={"c": 0.75}).name, "a default written out is the same run"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "htt"}, "no method 'htt'; did you mean 'hat'"),
        ({"benchmark": "pmnits"}, "no benchmark 'pmnits'; did you mean 'pmnist'"),
        ({"network": "alexnt"}, "no network 'alexnt'; did you mean 'alexnet'"),
        ({"seed": -1}, "seed must be a whole number from 0 to 2147483647, not -1"),
        ({"method": "hat", "method_options": {"smx": 2}}, "hat has no option 'smx'; did you mean 'smax'"),
        ({"method": "hat", "method_options": {"c": -1.0}}, "c must be at least 0, not -1.0"),
        ({"network_options": {"widths": (0,)}}, "widths must be at least 1, not 0"),
        ({"benchmark_options": {"data": "tiny"}}, "data must be one of 'full', 'sample', not 'tiny'"),
        ({"heads": "two"}, "heads must be one of 'multi', 'shared', not 'two'"),
    ],
)
def test_a_bad_spec_is_refused_with_the_nearest_name(changes, said):
    with pytest.raises(ValueError, match=said):
        Run(**{"benchmark": "smnist", "method": "sgd", **changes})


def test_a_folder_that_can_t_be_written(tmp_path, monkeypatch):
    def acquire(lock, timeout):  # nothing is read-only for root, so the system's answer is played
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.raises(ValueError, match=r"can't write to the folder .*out: Permission denied"):
        run(small(), tmp_path / "out")


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match=r"can't write to the folder .*out"):
        run(small(), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
