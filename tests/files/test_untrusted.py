"""Files that cannot be trusted: pickles, malicious archives, names that contain markup, full disks, other versions."""

import ast
import contextlib
import csv
import errno
import gzip
import io
import json
import os
import re
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hatrack
from hatrack.datasets import archives as readers
from hatrack.datasets import cache
from hatrack.experiments.record import SCHEMA, sign
from hatrack.files import tensors
from hatrack.networks.mlp import mlp
from hatrack.reporting.tables import csv_text, settings
from hatrack.training.checkpoint import FORMAT
from tests.helpers import archives, mutations
from tests.helpers.fuzzing import RUN, Outcome, contents, finished, limits, model, own, program, results, stopped
from tests.helpers.records import Reader, foreign_scripts, make, save, with_spec

ROOT = Path(__file__).parent.parent.parent


# No pickle


# These import what tables or the user's own words name, never a file; the last one only timm and transformers.
BY_NAME = ("hatrack/__init__.py", "hatrack/registry.py", "hatrack/networks/foreign.py")
# These start programs with fixed words, without a shell: torchrun with a module of the package, and squeue.
STARTS = {"hatrack/clusters/ranks.py": "subprocess.Popen", "hatrack/clusters/slurm_queue.py": "subprocess.run"}
WEIGHTS = "hatrack/networks/weights.py"  # reads a state_dict that the user names, by torch's loader of plain tensors only


def test_nothing_in_the_package_can_read_a_pickle_or_run_what_it_reads():
    modules = {
        "pickle",
        "cPickle",
        "_pickle",
        "dill",
        "cloudpickle",
        "joblib",
        "shelve",
        "marshal",
        "yaml",
        "jsonpickle",
        "runpy",
    }
    calls = re.compile(
        r"eval|exec|compile|__import__|(importlib\.)?import_module|os\.(system|popen|exec.*|spawn.*)|subprocess\..*"
        r"|torch\.(load|jit\.load|hub\.load|package\..*|serialization\..*)|(np|numpy)\.(load|memmap|fromfile)|.*\.read_pickle"
        r"|.*\.(extractall|unpack_archive)|(?!method\.).*\.extract"  # archives are read in memory and never extracted
    )
    files = sorted((ROOT / "hatrack").rglob("*.py"))
    assert len(files) > 50
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & modules, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in modules, where
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                file = path.relative_to(ROOT).as_posix()
                if STARTS.get(file) == called:
                    assert "shell" not in {k.arg for k in node.keywords}, where
                    continue
                if called == "torch.load" and file == WEIGHTS:
                    assert [ast.unparse(k.value) for k in node.keywords if k.arg == "weights_only"] == ["True"], where
                    continue
                if not (called == "importlib.import_module" and file in BY_NAME):
                    assert not calls.fullmatch(called), where
                given = {k.arg: k.value for k in node.keywords if k.arg in ("allow_pickle", "weights_only", "shell")}
                assert all(isinstance(v, ast.Constant) and v.value is False for v in given.values()), where


def test_the_pickles_of_these_tests_are_dangerous():
    """Reading one without care raises Unpickled."""
    kinds = mutations.pickles()
    with pytest.raises(mutations.Unpickled):
        torch.load(io.BytesIO(kinds["torch"]), weights_only=False)
    with pytest.raises(mutations.Unpickled):
        np.load(io.BytesIO(kinds["npy"]), allow_pickle=True)
    with pytest.raises(mutations.Unpickled):
        np.load(io.BytesIO(kinds["npz"]), allow_pickle=True)["x_train"]


# Archives


def tar_headers(outside: Path) -> list[tarfile.TarInfo]:
    """Return members that would do harm if they were extracted."""
    found = []
    for number, (kind, name, target) in enumerate((
        (tarfile.SYMTYPE, "link", "/etc/passwd"), (tarfile.SYMTYPE, "up", "../.."), (tarfile.LNKTYPE, "hard", "/etc/passwd"),
        (tarfile.CHRTYPE, "device", ""), (tarfile.BLKTYPE, "disk", ""), (tarfile.FIFOTYPE, "pipe", ""),
        (tarfile.DIRTYPE, str(outside / "made"), ""), (tarfile.REGTYPE, str(outside / "evil"), ""),
        (tarfile.REGTYPE, "../../../evil", ""), (tarfile.AREGTYPE, "up/evil", ""),
    )):  # fmt: skip
        info = tarfile.TarInfo(name if number > 5 else f"set/A/{name}.png")
        info.type, info.linkname = kind, target
        found.append(info)
    return found


