"""`hatrack data`: list, get, verify and import, with copies of every kind and everything that can be wrong with them."""

import dataclasses
import gzip
import pickle

import numpy as np
import pytest
from PIL import Image

from hatrack.cli.data import command as data_command
from hatrack.cli.data import state
from hatrack.datasets import cache
from hatrack.datasets.catalog import SETS
from hatrack.datasets.sources import load
from tests.helpers import archives
from tests.helpers.publishing import assert_same

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def run(capsys):
    """Run a command; what it says, or the one line of its error."""

    def command(*words):
        capsys.readouterr()
        data_command.main([str(word) for word in words], standalone_mode=False)
        return capsys.readouterr().out

    return command


@pytest.fixture
def refused(run, capsys):
    """Run a command that must fail with one line that has these words."""

    def command(*words, says):
        with pytest.raises((ValueError, OSError)) as error:
            run(*words)
        text = str(error.value)
        assert "\n" not in text
        for word in says:
            assert word in text
        return capsys.readouterr().out

    return command


@pytest.fixture
def faces(monkeypatch):
    """FaceScrub with three people."""
    monkeypatch.setitem(SETS, "facescrub", dataclasses.replace(SETS["facescrub"], classes=3, train=30, test=3))


def save(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **data)
    return path


def write(path, files):
    path.mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        (path / name).write_bytes(contents)
    return path


def contents(where):
    return {p.name: p.read_bytes() for p in where.glob("[!.]*")}


# list, verify


def test_list_says_what_is_there_and_what_the_rest_costs(run, folder, tmp_path):
    shown = run("list")
    assert str(folder) in shown
    for name in SETS:
        assert name in shown
    assert "246 MB to download" in shown
    assert "to be imported" in shown
    assert "here," not in shown
    run("import", save(tmp_path / "mnist.npz", archives.arrays("mnist")))
    save(folder / "cifar10.npz", archives.arrays("cifar10"))
    lines = {line.split()[0]: line for line in run("list").splitlines()}
    assert "here, 1 MB, 20 + 10 of them" in lines["mnist"]
    assert "here, 1 MB, put there by hand" in lines["cifar10"]


def test_list_says_which_checksums_were_never_compared_with_the_files(folder):
    unsure = {name for name in SETS if "checksums never compared with the real files" in state(name)}
    assert unsure == {name for name, spec in SETS.items() if spec.files} - {"mnist", "fashion-mnist", "cifar10"}


def test_verify_knows_the_canonical_sets(run, tmp_path, monkeypatch):
    assert "no sets" in run("verify")
    data = archives.arrays("mnist")
    spec = dataclasses.replace(SETS["mnist"], train=20, test=10, digest=cache.digest(data))
    monkeypatch.setitem(SETS, "mnist", spec)
    path = save(tmp_path / "mnist.npz", data)
    assert run("import", path) == "mnist: 20 + 10 images, canonical\n"
    assert "canonical" in run("list")
    assert run("verify") == f"mnist: 20 + 10 images, canonical, as imported from {path} on {cache.note('mnist').date}\n"
    data["x_test"][0, 0, 0] ^= 1
    assert run("import", save(path, data), "--replace") == "mnist: 20 + 10 images\n"
    assert "canonical" not in run("verify", "mnist")


def test_verify_tells_of_all_sets_before_it_fails(run, refused, folder, tmp_path):
    for name in ("mnist", "cifar10", "svhn"):
        run("import", save(tmp_path / f"{name}.npz", archives.arrays(name)))
    (folder / "mnist.npz").write_bytes(b"broken")
    good = contents(folder)
    shown = refused("verify", says=["mnist.npz is not a readable data file"])
    assert "cifar10: 20 + 10 images" in shown
    assert "svhn" in shown
    assert contents(folder) == good
    refused("verify", "gtsrb", says=["there is no", "gtsrb.npz"])
    refused("verify", "gtrsb", says=["did you mean 'gtsrb'"])


