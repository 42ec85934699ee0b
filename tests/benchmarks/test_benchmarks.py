"""Benchmarks on the samples that come with the package, and errors when the full data is missing or damaged."""

import gc
import math
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hatrack.benchmarks
from hatrack.benchmarks import BENCHMARKS
from hatrack.benchmarks.mixture import digits_and_clothes
from hatrack.benchmarks.mnist import block_map, pmnist, pmnist_blocks, rmnist, rotation_map, smnist
from hatrack.datasets.sources import load
from hatrack.options import parameters

SAMPLES = Path(hatrack.datasets.__file__).parent / "samples"
SAMPLED = [name for name, sequence in BENCHMARKS.items() if "data" in parameters(sequence)]
MEAN, STD = 0.1307, 0.3081  # MNIST in the HAT paper's code


@pytest.fixture(scope="module")
def arrays():
    """Return the arrays in the files of the samples."""
    result = {}
    for name in ("mnist", "fashion-mnist"):
        with np.load(SAMPLES / f"{name}.npz") as file:
            result[name] = {key: file[key] for key in file.files}
    return result


def everything(split):
    """Return all inputs of a split."""
    return split.inputs(torch.arange(len(split)))


# The samples


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_samples_are_balanced(arrays, name):
    for part, count in (("train", 400), ("test", 100)):
        x, y = arrays[name][f"x_{part}"], arrays[name][f"y_{part}"]
        assert (x.shape, x.dtype, y.dtype) == ((10 * count, 28, 28), np.uint8, np.uint8)
        assert np.bincount(y).tolist() == [count] * 10
        assert x.reshape(len(x), -1).max(1).min() > 50  # no image is empty
        assert len(np.unique(x.reshape(len(x), -1), axis=0)) > 0.99 * len(x)  # nor a copy of another one


def test_samples_are_small_and_have_their_licences():
    assert sum(path.stat().st_size for path in SAMPLES.glob("*.npz")) < 3.5e6
    text = (SAMPLES / "README.md").read_text(encoding="utf-8")
    for path in SAMPLES.glob("*.npz"):
        assert path.name in text
    for word in ("LeCun", "CC BY-SA 3.0", "Zalando", "MIT"):
        assert word in text


@pytest.mark.parametrize("name", SAMPLED)
def test_every_benchmark_of_the_samples(name):
    tasks = BENCHMARKS[name](3, data="sample", valid=0.15)
    again = BENCHMARKS[name](3, data="sample", valid=0.15)
    assert [t.index for t in tasks] == list(range(len(tasks)))
    assert len({t.name for t in tasks}) == len(tasks)
    for task, same in zip(tasks, again, strict=True):
        whole = len(task.train) + len(task.valid)
        assert len(task.valid) == int(0.15 * whole)
        assert not set(task.train.rows.tolist()) & set(task.valid.rows.tolist())
        assert set(task.train.y.tolist()) == set(task.test.y.tolist()) == set(range(task.classes))
        assert torch.equal(everything(task.test), everything(same.test))
        assert torch.equal(task.train.rows, same.train.rows)


# Permuted


@pytest.mark.parametrize("seed", [0, 5])
def test_pmnist_has_the_authors_permutations(arrays, seed):
    tasks = pmnist(seed, data="sample")
    assert len(tasks) == 10
    numbers = list(range(10))
    np.random.RandomState(seed).shuffle(numbers)
    x = arrays["mnist"]["x_test"].reshape(1000, 784)
    for i, task in enumerate(tasks):
        pixels = np.arange(784)  # sklearn.utils.shuffle(image, random_state=r_i * 100 + i) is image[pixels]
        np.random.RandomState(numbers[i] * 100 + i).shuffle(pixels)
        assert not np.array_equal(pixels, np.arange(784))
        assert task.classes == 10
        expected = (x[:, pixels] / 255 - MEAN) / STD
        np.testing.assert_allclose(everything(task.test).reshape(1000, 784), expected, atol=1e-5)
        np.testing.assert_array_equal(task.test.y, arrays["mnist"]["y_test"])


