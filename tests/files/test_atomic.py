"""Atomic writes and reads of plain files, function by function: what is on the disk, in what order, and with what rights."""

import errno
import os
import stat
import time

import pytest

from hatrack.files import atomic
from hatrack.files.atomic import LEFT_BEHIND, is_plain, make_private, new_file, read_bytes, remove_leftovers, write


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def flushed(monkeypatch):
    """What was flushed to the disk: the number of each file or folder (its inode), in order."""
    numbers, fsync = [], os.fsync

    def watched(handle):
        numbers.append(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    return numbers


# Reading


def test_the_largest_file_that_is_read(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert read_bytes(file) == read_bytes(file, 5) == read_bytes(file, None) == b"12345"
    with pytest.raises(ValueError, match="a has more than 4 bytes"):
        read_bytes(file, 4)


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="it is not a file"):
            read_bytes(path)
    with pytest.raises(ValueError, match="there is no such file"):
        read_bytes(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="can't be read: Not a directory"):
        read_bytes(tmp_path / "file" / "inside")


# Writing


@pytest.mark.parametrize(("content", "there"), [("é", b"\xc3\xa9"), (b"\xff\0", b"\xff\0")])
def test_texts_are_utf_8_and_bytes_are_as_they_are(content, there, tmp_path):
    write(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == there
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("follow", [True, False])
def test_a_link_is_followed_or_replaced(follow, tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write(tmp_path / "link", "new", follow=follow)
    assert (tmp_path / "link").read_text() == "new"
    assert (tmp_path / "link").is_symlink() is follow
    assert (tmp_path / "target").read_text() == ("new" if follow else "old")


def test_links_are_followed_and_files_can_be_read_by_others_unless_told_otherwise(tmp_path):
    before = os.umask(0o022)
    try:
        (tmp_path / "link").symlink_to(tmp_path / "target")
        write(tmp_path / "link", "x")
        write(tmp_path / "secret", "x", private=True)
        with new_file(tmp_path / "other") as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "link").is_symlink()
    assert [mode(tmp_path / name) for name in ("target", "secret", "other")] == [0o644, 0o600, 0o644]


@pytest.mark.parametrize("follow", [True, False])
def test_a_pipe_is_not_replaced(follow, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a file that could be replaced"):
        write(tmp_path / "pipe", "x", follow=follow)
    with pytest.raises(IsADirectoryError):
        write(tmp_path, "x", follow=follow)
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_the_content_is_on_the_disk_before_it_takes_its_place_and_the_name_afterwards(tmp_path, flushed, monkeypatch):
    (tmp_path / "a").write_text("old")
    seen, sizes = [], []

    fsync = os.fsync

    def watched(handle):
        sizes.append(os.fstat(handle).st_size)
        fsync(handle)

    def then():
        temporary = next(tmp_path.glob(".a.*"))
        seen.append((temporary.read_bytes(), (tmp_path / "a").read_text(), list(flushed)))

    monkeypatch.setattr(os, "fsync", watched)
    with new_file(tmp_path / "a", then=then) as file:
        file.write(b"new")
        temporary = os.path.basename(file.name)
    written = (tmp_path / "a").stat().st_ino
    assert seen == [(b"new", "old", [written])]
    assert flushed == [written, tmp_path.stat().st_ino]
    assert sizes[0] == len(b"new"), "nothing waits in a buffer"
    assert atomic.target_of(temporary) == "a"
    assert (tmp_path / "a").read_text() == "new"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no number"), OSError(errno.ENOSPC, "full", "/elsewhere")])
def test_a_write_that_fails_changes_nothing(error, tmp_path):
    (tmp_path / "a").write_text("old")

    def fail():
        with new_file(tmp_path / "a") as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "old")]
    if isinstance(error, OSError) and error.errno:
        assert (caught.value.errno, caught.value.strerror, caught.value.filename) == (
            errno.ENOSPC,
            "full",
            str(tmp_path / "a"),
        )
    else:
        assert caught.value is error


# Leftovers


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (".a.json.17-0123456789abcdef", "a.json"),
        (".a.json.17", "a.json"),
        (".a\nb.17", "a\nb"),
        (".a.17-0123456789abcde", ".a.17-0123456789abcde"),
        (".bashrc", ".bashrc"),
        ("a.17", "a.17"),
    ],
)
def test_the_file_that_a_temporary_one_was_to_become(name, target):
    assert atomic.target_of(name) == target