def cifar_files(extra: Any = ()) -> dict[str, bytes]:
    (packed,) = archives.cifar(archives.arrays("cifar10"), coarse=False).values()
    return {"cifar-10-binary.tar.gz": add_to_tar(packed, extra)}


def add_to_tar(packed: bytes, extra: Any) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        inside = {info.name: tar.extractfile(info).read() for info in tar}
    return archives.tarred(inside, extra)


def letter_files() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return archives.images(20, (28, 28)), np.arange(20) % 10


def import_files(folder: Path, files: dict[str, bytes], name: str) -> Outcome:
    """Write files to a folder and import them as a set."""
    folder.mkdir(exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return program("data", "import", str(folder), "--name", name)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HATRACK_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "notmnist", "caltech101"])
def test_tar_files_write_nothing_outside(name, data, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    builders: dict[str, Callable[[], dict[str, bytes]]] = {
        "cifar10": lambda: archives.cifar(archives.arrays("cifar10"), coarse=False),
        "cifar100": lambda: archives.cifar(archives.arrays("cifar100"), coarse=True),
        "notmnist": lambda: archives.notmnist(*letter_files()),
        "caltech101": lambda: archives.caltech({(f"{k:03}", f"{n}.jpg"): PHOTO for k in range(101) for n in range(2)}),
    }
    ((file, packed),) = builders[name]().items()
    if name == "caltech101":  # a .tar.gz in a .zip
        with zipfile.ZipFile(io.BytesIO(packed)) as whole:
            inside = {n: whole.read(n) for n in whole.namelist()}
        tar = "caltech-101/101_ObjectCategories.tar.gz"
        packed = archives.zipped({**inside, tar: add_to_tar(inside[tar], tar_headers(outside))})
    else:
        packed = add_to_tar(packed, tar_headers(outside))
    before = contents(tmp_path)
    assert import_files(tmp_path / "in", {file: packed}, name).code == 0
    after = set(contents(tmp_path)) - set(before)
    assert after == {f"in/{file}", f"data/{name}.npz", f"data/{name}.json", f"data/.{name}.lock"}
    assert not list(outside.iterdir())
    assert not list(tmp_path.parent.glob("evil*"))


PHOTO = archives.encode_image(archives.images(1, (12, 10, 3))[0], "JPEG")


@pytest.mark.parametrize("name", ["emnist-letters", "gtsrb"])
def test_zip_files_write_nothing_outside(name, data, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    build = archives.emnist if name == "emnist-letters" else archives.gtsrb
    files = build(archives.arrays(name))
    for file, packed in files.items():
        out = io.BytesIO(packed)
        with zipfile.ZipFile(out, "a") as whole:
            for evil in ("../../evil", str(outside / "evil"), "C:\\evil", "a/../../../evil"):
                whole.writestr(evil, b"x")
            link = zipfile.ZipInfo("link")
            link.external_attr = 0o120777 << 16
            whole.writestr(link, "/etc/passwd")
        files[file] = out.getvalue()
    assert import_files(tmp_path / "in", files, name).code == 0
    assert {p.name for p in data.iterdir()} == {f"{name}.npz", f"{name}.json", f".{name}.lock"}
    assert not list(outside.iterdir())
    assert not list(tmp_path.parent.glob("evil*"))


def test_tables_in_an_archive_name_only_its_members(data, tmp_path):
    """A path in GTSRB's tables is searched in the archive, never on the disk."""
    files = archives.gtsrb(archives.arrays("gtsrb"))
    (tmp_path / "secret.ppm").write_bytes(archives.encode_image(archives.images(1, (32, 32, 3))[0], "PPM"))
    truth = f"Filename;ClassId\n../../../../{tmp_path}/secret.ppm;1\n"
    files["GTSRB_Final_Test_GT.zip"] = archives.zipped({"GT-final_test.csv": truth.encode()})
    outcome = import_files(tmp_path / "in", files, "gtsrb")
    assert outcome.code == 2
    assert "There is no item named" in outcome.error


def refused(outcome: Outcome, *words: str) -> None:
    """Check that a command failed with one line that contains these words."""
    assert outcome.code == 2
    assert outcome.error.count("\n") == 1
    for word in words:
        assert word in outcome.error


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_large_extended_headers_of_a_tar_file_are_refused(kind, data, tmp_path):
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 3 << 30
    packed = gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))
    refused(import_files(tmp_path / "in", {"notMNIST_small.tar.gz": packed}, "notmnist"), "header", "3,221,225,472 bytes")


