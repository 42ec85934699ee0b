"""Extending a run: its record and model are those of a longer run from the beginning, also if it is killed in between."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from hatrack import METHODS, Record, Regime, Run, load, run
from hatrack.__main__ import main
from hatrack.benchmarks.mnist import pmnist, pmnist_blocks
from hatrack.experiments import extending
from hatrack.experiments.build import build_method, build_tasks, build_trunk
from hatrack.experiments.extending import check_growing, extended_run, other_conditions, prepare
from hatrack.experiments.run import folder_of, stopped_runs
from hatrack.experiments.sameness import differences
from hatrack.files import tensors as tensor_files
from tests.helpers.killing import OFTEN, Killed, killed_at, to_the_end
from tests.helpers.tiers import every_value, quick_and_slow

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free", "ignore:joint is first fitted")
HOW = {"device": "cpu", "engine": "auto", "precision": "tf32"}
WORDS = ("--device", "cpu")


def short(method, benchmark="smnist", **changes):
    options = {"data": "sample", **changes.pop("benchmark_options", {})}
    network = {"widths": (12,), "input_dropout": 0.0}
    given = {"network_options": network, "train_examples": 100, "regime": Regime(epochs=1, batch=200), **changes}
    if method == "packnet":
        given["method_options"] = {"retrain": 1}
    return Run(benchmark, method, benchmark_options=options, **given)


def split(method, first=2, **changes):
    return short(method, benchmark_options={"tasks": 5}, first_tasks=first, **changes)


def permuted(method, tasks=2, **changes):
    return short(method, "pmnist", benchmark_options={"tasks": tasks, "permutations": "prefix"}, **changes)


def extend(one, folder, tasks, *words, **how):
    run(one, folder, **{"keep_model": True, "keep_each": True, **how})
    return main(("extend", str(folder / f"{one.name}.json"), "--tasks", str(tasks), *WORDS, *words))


def assert_same_as_whole(whole, folder, tmp_path):
    """The record but for times and versions, and the model bit for bit."""
    expected = run(whole, tmp_path / "whole", keep_model=True)
    found = Record.load(folder / f"{whole.name}.json")
    assert differences(expected, found) == []
    assert (found.spec, found.weights_used) == (expected.spec, expected.weights_used)
    one, two = (tensor_files.load(place / f"{whole.name}.safetensors") for place in (folder, tmp_path / "whole"))
    assert one[0].keys() == two[0].keys()
    assert one[1] == two[1]
    assert all(torch.equal(one[0][name], two[0][name]) for name in one[0])
    return found


@pytest.mark.parametrize("method", quick_and_slow(METHODS, ("sgd", "hat", "ewc", "er")))
def test_split_mnist_from_two_tasks_to_five(method, tmp_path):
    one = split(method)
    assert extend(one, tmp_path, 5) == 0
    found = assert_same_as_whole(replace(one, first_tasks=0), tmp_path, tmp_path)
    assert found.extended == {"from": one.name, "tasks": 2, "missing": 0}


@pytest.mark.parametrize("method", quick_and_slow(["sgd", "hat", "ewc", "packnet", "er"], ["hat"]))
def test_permuted_mnist_from_two_tasks_to_three(method, tmp_path):
    assert extend(permuted(method), tmp_path, 3) == 0
    assert_same_as_whole(permuted(method, 3), tmp_path, tmp_path)


def own_file(folder, count):
    """Write image tasks of a user's own, and a TOML file that names the first ones."""
    entries = []
    for k in range(count):
        draw = np.random.default_rng(k)
        y = np.arange(60) % 2
        x = draw.integers(0, 80, (60, 6, 6)) + 150 * y[:, None, None] * (np.arange(6) % (k + 2) == 0)
        np.savez(folder / f"month-{k}.npz", **{
            f"{name}_{part}": value for part in ("train", "test") for name, value in (("x", x.astype(np.uint8)), ("y", y))
        })  # fmt: skip
        entries.append(f'[[task]]\nname = "month {k}"\ndata = "month-{k}.npz"\n')
    path = folder / "tasks.toml"
    path.write_text("".join(entries))
    return path


def owned(path, method="hat"):
    network = {"widths": (12,), "input_dropout": 0.0}
    regime = Regime(epochs=2, batch=20)
    return Run("own", method, benchmark_options={"tasks": str(path)}, network_options=network, regime=regime)


