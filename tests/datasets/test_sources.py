"""Data sets: the catalogue, the data folder, downloads of every published format from a local server, and failures."""

import errno
import hashlib
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from numpy.lib import format as npy
from PIL import Image

from hatrack.datasets import cache, download, images, matfile
from hatrack.datasets.archives import READERS
from hatrack.datasets.catalog import SETS
from hatrack.datasets.idx import read_idx
from hatrack.datasets.sources import BLOCK, load, load_all, read_arrays, require
from tests.helpers import archives
from tests.helpers.publishing import assert_same


def temporary_files(folder):
    """Return the names of temporary files, which must not be left behind."""
    return [p.name for p in folder.rglob("*") if p.is_file() and p.suffix not in (".npz", ".json", ".lock")]


# The catalogue


def test_the_catalogue_is_complete():
    assert len(SETS) == 10
    assert set(READERS) == {name for name, spec in SETS.items() if spec.files} == set(SETS) - {"facescrub"}
    for spec in SETS.values():
        assert spec.shape in ((28, 28), (32, 32, 3))
        for file in spec.files:
            assert len(file.md5) == 32
            assert int(file.md5, 16)
            assert file.size > 1000
            assert all(base.startswith("http") and base.endswith("/") for base in file.bases)
    files = [file.md5 for spec in SETS.values() for file in spec.files]
    assert len(set(files)) == len(files)


# Every published format


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("mnist", archives.mnist),
        ("fashion-mnist", archives.mnist),
        ("emnist-letters", archives.emnist),
        ("cifar10", lambda data: archives.cifar(data, coarse=False)),
        ("cifar100", lambda data: archives.cifar(data, coarse=True)),
        ("svhn", archives.svhn),
    ],
)
def test_download_and_load(folder, publish, name, pack):
    data = archives.arrays(name)
    classes = SETS[name].classes
    publish(name, pack(data), 2 * classes, classes)
    note = download.get(name)
    assert (note.train, note.test) == (2 * classes, classes)
    assert load(name).classes == classes
    assert_same(load(name), data)
    assert sorted(p.name for p in folder.glob("[!.]*")) == [f"{name}.json", f"{name}.npz"]
    assert temporary_files(folder) == []


def test_gtsrb_has_the_order_of_its_tables(folder, publish):
    data = archives.arrays("gtsrb")
    publish("gtsrb", archives.gtsrb(data), 86, 43)
    download.get("gtsrb")
    order = np.argsort(data["y_train"], kind="stable")  # class by class
    assert_same(load("gtsrb"), data | {"x_train": data["x_train"][order], "y_train": data["y_train"][order]})