def leave(folder, name, age):
    file = folder / name
    file.write_text("left")
    os.utime(file, (time.time() - age,) * 2)
    return file


def test_a_write_removes_what_killed_processes_left_an_hour_ago(tmp_path):
    assert LEFT_BEHIND == 3600
    old, young = leave(tmp_path, ".a.1", 3601), leave(tmp_path, ".a.2", 3500)
    others = [leave(tmp_path, name, 9999) for name in (".b.1", ".a.b", "a.1", ".a*.1")]
    write(tmp_path / "a", "x")
    assert not old.exists()
    assert young.exists()
    assert all(file.exists() for file in others)


def test_leftovers_of_any_age(tmp_path):
    """The times of other machines may lie in the future."""
    young, future = leave(tmp_path, ".[a].1", 0), leave(tmp_path, ".[a].2", -1000)
    (tmp_path / ".[a].3").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".[a].4").mkdir()
    remove_leftovers(tmp_path / "[a]")
    assert not young.exists()
    assert not future.exists()
    assert {file.name for file in tmp_path.iterdir()} == {".[a].3", ".[a].4"}


def test_leftovers_of_exactly_this_age_are_removed(tmp_path, monkeypatch):
    file = leave(tmp_path, ".a.1", 0)
    monkeypatch.setattr(time, "time", lambda: file.lstat().st_mtime + 10)
    remove_leftovers(tmp_path / "a", 10.5)
    assert file.exists()
    remove_leftovers(tmp_path / "a", 10)
    assert not file.exists()


def test_plain_files(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    found = {name: is_plain(tmp_path / name) for name in ("file", "link", "pipe", ".", "none")}
    assert found == {"file": True, "link": False, "pipe": False, ".": False, "none": False}


# Folders


def test_a_handle_is_closed_after_names_were_flushed(tmp_path, monkeypatch, flushed):
    closed, close = [], os.close
    monkeypatch.setattr(os, "close", lambda handle: (closed.append(os.fstat(handle).st_ino), close(handle)))
    atomic.flush_names(tmp_path)
    atomic.flush_names(tmp_path / "none")
    assert flushed == closed == [tmp_path.stat().st_ino]


def test_a_folder_is_made_and_left_empty(tmp_path):
    for _ in range(2):
        assert atomic.writable(tmp_path / "a" / "b") == tmp_path / "a" / "b"
        assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"can't write to the folder .*file: File exists"):
        atomic.writable(tmp_path / "file")


def test_a_file_that_was_there_is_not_taken_for_the_probe(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda count: "ab" * count)
    mine = tmp_path / f".writable.{os.getpid()}-{'ab' * 8}"
    mine.write_text("mine")
    with pytest.raises(ValueError, match="File exists"):
        atomic.writable(tmp_path)
    assert mine.read_text() == "mine"


def test_a_folder_of_ours_is_private_and_real(tmp_path, flushed):
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
        (tmp_path / "a" / "b" / "file").touch()
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a" / "b") == 0o700
    assert flushed == [(tmp_path / "a").stat().st_ino], "its name, once"
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "broken").symlink_to(tmp_path / "none")
    for name, kind in (("link", "a symbolic link"), ("broken", "a symbolic link"), ("a/b/file", "a file")):
        with pytest.raises(ValueError, match=f"must be a folder that hatrack made, not {kind}"):
            make_private(tmp_path / name)
    assert not (tmp_path / "none").exists()


def test_a_folder_that_another_process_makes_at_the_same_moment(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(type(tmp_path), "exists", lambda path: False)  # it comes just after this process has looked
    make_private(tmp_path / "a")
    make_private(tmp_path / "b")
    make_private(tmp_path / "c" / "d" / "e")
    assert (tmp_path / "b").is_dir()
    assert (tmp_path / "c" / "d" / "e").is_dir()