def test_pmnist_tasks_share_one_image_tensor():
    tasks = pmnist(0, data="sample", tasks=4)
    assert len({t.train.x.data_ptr() for t in tasks} | {t.valid.x.data_ptr() for t in tasks}) == 1
    assert len({t.test.x.data_ptr() for t in tasks}) == 1
    other = pmnist(1, data="sample", tasks=1)[0]
    assert other.train.x.data_ptr() == tasks[0].train.x.data_ptr()


def test_pmnist_with_a_plain_first_task(arrays):
    tasks, usual = pmnist(0, data="sample", tasks=3, first="plain"), pmnist(0, data="sample", tasks=3)
    assert [t.name for t in tasks] == ["plain", "permuted 1", "permuted 2"]
    plain = (arrays["mnist"]["x_test"][:, None] / 255 - MEAN) / STD
    np.testing.assert_allclose(everything(tasks[0].test), plain, atol=1e-5)
    for a, b in zip(tasks[1:], usual[1:], strict=True):
        assert torch.equal(everything(a.test), everything(b.test))


def test_many_permutations_are_all_different():
    # r_k * 100 + k is the same number for two tasks of this seed
    tasks = pmnist(49, data="sample", tasks=101)
    assert len({t.test.transform.pixels.numpy().tobytes() for t in tasks}) == 101


def test_pmnist_without_normalisation(arrays):
    task = pmnist(0, data="sample", tasks=1, first="plain", normalise=False)[0]
    np.testing.assert_allclose(everything(task.test)[:, 0], arrays["mnist"]["x_test"] / 255, atol=1e-6)


def test_fresh_permutations_differ_every_time():
    one, two = (pmnist(0, data="sample", tasks=3, first="plain", permutations="fresh") for _ in range(2))
    assert torch.equal(one[0].test.transform.pixels, two[0].test.transform.pixels), "the first task is not permuted"
    for a, b in zip(one[1:], two[1:], strict=True):
        assert not torch.equal(a.test.transform.pixels, b.test.transform.pixels)
        assert sorted(a.test.transform.pixels.flatten().tolist()) == list(range(784))
        assert torch.equal(a.train.rows, b.train.rows), "everything else depends on the seed alone"


@pytest.mark.parametrize("sequence", [pmnist, smnist])
def test_validation_on_the_training_set(sequence):
    for task in sequence(0, data="sample", validate_on="train"):
        assert task.valid is task.train
        assert len(task.train) == 400 * task.classes, "nothing is held out"


# Blocks


def test_whole_blocks_move():
    image = torch.arange(784).reshape(28, 28)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    moved = image.flatten()[block_map(order, 28)].reshape(28, 28)
    for target, block in enumerate(order.tolist()):
        (row, column), (from_row, from_column) = (tuple(7 * k for k in divmod(number, 4)) for number in (target, block))
        expected = image[from_row : from_row + 7, from_column : from_column + 7]
        assert torch.equal(moved[row : row + 7, column : column + 7], expected)


def test_pmnist_blocks(arrays):
    tasks = pmnist_blocks(0, data="sample")
    assert [t.name for t in tasks] == ["plain", "blocks 1", "blocks 2", "blocks 3", "blocks 4"]
    np.testing.assert_allclose(everything(tasks[0].test)[:, 0], arrays["mnist"]["x_test"] / 255, atol=1e-6)
    maps = [t.test.transform.pixels[0] for t in tasks]
    assert len({m.numpy().tobytes() for m in maps}) == 5
    for pixels in maps:
        assert torch.equal(pixels.sort().values, torch.arange(784))
        cut = pixels.reshape(4, 7, 4, 7).transpose(1, 2).reshape(16, 7, 7)
        assert torch.equal(cut - cut[:, :1, :1], (torch.arange(7)[:, None] * 28 + torch.arange(7)).expand(16, 7, 7))
    assert len({t.train.x.data_ptr() for t in tasks}) == 1
    other = pmnist_blocks(1, data="sample")
    assert not torch.equal(other[1].test.transform.pixels, tasks[1].test.transform.pixels)


