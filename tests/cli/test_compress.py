"""`hatrack compress`, and runs of a single task of a benchmark: what is trained, and what is told of it."""

import csv
import io

import pytest

from hatrack import Record, Regime, Run, run
from hatrack.__main__ import main
from hatrack.experiments.build import build_tasks
from hatrack.reporting.compression import draw_sizes, points, size
from tests.helpers.own_files import regression_file
from tests.helpers.records import Reader

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")
SHORT = ["--data", "sample", "--epochs", "3", "--batch", "100", "--widths", "20", "--gate-lr", "0.3", "--device", "cpu"]


def compress(folder, *words):
    return main(["compress", "smnist", *SHORT, "--out", str(folder), *words])


def records(folder):
    found = [Record.load(path) for path in sorted(folder.glob("*.json"))]
    return {(record.spec.method, record.spec.seed): record for record in found}


def test_records_table_and_files(tmp_path, capsys):
    assert compress(tmp_path, "--task", "digits 5-9", "--seeds", "0-1") == 0
    said, found = capsys.readouterr().out, records(tmp_path)
    assert list(found) == [("hat", 0), ("hat", 1), ("sgd", 0), ("sgd", 1)]
    for (method, _), record in found.items():
        assert [task.name for task in record.tasks] == ["digits 5-9"]
        assert record.spec.only_task == "digits 5-9"
        assert record.spec.watch_tasks
        if method == "hat":
            assert (record.spec.method_options["c"], record.spec.method_options["embedding"]) == (1.5, "uniform")
    sizes = [size(found["hat", seed]) for seed in (0, 1)]
    assert f"{50 * sum(sizes):.1f}" in said
    assert [size(found["sgd", seed]) for seed in (0, 1)] == [1.0, 1.0]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "compress.csv").read_text())))
    assert len(rows) == 12
    curve = found["hat", 1].curves[0]
    mine = [row for row in rows if (row["method"], row["seed"]) == ("hat", "1")]
    assert [float(row["size"]) for row in mine] == curve.used
    assert [float(row["accuracy"]) for row in mine] == [epoch.valid_accuracy for epoch in curve.epochs]
    assert (tmp_path / "compress.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "compress.svg").read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg" ')
    page = Reader((tmp_path / "compress.html").read_text())
    assert page.texts("h1") == ["digits 5-9 of smnist, mlp"]
    assert page.row("sgd")[1:3] == ["2", "100.0 ± 0.0"]
    assert main(("report", str(tmp_path))) == 0


def test_what_has_its_record_is_not_run_again(tmp_path):
    assert compress(tmp_path, "--task", "0", "--method", "pmask", "--c", "2.5") == 0
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert compress(tmp_path, "--task", "0", "--method", "pmask", "--c", "2.5") == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == times
    assert records(tmp_path)["pmask", 0].spec.method_options["c"] == 2.5
    assert 0 < size(records(tmp_path)["pmask", 0]) < 1


@pytest.mark.slow
def test_without_validation_data_the_test_data_are_shown(tmp_path):
    assert compress(tmp_path, "--task", "0", "--valid", "0") == 0
    record = records(tmp_path)["hat", 0]
    assert [point.accuracy for point in points(record)] == [row[0] for row in record.curves[0].watched]
    assert draw_sizes({"0": ([record], [])}).axes[0].get_ylabel() == "accuracy on test data, %"
    assert "the last epoch is kept" in (tmp_path / "compress.html").read_text()


def test_a_closed_network_is_said_and_models_are_kept(tmp_path, capsys):
    assert compress(tmp_path, "--task", "0", "--gate-lr", "1000", "--keep-model") == 0
    assert size(records(tmp_path)["hat", 0]) == 0
    assert "seed 0: every gate was closed" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_mistakes(tmp_path, capsys):
    for words, text in (
        (("compress", "--task", "0"), "comes first"),
        (("compress", "smnist"), "--task"),
        (("compress", "nowhere", "--task", "0"), "nowhere"),
        (("compress", "smnist", "--task", "7", "--data", "sample"), "smnist has no task '7'; there are: digits 0-4"),
        (("compress", "smnist", "--task", "", "--data", "sample"), "--task must be the name"),
        (("compress", "smnist", "--task", "0", "--data", "sample", "--method", "ewc"), "ewc"),
        (("compress", "smnist", "--task", "0", "--data", "sample", "--first-tasks", "1"), "--task"),
    ):
        assert main([*words, *(("--out", str(tmp_path)) if "smnist" in words else ())]) == 2
        assert text in capsys.readouterr().err, words
    assert main(("compress", "smnist", "--help")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "uses fewer units per task [1.5]" in said
    assert "[uniform]" in said


def test_a_run_of_one_task_is_that_of_this_task_as_the_first(tmp_path):
    given = {
        "benchmark_options": {"data": "sample", "tasks": 5},
        "network_options": {"widths": (20,)},
        "regime": Regime(epochs=1),
    }
    whole, alone = Run("smnist", "hat", **given), Run("smnist", "hat", only_task="digits 6-7", **given)
    assert "only_task" not in whole.spec
    (task,) = build_tasks(alone, "cpu")
    expected = build_tasks(whole, "cpu")[3]
    assert (task.index, task.train.task, task.name) == (0, 0, expected.name)
    assert task.train.y.equal(expected.train.y)
    assert task.valid.rows.equal(expected.valid.rows)
    first, named = (
        run(Run("smnist", "hat", first_tasks=1, **given)),
        run(Run("smnist", "hat", only_task="digits 0-1", **given)),
    )
    numbered = run(Run("smnist", "hat", only_task="0", **given))
    assert first.accuracy == named.accuracy == numbered.accuracy
    assert first.curves == named.curves
    with pytest.raises(ValueError, match="names one task"):
        Run("smnist", "hat", only_task="0", first_tasks=2, **given)


def test_a_task_without_classes_has_its_own_score(tmp_path, capsys):
    """R² in place of the accuracy, as a number and not in percent."""
    tasks, out = regression_file(tmp_path), tmp_path / "out"
    words = ["compress", "own", "--task", "task 0", "--tasks", str(tasks), "--network", "mlp", "--widths", "20"]
    assert main([*words, "--epochs", "3", "--batch", "20", "--lr", "0.01", "--device", "cpu", "--out", str(out)]) == 0
    said, found = capsys.readouterr().out, records(out)
    tested = found["sgd", 0].summary["accuracy"]
    assert found["sgd", 0].score == "R²"
    assert "validation R²" in said
    assert "test R²" in said
    assert "ccuracy" not in said
    page, rows = (out / "compress.html").read_text(), list(csv.DictReader(io.StringIO((out / "compress.csv").read_text())))
    assert Reader(page).row("sgd")[-1] == f"{tested:.3f}"
    assert "R² on validation data" in page
    assert "ccuracy" not in page
    assert [float(row["R²"]) for row in rows if row["method"] == "hat"] == [p.accuracy for p in points(found["hat", 0])]
