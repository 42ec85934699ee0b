"""Runs on trunks from files, frozen ones, and ones with adapters: what records name, models that are kept, kills, errors."""

import json

import pytest
import torch

import hatrack as hr
from hatrack import Record, Regime, Run, run
from hatrack.__main__ import main
from hatrack.experiments.build import build
from hatrack.experiments.run import stopped_runs
from hatrack.files.atomic import file_digest
from tests.helpers.learning import logits

NETWORK = {"widths": (12, 10), "dropout": 0.1, "input_dropout": 0.0}


def small(method, **changes):
    given = {"regime": Regime(epochs=2, batch=100), "train_examples": 50, **changes}
    return Run("smnist", method, benchmark_options={"data": "sample"}, network_options=NETWORK, **given)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A model that a run on one data set kept, for runs on another."""
    folder = tmp_path_factory.mktemp("kept")
    record = run(small("sgd", seed=7, first_tasks=1), folder, keep_model=True)
    return (folder / f"{record.name}.safetensors").rename(folder / "trunk.safetensors")


def test_a_record_names_a_file_and_its_digest_but_no_folder(kept, tmp_path):
    spec = small("lora", weights=str(kept), trunk="frozen", method_options={"rank": 2})
    record = run(spec, tmp_path)
    assert (record.spec.weights, record.spec.weights_digest) == ("trunk.safetensors", file_digest(kept))
    assert str(kept.parent) not in (tmp_path / f"{record.name}.json").read_text()
    other = tmp_path / "trunk.safetensors"
    other.write_bytes(kept.read_bytes())
    assert small("lora", weights=str(other), trunk="frozen", method_options={"rank": 2}).name == spec.name
    torch.save(build(small("sgd", seed=8))[1].net.trunk.state_dict(), other)
    other.rename(tmp_path / "other.pt").rename(other.with_suffix(".pt"))
    assert small("lora", weights=str(other.with_suffix(".pt")), trunk="frozen").name != spec.name


def test_the_sequence_begins_with_the_trunk_of_the_file(kept):
    trunk = hr.load(kept).net.trunk.state_dict()
    for changes in ({"weights": str(kept)}, {"weights": str(kept), "trunk": "frozen"}):
        method = build(small("sgd", **changes))[1]
        assert all(torch.equal(value, trunk[name]) for name, value in method.net.trunk.state_dict().items())
        stopped = changes.get("trunk") == "frozen"
        assert all(p.requires_grad is not stopped for p in method.net.trunk.parameters())
    method = build(small("hat", weights=str(kept), adapters=3))[1]
    state = {name.replace(".layer.", "."): value for name, value in method.net.trunk.trunk.state_dict().items()}
    assert all(torch.equal(state[name], value) for name, value in trunk.items())
    assert len(state) == len(trunk) + 4


@pytest.mark.parametrize(
    ("method", "changes"),
    [("lora", {"trunk": "frozen"}), ("hat", {"adapters": 4}), ("pmask", {"adapters": 4}), ("sgd", {"trunk": "frozen"})],
)
def test_a_model_that_is_kept_is_loaded_without_a_trunk(kept, method, changes, tmp_path):
    spec = small(method, weights=str(kept), **changes)
    record = run(spec, tmp_path, keep_model=True)
    loaded, (tasks, fresh) = hr.load(tmp_path / f"{record.name}.safetensors"), build(spec)
    found = [hr.evaluate(loaded, task.test).accuracy for task in tasks]
    assert found == record.accuracy[-1]
    assert record.summary["forgetting"] == 0
    stopped = {name for name, p in loaded.net.trunk.named_parameters() if not p.requires_grad}
    assert stopped == {name for name, p in fresh.net.trunk.named_parameters() if not p.requires_grad}
    now, then = dict(loaded.net.trunk.named_parameters()), dict(fresh.net.trunk.named_parameters())
    assert all(torch.equal(now[name], then[name]) for name in stopped)


@pytest.mark.parametrize(("method", "changes"), [("lora", {"trunk": "frozen"}), ("hat", {"adapters": 4})])
def test_a_run_that_was_killed_goes_on(kept, method, changes, tmp_path, monkeypatch):
    spec = small(method, weights=str(kept), **changes)
    whole = run(spec, tmp_path / "whole")

    def kill(event):
        if event.task.index == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(spec, tmp_path / "killed", progress=kill, save_every=0)
    monkeypatch.chdir(tmp_path)
    found, others = stopped_runs(tmp_path / "killed")
    assert not found
    assert "trunk.safetensors: there is no such file" in others[0]
    monkeypatch.chdir(kept.parent)
    found, others = stopped_runs(tmp_path / "killed")
    assert [one.name for one in found] == [spec.name]
    record = run(found[0], tmp_path / "killed")
    assert (record.accuracy, record.loss, record.name) == (whole.accuracy, whole.loss, whole.name)


def test_adapters_stand_on_a_trunk_that_the_run_pretrains():
    regime = Regime(epochs=4, batch=50, optimizer="adam", lr=0.01)
    record = run(small("hat", adapters=4, pretrain="fashion-mnist", pretrain_epochs=2, regime=regime))
    assert record.pretraining.epochs == 2
    assert record.summary["forgetting"] == 0
    assert record.summary["accuracy"] > 0.35, "0.2 by chance"
    assert [name.split(".")[-1] for name in record.usage[-1]] == ["down", "down"]


def test_frozen_features_lose_nothing_and_train_no_trunk(kept):
    record = run(small("sgd", weights=str(kept), trunk="frozen"))
    assert record.summary["forgetting"] == 0
    assert Run.from_spec(json.loads(json.dumps(small("sgd").spec))) == small("sgd")


@pytest.mark.filterwarnings("ignore:.* keeps the trunk at its random weights")
def test_options_that_contradict_each_other_and_files_that_are_not_there(kept, tmp_path, capsys):
    for words, said in {
        ("--adapter-layers", "2"): "adapter_layers is '2', but there are no adapters",
        ("--adapters", "2", "--freeze", "2"): "freeze is '2', but the whole trunk is frozen already",
        ("--adapters", "2", "--adapter-layers", "9"): "layers='9' matches no layer",
        ("--weights", "nowhere.pt"): "nowhere.pt: there is no such file",
        ("--weights", str(kept), "--widths", "5"): "does not fit the trunk",
        ("--network", "timm:resnet18"): "the library timm can't be imported",
        ("--network", "timn:resnet18"): "no network 'timn:resnet18'",
        ("--trunk", "cold"): "--trunk must be one of 'learned', 'frozen', not 'cold'",
    }.items():
        assert main(["run", "smnist", "sgd", "--data", "sample", *words, "--out", str(tmp_path)]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert said in lines[-1]
    assert not list(tmp_path.glob("*.json"))


def test_a_frozen_trunk_that_nothing_trained_is_told(kept, tmp_path):
    line = ["run", "smnist", "hat", "--data", "sample", "--widths", "12,10", "--out", str(tmp_path), "--dry-run"]
    for words in (["--trunk", "frozen"], ["--adapters", "3"]):
        with pytest.warns(UserWarning, match=f"{' '.join(words)} keeps the trunk at its random weights"):
            assert main([*line, *words, "--seeds", "0-1"]) == 0
        for given in (["--weights", str(kept)], ["--pretrain", "mnist"]):
            assert main([*line, *words, *given]) == 0  # a warning would be an error


def test_the_command_line_from_the_trunk_to_the_records(tmp_path, capsys):
    common = ["--data", "sample", "--epochs", "1", "--widths", "12,10"]
    assert (
        main(["run", "smnist", "sgd", *common, "--first-tasks", "1", "--keep-model", "--out", str(tmp_path / "trunk")]) == 0
    )
    model = next((tmp_path / "trunk").glob("*.safetensors"))
    for words in (["lora", "--rank", "2", "--trunk", "frozen"], ["hat", "--adapters", "4"]):
        out = tmp_path / words[0]
        assert main(["run", "smnist", *words, *common, "--weights", str(model), "--out", str(out)]) == 0
        record = Record.load(next(out.glob("*.json")))
        assert record.spec.weights == model.name
        assert record.spec.trunk == "frozen"
    assert main(["list", "timm:resnet18"]) == 0
    assert "--image-size" in capsys.readouterr().out


def test_lora_on_a_fresh_trunk_learns_the_first_task_as_frozen_does():
    answers = {}
    for name in ("frozen", "lora"):
        tasks, method = build(small(name))
        fit = hr.Trainer(Regime(epochs=2, batch=100))
        for task in tasks:
            method.learn(task, fit)
            answers[name, task.index] = logits(method, task)
            trunk = {key: value.clone() for key, value in method.net.trunk.state_dict().items()}
            answers.setdefault(("trunk", name), trunk)
        assert all(torch.equal(value, answers["trunk", name][key]) for key, value in trunk.items()), "the first alone"
    assert torch.equal(answers["frozen", 0], answers["lora", 0])
    assert not torch.equal(answers["frozen", 1], answers["lora", 1])
