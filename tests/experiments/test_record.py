"""Records: what is saved is what is read, whole or not at all."""

import dataclasses
import json
import math
import os
import stat
from pathlib import Path

import pytest

from hatrack import Record, Regime, Run
from hatrack.experiments.record import ADDED, SCHEMA, clean, name_of, sign
from hatrack.experiments.record_parts import Curve, CurvePoint, Seconds, Spec, TaskInfo
from hatrack.files.atomic import write
from hatrack.options import parameters
from tests.helpers.records import in_order

ROOT = Path(__file__).parent.parent.parent
RECORDS = sorted([*(ROOT / "docs" / "results" / "records").glob("*.json"), *(ROOT / "tests" / "data").glob("run-*/*.json")])
OPTIONS = ("benchmark_options", "network_options", "method_options")
SPEC = {
    "benchmark": "pmnist",
    "method": "hat",
    "network": "mlp",
    "seed": 0,
    "regime": {"lr": 0.05},
    **{k: {} for k in OPTIONS},
}


def make(**changes):
    values = {
        "name": name_of(SPEC),
        "spec": Spec.from_dict(SPEC),
        "tasks": [TaskInfo(f"task {k}", 10, 85, 15, 20) for k in range(2)],
        "parameters": 1234,
        "before": [0.1, 0.2],
        "accuracy": [[0.9, 0.3], [0.6, 0.8]],
        "loss": [[0.1, 2.0], [0.9, 0.3]],
        "train_loss": [[0.05, 2.5], [0.85, 0.25]],
        "without_task_id": [0.4, 0.7],
        "curves": [Curve(0, 0, [CurvePoint(0.05, 1.0, None, 0.5)])],
        "seconds": Seconds(1.5, [0.5, 0.6]),
        "versions": {"torch": "2.13.0"},
    }
    return Record(**{**values, **changes})


CURVE = make().to_dict()["curves"][0]


def saved(folder, **changes):
    """A record on disk whose file then has other contents under some keys, and a right digest; None takes a key away."""
    path = make().save(folder)
    data = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps(sign({k: v for k, v in data.items() if v is not None})), encoding="utf-8")
    return path


def test_round_trip(tmp_path):
    record = make()
    path = record.save(tmp_path)
    assert path == tmp_path / f"{record.name}.json"
    assert record.name.startswith("pmnist-hat-seed0-")
    assert Record.load(path) == record
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["schema"] == SCHEMA
    assert data["accuracy"] == [[0.9, 0.3], [0.6, 0.8]]
    assert path.read_text(encoding="utf-8").endswith("\n")


def test_every_digit_survives(tmp_path):
    value = 0.1 + 0.2  # 0.30000000000000004
    path = make(before=[value, math.nextafter(1, 0)]).save(tmp_path)
    assert Record.load(path).before == [value, math.nextafter(1, 0)]


def test_folders_and_files_may_be_texts(tmp_path):
    path = make().save(str(tmp_path))
    assert Record.load(str(path)) == make()