def test_gtsrb_frames_are_resized_whole(folder, publish):
    data = archives.arrays("gtsrb")
    frame = archives.images(1, (41, 27, 3))[0]
    data["x_train"] = [frame, *data["x_train"][1:]]
    publish("gtsrb", archives.gtsrb(data), 86, 43)
    download.get("gtsrb")
    expected = np.asarray(Image.fromarray(frame).resize((32, 32), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(load("gtsrb").train[0][0], expected.transpose(2, 0, 1))


def test_notmnist_is_split_by_class_and_its_empty_files_are_skipped(folder, publish):
    x, y = archives.images(100, (28, 28)), np.arange(100, dtype=np.uint8) % 10
    publish("notmnist", archives.notmnist(x, y), 90, 10)
    download.get("notmnist")
    first = load("notmnist")
    assert torch.bincount(first.train[1]).tolist() == [9] * 10
    assert torch.bincount(first.test[1]).tolist() == [1] * 10
    label = {image.tobytes(): int(c) for image, c in zip(x, y, strict=True)}
    seen = [(i.numpy().tobytes(), int(c)) for part in (first.train, first.test) for i, c in zip(*part, strict=True)]
    assert dict(seen) == label
    (folder / "notmnist.npz").unlink()
    download.get("notmnist")
    assert torch.equal(load("notmnist").test[0], first.test[0])  # the same split every time


def test_an_unreadable_image_in_an_archive_is_named(folder, publish):
    files = archives.notmnist(archives.images(10, (28, 28)), np.arange(10))
    inside = {
        "notMNIST_small/C/bad.png": b"not an image",
        **{f"notMNIST_small/{c}/1.png": archives.encode_image(archives.images(1, (28, 28))[0], "PNG") for c in "ABCDEFGHIJ"},
    }
    files["notMNIST_small.tar.gz"] = archives.tarred(inside)
    publish("notmnist", files, 10, 1)
    with pytest.raises(ValueError, match=r"notmnist.*notMNIST_small/C/bad\.png is not a readable image"):
        download.get("notmnist")
    assert not (folder / "notmnist.npz").exists()


def test_caltech_is_resized_split_and_without_the_background(folder, publish):
    names = ["Faces", "accordion", *(f"kind_{k:02}" for k in range(99))]
    photos = {}
    for k, name in enumerate(reversed(names)):
        for n in range(5):
            shape = (40, 30) if n == 0 else (30, 50, 3)  # some are gray
            photos[name, f"image_{n:04}.jpg"] = archives.encode_image(archives.images(1, shape, 5 * k + n)[0], "JPEG")
    publish("caltech101", archives.caltech(photos), 404, 101)
    download.get("caltech101")
    source = load("caltech101")
    assert torch.bincount(source.train[1]).tolist() == [4] * 101
    expected = {}
    for (name, _), contents in photos.items():
        image = Image.open(io.BytesIO(contents)).convert("RGB").resize((32, 32), Image.Resampling.BILINEAR)
        expected[np.asarray(image).transpose(2, 0, 1).tobytes()] = names.index(name)
    for x, y in (source.train, source.test):
        assert [expected[i.numpy().tobytes()] for i in x] == y.tolist()
    assert len({i.numpy().tobytes() for x, _ in (source.train, source.test) for i in x}) == 505


def test_splits_have_the_published_sizes():
    # 187 of every class of notMNIST; Caltech-101 in classes of 435, 55, 42, 33: 0.2 of each, rounded
    for sizes, share, held in (([1872, 1873], 0.1, [187, 187]), ([435, 55, 42, 33], 0.2, [87, 11, 8, 7])):
        y = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)
        parts = images.split(np.zeros((len(y), 1), np.uint8), y, share)
        assert np.bincount(parts["y_test"]).tolist() == held
        assert len(parts["y_train"]) == sum(sizes) - sum(held)


def test_archives_write_nothing(folder, publish, tmp_path):
    x = archives.images(20, (28, 28))
    inside = {f"notMNIST_small/{'ABCDEFGHIJ'[k % 10]}/{k}.png": archives.encode_image(i, "PNG") for k, i in enumerate(x)}
    link = tarfile.TarInfo("notMNIST_small/A/link.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    contents = archives.tarred({"../../../evil.txt": b"x", str(tmp_path / "evil.txt"): b"x", **inside}, [link])
    publish("notmnist", {"notMNIST_small.tar.gz": contents}, 10, 10)
    download.get("notmnist")
    assert not list(tmp_path.rglob("evil*"))
    assert len(load("notmnist").train[1]) == 10


# Headers that claim too much


def idx_file(count):
    """Return an idx file with three images whose header claims `count` images."""
    return io.BytesIO(struct.pack(">BBBB3I", 0, 0, 8, 3, count, 28, 28) + bytes(28 * 28 * 3))


def test_an_idx_file_that_claims_too_much():
    assert read_idx(idx_file(3), "images", (28, 28), 10).shape == (3, 28, 28)
    tracemalloc.start()
    with pytest.raises(ValueError, match="4000000000"):
        read_idx(idx_file(4_000_000_000), "images", (28, 28), 100_000)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    with pytest.raises(ValueError, match=r"ends after 2,352 of 3,136 bytes"):
        read_idx(idx_file(4), "images", (28, 28), 10)
    with pytest.raises(ValueError, match="more data than the 1,568 bytes"):
        read_idx(idx_file(2), "images", (28, 28), 10)
    with pytest.raises(ValueError, match="not an idx file"):
        read_idx(io.BytesIO(b"\0\0\x0d\3"), "images", (28, 28), 10)


def test_a_mat_file_that_claims_too_much(tmp_path):
    path = tmp_path / "a.mat"
    head = b"".ljust(124) + b"\0\1IM"
    x = np.zeros((4, 5), np.uint8)
    path.write_bytes(head + archives.matrix("other", x, 9) + archives.matrix("X", x, 9))
    assert matfile.read(path, ("X",), 100)["X"].shape == (4, 5)
    for contents, message in (
        (archives.matrix("X", x, 9, shape=(4000, 5)), r"20 numbers.*\(4000, 5\)"),
        (archives.matrix("X", x, 1), "'X'.*real numbers"),  # a cell array
        (archives.matrix("X", x, 9 | 0x800), "'X'.*real numbers"),  # complex
        (struct.pack("<II", 14, 1 << 31), "ends too early"),
        (archives.matrix("X", x, 9)[:-16], "ends too early"),
        (archives.matrix("Z", x, 9), "no array 'X'"),
    ):
        path.write_bytes(head + contents)
        with pytest.raises(ValueError, match=message):
            matfile.read(path, ("X",), 100)
    large = archives.zlib.compress(archives.matrix("X", np.zeros((1000, 1000), np.uint8), 9))
    path.write_bytes(head + struct.pack("<II", 15, len(large)) + large)
    with pytest.raises(ValueError, match="larger than the whole set"):
        matfile.read(path, ("X",), 1000)
    path.write_bytes(b"MATLAB 7.3 MAT-file, HDF5")
    with pytest.raises(ValueError, match="not a MATLAB 5 file"):
        matfile.read(path, ("X",), 100)


def test_an_npz_that_claims_too_much(folder):
    folder.mkdir()
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"shape": (10**10, 28, 28), "fortran_order": False, "descr": "|u1"})
    with zipfile.ZipFile(folder / "mnist.npz", "w") as file:
        for key in cache.ARRAYS:
            file.writestr(f"{key}.npy", header.getvalue() + b"0" * 100)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"x_train.*10000000000, 28, 28"):
        load("mnist")
    with pytest.raises(ValueError, match=r"x_train.*228 bytes"):
        read_arrays(folder / "mnist.npz")
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