def test_tar_files_that_decompress_to_too_much(data, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "UNPACKED", 10_000_000)
    packed = archives.tarred({"notMNIST_small/padding.txt": bytes(11_000_000)})
    assert len(packed) < 100_000
    refused(import_files(tmp_path / "in", {"notMNIST_small.tar.gz": packed}, "notmnist"), "more than 10,000,000 bytes")
    (tmp_path / "in" / "notMNIST_small.tar.gz").unlink()
    packed = archives.tarred({"cifar-10-batches-bin/data_batch_1.bin": bytes(11_000_000)})
    refused(import_files(tmp_path / "in", {"cifar-10-binary.tar.gz": packed}, "cifar10"), "more than 10,000,000 bytes")


def test_a_large_member_of_a_tar_file(data, tmp_path):
    info = tarfile.TarInfo("notMNIST_small/A/a.png")
    info.size = 1 << 40
    head = tarfile.TarInfo("x").tobuf() + info.tobuf(tarfile.GNU_FORMAT)
    refused(
        import_files(tmp_path / "in", {"notMNIST_small.tar.gz": gzip.compress(head + bytes(5000))}, "notmnist"),
        "1,099,511,627,776 bytes",
    )
    info.name = "cifar-10-batches-bin/data_batch_1.bin"
    packed = gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(5000))
    refused(import_files(tmp_path / "in", {"cifar-10-binary.tar.gz": packed}, "cifar10"), "357,797,470 images")


def declare(packed: bytes, name: str, size: int) -> bytes:
    """Return the zip file with another size of one member in its headers."""
    result = bytearray(packed)
    with zipfile.ZipFile(io.BytesIO(packed)) as file:
        local = file.getinfo(name).header_offset
    central = packed.index(b"PK\x01\x02", packed.rindex(name.encode()) - 46)
    for place in (local + 22, central + 24):
        result[place : place + 4] = struct.pack("<I", size)
    return bytes(result)


def test_sizes_in_zip_files_are_checked_first(data, tmp_path):
    files = archives.gtsrb(archives.arrays("gtsrb"))
    name = "GTSRB/Final_Test/Images/00003.ppm"
    bad = declare(files["GTSRB_Final_Test_Images.zip"], name, 2**32 - 2)
    with zipfile.ZipFile(io.BytesIO(bad)) as whole:
        total = sum(info.file_size for info in whole.infolist() if info.filename.endswith(".ppm"))
    refused(
        import_files(tmp_path / "in", {**files, "GTSRB_Final_Test_Images.zip": bad}, "gtsrb"),
        f"decompresses to {total:,} bytes",
    )
    bad = declare(files["GTSRB_Final_Test_Images.zip"], name, 200_000_000)
    refused(
        import_files(tmp_path / "in", {**files, "GTSRB_Final_Test_Images.zip": bad}, "gtsrb"),
        f"{name} has 200,000,000 bytes",
    )
    bad = declare(files["GTSRB_Final_Test_GT.zip"], "GT-final_test.csv", 2**32 - 2)
    refused(
        import_files(tmp_path / "in", {**files, "GTSRB_Final_Test_GT.zip": bad}, "gtsrb"),
        "GT-final_test.csv has 4,294,967,294",
    )


@pytest.mark.parametrize("name", ["mnist", "emnist-letters"])
def test_gz_files_that_decompress_to_too_much(name, data, tmp_path):
    """Nothing is read beyond the size in the header."""
    build = archives.mnist if name == "mnist" else archives.letters
    files = build(archives.arrays(name))
    file = next(name for name in files if "images" in name)
    files[file] = gzip.compress(gzip.decompress(files[file]) + bytes(30_000_000), 1)
    with limits():
        refused(import_files(tmp_path / "in", files, name), name, "more data")