def test_saving_again_replaces(tmp_path):
    make().save(tmp_path)
    path = make(parameters=5).save(tmp_path)
    assert Record.load(path).parameters == 5
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    path = make().save(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path, monkeypatch, call, error):
    path = make().save(tmp_path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        make(parameters=5).save(tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_record_that_json_cannot_hold_is_not_written(tmp_path):
    path = make().save(tmp_path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        make(versions={"torch": object()}).save(tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "other").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "other" / "file")
    for text in ("new", "newer"):
        write(link, text)
        assert link.is_symlink()
        assert (tmp_path / "other" / "file").read_text() == text


def test_what_is_no_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="pipe is not a file that could be replaced"):
        write(pipe, "text")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(OSError, match="No such file") as error:
        write(tmp_path / "no" / "file", "text")
    assert error.value.filename == str(tmp_path / "no" / "file")


def test_write_takes_bytes(tmp_path):
    write(tmp_path / "picture.png", b"\x89PNG\r\n\x00")
    assert (tmp_path / "picture.png").read_bytes() == b"\x89PNG\r\n\x00"
    write(tmp_path / "text", "Grüße\n")
    assert (tmp_path / "text").read_bytes() == b"Gr\xc3\xbc\xc3\x9fe\n"


# Its typed parts


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_the_file_of_a_record_that_is_loaded_and_saved_is_the_same(every, tmp_path):
    """Those of the first versions have no digest; it is added, and nothing else changes."""
    assert len(RECORDS) >= 10
    for path in RECORDS[::every]:
        before = path.read_text(encoding="utf-8")
        after = Record.load(path).save(tmp_path).read_text(encoding="utf-8")
        if '"digest"' not in before:
            after = json.dumps({k: v for k, v in json.loads(after).items() if k != "digest"}, indent=1) + "\n"
        assert after == before, path


def test_parts_have_types(tmp_path):
    record = Record.load(make(curves=[Curve(1, 0, [CurvePoint(0.05, 1.0, None, 0.5)], halved=2)]).save(tmp_path))
    assert (record.spec.benchmark, record.spec.method, record.spec.seed) == ("pmnist", "hat", 0)
    assert record.tasks[1] == TaskInfo(name="task 1", classes=10, train=85, valid=15, test=20)
    assert record.curves[0].epochs[-1].loss == 1.0
    assert record.curves[0].halved == 2
    assert in_order(record.halvings, "'task 1'", "2 x")
    assert record.seconds.learn == [0.5, 0.6]
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.spec.seed = 1


def test_a_missing_key_has_its_default_and_is_not_written(tmp_path):
    record = make(tasks=[TaskInfo("a", 2), TaskInfo("b", 2)], seconds=Seconds())
    path = record.save(tmp_path)
    loaded, data = Record.load(path), json.loads(path.read_text())
    assert (loaded.spec.heads, loaded.spec.init, loaded.spec.freeze) == ("multi", "default", "")
    assert loaded.spec.data_digest is None
    assert loaded.tasks[0].train is None
    assert loaded.seconds.total is None
    assert loaded.curves[0].halved == 0
    assert data["spec"] == SPEC
    assert data["tasks"][0] == {"name": "a", "classes": 2}
    assert data["seconds"] == {}
    assert list(data["curves"][0]) == ["task", "best", "epochs"]


def test_the_defaults_of_a_spec_are_those_of_a_run():
    for name, option in parameters(Run).items():
        assert getattr(Spec, name) == option.default


def test_a_key_of_a_spec_that_is_not_known_is_kept(tmp_path):
    spec = Spec.from_dict({**SPEC, "novelty": 3})
    record = make(spec=spec, name=name_of(spec.written))
    loaded = Record.load(record.save(tmp_path))
    assert loaded.spec.written["novelty"] == 3
    assert loaded == record != make()
    assert loaded.spec.replace(seed=4) == Spec.from_dict({**SPEC, "novelty": 3, "seed": 4})


def test_repr_is_one_line():
    # accuracy (0.6 + 0.8) / 2
    assert repr(make()) == "Record(benchmark='pmnist', method='hat', seed=0, tasks=2, accuracy=0.7000)"


# Numbers that are not finite


def test_numbers_that_are_not_finite_become_null(tmp_path):
    path = make(loss=[[0.1, math.nan], [math.inf, -math.inf]]).save(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert "NaN" not in text
    assert "Infinity" not in text
    assert Record.load(path).loss == [[0.1, None], [None, None]]
    assert math.isnan(Record.load(saved(tmp_path, train_loss=[[0.1, 0.2], [None, 0.3]])).summary["loss_forgetting"])


def test_clean():
    dirty = {"a": (1, 2.5, math.nan), "b": [{"c": math.inf}], "d": "nan", "e": None, "f": True}
    assert clean(dirty) == {"a": [1, 2.5, None], "b": [{"c": None}], "d": "nan", "e": None, "f": True}


# Files that are no records


def assert_refused(path, *words):
    with pytest.raises(ValueError, match=path.name) as error:
        Record.load(path)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"not json", b"\xff\xfe\x00", b'{"schema": 1,', b"[" * 100_000, b'{"schema": ' + b"1" * 5000 + b"}"],
    ids=["empty", "text", "binary", "cut", "deep", "long number"],
)
def test_not_json(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    assert_refused(path, "not JSON")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_that_was_cut(tmp_path, share):
    path = make().save(tmp_path)
    text = path.read_bytes()
    path.write_bytes(text[: int(share * len(text))])
    assert_refused(path, "not JSON")


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", '"text"', "{}", '{"schema": "1"}', '{"schema": null}', '{"schema": true}']
)
def test_json_that_is_no_record(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8")
    assert_refused(path, "schema")


def test_a_newer_schema(tmp_path):
    assert_refused(saved(tmp_path, schema=SCHEMA + 1), f"schema {SCHEMA + 1}", f"newer than {SCHEMA}")
    path = tmp_path / "newer.json"
    path.write_text(json.dumps({"schema": SCHEMA + 7, "other": 1}), encoding="utf-8")
    assert_refused(path, f"schema {SCHEMA + 7}")


@pytest.mark.parametrize("schema", [0, -1])
def test_a_schema_that_never_was(tmp_path, schema):
    assert_refused(saved(tmp_path, schema=schema), f"schema {schema}")


@pytest.mark.parametrize("key", [f.name for f in dataclasses.fields(Record) if f.name not in ("schema", "usage", *ADDED)])
def test_missing_keys_are_named(tmp_path, key):
    assert_refused(saved(tmp_path, **{key: None}), key, "missing")


def test_unknown_keys_are_passed_over(tmp_path):
    assert Record.load(saved(tmp_path, later="something")) == make()


@pytest.mark.parametrize("key", ["accuracy", "loss", "train_loss"])
@pytest.mark.parametrize(
    "rows", [[[0.1, 0.2]], [[0.1, 0.2], [0.3]], [[0.1, 0.2, 0.3]] * 2, "text", 3, [1, 2], {}],
)  # fmt: skip
def test_wrong_matrices(tmp_path, key, rows):
    assert_refused(saved(tmp_path, **{key: rows}), key, "2 x 2")


@pytest.mark.parametrize("key", ["before", "without_task_id"])
@pytest.mark.parametrize("values", [[0.1], [0.1, 0.2, 0.3], 0.5, {"0": 0.1, "1": 0.2}])
def test_wrong_lists(tmp_path, key, values):
    assert_refused(saved(tmp_path, **{key: values}), key, "2 numbers")


@pytest.mark.parametrize("value", ["x", True, -0.1, 1.5, 10**400, [0.5]])
def test_wrong_shares(tmp_path, value):
    said = "must be a number from 0 to 1 or null, not "
    assert_refused(saved(tmp_path, accuracy=[[0.1, 0.2], [0.1, value]]), f"accuracy[1][1] {said}")
    assert_refused(saved(tmp_path, before=[0.1, value]), f"before[1] {said}")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_wrong_numbers(tmp_path, value):
    path = saved(tmp_path, loss=[[0.1, 0.2], [0.3, 7.125]])
    path.write_text(path.read_text().replace("7.125", value))
    assert_refused(path, "not JSON" if value != "1e999" else "loss[1][1] must be a number")


# Records that were edited by hand


def test_a_number_that_was_changed_is_noticed(tmp_path):
    path = make().save(tmp_path)
    path.write_text(path.read_text().replace("0.3", "0.31"))
    assert_refused(path, "it was changed after it was written")


def test_a_record_from_before_there_were_digests(tmp_path):
    path = make().save(tmp_path)
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "digest"}))
    assert Record.load(path) == make()


