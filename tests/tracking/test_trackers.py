"""TensorBoard and W&B: their own files hold the curves of a run that was killed and goes on, without gaps or doubles."""

import signal
import struct

import pytest

from hatrack import Record, run
from tests.helpers.killing import OFTEN, WORDS, Killed, here, killed_at, spec, start, to_the_end, wait_for_epochs

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


@pytest.fixture
def tensorboard():
    """A function that reads the curves of a folder with TensorBoard's own reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(folder):
        found = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0})
        found.Reload()
        return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    return read


def check(curves, record: Record):
    """Every epoch of the record is a point, once and in order."""
    points = [point for curve in record.curves for point in curve.epochs]
    for tag, values in {
        "loss/training": [point.loss for point in points],
        "loss/validation": [point.valid_loss for point in points],
        "score/validation": [point.valid_accuracy for point in points],
        "lr": [point.lr for point in points],
    }.items():
        assert [step for step, _ in curves[tag]] == list(range(1, len(points) + 1)), tag
        assert [value for _, value in curves[tag]] == pytest.approx(values, rel=1e-6), tag
    assert len(curves["score/average"]) == len(record.tasks)
    assert curves["score/average"][-1][1] == pytest.approx(record.summary["accuracy"], rel=1e-6)
    assert curves["score/forgetting"][-1][1] == pytest.approx(record.summary["forgetting"], abs=1e-6)
    first = record.tasks[0].name
    assert [value for _, value in curves[f"test/{first}"]] == pytest.approx([row[0] for row in record.accuracy], rel=1e-6)


@pytest.mark.slow
def test_tensorboard_reads_a_run_that_was_killed(tmp_path, tensorboard):
    """A real kill of a real process; the same command goes on."""
    how = ("--save-every", "0.002", "--log", "tensorboard")
    process = start(tmp_path, *how)
    wait_for_epochs(tmp_path, 2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (record,) = here(tmp_path, *how)
    folder = tmp_path / "tensorboard" / record.name
    assert len(list(folder.glob("events.*"))) == 2, "a file for each process"
    curves = tensorboard(folder)
    check(curves, record)
    assert any(tag.startswith("capacity/linear 1") for tag in curves)
    assert int(WORDS[WORDS.index("--epochs") + 1]) * 2 == len(curves["lr"])


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [OFTEN, 5.0])
def test_tensorboard_reads_a_run_that_was_killed_many_times(minutes, tmp_path, tensorboard, monkeypatch):
    kills = killed_at(monkeypatch, 0.1, seed=5, most=5)
    record = to_the_end(spec("packnet", epochs=3), tmp_path, save_every=minutes, log="tensorboard")
    assert len(kills) > 1
    check(tensorboard(tmp_path / "tensorboard" / record.name), record)


def test_tensorboard_hides_a_fit_that_began_again(tmp_path, tensorboard):
    one = spec("sgd", epochs=2, optimizer="sgd", lr=1e5, on_divergence="halve", clip=0.0)
    with pytest.warns(UserWarning, match="begins again"):
        record = run(one, tmp_path, log="tensorboard")
    check(tensorboard(tmp_path / "tensorboard" / record.name), record)


def test_tensorboard_that_is_asked_for_later_has_the_whole_run(tmp_path, tensorboard, monkeypatch):
    """The lines have the epochs before."""
    one, kills = spec("hat", epochs=4), killed_at(monkeypatch, 0.05, seed=2, most=1)
    while not kills:
        with pytest.raises(Killed):
            run(one, tmp_path, save_every=OFTEN)
    record = run(one, tmp_path, log="tensorboard")
    check(tensorboard(tmp_path / "tensorboard" / record.name), record)


# W&B


def history(path):
    """The rows that a file of W&B holds: a log of LevelDB, with a protocol buffer in every record."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, rows = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: float(value) for key, value in items.items() if not key.startswith("_") or key == "_step"})
    return rows


@pytest.mark.slow
def test_wandb_keeps_the_curves_of_a_killed_run_offline(tmp_path, monkeypatch):
    """Every process writes a folder; the last has the whole run, and both are of one run of W&B."""
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_CONFIG_DIR": "c", "WANDB_CACHE_DIR": "d"}.items():
        monkeypatch.setenv(name, str(tmp_path / value) if len(value) == 1 else value)
    how = ("--save-every", "0.002", "--log", "wandb")
    process = start(tmp_path / "runs", *how)
    wait_for_epochs(tmp_path / "runs", 2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    ended = start(tmp_path / "runs", *how)
    _, err = ended.communicate(timeout=120)
    assert ended.returncode == 0, err
    (record,) = (Record.load(path) for path in (tmp_path / "runs").glob("*.json"))
    files = sorted((tmp_path / "runs").glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime)
    assert len(files) == 2
    assert files[0].name == files[1].name, "one id"
    rows = history(files[-1])
    curves = {
        key: [(int(row["epoch"]), row[key]) for row in rows if key in row]
        for key in dict.fromkeys(k for r in rows for k in r)
    }
    check(curves, record)
    steps = [row["_step"] for row in rows]
    assert steps == sorted(set(steps))
