"""Pretraining: the trunk is trained first, by the seed alone; runs go on after a kill; sets must fit the benchmark."""

import json
from dataclasses import replace

import pytest
import torch

from hatrack import Method, Network, Record, Regime, Run, Trainer, evaluate, run
from hatrack.__main__ import main
from hatrack.benchmarks import BENCHMARKS
from hatrack.benchmarks.mixture import COLOUR, NORMS, colour_transform
from hatrack.benchmarks.whole_set import VALID, whole_set
from hatrack.datasets import sources
from hatrack.experiments import pretraining, run_folder
from hatrack.experiments.build import build, build_method, build_trunk
from hatrack.experiments.pretraining import pretrained_trunk, pretraining_task
from hatrack.experiments.progress import describe
from hatrack.experiments.run import stopped_runs
from hatrack.methods.divergence import Diverged
from hatrack.reporting.report import report
from hatrack.seeds import derive
from hatrack.tasks.arrays import normalisation
from hatrack.tasks.task import Task
from hatrack.training.checkpoint import Checkpointer, Stopped, stopping
from hatrack.training.fit_loop import FitLoop
from tests.helpers.killing import OFTEN, Killed, assert_same, killed_at, to_the_end
from tests.helpers.runs import small
from tests.helpers.tiers import quick_and_slow

HOW = {"device": "cpu", "engine": "eager", "progress": None}


def pretrained(method="sgd", seed=0, **changes):
    return small(method, seed, **{"pretrain": "fashion-mnist", "regime": Regime(epochs=2, batch=100), **changes})


def trained_by_hand(spec: Run, tasks: list[Task]) -> tuple[dict[str, torch.Tensor], float | None]:
    """The trunk and its validation accuracy: plain SGD on all classes of the set, in a network of its own."""
    source = sources.load(spec.pretrain, "sample")
    transform = normalisation((1, 28, 28), 0.1307, 0.3081)  # that of the benchmark
    task = Task.build(0, "set", 10, source.train, source.test, transform, valid=0.15, seed=spec.seed)
    trunk = build_trunk(spec, tasks)
    net = Network(trunk, tasks=[task], seed=spec.seed)
    regime = replace(spec.regime, epochs=spec.pretrain_epochs or spec.regime.epochs)
    result = Method(net).learn(task, Trainer(regime, seed=derive(spec.seed, "pretraining")))
    return trunk.state_dict(), result.valid_accuracy


@pytest.mark.parametrize(("seed", "epochs"), [(0, 0), (3, 1)])
def test_the_sequence_begins_with_a_trunk_trained_on_the_set(seed, epochs):
    spec = pretrained(seed=seed, pretrain_epochs=epochs)
    record = run(spec)
    tasks, plain = build(spec)
    state, accuracy = trained_by_hand(spec, tasks)
    trunk = build_trunk(spec, tasks)
    trunk.load_state_dict(state)
    method = build_method(spec, tasks, trunk, "cpu")
    assert record.before == [evaluate(method, task.test).accuracy for task in tasks]
    assert record.before != [evaluate(plain, task.test).accuracy for task in tasks]
    assert record.pretraining.valid_accuracy == accuracy > 0.5
    assert record.pretraining.epochs == (epochs or 2)
    assert [len(curve.epochs) for curve in record.curves] == [2, 2], "the regime of the tasks is not changed"


def test_frozen_parts_keep_the_pretrained_weights(monkeypatch):
    spec, seen = pretrained("ewc", freeze="2", network_options={"widths": (20, 10)}), []
    end = Method.learn

    def learn(self, task, fit):
        result = end(self, task, fit)
        seen.append((self, task.name))
        return result

    monkeypatch.setattr(Method, "learn", learn)
    run(spec)
    monkeypatch.undo()
    state, _ = trained_by_hand(spec, build(spec)[0])
    assert [name for _, name in seen] == ["pretraining on fashion-mnist", "digits 0-4", "digits 5-9"]
    assert torch.equal(seen[-1][0].net.trunk[2].weight, state["2.weight"])
    assert not torch.equal(seen[-1][0].net.trunk[5].weight, state["5.weight"]), "a control: the next layer was trained on"
    assert not seen[-1][0].net.trunk[2].weight.requires_grad
    assert seen[0][0].net.trunk[2].weight.requires_grad, "it is frozen after the pretraining only"