# Downloads that fail


@pytest.mark.parametrize(
    ("trouble", "reason", "times"),
    [("cut", "connection was lost", 3), ("wrong", "md5", 3), ("missing", "404", 1)],
)
def test_a_failed_download_is_continued_by_the_next_call(folder, site, digits, trouble, reason, times):
    file = "t10k-images-idx3-ubyte.gz"
    site.trouble[file] = trouble
    with pytest.raises(OSError, match=reason) as error:
        download.get("mnist")
    assert f"{file}: {site.address}{file}: " in str(error.value)
    assert "\n" not in str(error.value)
    assert site.requests[file] == times
    assert not (folder / "mnist.npz").exists()
    complete = sorted(p.name for p in (folder / "downloads" / "mnist").iterdir())
    assert complete == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
    site.trouble.clear()
    download.get("mnist")
    assert_same(load("mnist"), digits)
    assert site.requests["train-images-idx3-ubyte.gz"] == 1


@pytest.mark.parametrize("right", [True, False])
def test_the_sha256_of_a_file_decides_where_it_is_known(folder, site, digits, monkeypatch, right):
    first, *others = SETS["mnist"].files
    known = hashlib.sha256(site.files[first.name]).hexdigest() if right else "0" * 64
    files = (first._replace(sha256=known, md5="0" * 32 if right else first.md5), *others)
    monkeypatch.setitem(SETS, "mnist", archives.dataclasses.replace(SETS["mnist"], files=files))
    if right:
        download.get("mnist")
        assert_same(load("mnist"), digits)
    else:
        with pytest.raises(OSError, match=f"its sha256 is not {known}"):
            download.get("mnist")


def test_addresses_with_https_come_first_and_checksums_are_whole():
    for spec in SETS.values():
        for file in spec.files:
            assert sorted(file.bases, key=lambda base: not base.startswith("https://")) == list(file.bases)
            assert re.fullmatch("[0-9a-f]{32}", file.md5)
            assert re.fullmatch("([0-9a-f]{64})?", file.sha256)
    assert {name for name, spec in SETS.items() if spec.files and not all(file.sha256 for file in spec.files)} == {
        "notmnist",
        "gtsrb",
    }, "no published one is known to us"


def test_a_server_that_fails_once_is_tried_again(folder, site, digits, monkeypatch):
    site.trouble["train-labels-idx1-ubyte.gz"] = "cut"
    monkeypatch.setattr(time, "sleep", lambda seconds: site.requests["train-labels-idx1-ubyte.gz"] and site.trouble.clear())
    download.get("mnist")
    assert site.requests["train-labels-idx1-ubyte.gz"] == 2
    assert_same(load("mnist"), digits)


