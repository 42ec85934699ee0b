"""Links and foreign files: a run changes and removes only what it made, in its own folder, and keeps its states private."""

import os
import stat
from pathlib import Path

import pytest

from hatrack import Record, run
from hatrack.__main__ import main
from hatrack.datasets import cache
from hatrack.experiments.run import folder_of, stopped_runs
from hatrack.files import atomic
from hatrack.files.atomic import new_file, remove_leftovers, writable, write
from tests.helpers import archives
from tests.helpers.fuzzing import contents
from tests.helpers.killing import OFTEN, Killed, assert_same, killed_at, spec

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")
FOREIGN = (".bashrc", ".env", "weights.safetensors", "task-x.safetensors", "fit-0-0.safetensors", "notes.trunk", "again.txt")


@pytest.fixture
def elsewhere(tmp_path):
    """A folder of the user's with files of all sorts."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in (*FOREIGN, "task-0.safetensors", "again"):
        (folder / name).write_text(f"mine: {name}")
    return folder


def part_of(one, out: Path) -> Path:
    return folder_of(one, out).path


@pytest.mark.parametrize("again", [False, True])
def test_a_link_in_place_of_the_folder_of_states_is_refused(elsewhere, tmp_path, again):
    one, out = spec("sgd", epochs=1), tmp_path / "runs"
    out.mkdir()
    part_of(one, out).symlink_to(elsewhere)
    before = contents(elsewhere)
    with pytest.raises(ValueError, match=f"{one.name}.part must be a folder that hatrack made, not a symbolic link"):
        run(one, out, again=again)
    assert contents(elsewhere) == before
    assert [path.name for path in out.iterdir()] == [f"{one.name}.part"], "not even a lock is left"
    assert stopped_runs(out)[0] == []


def test_the_command_refuses_it_with_exit_code_2(elsewhere, tmp_path, capsys):
    out = tmp_path / "runs"
    words = [
        "run",
        "smnist",
        "sgd",
        "--data",
        "sample",
        "--widths",
        "5",
        "--epochs",
        "1",
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    assert main(words) == 0
    (record,) = out.glob("*.json")
    record.unlink()
    record.with_suffix(".part").symlink_to(elsewhere)
    before = contents(elsewhere)
    assert main(words) == 2
    assert record.with_suffix(".part").name in capsys.readouterr().err
    assert contents(elsewhere) == before


@pytest.mark.parametrize("again", [False, True])
def test_foreign_files_in_the_folder_of_states_stay(tmp_path, again):
    one = spec("hat", epochs=1)
    part = part_of(one, tmp_path)
    part.mkdir()
    for name in FOREIGN:
        (part / name).write_text("mine")
    (part / "sub").mkdir()
    run(one, tmp_path, save_every=OFTEN, again=again)
    assert sorted(path.name for path in part.iterdir()) == sorted([*FOREIGN, "sub"]), "all of them, and nothing of the run's"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".part"]
    assert stopped_runs(tmp_path) == ([], [])
    assert_same(run(one, tmp_path), run(one))


def test_a_link_in_place_of_a_state_is_replaced_and_not_followed(tmp_path):
    one, target = spec("sgd", epochs=1), tmp_path / "target"
    part = part_of(one, tmp_path / "runs")
    part.mkdir(parents=True)
    target.write_text("mine")
    for name in ("task-0", "task-1", "fit-0-0-0", "fit-0-0-1"):
        (part / f"{name}.safetensors").symlink_to(target)
    run(one, tmp_path / "runs", save_every=OFTEN)
    assert target.read_text() == "mine"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_place_of_a_record_is_replaced_and_not_followed(there, tmp_path):
    one, target = spec("sgd", epochs=1), tmp_path / "target"
    record = tmp_path / "runs" / f"{one.name}.json"
    record.parent.mkdir()
    if there:
        target.write_text("mine")
    record.symlink_to(target)
    run(one, record.parent, again=there)
    assert target.exists() == there
    assert not there or target.read_text() == "mine"
    assert not record.is_symlink()
    assert Record.load(record).name == one.name


def test_planted_names_of_temporary_files_do_nothing(tmp_path, monkeypatch):
    """Version 0.1 named them .NAME.PID, which anybody can guess, and opened what was there."""
    target, path = tmp_path / "target", tmp_path / "record.json"
    target.write_text("mine")
    (tmp_path / f".record.json.{os.getpid()}").symlink_to(target)
    write(path, "text")
    assert (target.read_text(), path.read_text()) == ("mine", "text")
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda count: "0" * 2 * count)  # guessed after all
    (tmp_path / f".record.json.{os.getpid()}-{'0' * 16}").symlink_to(target)
    with pytest.raises(FileExistsError):
        write(path, "other")
    assert (target.read_text(), path.read_text()) == ("mine", "text")
    (tmp_path / f".writable.{os.getpid()}-{'0' * 16}").symlink_to(tmp_path / "made")
    with pytest.raises(ValueError, match="File exists"):
        writable(tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_lock_that_is_a_link_changes_nothing_elsewhere(tmp_path):
    one, target = spec("sgd", epochs=1), tmp_path / "target"
    target.write_text("mine")
    (tmp_path / f"{one.name}.lock").symlink_to(target)
    with pytest.raises(ValueError, match="can't write to the folder"):
        run(one, tmp_path)
    assert target.read_text() == "mine"


def test_only_temporary_files_of_ours_are_removed(tmp_path):
    path = tmp_path / "x.json"
    mine = (".x.json.swp", ".x.json.12~", ".x.json.bak.7.old", "x.json.12", ".y.json.12", ".x.json.12-abc")
    for name in (*mine, ".x.json.12", f".x.json.12-{'a' * 16}"):
        (tmp_path / name).touch()
    (tmp_path / ".x.json.13").symlink_to(tmp_path / "nowhere")
    remove_leftovers(path)
    assert {file.name for file in tmp_path.iterdir()} == {*mine, ".x.json.13"}


def test_states_are_private_and_records_are_not(tmp_path, monkeypatch):
    one = spec("hat")
    kills = killed_at(monkeypatch, 1.0, seed=0, most=1)
    old = os.umask(0o022)
    try:
        with pytest.raises(Killed):
            run(one, tmp_path, save_every=OFTEN)
        part = part_of(one, tmp_path)
        folder_of(one, tmp_path).checkpointer.wait()
        assert kills
        assert stat.S_IMODE(part.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in part.iterdir()} == {0o600}
        run(one, tmp_path)
        assert stat.S_IMODE((tmp_path / f"{one.name}.json").stat().st_mode) == 0o644
    finally:
        os.umask(old)


def test_a_file_under_way_can_be_read_by_nobody_else(tmp_path):
    with new_file(tmp_path / "state", private=True):
        (temporary,) = tmp_path.iterdir()
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600


def test_the_temporary_file_of_a_set_is_no_link(tmp_path, monkeypatch):
    monkeypatch.setenv("HATRACK_DATA", str(tmp_path / "data"))
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f".mnist.npz.{os.getpid()}").symlink_to(target)
    (tmp_path / "data" / "mnist.npz").symlink_to(target)
    cache.keep("mnist", archives.arrays("mnist"), "downloaded")
    assert target.read_text() == "mine"
