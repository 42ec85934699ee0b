"""Whether the lock of a run in a folder keeps other machines out, by the kind of file system that the folder is on.

A lock is taken with `flock`. What that means on a network is decided by the file system and by how it is mounted:
man 2 flock, man 5 nfs (`nolock`, `local_lock`), the manuals of Lustre (`flock`, `localflock`) and of BeeGFS.
"""

import os
import re
import warnings
from pathlib import Path
from typing import Literal, NamedTuple

from filelock import FileLock, Timeout

MOUNTS, LOCKS = Path("/proc/self/mountinfo"), Path("/proc/locks")
Scope = Literal["machine", "machines", "unknown"]
ON_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "vfat", "exfat", "ntfs3")
SHARED = ("nfs4", "ceph", "gpfs", "ocfs2", "gfs2", "fuse.glusterfs", "fuse.ceph", "wekafs", "fuse.juicefs")
ALONE = (
    "fuse.sshfs",
    "fuse.rclone",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "fuse.mount-s3",
    "9p",
    "virtiofs",
    "vboxsf",
    "fuse.vmhgfs-fuse",
)
NOT_SHARED_BY = {  # options of a mount with which a lock holds on one machine only
    "nfs": ("nolock", "local_lock=flock", "local_lock=all"),
    "nfs4": ("nolock", "local_lock=flock", "local_lock=all"),
    "lustre": ("localflock", "noflock"),
    "cifs": ("nobrl",),
    "smb3": ("nobrl",),
}
ASKS_FOR_SHARED = {"lustre": "flock"}  # without this option nothing is locked on other machines


class LockScope(NamedTuple):
    """How far a lock reaches.

    Attributes:
        scope: "machine" if it keeps out processes of one machine only, "machines" if of all that mount the folder; or
            "unknown".
        kind: the kind of file system, such as "ext4".
        network: whether other machines may have the folder mounted.
        why: what decides it, in a few words.
    """

    scope: Scope
    kind: str
    network: bool
    why: str


def lock_scope(folder: Path, mounts: Path = MOUNTS) -> LockScope:
    """Return how far locks of files in a folder reach.

    Args:
        folder: the folder; it need not exist yet.
        mounts: the list of mounts, as Linux writes it.
    """
    try:
        found = _mount_of(folder.absolute(), mounts.read_text(errors="surrogateescape"))
    except OSError:
        found = None
    if found is None:
        return LockScope("unknown", "unknown", True, "this system does not tell what the folder is mounted from")
    kind, options = found
    if kind in ON_DISKS:
        return LockScope("machine", kind, False, "it is a disk of this machine")
    if given := [option for option in NOT_SHARED_BY.get(kind, ()) if option in options]:
        return LockScope("machine", kind, True, f"it is mounted with {given[0]}")
    if kind in ASKS_FOR_SHARED and ASKS_FOR_SHARED[kind] not in options:
        return LockScope("machine", kind, True, f"it is mounted without {ASKS_FOR_SHARED[kind]}")
    if kind in SHARED or kind in NOT_SHARED_BY:
        return LockScope("machines", kind, True, "its server keeps the locks")
    if kind in ALONE:
        return LockScope("machine", kind, True, f"{kind} does not pass locks on")
    return LockScope("unknown", kind, True, f"whether {kind} passes locks on is decided by its settings")


def _mount_of(folder: Path, text: str) -> tuple[str, set[str]] | None:
    """Return the kind of file system and the options of the mount that a folder is in; the last of the deepest ones."""
    real, best, found = os.path.realpath(folder), -1, None
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        if len(before.split()) < 6 or len(after.split()) < 3:
            continue
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best = len(point)
            found = after.split()[0], {*before.split()[5].split(","), *after.split()[2].split(",")}
    return found


def is_held(lock: Path, locks: Path = LOCKS) -> bool:
    """Return whether a process holds a lock.

    Where the system lists the locks of this machine, nothing is taken, not even for a moment in which somebody else might
    want it. Only locks that other machines may hold must be tried.

    Args:
        lock: the file of the lock.
        locks: the list of locks, as Linux writes it.
    """
    try:
        stat, listed = lock.stat(), locks.read_text()
        place = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        if any(line.split()[5] == place for line in listed.splitlines() if len(line.split()) > 5 and "->" not in line):
            return True
        if not lock_scope(lock.parent).network:
            return False
    except FileNotFoundError:
        if not lock.exists():
            return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return False


def warn_if_unsafe(folder: Path, mounts: Path = MOUNTS) -> None:
    """Warn if several machines may have a folder and its locks do not surely keep them from each other's runs."""
    found = lock_scope(folder, mounts)
    if found.network and found.scope != "machines":
        holds = "hold on one machine only" if found.scope == "machine" else "may hold on one machine only"
        warnings.warn(
            f"{folder} is on {found.kind}, where locks {holds} ({found.why}): give every machine its own part with --shard",
            stacklevel=2,
        )
