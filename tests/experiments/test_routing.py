"""The router of a run: its results against a loop, that they change no others, and where records and tables show them."""

import dataclasses
import json

import pytest
import torch

from hatrack import Record, report, run
from hatrack.__main__ import main
from hatrack.experiments.record_parts import Routed
from hatrack.experiments.routing import fit_and_route, routed
from hatrack.methods.evaluate import evaluate
from hatrack.reporting.export import export
from hatrack.reporting.tables import csv_text, ranking, settings
from tests.helpers import records
from tests.helpers.killing import OFTEN, SAME, assert_same, killed_at, spec, to_the_end
from tests.helpers.learning import learn, make
from tests.helpers.runs import small
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")


@pytest.mark.parametrize("heads", ["multi", "shared"])
def test_the_results_are_those_of_a_loop_over_images(heads):
    tasks = toy_tasks(3)
    method = make("hat", tasks, heads=heads)
    learn(method, tasks)
    found = fit_and_route(method, tasks, "distance")
    for task in tasks:
        right = there = 0
        for image, label in zip(task.test.raw(torch.arange(30)), task.test.y.tolist(), strict=True):
            own = method.route(image[None], kind="distance").item()
            there += own == task.index
            right += method.predict(image[None], own).item() == label and (heads == "shared" or own == task.index)
        assert found.accuracy[task.index] == pytest.approx(right / 30)
        assert found.task[task.index] == pytest.approx(there / 30)
    assert found.kind == "distance"
    assert routed(method, [tasks[1].test], "distance").task == [found.task[1]]


def test_with_one_task_it_is_the_accuracy_with_the_task_id():
    tasks = toy_tasks(1)
    method = make("hat", tasks)
    learn(method, tasks)
    assert fit_and_route(method, tasks, "both").accuracy == [evaluate(method, tasks[0].test).accuracy]


def test_a_run_with_a_router_has_the_same_other_results(tmp_path):
    plain, with_router = small("hat"), small("hat", router="both")
    one, two = run(plain), run(with_router, tmp_path)
    assert "router" not in plain.spec
    assert plain.name != with_router.name
    assert all(getattr(one, name) == getattr(two, name) for name in SAME if name != "spec")
    assert one.routed is None
    assert "routed" not in one.to_dict()
    assert "routed" not in one.summary
    assert two.routed.kind == "both"
    assert len(two.routed.accuracy) == len(two.routed.task) == 2
    assert two.summary["routed"] == pytest.approx(sum(two.routed.accuracy) / 2)
    loaded = Record.load(tmp_path / f"{with_router.name}.json")
    assert loaded.routed == two.routed
    assert loaded.spec.router == "both"


def test_a_method_that_guarantees_nothing_has_no_results():
    assert run(small("sgd", router="both")).routed is None


def test_a_run_that_was_killed_has_the_same_results(tmp_path, monkeypatch):
    one = dataclasses.replace(spec("hat"), router="distance")
    expected = run(one)
    kills = killed_at(monkeypatch, 0.1, 1, 3)
    record = to_the_end(one, tmp_path)
    assert kills
    assert_same(record, expected)
    assert record.routed == expected.routed is not None


def with_routed(seed, values):
    record = records.make("hat", seed)
    record.routed = Routed("both", [values] * len(record.tasks), [values] * len(record.tasks)) if values else None
    return record


def test_tables_have_the_column_if_a_record_has_the_results():
    without = settings([with_routed(0, None), with_routed(1, None)])
    for text in (csv_text(without), export(without, "markdown")):
        assert "routed" not in text
        assert "router" not in text
    within = settings([with_routed(0, 0.25), with_routed(1, 0.75)])
    assert ranking(within[0])[0].measures["routed"].mean == 0.5
    head, line = csv_text(within).splitlines()[:2]
    assert line.split(",")[head.split(",").index("routed")] == "0.5"
    assert "| 50.0 ± 35.4 |" in export(within, "markdown")
    mixed = settings([with_routed(0, 0.25), records.make("sgd", 0)])
    cells = [line.split(",")[head.split(",").index("routed")] for line in csv_text(mixed).splitlines()[1:]]
    assert sorted(cells) == ["", "0.25"]


def test_the_page_has_the_column_and_explains_it(tmp_path):
    text = report(records.save(tmp_path, [with_routed(0, 0.25), records.make("sgd", 0)])).read_text(encoding="utf-8")
    reader = records.Reader(text)
    assert "measure-routed" in reader.ids
    assert reader.row("hat")[8] == "25.0"
    assert reader.row("sgd")[8] == "—"
    plain = report(records.save(tmp_path / "plain", [records.make("hat", 0)])).read_text(encoding="utf-8")
    assert "measure-routed" not in plain


@pytest.mark.parametrize(
    "wrong",
    [{"kind": 3}, {"accuracy": [0.5]}, {"task": [0.5, 2.0]}, {"accuracy": None}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_record_with_wrong_results_is_refused(wrong, tmp_path):
    record = run(small("hat", router="both"), tmp_path)
    path = tmp_path / f"{record.name}.json"
    data = json.loads(path.read_text())
    data["routed"] |= wrong
    del data["digest"]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"routed.{next(iter(wrong))}"):
        Record.load(path)


def test_the_command_line(tmp_path, capsys):
    words = "run smnist hat --data sample --epochs 1 --widths 10 --router distance --out"
    assert main([*words.split(), str(tmp_path), "--save-every", str(OFTEN)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert Record.load(path).routed.kind == "distance"
    assert main([*words.replace("distance", "distanc").split(), str(tmp_path)]) == 2
    assert "distance" in capsys.readouterr().err