ADDED = '[[task]]\nname = "month 2"\ndata = "month-2.npz"\n'


@pytest.mark.parametrize("between", ["", "\n# added in March\n\n"])
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_task_that_is_added_at_the_end_of_a_file(between, end, tmp_path):
    """A task a month: the file grows, and the model goes on from where it was."""
    path = own_file(tmp_path, 3)
    path.write_text("\n".join(path.read_text().splitlines()[:6]) + end)
    old = owned(path)
    run(old, tmp_path, keep_model=True, keep_each=True)
    with path.open("a") as file:
        file.write("\n" * (not end) + between + ADDED)
    assert main(("extend", str(tmp_path / f"{old.name}.json"), "--tasks", "3", *WORDS)) == 0
    found = assert_same_as_whole(owned(path), tmp_path, tmp_path)
    assert [task.name for task in found.tasks] == ["month 0", "month 1", "month 2"]
    assert found.extended["from"] == old.name != found.name
    assert found.summary["forgetting"] == 0


@pytest.mark.parametrize("change", ["name", "data", "inserted", "comment"])
def test_a_file_that_did_more_than_grow_is_refused(change, tmp_path, capsys):
    path = own_file(tmp_path, 3)
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:6]))
    old = owned(path)
    run(old, tmp_path, keep_model=True)
    text = {
        "name": whole.replace("month 1", "month one"),
        "inserted": "".join(whole.splitlines(keepends=True)[k] for k in (0, 1, 2, 6, 7, 8, 3, 4, 5)),
        "comment": "# ours\n" + whole,
    }
    path.write_text(text.get(change, whole))
    if change == "data":
        arrays = dict(np.load(tmp_path / "month-0.npz"))
        np.savez(tmp_path / "month-0.npz", **{**arrays, "y_train": 1 - arrays["y_train"]})
    assert main(("extend", str(tmp_path / f"{old.name}.json"), "--tasks", "3", *WORDS)) == 2
    said = capsys.readouterr().err.strip()
    assert "can't be extended" in said
    assert "\n" not in said
    assert len(list(tmp_path.glob("own-*.json"))) == 1


def test_an_extension_is_extended_and_keeps_the_models_after_its_tasks(tmp_path):
    assert extend(split("hat"), tmp_path, 3, "--keep-each") == 0
    middle = tmp_path / f"{split('hat', 3).name}.json"
    kept = [load(middle.with_name(f"{middle.stem}.task-{k}.safetensors")) for k in (1, 2, 3)]
    assert [len(method.history) for method in kept] == [1, 2, 3]
    assert all(len(method.net.classes) == 3 for method in kept)
    assert main(("extend", str(middle), "--tasks", "5", *WORDS)) == 0
    found = assert_same_as_whole(split("hat", 0), tmp_path, tmp_path)
    assert found.extended["from"] == middle.stem


@pytest.mark.parametrize("changes", [{"heads": "shared"}, {"scenario": "class"}, {"router": "distance"}])
def test_other_heads_and_a_router(changes, tmp_path):
    one = split("hat" if "router" in changes else "ewc", **changes)
    assert extend(one, tmp_path, 4) == 0
    assert_same_as_whole(replace(one, first_tasks=4), tmp_path, tmp_path)


@pytest.mark.slow
def test_killed_in_the_middle_of_an_extension_and_continued(tmp_path, monkeypatch):
    one, whole = split("hat", regime=Regime(epochs=2, batch=100)), split("hat", 0, regime=Regime(epochs=2, batch=100))
    record = run(one, tmp_path, keep_model=True, keep_each=True)
    path, folder = tmp_path / f"{one.name}.json", folder_of(whole, tmp_path)
    assert extended_run(record, 5) == whole
    prepare(path, record, whole, folder, **HOW)
    kills = killed_at(monkeypatch, 0.2, 0, 4)
    with pytest.raises(Killed):
        run(whole, tmp_path, save_every=OFTEN, keep_model=True)
    ((continued,), others) = stopped_runs(tmp_path)
    assert (continued, others) == (whole, [])
    state = sorted(folder.path.glob("*"))
    prepare(path, record, whole, folder, **HOW)  # the same command again changes nothing of what was saved
    assert sorted(folder.path.glob("*")) == state
    to_the_end(whole, tmp_path, save_every=OFTEN, keep_model=True)
    assert len(kills) > 1
    monkeypatch.undo()
    assert assert_same_as_whole(whole, tmp_path, tmp_path).extended["from"] == one.name


