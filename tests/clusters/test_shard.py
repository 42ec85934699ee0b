"""Parts of a command's runs, and how far locks reach."""

import warnings
from pathlib import Path

import pytest
from filelock import FileLock

from hatrack import Record
from hatrack.__main__ import main
from hatrack.clusters.shard import Shard, parse_shard
from hatrack.clusters.shared_folder import is_held, lock_scope, warn_if_unsafe
from tests.helpers.runs import small

WORDS = (
    "--data",
    "sample",
    "--widths",
    "12",
    "--epochs",
    "1",
    "--batch",
    "100",
    "--device",
    "cpu",
    "--train-examples",
    "100",
)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_run_is_in_one_part(count):
    runs = [small(method, seed) for method in ("sgd", "hat") for seed in range(7)]
    parts = [[one.name for one in Shard(number, count).part_of(runs)] for number in range(1, count + 1)]
    assert sorted(name for part in parts for name in part) == sorted(one.name for one in runs)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    backwards = [{one.name for one in Shard(number, count).part_of(runs[::-1])} for number in range(1, count + 1)]
    assert backwards == [set(part) for part in parts], "the order of runs decides nothing"


def test_a_run_that_is_named_twice_is_in_one_part():
    runs = [small(seed=0), small(seed=1), small(seed=0)]
    assert sorted(len(Shard(number, 2).part_of(runs)) for number in (1, 2)) == [1, 2]


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2", "1.5/2"])
def test_what_is_no_part_is_an_error(text):
    with pytest.raises(ValueError, match="--shard must be"):
        parse_shard(text)


def test_the_parts_of_a_command_are_the_whole_command(tmp_path, capsys):
    for part in ("1/3", "2/3", "3/3"):
        assert (
            main(["run", "smnist", "sgd,hat", "--seeds", "0-1", *WORDS, "--out", str(tmp_path / "parts"), "--shard", part])
            == 0
        )
    assert main(["run", "smnist", "sgd,hat", "--seeds", "0-1", *WORDS, "--out", str(tmp_path / "one")]) == 0
    one, parts = ({p.name: Record.load(p) for p in (tmp_path / name).glob("*.json")} for name in ("one", "parts"))
    assert one.keys() == parts.keys()
    assert len(one) == 4
    for name, record in one.items():
        assert record.accuracy == parts[name].accuracy
        assert record.curves == parts[name].curves
    capsys.readouterr()


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:26 / /net/nfs rw - nfs server:/x rw,vers=3,local_lock=none
31 22 0:27 / /net/nolock rw - nfs server:/x rw,nolock,local_lock=all
32 22 0:28 / /net/nfs4 rw - nfs4 server:/x rw,vers=4.2
33 22 0:29 / /net/lustre rw - lustre mds:/x rw,flock
34 22 0:30 / /net/lustre-local rw - lustre mds:/x rw,localflock
35 22 0:31 / /net/lustre-plain rw - lustre mds:/x rw
36 22 0:32 / /net/ssh rw - fuse.sshfs host:/x rw
37 22 0:33 / /net/with\\040space rw - nfs4 server:/y rw
38 22 0:34 / /net/strange rw - fuse.something x rw
39 22 0:35 / /net/nfs4/inside rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("folder", "scope", "network"),
    [
        ("/home/x", "machine", False),
        ("/net/nfs/runs", "machines", True),
        ("/net/nolock", "machine", True),
        ("/net/nfs4/runs", "machines", True),
        ("/net/nfs4x", "machine", False),
        ("/net/nfs4/inside/runs", "machine", False),
        ("/net/lustre/a", "machines", True),
        ("/net/lustre-local/a", "machine", True),
        ("/net/lustre-plain/a", "machine", True),
        ("/net/ssh/a", "machine", True),
        ("/net/with space/a", "machines", True),
        ("/net/strange/a", "unknown", True),
    ],
)
def test_how_far_a_lock_reaches(folder, scope, network, tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    found = lock_scope(Path(folder), mounts)
    assert (found.scope, found.network) == (scope, network)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_if_unsafe(Path(folder), mounts)
    assert bool(said) == (network and scope != "machines")


def test_without_a_list_of_mounts_nothing_is_promised(tmp_path):
    assert lock_scope(tmp_path, tmp_path / "none").scope == "unknown"


@pytest.mark.parametrize("locks", ["/proc/locks", "/nowhere"])
def test_whether_a_lock_is_held(locks, tmp_path):
    """By the system's list of locks, or by trying."""
    lock = tmp_path / "x.lock"
    assert not is_held(lock, Path(locks))
    with FileLock(lock):
        assert is_held(lock, Path(locks))
    lock.touch()
    assert not is_held(lock, Path(locks))