def test_progress_of_the_pretraining_counts_as_nothing_done_yet():
    spec, shown = pretrained(pretrain_epochs=1), []
    run(spec, progress=lambda event: shown.append((event.task.index, event.tasks, *describe(spec, event))))
    assert [place for *place, _ in shown] == [[-1, 2, 0], [0, 2, 0.25], [0, 2, 0.5], [1, 2, 0.75], [1, 2, 1]]
    assert "pretraining on fashion-mnist (0 of 2)" in shown[0][3]


def test_one_seed_gives_one_record():
    records = []
    for _ in range(2):
        torch.manual_seed(len(records))
        records.append(run(pretrained()))
    assert_same(*records)
    assert records[0].pretraining == records[1].pretraining
    assert run(pretrained(seed=1)).pretraining != records[0].pretraining


@pytest.fixture
def trainings(monkeypatch):
    """The epochs at whose beginning the pretraining was, one list per time that it was started."""
    started, begin, epoch = [], pretraining.pretrain, FitLoop.epoch

    def pretrain(*args, **how):
        started.append([])
        return begin(*args, **how)

    def one_epoch(self):
        if self.task.name.startswith("pretraining"):
            started[-1].append(len(self.result.epochs))
        epoch(self)

    monkeypatch.setattr(pretraining, "pretrain", pretrain)
    monkeypatch.setattr(FitLoop, "epoch", one_epoch)
    return started


@pytest.mark.parametrize("method", quick_and_slow(["sgd", "joint", "hat", "pnn", "independent"], ["hat"]))
def test_a_run_that_is_killed_later_does_not_repeat_it(method, tmp_path, monkeypatch, trainings):
    whole = run(pretrained(method))
    kills = killed_at(monkeypatch, 0.1, seed=sum(map(ord, method)), most=4)
    again = to_the_end(pretrained(method), tmp_path, save_every=OFTEN)
    assert kills
    assert trainings == [[0, 1], [0, 1]], "once in each run"
    assert_same(whole, again)
    assert whole.pretraining == again.pretraining
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_run_that_is_killed_in_it_starts_it_anew(tmp_path, monkeypatch, trainings):
    whole = run(pretrained())
    with monkeypatch.context() as patch:
        patch.setattr(
            pretraining, "_stop_if_asked", lambda loop: (_ for _ in ()).throw(Killed) if len(trainings[-1]) == 2 else None
        )
        with pytest.raises(Killed):
            run(pretrained(), tmp_path)
    assert trainings[-1] == [0, 1]
    assert_same(whole, run(pretrained(), tmp_path))
    assert trainings[-1] == [0, 1]


def test_killed_before_the_first_task_and_resumed(tmp_path, monkeypatch, trainings):
    spec = pretrained()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "begin_task", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run(spec, tmp_path)
    assert stopped_runs(tmp_path)[0] == [spec]
    assert_same(run(spec, tmp_path), run(spec))
    assert len(trainings) == 2


def test_a_damaged_trunk_is_trained_again(tmp_path, monkeypatch, trainings):
    spec = pretrained()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "begin_task", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run(spec, tmp_path)
    (path,) = tmp_path.glob(f"*.part/{run_folder.TRUNK}")
    path.write_bytes(path.read_bytes()[:-9])
    assert_same(run(spec, tmp_path), run(spec))
    assert len(trainings) == 3


def test_a_request_to_stop_is_heard_within_an_epoch(trainings):
    spec, tasks = pretrained(), BENCHMARKS["smnist"](0, data="sample")
    first = pretraining_task(spec, tasks)
    stopping.set()
    try:
        with pytest.raises(Stopped, match="pretraining on fashion-mnist"):
            pretrained_trunk(spec, tasks, first, None, **HOW)
    finally:
        stopping.clear()
    assert trainings == [[0]]


def test_a_divergence_names_the_pretraining(tmp_path):
    with pytest.raises(Diverged, match="sgd seed 0, task 'pretraining on fashion-mnist'") as caught:
        run(pretrained(regime=Regime(epochs=2, batch=100, lr=1e30)), tmp_path)
    assert ".part" not in str(caught.value), "there is no state to go on from"