def test_without_the_models_after_single_tasks_their_numbers_are_missing(tmp_path, capsys):
    assert extend(split("sgd", 3), tmp_path, 5, keep_each=False) == 0
    assert "4 numbers" in capsys.readouterr().out  # two new tasks after two old ones
    whole = split("sgd", 0)
    found, expected = Record.load(tmp_path / f"{whole.name}.json"), run(whole)
    assert found.extended["missing"] == 4
    for name in ("accuracy", "loss", "train_loss"):
        one, two = getattr(found, name), getattr(expected, name)
        assert [row[3:] for row in one[:2]] == [[None, None]] * 2
        assert [row[:3] for row in one[:2]] == [row[:3] for row in two[:2]]
        assert one[2:] == two[2:]
    assert found.summary["accuracy"] == expected.summary["accuracy"]
    assert main(("report", str(tmp_path))) == 0


def test_what_cannot_be_extended_is_refused_in_one_line(tmp_path, capsys):
    def refused(one, tasks, text, *words, **how):
        assert extend(one, tmp_path, tasks, *words, **how) == 2
        said = capsys.readouterr().err
        assert text in said
        assert said.count("\n") == 1, said

    refused(split("sgd"), 2, "more than 2")
    refused(split("sgd"), 6, "--tasks must be from 3 to 5, the tasks of smnist, not 6")
    refused(short("sgd"), 9, "at most 2")
    refused(split("hat", method_options={"reuse": "never"}), 3, "--room N")
    refused(split("hat", method_options={"reuse": "never", "room": 3}), 4, "--room 3")
    refused(short("sgd"), 5, "--first-tasks")
    refused(short("sgd", "pmnist", benchmark_options={"tasks": 2}), 3, "--permutations prefix")
    refused(short("sgd", "digits-and-clothes"), 7, "at most 6")
    refused(split("sgd", regime=Regime(epochs=1, keep_state=True)), 3, "optimizer")
    refused(split("sgd", watch_tasks=True), 3, "--watch-tasks")
    refused(split("pnn", method_options={"columns": "budget"}), 3, "number of tasks")
    refused(split("mas"), 3, "--keep-model", keep_model=False)
    refused(split("si"), 3, "task-1.safetensors is missing", "--keep-each", keep_each=False)
    assert not list(tmp_path.glob("*.part/task-*"))


def test_a_new_task_with_more_classes_is_said_of_compiled_steps(tmp_path, monkeypatch):
    """Heads have room for as many in all steps of the longer run, which then round otherwise."""
    record = run(split("sgd"), tmp_path)
    whole = extended_run(record, 3)
    for classes, said in ((2, []), (7, ["most classes of a task 2 -> 7"])):
        tasks = build_tasks(whole, "cpu")
        tasks[2] = replace(tasks[2], classes=classes)
        monkeypatch.setattr(extending, "build_tasks", lambda *given, tasks=tasks: tasks)
        assert other_conditions(record, whole, **HOW) == []
        record.versions["engine"] = "compiled"
        assert other_conditions(record, whole, **{**HOW, "engine": "compiled"}) == said
        record.versions["engine"] = "eager"


def test_another_way_to_compute_is_said(tmp_path, capsys):
    one = split("sgd")
    record = run(one, tmp_path, keep_model=True)
    whole = extended_run(record, 3)
    assert other_conditions(record, whole, **HOW) == []
    assert other_conditions(record, whole, **{**HOW, "engine": "compiled"}) == ["engine eager -> compiled"]
    record.versions["torch"] = "1.0"
    record.save(tmp_path)
    assert main(("extend", str(tmp_path / f"{one.name}.json"), "--tasks", "3", *WORDS)) == 0
    assert "torch 1.0 -> " in capsys.readouterr().out


def test_how_options_were_chosen_stays_with_them(tmp_path):
    one = split("sgd")
    run(one, tmp_path, keep_model=True, tuned={"protocol": "first-tasks"})
    assert main(("extend", str(tmp_path / f"{one.name}.json"), "--tasks", "3", *WORDS)) == 0
    assert Record.load(tmp_path / f"{split('sgd', 3).name}.json").tuned == {"protocol": "first-tasks"}