@pytest.mark.parametrize("claimed", [10**13, 10**9])
def test_an_npz_file_of_a_user_that_claims_too_much(claimed, tmp_path, monkeypatch):
    """Its arrays have no known limit, but they cannot be larger than what its bytes can decompress to."""
    monkeypatch.chdir(tmp_path)
    own(tmp_path)
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({claimed},), }}".ljust(117) + "\n"
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()
    with zipfile.ZipFile("task0.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for key in cache.ARRAYS:
            file.writestr(f"{key}.npy", head)
    whole = Path("task0.npz").read_bytes()
    bad = whole
    for key in cache.ARRAYS:
        bad = declare(bad, f"{key}.npy", min(claimed + len(head), 2**32 - 2))
    Path("task0.npz").write_bytes(bad)
    refused(program("run", "own", "sgd", *RUN), "task0.npz", "x_train", f"{min(claimed + len(head), 2**32 - 2):,} bytes")
    assert contents(tmp_path).keys() == {"task0.npz", "task1.npz", "tasks.toml"}


def test_labels_that_claim_too_many_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own(tmp_path)
    arrays = dict(np.load("task0.npz"))
    np.savez("task0.npz", **arrays | {"y_train": np.arange(16) % 2 * 10**15})
    refused(program("run", "own", "sgd", *RUN), "outside the 2 classes")
    Path("tasks.toml").write_text('[[task]]\nname = "a"\ndata = "task0.npz"\n')
    refused(program("run", "own", "sgd", *RUN), "tasks.toml", "class 1 of 1000000000000001 has no example")
    np.savez("task0.npz", **arrays | {"x_train": np.ones((16, 6, 6), complex)})
    refused(program("run", "own", "sgd", *RUN), "task0.npz", "x_train is not an array of numbers")


# Names


EVIL = """<script>alert("1")</script> & 'x' </svg><img src=x onerror=alert(1)> ${7*7} {{7*7}} \u202e数 =1+1"""


def test_the_names_of_a_users_tasks_are_escaped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own(tmp_path)
    names = [EVIL.replace("\u202e", ""), "x" * 900]
    tasks = [{"name": name, "data": f"task{k}.npz"} for k, name in enumerate(names)]
    Path("tasks.toml").write_text(mutations.toml({"task": tasks}), encoding="utf-8")
    outcome = program("run", "own", "random", *RUN)
    assert (outcome.code, outcome.error) == (0, "")
    assert program("report", "runs").code == 0
    text = Path("runs/report.html").read_text(encoding="utf-8")
    page = Reader(text)
    assert foreign_scripts(text) == []
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    cells = [cell for row in page.rows for cell in row]
    assert names[0] in cells
    assert names[1] in cells
    assert "Content-Security-Policy" in text
    assert all(len(path.name) < 200 for path in Path("runs").rglob("*"))


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "a\x07", "a\u202eb", "\x00"])
def test_a_name_with_control_characters_is_refused(name, tmp_path, monkeypatch):
    """They would change the state of a terminal."""
    monkeypatch.chdir(tmp_path)
    own(tmp_path)
    Path("tasks.toml").write_text(mutations.toml({"task": [{"name": name, "data": "task0.npz"}]}), encoding="utf-8")
    outcome = program("run", "own", "hat", *RUN)
    refused(outcome, "tasks.toml, task 1: name")
    assert re.fullmatch(r"[\x20-\x7e]+\n", outcome.error)


def test_every_name_of_a_record_is_escaped_everywhere(tmp_path):
    record = make(names=(EVIL, "x" * 100_000))
    changes = {
        "benchmark": EVIL.replace("/", "|"),  # it becomes part of a file's name
        "method": EVIL.replace("/", "|"),
        "network": EVIL * 1000,
        "benchmark_options": {"data": EVIL, EVIL: 1},
        "network_options": {EVIL: [EVIL, 1, None]},
        "method_options": {"c": EVIL * 1000, EVIL: EVIL},
        "regime": {**record.spec.regime, "schedule": EVIL, EVIL: EVIL},
        EVIL: EVIL,
    }
    record = with_spec(record, **changes)
    record.versions = {EVIL: EVIL, "torch": EVIL}
    save(tmp_path / "runs", [record])
    outcome = program("report", str(tmp_path / "runs"))
    assert (outcome.code, outcome.error) == (0, "")
    text = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    page = Reader(text)
    assert foreign_scripts(text) == []
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") > 20
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "by_task.csv", "report.html", "table.csv", f"{record.name}.json"}  # fmt: skip