# Records


def test_the_file_of_the_record(tmp_path):
    spec = pretrained(pretrain_epochs=1)
    record = run(spec, tmp_path)
    path = tmp_path / f"{spec.name}.json"
    assert Record.load(path) == record
    data = json.loads(path.read_text())
    assert data["pretraining"] == {"epochs": 1, "valid_accuracy": record.pretraining.valid_accuracy}
    assert (record.spec.pretrain, record.spec.pretrain_epochs) == ("fashion-mnist", 1)
    assert Run.from_spec(data["spec"]) == spec
    said = f"accuracy on validation data: seed 0 {record.pretraining.valid_accuracy:.1%}"
    assert said in report(tmp_path).read_text(encoding="utf-8")
    data["pretraining"] = {"epochs": 1, "valid_accuracy": 2}
    del data["digest"]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"pretraining\.valid_accuracy"):
        Record.load(path)


def test_runs_without_it_are_what_they_were(tmp_path):
    spec = small()
    assert not {"pretrain", "pretrain_epochs"} & set(spec.spec)
    record = run(spec, tmp_path)
    assert record.pretraining is None
    assert "pretraining" not in json.loads((tmp_path / f"{spec.name}.json").read_text())


def test_the_command(tmp_path, capsys):
    words = ["run", "smnist", "sgd", "--data", "sample", "--widths", "9", "--epochs", "1", "--device", "cpu"]
    assert main([*words, "--pretrain", "mnist", "--pretrain-epochs", "1", "--freeze", "2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert Record.load(path).pretraining.epochs == 1
    capsys.readouterr()
    for wrong, said in [
        (["--pretrain", "mnits"], "did you mean 'mnist'"),
        (["--pretrain-epochs", "2"], "pretrain"),
        (["--pretrain", "cifar10"], "cifar10 (images 3x32x32)"),
        (["--pretrain", "notmnist"], "no sample of notmnist"),
    ]:
        assert main([*words, *wrong, "--out", str(tmp_path / "none")]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert not (tmp_path / "none").exists()


# The set as a task


def toy(shape, mean=0.5, std=0.25):
    x, y = torch.zeros(4, *shape, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    return Task.build(0, "toy", 2, (x, y), (x, y), normalisation(shape, mean, std), valid=0.0, seed=0)


def test_the_set_is_normalised_as_the_benchmark():
    task = whole_set("mnist", [toy((1, 28, 28))] * 2, data="sample", seed=3)
    source = sources.load("mnist", "sample")
    raw = source.test[0][:5] / 255
    torch.testing.assert_close(task.test.inputs(torch.arange(5)), (raw - 0.5) / 0.25)
    assert len(task.valid) == int(VALID * len(source.train[0]))
    assert task.classes == 10


def test_of_mixed_tasks_it_has_a_normalisation_of_its_own():
    task = whole_set("mnist", [toy((1, 28, 28)), toy((1, 28, 28), mean=0.1)], data="sample")
    source = sources.load("mnist", "sample")
    every = source.train[0].double() / 255
    found = task.test.inputs(torch.arange(5))
    torch.testing.assert_close(found, ((source.test[0][:5] / 255 - every.mean()) / every.std(unbiased=False)).float())


def test_gray_images_become_colour_as_in_the_mixture():
    tasks = [toy(COLOUR, *NORMS["mnist"])]
    task = whole_set("mnist", tasks, data="sample")
    expected = colour_transform((1, 28, 28), NORMS["mnist"])(sources.load("mnist", "sample").test[0][:5])
    torch.testing.assert_close(task.test.inputs(torch.arange(5)), expected)
    assert task.shape == COLOUR


@pytest.mark.parametrize(
    ("shape", "names"), [((1, 28, 28), "mnist, fashion-mnist, notmnist, emnist-letters"), ((1, 9, 9), "no set")]
)
def test_a_set_of_another_shape_is_refused_in_one_line(shape, names):
    with pytest.raises(ValueError, match=r"cifar10 .*3x32x32") as caught:
        whole_set("cifar10", [toy(shape)])
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)