def test_another_spec_than_the_name_says(tmp_path):
    other = {**SPEC, "seed": 1}
    assert_refused(saved(tmp_path, spec=other), f"its spec is that of {name_of(other)}", f"its name {name_of(SPEC)}")
    path = make().save(tmp_path)
    assert_refused(path.rename(tmp_path / "other.json"), f"the file of this run is called {path.name}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"curves": [{**CURVE, "task": 2}]}, "curves[0].task must be a whole number from 0 to 1, not 2"),
        ({"curves": [{**CURVE, "best": 1}]}, "curves[0].best must be a whole number from 0 to 0, not 1"),
        ({"curves": [{**CURVE, "epochs": [{"lr": 1.0}]}]}, "curves[0].epochs[0].loss is missing"),
        ({"usage": [{"layer": 0.5}]}, "usage must be a list of 2"),
        ({"usage": [{"layer": 0.5}, {"layer": -1}]}, "usage[1].layer must be a number from 0"),
        ({"seconds": {"total": -1}}, "seconds.total must be a number from 0"),
        ({"seconds": {"total": 1.0, "learn": [1.0]}}, "seconds.learn must be a list of 2"),
        ({"tasks": [{"name": "one", "classes": -1}, {"name": "two", "classes": 2}]}, "tasks[0].classes must be a whole"),
        ({"parameters": 1.5}, "parameters must be a whole number"),
        ({"versions": {"torch": {"a": 1}}}, "versions.torch must be a text, a number or a list of them"),
    ],
)
def test_a_record_that_contradicts_itself(tmp_path, changes, said):
    assert_refused(saved(tmp_path, **changes), said)