def closed_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_without_a_network(folder, digits):
    with pytest.raises(OSError, match=r"connection refused.*--mirror"):
        download.get("mnist", mirror=f"http://127.0.0.1:{closed_port()}/here")


def test_a_second_address_is_tried(folder, site, digits, monkeypatch):
    dead = f"http://127.0.0.1:{closed_port()}/"
    files = tuple(file._replace(bases=(dead, site.address)) for file in SETS["mnist"].files)
    monkeypatch.setitem(SETS, "mnist", archives.dataclasses.replace(SETS["mnist"], files=files))
    download.get("mnist")
    assert_same(load("mnist"), digits)


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_mirror(folder, site, digits, monkeypatch, how):
    files = tuple(file._replace(bases=("http://127.0.0.1:1/",)) for file in SETS["mnist"].files)
    monkeypatch.setitem(SETS, "mnist", archives.dataclasses.replace(SETS["mnist"], files=files))
    mirror = site.address.rstrip("/")
    if how == "variable":
        monkeypatch.setenv("HATRACK_MIRROR", mirror)
    download.get("mnist", mirror=mirror if how == "argument" else "")
    assert_same(load("mnist"), digits)


def test_a_mirror_that_is_no_address(folder, digits):
    with pytest.raises(ValueError, match=r"mirror.*https.*'example\.org'"):
        download.get("mnist", mirror="example.org")


def test_files_that_are_not_the_complete_set(folder, digits, monkeypatch):
    monkeypatch.setitem(SETS, "mnist", archives.dataclasses.replace(SETS["mnist"], train=25))
    with pytest.raises(ValueError, match=r"mnist.*20 \+ 10 images.*25 \+ 10"):
        download.get("mnist")
    monkeypatch.setitem(SETS, "mnist", archives.dataclasses.replace(SETS["mnist"], train=20, digest="0" * 64))
    with pytest.raises(ValueError, match=r"mnist.*digest"):
        download.get("mnist")
    assert not (folder / "mnist.npz").exists()


def test_a_set_is_downloaded_again_only_if_it_is_damaged(folder, site, digits, capsys):
    assert download.get("mnist") is not None
    requests = site.requests.total()
    assert download.get("mnist") is None
    assert site.requests.total() == requests
    (folder / "mnist.npz").write_bytes(b"broken")
    assert download.get("mnist") is not None
    assert str(folder / "mnist.npz") in capsys.readouterr().err
    assert_same(load("mnist"), digits)


