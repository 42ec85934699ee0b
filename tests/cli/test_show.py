"""`hatrack show`: what it prints of a record is what the record holds."""

import pytest

from hatrack import Record, Regime, run
from hatrack.__main__ import main
from hatrack.cli.showing import changed
from tests.helpers.records import make, with_spec
from tests.helpers.runs import small

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


def shown(path, capsys):
    assert main(("show", str(path))) == 0
    return capsys.readouterr().out


def test_settings_results_files_and_commands(tmp_path, capsys):
    one = small("hat", method_options={"c": 1.5}, regime=Regime(epochs=1), first_tasks=1)
    record = run(one, tmp_path, keep_model=True)
    path = tmp_path / f"{one.name}.json"
    said = shown(path, capsys)
    assert list(changed(record)) == [
        "data sample",
        "widths 20",
        "dropout 0.2",
        "input-dropout 0",
        "c 1.5",
        "epochs 1",
        "train-examples 200",
        "first-tasks 1",
    ]
    assert all(text in said for text in changed(record))
    assert f"{100 * record.accuracy[0][0]:.1f}" in said
    assert f"{100 * record.before[0]:.1f}" in said
    assert f"{record.parameters:,}" in said
    assert f"{record.costs.steps}" in said
    assert "capacity: the fullest layer, linear 1, 20 units, is " in said
    assert record.versions["torch"] in said
    for command in ("extend", "inspect", "export", "certify", "run --from", "report"):
        assert f"  hatrack {command} " in said
    path.with_suffix(".safetensors").unlink()
    said = shown(path, capsys)
    assert "--keep-model" in said
    assert "hatrack extend" not in said


def test_many_tasks_are_shown_by_their_diagonal_and_last_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    count = 12
    matrix = [[0.5 + 0.03 * t - 0.01 * i for i in range(count)] for t in range(count)]
    found = make(accuracy=matrix, names=[f"task {k}" for k in range(count)])
    said = shown(found.save(tmp_path), capsys)
    for k in range(count):
        (line,) = [line for line in said.splitlines() if line.startswith(f" {k} ")]
        assert [f"{100 * matrix[k][k]:.1f}", f"{100 * matrix[-1][k]:.1f}"] == line.split()[-2:]


def test_tasks_count_from_0_as_everywhere(tmp_path, capsys):
    lines = shown(make(names=["first", "second"]).save(tmp_path), capsys).splitlines()
    assert [line.split() for line in lines if line.split()[:1] == ["task"]] == [["task", "0", "1"]]
    assert [line.split()[:2] for line in lines if line.split()[1:2] in (["first"], ["second"])] == [
        ["0", "first"],
        ["1", "second"],
    ]


def test_an_unknown_method_and_missing_numbers(tmp_path, capsys):
    found = with_spec(make(), method="somewhere:Own")
    found.accuracy[0][1] = None
    said = shown(found.save(tmp_path), capsys)
    assert "somewhere:Own" in said
    assert "—" in said
    assert main(("show", str(tmp_path / "none.json"))) == 2
    assert Record.load(tmp_path / f"{found.name}.json").accuracy[0][1] is None


def test_an_extension_that_would_be_refused_is_not_suggested(tmp_path, capsys):
    plain = {"regime": Regime(epochs=1), "first_tasks": 1}
    for changes, suggested in (
        ({}, True),
        ({"method_options": {"reuse": "never", "room": 2}}, True),
        ({"method_options": {"reuse": "never"}}, False),
        ({"method_options": {"reuse": "never", "room": 1}}, False),
        ({"regime": Regime(epochs=1, keep_state=True)}, False),
        ({"watch_tasks": True}, False),
    ):
        one = small("hat", **{**plain, **changes})
        run(one, tmp_path, keep_model=True)
        path = tmp_path / f"{one.name}.json"
        assert ("hatrack extend" in shown(path, capsys)) == suggested, changes
        assert main(("extend", str(path), "--tasks", "2", "--device", "cpu")) == (0 if suggested else 2)
        capsys.readouterr()