def test_no_cell_of_the_table_is_a_formula():
    record = with_spec(make(), method='=HYPERLINK("http:evil")')
    (row,) = csv.DictReader(io.StringIO(csv_text(settings([record]))))
    assert row["method"] == """'=HYPERLINK("http:evil")"""


# Disks


class Disk:
    """A disk under a folder that allows `calls` more calls that change it; then every call fails with error `number`."""

    def __init__(self, root: Path, calls: int, number: int = errno.ENOSPC) -> None:
        self.root, self.left, self.number = str(root), calls, number
        self.refused = 0

    def call(self, path: Any, *named: str) -> None:
        if str(path).startswith(self.root) or not str(path).startswith("/"):
            self.left -= 1
            if self.left < 0:
                self.refused += 1
                raise OSError(self.number, os.strerror(self.number), *named)

    @contextlib.contextmanager
    def attached(self) -> Iterator["Disk"]:
        opened, low, disk = io.open, os.open, self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                disk.call(self.name)
                return super().write(data)

        def open_file(file: Any, mode: str = "r", *words: Any, **more: Any) -> Any:
            if not set(mode) & set("wax+") or "b" not in mode:
                return opened(file, mode, *words, **more)
            disk.call(file, str(file))
            return File(file, mode.replace("b", ""))

        def open_low(path: Any, flags: int, *words: Any, **more: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                disk.call(path, str(path))
            return low(path, flags, *words, **more)

        def guarded(real: Any) -> Any:
            def call(*words: Any, **more: Any) -> Any:
                place = words[0]
                disk.call(*([disk.root] if isinstance(place, int) else [place, str(place)]))  # fsync gets a file descriptor
                return real(*words, **more)

            return call

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io, "open", open_file)
            patch.setattr(os, "open", open_low)
            for name in ("mkdir", "fsync", "replace"):
                patch.setattr(os, name, guarded(getattr(os, name)))
            if self.number == errno.EROFS:
                for name in ("unlink", "rmdir", "rename"):
                    patch.setattr(os, name, guarded(getattr(os, name)))
            yield self


def temporary_files(root: Path) -> list[str]:
    """Return the names of temporary files, which a failure must not leave behind."""
    return [path.name for path in root.rglob(".*") if path.suffix != ".lock"]


def repeat_until_it_fits(root: Path, work: Callable[[], Outcome], named: str, step: int, freed: Callable[[], None]) -> int:
    """Run a command on a disk that allows 0, step, 2 * step, ... calls, until it succeeds.

    Every failure must be one line that names `named`, and must change no file; after it, `freed` runs with enough space.

    Returns:
        How many calls the command makes, rounded up to a multiple of `step`.
    """
    calls = 0
    while True:
        before = contents(root)
        with Disk(root, calls).attached() as disk:
            outcome = work()
        if not disk.refused:
            return calls
        if outcome.code:
            refused(outcome, "o space left", named)
            after = contents(root)
            assert {name: after.get(name) for name in before} == before, f"changed after {calls} calls"
        assert not temporary_files(root), f"left behind after {calls} calls"
        freed()
        calls += step


def run_on(root: Path, more: tuple[str, ...]) -> Callable[[], Outcome]:
    return lambda: program("run", "own", "hat", *RUN, *more)