# Rotated


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, -1])
@pytest.mark.parametrize("size", [28, 5])
def test_right_angles_rotate_anticlockwise(turns, size):
    image = torch.arange(size * size).reshape(size, size)
    turned = image.flatten()[rotation_map(90.0 * turns, size)].reshape(size, size)
    assert torch.equal(turned, torch.rot90(image, turns))  # as torchvision's rotate, positive is anticlockwise


@pytest.mark.parametrize("degrees", [-7.3, 12.5, 33.7, 101.1])
def test_a_rotation_uses_the_nearest_pixel(degrees):
    size = 28
    c, cos, sin = (size - 1) / 2, math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    expected = []
    for row in range(size):
        for column in range(size):
            right, up = column - c, c - row  # with y upwards; rotating back by `degrees` gives the source
            x, y = cos * right + sin * up, cos * up - sin * right
            column_, row_ = math.floor(x + c + 0.5), math.floor(c - y + 0.5)
            inside = 0 <= row_ < size and 0 <= column_ < size
            expected.append(row_ * size + column_ if inside else -1)
    assert rotation_map(degrees, size).tolist() == expected
    assert -1 in expected


@pytest.mark.parametrize("degrees", [-7.3, 33.7, 101.1])
def test_a_rotation_equals_pillows(degrees):
    # torchvision's rotate of 004 calls this for images
    image = np.random.RandomState(0).randint(1, 256, (28, 28)).astype(np.uint8)
    pixels = rotation_map(degrees, 28).numpy()
    turned = np.where(pixels < 0, 0, image.flatten()[pixels]).reshape(28, 28)
    np.testing.assert_array_equal(turned, np.asarray(Image.fromarray(image).rotate(degrees, Image.Resampling.NEAREST)))


@pytest.mark.parametrize("step", [10.0, 25.0])
def test_rmnist_angles(step):
    angles = []
    for seed in range(3):
        tasks = rmnist(seed, data="sample", step=step)
        assert len(tasks) == 20
        for k, task in enumerate(tasks):
            angle = float(task.name.split()[-1])  # rounded to one place
            assert (k - 1) * step - 0.05 <= angle <= k * step + 0.05
            angles.append(k * step - angle)
    assert len(set(angles)) > 40
    assert [t.name for t in rmnist(0, data="sample", step=0.0)] == [t.name for t in rmnist(0, data="sample", step=9.0)]
    assert min(angles) < 0.1 * step
    assert max(angles) > 0.9 * step


def test_rmnist_rotates_the_digits(arrays):
    task = rmnist(0, data="sample", tasks=8)[7]
    angle = 7 * 10 - np.random.RandomState(0).uniform(0, 10, 8)[7]
    seen = everything(task.test)[:20, 0].numpy()
    for n in range(20):
        turned = np.asarray(Image.fromarray(arrays["mnist"]["x_test"][n]).rotate(angle, Image.Resampling.NEAREST))
        different = np.abs(seen[n] - turned / 255) > 1e-4
        assert different.sum() <= 3  # at a tie, Pillow's fixed-point arithmetic may choose the other pixel
    assert len({t.train.x.data_ptr() for t in rmnist(0, data="sample", tasks=3)}) == 1


# Split


@pytest.mark.parametrize(("tasks", "groups"), [(2, ["01234", "56789"]), (5, ["01", "23", "45", "67", "89"])])
def test_smnist_label_groups(arrays, tasks, groups):
    x, y = arrays["mnist"]["x_test"], arrays["mnist"]["y_test"]
    for task, group in zip(smnist(0, data="sample", tasks=tasks), groups, strict=True):
        digits = [int(d) for d in group]
        keep = np.isin(y, digits)
        assert task.classes == len(digits)
        assert len(task.train) + len(task.valid) == 400 * len(digits)
        np.testing.assert_allclose(everything(task.test)[:, 0], (x[keep] / 255 - MEAN) / STD, atol=1e-5)
        assert task.test.y.tolist() == [digits.index(d) for d in y[keep]]