def test_a_pipe_or_a_folder_is_not_read(tmp_path):
    """The first would keep us waiting for ever."""
    os.mkfifo(tmp_path / "pipe.json")
    assert_refused(tmp_path / "pipe.json", "it is not a file")
    (tmp_path / "folder.json").mkdir()
    assert_refused(tmp_path / "folder.json", "it is not a file")
    assert_refused(tmp_path / "nothing.json", "there is no such file")


@pytest.mark.parametrize(
    ("key", "value"),
    [("tasks", []), ("tasks", "two"), ("tasks", [1, 2]), ("tasks", [{}, {}]), ("spec", []), ("curves", 3), ("name", 3),
     ("parameters", "many"), ("seconds", []), ("versions", "new")],
)  # fmt: skip
def test_other_parts_of_the_wrong_kind(tmp_path, key, value):
    assert_refused(saved(tmp_path, **{key: value}), key)


# Its name and its summary


def test_summary():
    # accuracy (0.6 + 0.8) / 2; learning (0.9 + 0.8) / 2; forgetting 0.9 - 0.6; backward 0.6 - 0.9; forward 0.3 - 0.2 if
    # the head is shared; without a task id (0.4 + 0.7) / 2; loss on training data 0.85 - 0.05
    expected = {"accuracy": 0.7, "learning": 0.85, "forgetting": 0.3, "forgetting_mirzadeh": 0.3, "backward": -0.3,
                "forward": 0.1, "without_task_id": 0.55, "loss_forgetting": 0.8}  # fmt: skip
    record = make()
    assert record.summary == pytest.approx({**expected, "forward": math.nan}, nan_ok=True)
    record.spec = record.spec.replace(heads="shared")
    assert record.summary == pytest.approx(expected)


def test_a_run_is_named_by_its_spec():
    spec = Run("pmnist", "hat", 3)
    assert spec.name.startswith("pmnist-hat-seed3-")
    same = Run(
        "pmnist", "hat", 3, method_options={"smax": 400.0}, benchmark_options={"tasks": 10}, regime=Regime(epochs=200)
    )
    assert same.name == spec.name
    others = [
        Run("pmnist", "hat", 4),
        Run("pmnist", "hat", 3, method_options={"smax": 401.0}),
        Run("pmnist", "hat", 3, regime=Regime(epochs=199)),
        Run("pmnist", "hat", 3, network_options={"widths": (2000, 2001)}),
        Run("pmnist", "hat", 3, benchmark_options={"data": "sample"}),
        Run("pmnist", "hat", 3, heads="shared"),
        Run("pmnist", "hat", 3, freeze="2"),
    ]
    assert len({r.name for r in [spec, *others]}) == len(others) + 1


def test_one_and_one_point_zero_are_the_same_run():
    one = Run("pmnist", "hat", regime=Regime(lr=1), method_options={"c": 1}, network_options={"dropout": 0})
    same = Run("pmnist", "hat", regime=Regime(lr=1.0), method_options={"c": 1.0}, network_options={"dropout": 0.0})
    assert one.name == same.name


def test_a_spec_survives_json():
    spec = Run("pmnist", "hat", network_options={"widths": (30, 20)}).spec
    assert json.loads(json.dumps(spec)) == spec
    assert spec["network_options"]["widths"] == [30, 20]
    assert spec["regime"]["epochs"] == 200