@pytest.mark.parametrize(
    ("step", "more"), [(8, ()), pytest.param(1, ("--save-every", "0.00001"), marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_a_disk_that_fills_up_during_a_run(step, more, tmp_path, monkeypatch):
    """At any call. When there is space again, the run continues from its checkpoints and gives the same record."""
    monkeypatch.chdir(tmp_path)
    own(tmp_path)
    assert program("run", "own", "hat", *RUN[:-1], "whole").code == 0
    whole = results(next(Path("whole").glob("*.json")))

    def freed() -> None:
        assert run_on(tmp_path, ())().code == 0
        (path,) = Path("runs").glob("*.json")
        assert results(path) == whole
        path.unlink()

    assert repeat_until_it_fits(tmp_path, run_on(tmp_path, more), "runs", step, freed) > 20


def test_a_disk_that_fills_up_when_a_set_is_imported(data, tmp_path):
    copies = tmp_path / "in"
    copies.mkdir()
    np.savez(copies / "mnist.npz", **archives.arrays("mnist"))

    def work() -> Outcome:
        return program("data", "import", str(copies))

    def freed() -> None:
        assert work().code == 0
        assert program("data", "verify", "mnist").code == 0
        for path in data.glob("mnist.*"):
            path.unlink()

    assert repeat_until_it_fits(data, work, "data", 4, freed) > 5


@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_when_a_report_is_made(step, tmp_path):
    save(tmp_path / "runs", [make()])

    def work() -> Outcome:
        return program("report", str(tmp_path / "runs"))

    assert repeat_until_it_fits(tmp_path, work, "runs", step, lambda: None) > 10
    assert (tmp_path / "runs" / "report.html").read_text().endswith("</html>\n")


def test_a_disk_that_fills_up_when_a_method_is_saved(tmp_path):
    model(tmp_path)
    path = tmp_path / "model.safetensors"
    method = hatrack.load(path, trunk())
    for calls in range(3):
        before = contents(tmp_path)
        with Disk(tmp_path, calls).attached(), pytest.raises(OSError, match="No space left on device"):
            hatrack.save(method, path)
        assert contents(tmp_path) == before


def trunk() -> torch.nn.Module:
    return mlp((1, 4, 4), widths=(24, 24), dropout=0.2, input_dropout=0.1)


COMMANDS = {
    "run": (own, ["run", "own", "sgd", *RUN], "runs"),
    "run again": (finished, ["run", "own", "sgd", *RUN, "--again"], "runs"),
    "go on": (stopped, ["run", "own", "hat", *RUN], "runs"),
    "resume": (stopped, ["resume", "runs", "--device", "cpu"], "runs"),
    "report": (finished, ["report", "runs"], "runs"),
    "report elsewhere": (finished, ["report", "runs", "--out", "there"], "there"),
    "import": (
        lambda root: np.savez(root / "mnist.npz", **archives.arrays("mnist")),
        ["data", "import", "mnist.npz"],
        "data",
    ),
}


@pytest.fixture
def place(pristine, tmp_path, monkeypatch):
    """Return a function that copies the folder that `build` writes and makes it the current folder."""

    def copy(build: Callable[[Path], None]) -> Path:
        root = Path(shutil.copytree(pristine(build), tmp_path / "copy"))
        monkeypatch.chdir(root)
        monkeypatch.setenv("HATRACK_DATA", str(root / "data"))
        return root

    return copy


@pytest.mark.parametrize("name", COMMANDS)
def test_a_read_only_folder(name, place):
    """The command fails before it does any work."""
    build, words, named = COMMANDS[name]
    root = place(build)
    before = contents(root)
    for number in (errno.EROFS, errno.EACCES):
        with Disk(root, 0, number).attached():
            refused(program(*words), named, os.strerror(number))
        assert contents(root) == before


def test_a_finished_run_needs_no_writable_folder(place):
    root = place(finished)
    before = contents(root)
    with Disk(root, 0, errno.EROFS).attached():
        assert program("run", "own", "sgd", *RUN).code == 0
    assert contents(root) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_in_place_of_a_folder(name, place):
    build, words, named = COMMANDS[name]
    root = place(build)
    if (root / named).exists():
        (root / named).rename(root / "before")
    (root / named).write_text("mine")
    before = contents(root)
    refused(program(*words), named)
    assert contents(root) == before


# Other versions, other runs


def change_metadata(path: Path, **changes: Any) -> None:
    values, metadata = tensors.load(path)
    tensors.save(path, values, {**metadata, **changes})


def change_record(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(sign({**json.loads(path.read_text()), **changes})))


VERSIONS: dict[str, tuple[Any, str, Callable[[Path], None], list[list[str]], str]] = {
    "a newer record": (
        finished, "runs/*.json", lambda path: change_record(path, schema=SCHEMA + 1),
        [["report", "runs"], ["run", "own", "sgd", *RUN]], f"schema {SCHEMA + 1}, newer than {SCHEMA}",
    ),
    "a record of another run": (
        finished, "runs/*.json", lambda path: change_record(path, spec={**json.loads(path.read_text())["spec"], "seed": 1}),
        [["report", "runs"], ["run", "own", "sgd", *RUN]], "its spec is that of own-sgd-seed1-",
    ),
    "an edited record": (
        finished, "runs/*.json", lambda path: path.write_text(path.read_text().replace('"parameters": ', '"parameters": 1')),
        [["report", "runs"], ["run", "own", "sgd", *RUN]], "it was changed after it was written",
    ),
    "a newer state": (
        stopped, "runs/*.part/task-1.*", lambda path: change_metadata(path, format=FORMAT + 1),
        [["run", "own", "hat", *RUN], ["resume", "runs", "--device", "cpu"]], "newer than this version can read",
    ),
    "a state of another run": (
        stopped, "runs/*.part/task-1.*", lambda path: change_metadata(path, spec={"benchmark": "own"}),
        [["run", "own", "hat", *RUN]], "belongs to another run",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERSIONS)
def test_other_versions_and_other_runs(name, place):
    build, pattern, damage, commands, said = VERSIONS[name]
    root = place(build)
    (path,) = root.glob(pattern)
    damage(path)
    before = contents(root)
    for words in commands:
        refused(program(*words), path.name, said)
        after = contents(root)
        kept = [file for file in before if not str(file).endswith("epochs.jsonl")]  # whose lines only grow
        assert {file: after.get(file) for file in kept} == {file: before[file] for file in kept}


def test_unknown_files_among_the_checkpoints_are_ignored(place):
    root = place(stopped)
    (part,) = root.glob("runs/*.part")
    (part / "task-x.safetensors").write_bytes(b"")
    (part / "task-0-1.safetensors").write_bytes(b"")
    os.mkfifo(part / "task-7.safetensors")  # reading it would never end
    assert program("run", "own", "hat", *RUN).code == 0
    assert results(next(root.glob("runs/*.json"))) == results(next(root.glob("whole/*.json")))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "there is not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: you tried to allocate 8000 bytes. Error"),
            "for another 8000 bytes",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU"),
            "for another 2.50 GiB",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "runs/x.json"), "runs/x.json: Permission denied"),
        (ValueError("a\x1b[2Jb" + "x" * 5000), "a [2Jbxxx"),
    ],
)
def test_an_error_is_shown_as_one_line(error, said, monkeypatch):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("hatrack.cli.list.everything", fail)
    outcome = program("list")
    refused(outcome, said)
    assert re.fullmatch(r"[^\x00-\x1f]{10,1020}\n", outcome.error)