def test_smnist_training_labels_belong_to_their_images(arrays):
    x, y = arrays["mnist"]["x_train"], arrays["mnist"]["y_train"]
    task = smnist(1, data="sample")[1]
    for split in (task.train, task.valid):
        seen = everything(split)[:50, 0].numpy()
        for n in range(50):
            row = split.rows[n].item()
            np.testing.assert_allclose(seen[n], (x[row] / 255 - MEAN) / STD, atol=1e-5)
            assert split.y[n].item() == y[row] - 5


# Digits and clothes


def test_digits_and_clothes_alternate(arrays):
    tasks = digits_and_clothes(0, data="sample")
    assert [t.name.split()[0] for t in tasks] == ["digits", "clothes"] * 3
    assert [t.classes for t in tasks] == [3] * 6
    for k, task in enumerate(tasks):
        data, first = arrays["mnist" if k % 2 == 0 else "fashion-mnist"], 3 * (k // 2)
        keep = (data["y_test"] >= first) & (data["y_test"] < first + 3)
        assert torch.bincount(task.test.y).tolist() == [100, 100, 100]
        assert len(task.train) + len(task.valid) == 1200
        assert task.test.y.tolist() == (data["y_test"][keep].astype(int) - first).tolist()
        mean, std = (MEAN, STD) if k % 2 == 0 else (0.2860, 0.3530)
        np.testing.assert_allclose(everything(task.test)[:, 0], (data["x_test"][keep] / 255 - mean) / std, atol=1e-5)
    assert len({t.train.x.data_ptr() for t in tasks}) == 2


def test_normalisation_fits_the_data(arrays):
    # the constants belong to the complete sets, of which the samples are a random part
    for name, mean, std in (("mnist", MEAN, STD), ("fashion-mnist", 0.2860, 0.3530)):
        x = arrays[name]["x_train"] / 255
        assert x.mean() == pytest.approx(mean, abs=0.01)
        assert x.std() == pytest.approx(std, abs=0.01)


# Options


@pytest.mark.parametrize(
    ("sequence", "options", "message"),
    [
        (pmnist, {"tasks": 0}, "tasks must be at least 1, not 0"),
        (pmnist, {"first": "plane"}, "first must be one of 'permuted', 'plain', not 'plane'"),
        (pmnist, {"data": "samples"}, "data must be one of 'full', 'sample', not 'samples'"),
        (pmnist, {"valid": -0.5}, "valid must be at least 0, not -0.5"),
        (pmnist, {"validate_on": "test"}, "validate_on must be one of 'held-out', 'train', not 'test'"),
        (rmnist, {"step": -1.0}, "step must be at least 0, not -1.0"),
        (smnist, {"tasks": 3}, "tasks must be one of 2, 5, not 3"),
        (smnist, {"tasks": 5.0}, "tasks must be one of 2, 5, not 5.0"),
        (digits_and_clothes, {"data": "none"}, "data must be one of"),
    ],
)
def test_options_out_of_range(sequence, options, message):
    with pytest.raises(ValueError, match=message):
        sequence(0, **{"data": "sample", **options})


# Data that is missing or damaged


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HATRACK_DATA", str(tmp_path))
    return tmp_path


def small(**changes):
    """Return a small MNIST with ten training images of every class, with changes."""
    y = np.arange(100, dtype=np.uint8) % 10
    x = np.random.RandomState(0).randint(0, 256, (100, 28, 28)).astype(np.uint8)
    return {"x_train": x, "y_train": y, "x_test": x[:50], "y_test": y[:50], **changes}


@pytest.mark.parametrize("name", SAMPLED)
def test_the_error_for_missing_data_names_the_remedies(folder, name):
    with pytest.raises(FileNotFoundError) as error:
        BENCHMARKS[name](0)
    text = str(error.value)
    for word in ("--data sample", "HATRACK_DATA", "mnist.npz", str(folder)):
        assert word in text
    assert "\n" not in text


def test_without_the_variable_the_cache_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("HATRACK_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "cache" / "hatrack" / "mnist.npz")):
        smnist(0)


def test_full_data_is_read_from_the_folder(folder):
    np.savez_compressed(folder / "mnist.npz", **small())
    task = pmnist(0, tasks=1, first="plain")[0]
    np.testing.assert_allclose(everything(task.test)[:, 0], (small()["x_test"] / 255 - MEAN) / STD, atol=1e-5)
    changed = small(x_test=np.zeros((50, 28, 28), np.uint8))
    np.savez(folder / "mnist.npz", **changed)  # the cache notices that the file was replaced
    assert everything(pmnist(0, tasks=1)[0].test).unique().numel() == 1


def assert_refused(folder, *words):
    """Check that pmnist refuses the file with an error that names the file and contains these words."""
    with pytest.raises(ValueError, match=r"mnist\.npz") as error:
        pmnist(0)
    assert str(folder) in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not a data file", b"PK\x03\x04 and no more"])
def test_damaged_files(folder, content):
    (folder / "mnist.npz").write_bytes(content)
    assert_refused(folder)


@pytest.mark.parametrize("position", [0.1, 0.5, 0.9])
def test_a_file_that_is_truncated_or_damaged(folder, position):
    path = folder / "mnist.npz"
    whole = (SAMPLES / "mnist.npz").read_bytes()
    at = int(position * len(whole))
    path.write_bytes(whole[:at])
    assert_refused(folder)
    path.write_bytes(whole[:at] + b"\xff" * 64 + whole[at + 64 :])
    assert_refused(folder)


def test_a_file_that_cannot_be_decompressed(folder):
    whole = bytearray((SAMPLES / "mnist.npz").read_bytes())
    # a local header of a zip file has 30 bytes; bytes 26-27 and 28-29 are the lengths of the name and the extra field
    data = 30 + int.from_bytes(whole[26:28], "little") + int.from_bytes(whole[28:30], "little")
    whole[data] = 0xFF  # no such kind of compressed block
    (folder / "mnist.npz").write_bytes(whole)
    assert_refused(folder)


def test_a_damaged_file_is_closed(folder):
    (folder / "mnist.npz").write_bytes(b"PK\x03\x04 and no more")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert_refused(folder)
        gc.collect()
    assert [w.message for w in seen if w.category is ResourceWarning] == []


def test_a_single_array_instead_of_an_archive(folder):
    with (folder / "mnist.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    assert_refused(folder)


class Trap:
    """An object whose pickle fails the test when it is read."""

    def __reduce__(self):
        return (pytest.fail, ("something was unpickled",))


def test_pickles_are_never_read(folder):
    (folder / "mnist.npz").write_bytes(pickle.dumps(Trap()))
    assert_refused(folder)
    np.savez(folder / "mnist.npz", **small(y_train=np.array([Trap()] * 100, dtype=object)))
    assert_refused(folder)


def test_missing_arrays_are_named(folder):
    data = small()
    del data["y_test"]
    np.savez(folder / "mnist.npz", **data)
    assert_refused(folder, "y_test")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_train": np.zeros((100, 28, 28), np.float32)}, ["x_train", "uint8", "float32"]),
        ({"y_test": np.arange(50) % 10}, ["y_test", "uint8", "int64"]),
        ({"y_train": np.arange(100, dtype=np.uint8) % 11}, ["training", "label 10"]),
        ({"y_test": np.full(50, 255, np.uint8)}, ["test", "label 255"]),
        ({"y_train": np.arange(100, dtype=np.uint8) % 9}, ["training", "class 9"]),
        ({"y_train": np.zeros(99, np.uint8)}, ["training", "100", "99"]),
        ({"x_train": np.zeros((100, 32, 32), np.uint8), "x_test": np.zeros((50, 32, 32), np.uint8)}, ["28", "32"]),
        ({"x_test": np.zeros((50, 32, 32), np.uint8)}, ["28", "32"]),
        ({"x_train": np.zeros((100, 28, 28, 3), np.uint8), "x_test": np.zeros((50, 28, 28, 3), np.uint8)}, ["28", "3"]),
        ({"x_train": np.zeros((), np.uint8)}, []),
    ],
)
def test_wrong_contents_are_named(folder, changes, words):
    np.savez(folder / "mnist.npz", **small(**changes))
    assert_refused(folder, *words)


def test_unknown_data_set():
    with pytest.raises(ValueError, match="no data set 'mnits'; did you mean 'mnist'"):
        load("mnits")