# get


def test_get(run, refused, digits, site, monkeypatch):
    assert run("get", "mnist") == "mnist: 20 + 10 images\n"
    assert run("get", "mnist") == "mnist: already there\n"
    assert_same(load("mnist"), digits)
    requests = site.requests.total()
    refused("get", "mnist", "cifar", says=["no data set 'cifar'", "cifar10"])
    refused("get", "facescrub", says=["import FOLDER --name facescrub"])
    assert site.requests.total() == requests
    monkeypatch.setenv("HATRACK_MIRROR", site.address)
    shown = refused(
        "get", "all", says=["could not download cifar-10-binary.tar.gz", "could not download caltech-101.zip", "404"]
    )
    assert shown == "mnist: already there\n"


# import: .npz


def test_import_a_folder_of_npz_files(run, folder, tmp_path):
    sets = {name: archives.arrays(name) for name in ("mnist", "cifar100", "emnist-letters")}
    for name, data in sets.items():
        save(tmp_path / "in" / f"{name}.npz", data)
    save(tmp_path / "in" / "svhn-part.npz", archives.arrays("svhn"))
    save(tmp_path / "in" / "cifar-10.npz", archives.arrays("cifar10"))
    shown = run("import", tmp_path / "in")
    for name, data in sets.items():
        assert f"{name}: " in shown
        assert_same(load(name), data)
    assert "svhn-part.npz: skipped, it is only a small part of svhn" in shown
    assert "cifar-10.npz: skipped, no data set 'cifar-10'; did you mean 'cifar10'" in shown
    assert sorted(p.stem for p in folder.glob("*.npz")) == ["cifar100", "emnist-letters", "mnist"]
    before = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.npz")}
    assert run("import", tmp_path / "in").count("already there") == 3
    assert {p.name: p.stat().st_mtime_ns for p in folder.glob("*.npz")} == before


def test_a_part_of_a_set_must_be_named(run, refused, folder, tmp_path):
    data = archives.arrays("svhn")
    path = save(tmp_path / "in" / "svhn-part.npz", data)
    save(tmp_path / "in" / "mnist.npz", archives.arrays("mnist"))
    refused("import", path, says=["only a small part of svhn", "--name svhn"])
    assert not list(folder.glob("*.npz"))
    assert "svhn: 20 + 10 images of 73,257 + 26,032" in run("import", path.parent, "--name", "svhn")
    assert_same(load("svhn"), data)
    assert not (folder / "mnist.npz").exists()
    assert "already there" in run("import", path, "--name", "svhn")


def test_other_images_replace_a_set_only_when_asked(run, refused, folder, tmp_path):
    first, second = archives.arrays("mnist"), archives.arrays("mnist", 3)
    run("import", save(tmp_path / "mnist.npz", first))
    good = contents(folder)
    path = save(tmp_path / "mnist.npz", second)
    refused("import", path, says=["has other images than", "--replace"])
    assert contents(folder) == good
    run("import", path, "--replace")
    assert_same(load("mnist"), second)
    (folder / "mnist.npz").write_bytes(b"broken")
    run("import", path)  # what is broken is replaced without asking
    assert_same(load("mnist"), second)


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("something was unpickled",))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"y_train": np.array([Trap()] * 20, dtype=object)}, ["y_train", "pickled"]),
        ({"y_train": np.arange(20, dtype=np.uint8) % 11}, ["training", "label 10 is outside the 10 classes"]),
        ({"y_test": np.full(10, 99, np.uint8)}, ["test", "label 99"]),
        ({"y_train": np.zeros(20, np.uint8)}, ["class 1 of 10 has no example"]),
        ({"x_test": np.zeros((10, 32, 32, 3), np.uint8)}, ["x_test", "(28, 28)"]),
        ({"x_test": np.zeros((0, 28, 28), np.uint8), "y_test": np.zeros(0, np.uint8)}, ["no images"]),
        ({"y_test": np.zeros(9, np.uint8)}, ["10 images", "(9,)"]),
        ({"x_train": np.zeros((20, 28, 28))}, ["x_train", "uint8", "float64"]),
        ({"x_train": np.zeros((200_000, 28, 28), np.uint8)}, ["x_train", "larger than the whole set"]),
    ],
)
def test_wrong_arrays_are_refused(run, refused, folder, tmp_path, changes, says):
    run("import", save(tmp_path / "mnist.npz", archives.arrays("mnist")))
    good = contents(folder)
    bad = save(tmp_path / "bad" / "mnist.npz", archives.arrays("mnist") | changes)
    save(tmp_path / "bad" / "cifar10.npz", archives.arrays("cifar10"))
    shown = refused("import", bad.parent, "--replace", says=[str(bad), *says])
    assert "cifar10: 20 + 10 images" in shown  # the good file beside it is taken
    assert {name: data for name, data in contents(folder).items() if "mnist" in name} == good


