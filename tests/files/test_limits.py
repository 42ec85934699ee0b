"""Limits of size and time: small files that decompress to much, large texts, and servers that never end."""

import io
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hatrack import Record
from hatrack.benchmarks.task_file import fingerprint
from hatrack.datasets import download, fetch
from hatrack.datasets.images import read_folder
from hatrack.datasets.sources import read_arrays
from hatrack.files import atomic, limits, tensors
from tests.helpers.fuzzing import OWN, contents, own, program
from tests.helpers.mutations import toml

MEGABYTE = 1 << 20


def zeros(path: Path, *shape: int, compressed: bool = True) -> Path:
    """Write an .npz file of zeros without ever having them in memory."""
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    small = {"y_train": np.arange(shape[0]) % 2, "x_test": np.zeros((2, *shape[1:3]), np.uint8)[:, :4, :4], "y_test": [0, 1]}
    with zipfile.ZipFile(path, "w", kind) as file:
        with file.open("x_train.npy", "w", force_zip64=True) as out:
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
            out.write(header.getvalue())
            left = int(np.prod(shape))
            while left:
                out.write(bytes(part := min(left, MEGABYTE)))
                left -= part
        for name, values in small.items():
            data = io.BytesIO()
            np.save(data, np.asarray(values, np.uint8))
            file.writestr(f"{name}.npy", data.getvalue())
    return path


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((5, 6000, 6000), "36,000,000 numbers"),
        ((2, 3000, 3000), "9,000,000 numbers"),
        ((80, 2000, 2000), "would decompress"),
    ],
)
def test_a_small_file_that_decompresses_to_much(shape, said, tmp_path, monkeypatch):
    own(tmp_path)
    monkeypatch.chdir(tmp_path)
    zeros(tmp_path / "task0.npz", *shape)
    assert (tmp_path / "task0.npz").stat().st_size < 2e6
    tracemalloc.start()
    outcome = program("run", "own", "sgd", "--tasks", "tasks.toml", "--epochs", "1", "--device", "cpu")
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcome.code == 2
    assert said in outcome.error
    assert "task0.npz" in outcome.error
    assert taken < 30 * MEGABYTE


def test_what_is_not_compressed_may_be_as_regular_as_it_is(tmp_path):
    """80 MB of zeros, stored as they are."""
    path = zeros(tmp_path / "large.npz", 80, 1000, 1000, compressed=False)
    assert read_arrays(path)["x_train"].shape == (80, 1000, 1000)


def test_images_of_a_folder_have_the_same_limits(tmp_path, monkeypatch):
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for number in range(2):
            Image.new("L", (2100, 2100)).save(tmp_path / label / f"{number}.png")
    with pytest.raises(ValueError, match=r"2100 x 2100 = 4,410,000 numbers; at most 4,194,304"):
        read_folder(tmp_path)
    monkeypatch.setattr(limits, "FREE", MEGABYTE)
    with pytest.raises(ValueError, match=r"would decompress [\d,]+ bytes to 12,000,000"):
        read_folder(tmp_path, shape=(1500, 2000), test_share=0.5)
    assert read_folder(tmp_path, shape=(20, 20))["x_train"].shape == (2, 20, 20)


def test_a_text_that_is_too_large_is_refused(tmp_path):
    path = tmp_path / "record.json"
    with path.open("wb") as file:
        file.truncate(40_000_000)
    tracemalloc.start()
    for read in (Record.load, atomic.read_bytes, lambda path: fingerprint(str(path))):
        with pytest.raises(ValueError, match=r"record\.json has more than 32,000,000 bytes"):
            read(path)
    assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    tracemalloc.stop()


def test_the_header_of_a_file_of_tensors_is_limited(tmp_path):
    path = tmp_path / "model.safetensors"
    head = b"{" + b" " * 33_000_000 + b"}"
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(ValueError, match="is not a file of hatrack"):
        tensors.load(path)


def test_the_digest_of_data_takes_no_memory(tmp_path):
    (tmp_path / "tasks.toml").write_text(toml(OWN))
    for number in range(2):
        with (tmp_path / f"task{number}.npz").open("wb") as file:
            file.truncate(50 * MEGABYTE)
    tracemalloc.start()
    assert len(fingerprint(str(tmp_path / "tasks.toml"))) == 64
    assert tracemalloc.get_traced_memory()[1] < 5 * MEGABYTE
    tracemalloc.stop()


# Servers


def one_address(site, monkeypatch, size: int) -> None:
    """The first file has this published size."""
    first, *others = download.SETS["mnist"].files
    entry = download.SETS["mnist"]
    files = (first._replace(size=size), *others)
    monkeypatch.setitem(download.SETS, "mnist", type(entry)(**{**vars(entry), "files": files}))


def test_a_server_that_sends_too_much(folder, site, digits, monkeypatch):
    one_address(site, monkeypatch, 500_000)
    site.trouble["train-images-idx3-ubyte.gz"] = "endless"
    with pytest.raises(OSError, match=r"could not download train-images.*more than 1,550,000 bytes"):
        download.get("mnist")
    assert site.requests["train-images-idx3-ubyte.gz"] == 1, "it would be the same again"
    assert contents(folder / "downloads") == {}


def test_a_size_that_is_announced_is_refused_at_once(folder, site, digits, monkeypatch):
    one_address(site, monkeypatch, 0)
    site.files["train-images-idx3-ubyte.gz"] = bytes(2_000_000)
    monkeypatch.setattr(fetch, "CHUNK", None)  # nothing is read
    with pytest.raises(OSError, match="more than 1,000,000 bytes"):
        download.get("mnist")


def test_a_server_that_is_too_slow(folder, site, digits, monkeypatch):
    monkeypatch.setattr(fetch, "PATIENCE", 0.3)
    one_address(site, monkeypatch, 1000)
    site.trouble["train-images-idx3-ubyte.gz"] = "dripping"
    began = time.monotonic()
    with pytest.raises(OSError, match=r"it is too slow: \d+ of 1,000 bytes"):
        download.get("mnist")
    assert time.monotonic() - began < 5
    assert contents(folder / "downloads") == {}


def test_a_link_in_place_of_the_folder_of_downloads(folder, site, digits, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "tmp_notes").write_text("mine")
    (folder / "downloads").mkdir(parents=True)
    (folder / "downloads" / "mnist").symlink_to(other)
    with pytest.raises(ValueError, match="mnist must be a folder that hatrack made"):
        download.get("mnist")
    assert (other / "tmp_notes").read_text() == "mine"