@pytest.fixture
def defect(tmp_path, monkeypatch):
    """A command that fails as no command should; the folder of temporary files is returned."""

    def fail() -> None:
        raise RuntimeError("a \x1b[2Jdefect\nof ours")

    monkeypatch.setattr("hatrack.cli.list.everything", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def test_a_defect_of_the_program_is_one_line_and_a_log_file(defect):
    outcome = program("list")
    (log,) = defect.iterdir()
    assert outcome.code == 1
    assert re.fullmatch(r"hatrack: [^\x00-\x1f]+\n", outcome.error)
    assert "RuntimeError: a [2Jdefect of ours" in outcome.error
    assert "report it" in outcome.error
    assert outcome.error.endswith(f"{log}\n")
    text = log.read_text()
    assert "Traceback" in text
    assert "in fail" in text
    assert "hatrack list\n" in text
    assert log.stat().st_mode & 0o077 == 0, "others can't read it"


def test_a_defect_is_told_of_where_no_log_can_be_written(defect):
    defect.rmdir()
    outcome = program("list")
    assert outcome.code == 1
    assert re.fullmatch(r"hatrack: .*a \[2Jdefect of ours.*HATRACK_TRACEBACK.*No such file or directory\)\n", outcome.error)


def test_tracebacks_are_shown_if_somebody_asks(defect, monkeypatch):
    monkeypatch.setenv("HATRACK_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="defect"):
        program("list")
    with pytest.raises(ValueError, match="no folder"):
        program("report", "nowhere")
    assert not list(defect.iterdir())