@pytest.mark.parametrize("raw", [b"", b"PK\x03\x04 no more", pickle.dumps(Trap()), b"\x93NUMPY\x01\x00"])
def test_files_that_are_no_archives(refused, tmp_path, raw):
    path = tmp_path / "mnist.npz"
    path.write_bytes(raw)
    refused("import", path, says=[str(path), "not a readable data file"])


# import: published files


def test_import_idx_files(run, refused, folder, tmp_path, monkeypatch):
    data = archives.arrays("mnist")
    packed = write(tmp_path / "packed", archives.mnist(data))
    refused("import", packed, says=["mnist or fashion-mnist", "--name"])
    run("import", packed, "--name", "fashion-mnist")
    assert_same(load("fashion-mnist"), data)
    assert not (folder / "mnist.npz").exists()
    monkeypatch.setitem(SETS, "mnist", dataclasses.replace(SETS["mnist"], digest=cache.digest(data)))
    plain = write(tmp_path / "plain", {n.removesuffix(".gz"): gzip.decompress(c) for n, c in archives.mnist(data).items()})
    assert "canonical" in run("import", plain / "t10k-labels-idx1-ubyte")  # known by its digest
    assert_same(load("mnist"), data)


def test_import_letters(run, tmp_path):
    data = archives.arrays("emnist-letters")
    run("import", write(tmp_path / "in", archives.letters(data)))
    assert_same(load("emnist-letters"), data)


def test_import_mat_files(run, refused, tmp_path):
    data = archives.arrays("svhn")
    where = write(tmp_path / "in", archives.svhn(data))
    run("import", where / "test_32x32.mat")
    assert_same(load("svhn"), data)
    (where / "train_32x32.mat").unlink()
    refused("import", where / "test_32x32.mat", says=["test_32x32.mat", "is not a set"])
    write(where, {"train_32x32.mat": archives.mat(data["x_train"], data["y_train"] * np.uint8(3), packed=True)})
    refused("import", where, "--replace", says=["svhn", "labels are not from 1 to 10"])
    assert_same(load("svhn"), data)