def test_a_terminal_shows_progress(folder, digits, monkeypatch, capsys):
    download.get("mnist", keep=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    for path in (folder / "mnist.npz", folder / "downloads" / "mnist" / "train-images-idx3-ubyte.gz"):
        path.unlink()
    download.get("mnist")
    shown = capsys.readouterr().err
    size = len(archives.mnist(digits)["train-images-idx3-ubyte.gz"]) / 1000
    assert "mnist: train-images-idx3-ubyte.gz" in shown
    assert f"{size:.1f}/{size:.1f} kB" in shown


def test_downloaded_archives_can_be_kept(folder, digits):
    download.get("mnist", keep=True)
    assert len(list((folder / "downloads" / "mnist").iterdir())) == 4


def test_facescrub_can_only_be_imported(folder):
    with pytest.raises(ValueError, match="hatrack data import FOLDER --name facescrub"):
        download.get("facescrub")


def test_without_pooch(folder, digits, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(OSError, match="pip install pooch"):
        download.get("mnist")


# A full disk


class Full(io.FileIO):
    """A file on a disk that has space for 10,000 bytes."""

    def write(self, data):
        if self.tell() + len(data) > 10_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("before", [False, True])
def test_a_full_disk_leaves_no_incomplete_set(folder, monkeypatch, before):
    old, new = archives.arrays("mnist", 3), archives.arrays("mnist")
    if before:
        with cache.locked("mnist"):
            cache.keep("mnist", old, "downloaded")
    folder.mkdir(exist_ok=True)
    real = io.open
    with monkeypatch.context() as patch:
        patch.setattr(
            io, "open", lambda path, mode="r", *a, **k: Full(path, "x") if mode == "xb" else real(path, mode, *a, **k)
        )
        with pytest.raises(OSError, match=r"no space left in .* for mnist") as error:
            cache.keep("mnist", new, "downloaded")
    assert "\n" not in str(error.value)
    assert temporary_files(folder) == []
    assert (folder / "mnist.npz").exists() == before
    if before:
        assert_same(load("mnist"), old)


def test_a_disk_that_fills_up_during_a_download(folder, digits, monkeypatch):
    def full(*words, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    import pooch

    monkeypatch.setattr(pooch, "retrieve", full)
    with pytest.raises(OSError, match=r"no space left in .* for mnist"):
        download.get("mnist")


# Two processes

CHILD = """
import dataclasses, json, sys
from hatrack.datasets import download
from hatrack.datasets.catalog import SETS, File
print("ready", flush=True)
files, train, test = json.loads(sys.stdin.readline())
SETS["mnist"] = dataclasses.replace(SETS["mnist"], files=tuple(File(*f) for f in files), train=train, test=test, digest="")
print("downloaded" if download.get("mnist") else "there")
"""


def child():
    spec = SETS["mnist"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", CHILD], text=True, **pipes)
    return process, json.dumps([spec.files, spec.train, spec.test]) + "\n"


@pytest.mark.slow
def test_two_processes_download_the_same_set(folder, site, digits):
    site.trouble["train-images-idx3-ubyte.gz"] = "slow"
    both = [child(), child()]
    for process, _ in both:
        assert process.stdout.readline() == "ready\n"
    for process, spec in both:  # at the same time
        process.stdin.write(spec)
        process.stdin.flush()
    first, second = sorted(process.communicate(timeout=60) for process, _ in both)
    assert [process.returncode for process, _ in both] == [0, 0]
    assert first == ("downloaded\n", "")
    assert second[0] == "there\n"
    assert re.fullmatch(r".*\bmnist\b.*\n", second[1]), "the second process says that it waits"
    assert set(site.requests.values()) == {1}, "no file was downloaded twice"
    assert_same(load("mnist"), digits)


def test_a_killed_download_does_not_disturb_the_next_one(folder, site, digits):
    site.trouble["t10k-images-idx3-ubyte.gz"] = "stuck"
    process, spec = child()
    process.stdin.write(spec)
    process.stdin.flush()
    until = time.monotonic() + 60
    while not site.requests["t10k-images-idx3-ubyte.gz"] and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    site.trouble.clear()
    download.get("mnist")  # the lock is free, and the incomplete file is not taken for a complete one
    assert_same(load("mnist"), digits)
    assert site.requests["train-images-idx3-ubyte.gz"] == 1
    assert site.requests["t10k-images-idx3-ubyte.gz"] == 2
    assert temporary_files(folder) == []


# The data folder


def test_a_set_is_cached_until_its_file_changes(folder):
    first, second = archives.arrays("mnist"), archives.arrays("mnist", 3)
    cache.folder().mkdir()
    cache.keep("mnist", first, "downloaded")
    assert load("mnist") is load("mnist")
    cache.keep("mnist", second, "downloaded")
    assert_same(load("mnist"), second)


def test_the_digest_does_not_depend_on_how_arrays_are_stored():
    data = archives.arrays("cifar10")
    reordered = data | {"x_train": np.asfortranarray(data["x_train"])}
    assert cache.digest(reordered) == cache.digest(data)
    for key in cache.ARRAYS:
        other = data[key].copy()
        other.flat[-1] ^= 1
        assert cache.digest(data | {key: other}) != cache.digest(data)
    x = data["x_train"]
    assert cache.digest(data | {"x_train": x.reshape(x.shape[0], 3, 32, 32)}) != cache.digest(data)


def test_a_changed_file_is_refused(folder):
    cache.folder().mkdir()
    cache.keep("mnist", archives.arrays("mnist"), "downloaded")
    other = archives.arrays("mnist")
    other["x_train"][0, 0, 0] ^= 1
    np.savez(folder / "mnist.npz", **other)
    with pytest.raises(ValueError, match=r"mnist\.npz.*downloaded on \d{4}-\d\d-\d\d.*digest"):
        load("mnist")
    (folder / "mnist.json").write_text("{")
    with pytest.raises(ValueError, match=r"mnist\.json.*delete it"):
        load("mnist")
    (folder / "mnist.json").unlink()
    assert_same(load("mnist"), other)  # put there by hand


def test_a_process_that_dies_between_data_and_metadata_leaves_a_valid_set(folder, monkeypatch):
    cache.folder().mkdir()
    cache.keep("mnist", archives.arrays("mnist"), "downloaded")
    new = archives.arrays("mnist", 3)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "write_file", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cache.keep("mnist", new, "downloaded")
    assert_same(load("mnist"), new)


def test_colour_sets_and_arrays_in_another_order(folder):
    data = archives.arrays("cifar10")
    folder.mkdir()
    np.savez(folder / "cifar10.npz", **{key: np.asfortranarray(array) for key, array in data.items()})
    assert_same(load("cifar10"), data)


def test_channels_come_first_however_many_images_there_are(folder):
    data = archives.arrays("cifar10", 52)  # of each of ten classes
    assert len(data["x_train"]) > 2 * BLOCK
    folder.mkdir()
    np.savez(folder / "cifar10.npz", **data)
    for part, (x, _) in {"train": load("cifar10").train, "test": load("cifar10").test}.items():
        assert np.array_equal(x.numpy(), np.moveaxis(data[f"x_{part}"], 3, 1))
        assert x.is_contiguous()


def test_several_sets_are_loaded_at_a_time(folder, monkeypatch):
    cache.folder().mkdir()
    sets = {name: archives.arrays(name) for name in ("cifar10", "mnist", "cifar100")}
    for name, arrays in sets.items():
        cache.keep(name, arrays, "downloaded")
    both, verified = threading.Barrier(2, timeout=60), cache.verified

    def two_at_a_time(name):
        if name != "cifar100":
            both.wait()  # an error unless another thread comes as well
        return verified(name)

    monkeypatch.setattr(cache, "verified", two_at_a_time)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = load_all(["mnist", "cifar10", "mnist", "cifar100"])
    assert list(found) == ["mnist", "cifar10", "cifar100"]
    for name, source in found.items():
        assert_same(source, sets[name])
        assert source is load(name)
    with pytest.raises(FileNotFoundError, match="svhn and gtsrb"):
        load_all(["mnist", "svhn", "gtsrb"])
    (folder / "cifar100.npz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"cifar100\.npz is not a readable data file"):
        load_all(["mnist", "cifar100", "cifar10"])


def test_a_folder_that_can_not_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HATRACK_DATA", str(tmp_path / "file"))
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "file"))), cache.locked("mnist"):
        pass


# Missing sets


def test_exactly_the_missing_sets_are_named(folder):
    cache.folder().mkdir()
    for name in ("mnist", "cifar10"):
        cache.keep(name, archives.arrays(name), "downloaded")
    require("mnist", "cifar10")
    with pytest.raises(FileNotFoundError) as error:
        require("mnist", "svhn", "cifar10", "facescrub", "gtsrb")
    text = str(error.value)
    assert "svhn, facescrub and gtsrb" in text
    for word in ("hatrack data get svhn gtsrb", "hatrack data import FOLDER", str(folder / "svhn.npz"), "HATRACK_DATA"):
        assert word in text
    for word in ("--data sample", "cifar10", "\n"):
        assert word not in text
    with pytest.raises(FileNotFoundError, match=r"fashion-mnist.*--data sample"):
        load("fashion-mnist")


def test_samples(folder):
    require("mnist", "fashion-mnist", data="sample")
    assert len(load("mnist", "sample").train[1]) == 4000
    with pytest.raises(FileNotFoundError, match=r"no sample of cifar10 and svhn.*mnist and fashion-mnist"):
        require("mnist", "cifar10", "svhn", data="sample")
    with pytest.raises(ValueError, match="did you mean 'cifar10'"):
        require("cifar-10")


# A user's own data


def test_arrays_and_images_of_a_user(tmp_path):
    np.savez(
        tmp_path / "own.npz", x_train=np.ones((4, 2)), y_train=np.arange(4), x_test=np.ones((2, 2)), y_test=np.arange(2)
    )
    data = read_arrays(tmp_path / "own.npz")
    assert data["x_train"].dtype == np.float64
    assert data["y_train"].tolist() == [0, 1, 2, 3]
    for size in (9, 9, 12):
        for name in ("cat", "dog"):
            path = tmp_path / "pets" / name / f"{len(list(tmp_path.rglob('*.png')))}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(archives.images(1, (7, size))[0]).save(path)
        if size == 9:
            assert images.common_shape(sorted((tmp_path / "pets").rglob("*.png"))) == (7, 9)
    data = read_arrays(tmp_path / "pets")
    assert data["x_train"].shape == (4, 32, 32)
    assert sorted(data["y_test"]) == [0, 1]
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none"))):
        read_arrays(tmp_path / "none")