def test_replayed_tasks_and_a_wider_new_one_are_refused(tmp_path):
    one = split("er", 1)
    record = run(one, tmp_path, keep_model=True)
    whole = split("er", 2)
    tasks = build_tasks(whole, "cpu")
    wider = [tasks[0], replace(tasks[1], classes=3)]
    method = build_method(whole, wider, build_trunk(whole, wider), "cpu")
    with pytest.raises(ValueError, match="more classes"):
        check_growing(one, wider, len(record.tasks), method)


def test_a_model_of_another_run_is_refused(tmp_path, capsys):
    one, other = split("sgd"), split("sgd", 3)
    run(one, tmp_path, keep_model=True), run(other, tmp_path, keep_model=True)
    (tmp_path / f"{other.name}.safetensors").replace(tmp_path / f"{one.name}.safetensors")
    assert main(("extend", str(tmp_path / f"{one.name}.json"), "--tasks", "4", *WORDS)) == 2
    assert "model of another run" in capsys.readouterr().err


def test_prefix_permutations_depend_on_the_seed_and_the_number_of_the_task_only():
    for make in (pmnist, pmnist_blocks):
        few, many, other = (
            make(seed, data="sample", tasks=tasks, permutations="prefix", first="permuted")
            for seed, tasks in ((3, 2), (3, 7), (4, 2))
        )
        maps = [[task.train.transform.pixels for task in tasks] for tasks in (few, many, other)]
        assert all(torch.equal(a, b) for a, b in zip(maps[0], maps[1], strict=False))
        assert not torch.equal(maps[0][0], maps[2][0])
        assert not torch.equal(maps[1][0], maps[1][1])
        assert all(torch.equal(m.sort(-1).values, torch.arange(784)[None]) for m in maps[1])


def test_a_record_from_before_has_no_field_and_one_that_is_wrong_is_refused(tmp_path):
    one = split("sgd", 1)
    record = run(one, tmp_path)
    path = tmp_path / f"{one.name}.json"
    assert "extended" not in json.loads(path.read_text())
    record.extended = {"from": "other", "tasks": -1, "missing": 0}
    with pytest.raises(ValueError, match=r"extended\.tasks"):
        Record.load(record.save(tmp_path))


def without_digests(path):
    """Write a record as versions did that noted no digests of models."""
    record = Record.load(path)
    record.models = {}
    record.save(path.parent)


@pytest.mark.parametrize(("method", "noted"), every_value(["sgd", "hat"], [True, False]))
def test_a_model_of_the_same_tasks_but_of_another_run_is_refused(method, noted, tmp_path, capsys):
    one, others = split(method), (split(method, seed=1), split(method, regime=Regime(epochs=2, batch=200)))
    run(one, tmp_path, keep_model=True, keep_each=True)
    path = tmp_path / f"{one.name}.json"
    if not noted:
        without_digests(path)
    for other in others:
        run(other, tmp_path / "other", keep_model=True, keep_each=True)
        for ending in (".safetensors", ".task-1.safetensors"):
            place = path.with_name(one.name + ending)
            content = place.read_bytes()
            place.write_bytes((tmp_path / "other" / (other.name + ending)).read_bytes())
            assert main(("extend", str(path), "--tasks", "3", *WORDS)) == 2
            said = capsys.readouterr().err
            assert f"{place} is not the model" in said
            assert said.count("\n") == 1
            place.write_bytes(content)
    assert main(("extend", str(path), "--tasks", "3", *WORDS)) == 0


@pytest.mark.parametrize("method", ["ewc", "packnet", "er", "pmask", "pnn", "joint"])
def test_the_right_model_of_a_record_without_digests_is_taken(method, tmp_path):
    one = split(method)
    run(one, tmp_path, keep_model=True, keep_each=True)
    without_digests(tmp_path / f"{one.name}.json")
    assert main(("extend", str(tmp_path / f"{one.name}.json"), "--tasks", "3", *WORDS)) == 0
    assert list(Record.load(tmp_path / f"{split(method, 3).name}.json").models) == ["end"]


def test_a_record_has_the_digests_of_the_models_that_were_kept(tmp_path):
    one = split("sgd")
    assert run(one, tmp_path / "none").models == {}
    first, again = (run(one, tmp_path / name, keep_model=True, keep_each=True) for name in ("a", "b"))
    assert list(first.models) == ["end", "task-1", "task-2"]
    assert first.models == again.models == Record.load(tmp_path / "a" / f"{one.name}.json").models
    for name in (f"{one.name}.safetensors", f"{one.name}.task-1.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