def test_import_archives(run, refused, tmp_path):
    data = archives.arrays("cifar10")
    files = archives.cifar(data, coarse=False)
    where = write(tmp_path / "in", files)
    run("import", where)
    assert_same(load("cifar10"), data)
    name, whole = next(iter(files.items()))
    for bad in (whole[: len(whole) // 2], b"nothing", archives.tarred({"cifar-10-batches-bin/data_batch_1.bin": b""})):
        write(where, {name: bad})
        refused("import", where / name, "--replace", says=["the files of cifar10", "can't be read"])
    assert_same(load("cifar10"), data)


# import: images


def people(path, names=("ann", "bob", "eve"), count=10, size=None):
    """Folders of images; returns {image as stored: label}."""
    expected = {}
    for label, name in enumerate(names):
        (path / name).mkdir(parents=True)
        for n in range(count):
            shape = size or ((32, 32, 3), (50, 40, 3), (20, 20))[n % 3]
            image = Image.fromarray(archives.images(1, shape, 100 * label + n)[0])
            image.save(path / name / f"{n}.{('png', 'bmp', 'tiff')[n % 3]}")
            stored = np.asarray(image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR))
            expected[stored.transpose(2, 0, 1).tobytes()] = label
    return expected


def pairs(part):
    return [(x.numpy().tobytes(), int(y)) for x, y in zip(*part, strict=True)]


def test_import_a_folder_of_images(run, refused, faces, tmp_path):
    expected = people(tmp_path / "faces")
    (tmp_path / "faces" / "ann" / "notes.txt").write_text("not an image")
    refused("import", tmp_path / "faces", says=["--name"])
    assert run("import", tmp_path / "faces", "--name", "facescrub") == "facescrub: 27 + 3 images of 30 + 3\n"
    source = load("facescrub")
    assert dict(pairs(source.train) + pairs(source.test)) == expected
    assert source.test[1].tolist() == [0, 1, 2]


def test_import_images_with_a_test_set(run, refused, faces, tmp_path):
    path = tmp_path / "facescrub"
    train = people(path / "train", ("10", "9", "100"), size=(32, 32, 3))
    test = people(path / "test", ("10", "9", "100"), 2, size=(33, 32, 3))
    run("import", path)  # the folder has the name of the set
    order = {0: 1, 1: 0, 2: 2}  # names that are numbers count as numbers
    source = load("facescrub")
    assert dict(pairs(source.train)) == {image: order[label] for image, label in train.items()}
    assert dict(pairs(source.test)) == {image: order[label] for image, label in test.items()}
    (path / "test" / "9").rename(path / "test" / "8")
    refused("import", path, "--replace", says=[str(path / "test" / "8"), "no counterpart"])


def test_folders_of_images_that_are_refused(run, refused, faces, folder, tmp_path):
    path = tmp_path / "facescrub"
    people(path)
    run("import", path)
    good = contents(folder)
    bad = path / "bob" / "3.png"
    whole = bad.read_bytes()
    for broken in (b"", b"not an image", whole[: len(whole) // 2], b"%!PS-Adobe-3.0 EPSF-3.0\n"):
        bad.write_bytes(broken)
        refused("import", path, "--replace", says=[str(bad), "not a readable image"])
    bad.write_bytes(whole)
    (path / "zoe").mkdir()
    refused("import", path, "--replace", says=["4 sub-folders; 3 are needed"])
    (path / "eve").rename(tmp_path / "eve")
    refused("import", path, "--replace", says=["no images", str(path / "zoe")])
    assert contents(folder) == good


def test_gray_sets_take_gray_images(run, tmp_path):
    for letter in "ABCDEFGHIJ":
        (tmp_path / "notmnist" / letter).mkdir(parents=True)
        for n in range(3):
            Image.fromarray(archives.images(1, (56, 56, 3), n)[0]).save(tmp_path / "notmnist" / letter / f"{n}.jpg")
    (tmp_path / "notmnist" / "A" / "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png").write_bytes(b"")
    run("import", tmp_path / "notmnist")
    assert load("notmnist").train[0].shape == (20, 1, 28, 28)


def test_nothing_to_import(refused, tmp_path):
    refused("import", tmp_path / "none", says=["there is no file or folder", "none"])
    (tmp_path / "empty").mkdir()
    refused("import", tmp_path / "empty", says=["nothing to import", ".npz"])
    (tmp_path / "text.txt").write_text("")
    refused("import", tmp_path / "text.txt", says=["text.txt", ".npz"])
    refused("import", tmp_path / "empty", "--name", "cifar", says=["did you mean 'cifar10'"])
