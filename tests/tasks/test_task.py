"""Splits, transforms and tasks: what a step gets is what the arrays held."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hatrack import Split, Task
from hatrack.tasks.arrays import hold_out, normalisation, to_inputs
from hatrack.tasks.device import all_to_device, split_to_device, to_device
from hatrack.tasks.transform import Transform
from tests.helpers.toys import toy_tasks

Y = np.arange(12) % 3


def images(*shape, dtype=np.float32, seed=0):
    values = np.random.RandomState(seed).randint(0, 256, shape)
    return values.astype(dtype) if np.issubdtype(dtype, np.integer) else (values / 255).astype(dtype)


def everything(split):
    return split.inputs(torch.arange(len(split)))


def make(x, y=None, x_test=None, y_test=None, name="mine", **changes):
    y = Y if y is None else y
    return Task.from_arrays(0, name, x, y, x if x_test is None else x_test, y if y_test is None else y_test, **changes)


# Task.from_arrays


@pytest.mark.parametrize(
    ("shape", "seen", "channels_first"),
    [
        ((12, 5, 4), (1, 5, 4), lambda x: x[:, None]),
        ((12, 5, 4, 3), (3, 5, 4), lambda x: np.moveaxis(x, 3, 1)),
        ((12, 5, 4, 1), (1, 5, 4), lambda x: np.moveaxis(x, 3, 1)),
        ((12, 3, 5, 4), (3, 5, 4), lambda x: x),
        ((12, 1, 5, 4), (1, 5, 4), lambda x: x),
        ((12, 7), (7,), lambda x: x),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_from_arrays_reads_every_layout(shape, seen, channels_first, dtype, kind):
    x = images(*shape, dtype=dtype)
    task = make(kind(x), kind(Y), valid=0)
    expected = channels_first(x).astype(np.float64) / (255 if dtype == np.uint8 else 1)
    assert task.shape == seen
    assert (task.index, task.name, task.classes) == (0, "mine", 3)
    for split in (task.train, task.test):
        order = split.rows.numpy()
        assert everything(split).dtype == torch.float32
        np.testing.assert_allclose(everything(split), expected[order], atol=1e-6)
        np.testing.assert_array_equal(split.y, Y[order])


def test_from_arrays_normalises_by_channel():
    x = images(12, 5, 4, 3, dtype=np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    seen = everything(make(x, mean=mean, std=std).test).numpy()
    for n in range(12):
        for c in range(3):
            np.testing.assert_allclose(seen[n, c], (x[n, :, :, c] / 255 - mean[c]) / std[c], atol=1e-6)


@pytest.mark.parametrize("shape", [(12, 7), (12, 5, 4), (12, 3, 5, 4)])
def test_from_arrays_normalises_by_one_number(shape):
    x = images(*shape, dtype=np.float64)
    seen = everything(make(x, mean=0.25, std=4.0).test).numpy()
    np.testing.assert_allclose(seen.reshape(12, -1), (x.reshape(12, -1) - 0.25) / 4, atol=1e-6)


def test_from_arrays_keeps_uint8_and_does_not_copy():
    x = images(12, 5, 4, dtype=np.uint8)
    task = make(x)
    assert task.train.x.dtype == torch.uint8
    assert task.train.x.data_ptr() == task.valid.x.data_ptr() == x.ctypes.data


def test_from_arrays_takes_read_only_arrays():
    # np.frombuffer and memory-mapped files give such arrays
    x = np.frombuffer(images(12, 5, 4, dtype=np.uint8).tobytes(), np.uint8).reshape(12, 5, 4)
    y = np.frombuffer(Y.tobytes(), Y.dtype)
    np.testing.assert_allclose(everything(make(x, y).test)[:, 0], x / 255, atol=1e-6)


def test_from_arrays_takes_lists_and_any_whole_numbers():
    task = Task.from_arrays(0, "lists", [[0.0, 1.0], [2.0, 3.0]], [0, 1], [[4.0, 5.0]], [1.0], valid=0, scale=1)
    assert task.classes == 2
    assert everything(task.test).tolist() == [[4, 5]]
    assert task.test.y.tolist() == [1]
    assert task.test.y.dtype == torch.int64


def test_the_index_may_be_a_task_number_numpy():
    x = images(12, 7)
    task = Task.from_arrays(np.int64(1), "mine", x, Y, x, Y)
    assert type(task.index) is int
    assert type(task.train.task) is int


def test_labels_that_are_all_negative_are_named_and_not_a_range_of_no_classes():
    x = images(12, 7)
    with pytest.raises(ValueError, match="labels count from 0, and all are below it: the largest is -1"):
        make(x, np.full(12, -1), x, Y)


def test_classes_may_be_more_than_the_test_labels_show():
    x = images(12, 7)
    task = make(x, Y, x[:2], np.zeros(2, int))
    assert task.classes == 3


def test_valid_shares_the_training_images_and_nothing_else():
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    task = make(x, np.arange(20) % 2, valid=0.25, scale=1)
    train, valid = everything(task.train)[:, 0], everything(task.valid)[:, 0]
    assert (len(task.train), len(task.valid), len(task.test)) == (15, 5, 20)
    assert sorted(torch.cat([train, valid]).tolist()) == x[:, 0].tolist()
    assert (task.train.y == train / 2 % 2).all()
    assert (task.valid.y == valid / 2 % 2).all()


# Units

VALUES = images(12, 3, 4, 4, dtype=np.uint8)


def seen_by_network(task):
    return everything(task.train), everything(task.valid), everything(task.test)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint16])
@pytest.mark.parametrize("shape", [(12, 3, 4, 4), (12, 12, 4), (12, 48)])
@pytest.mark.parametrize("how", [{}, {"mean": 0.5, "std": 0.25}, {"mean": 1.0}])
def test_numbers_that_look_like_bytes_must_state_their_scale(dtype, shape, how):
    with pytest.raises(ValueError, match=r"^task 'mine': .*0 to 255.*scale=255.*scale=1[^\n]*$"):
        make(VALUES.reshape(shape).astype(dtype), **how)


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("how", [{}, {"mean": 0.5, "std": 0.25}, {"mean": (0.1, 0.2, 0.3), "std": (0.5, 1.0, 2.0)}])
def test_with_a_scale_they_are_seen_as_bytes_are(dtype, how):
    scaled, plain = make(VALUES.astype(dtype), scale=255, **how), make(VALUES, **how)
    for one, two in zip(seen_by_network(scaled), seen_by_network(plain), strict=True):
        torch.testing.assert_close(one, two)


def test_the_scale_may_be_any_number_and_1_changes_nothing():
    x = VALUES.astype(np.float32)
    assert torch.equal(everything(make(x, scale=1).test), torch.from_numpy(x))
    torch.testing.assert_close(everything(make(x, scale=np.float32(51)).test), torch.from_numpy(x / 51))


@pytest.mark.parametrize("how", [{"mean": 120.0, "std": 70.0}, {"std": 255}, {"mean": (1, 2, 120)}])
def test_a_mean_or_std_above_1_states_the_units(how):
    x = VALUES.astype(np.float32)
    mean, std = (np.asarray(how.get(key, other), np.float32).reshape(-1, 1, 1) for key, other in (("mean", 0), ("std", 1)))
    torch.testing.assert_close(everything(make(x, **how).test), torch.from_numpy((x - mean) / std))


@pytest.mark.parametrize(
    "x",
    [
        VALUES.astype(np.float32) / 255,
        VALUES.astype(np.float32) / 127.5,
        VALUES.astype(np.float32) - 1,
        VALUES > 100,
        (VALUES.astype(np.float32) - 120) / 70,
    ],
    ids=["0 to 1", "0 to 2", "negative", "bool", "standardised"],
)
def test_numbers_that_do_not_look_like_bytes_need_no_scale(x):
    assert torch.equal(everything(make(x).test), torch.from_numpy(x.astype(np.float32)))


def test_one_of_two_parts_may_show_the_units():
    """Some test images have no negative value although the data are standardised; and the other way round."""
    x = VALUES.astype(np.float32)
    assert everything(make(x - 1, x_test=x).test).max() == 255
    with pytest.raises(ValueError, match="scale=255"):
        make(x / 255, x_test=x)


def test_bytes_for_training_and_scaled_floats_for_test():
    task = make(VALUES, x_test=VALUES.astype(np.float32), scale=255, mean=0.5)
    torch.testing.assert_close(everything(task.test), torch.from_numpy(VALUES / 255 - 0.5).float())
    torch.testing.assert_close(everything(task.train)[0], torch.from_numpy(VALUES / 255 - 0.5).float()[task.train.rows[0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 0}, "scale.*greater than 0.*not 0"),
        ({"scale": -255.0}, "scale.*greater than 0.*not -255.0"),
        ({"scale": float("nan")}, "scale.*not nan"),
        ({"scale": float("inf")}, "scale.*not inf"),
        ({"scale": "255"}, "scale.*not '255'"),
        ({"scale": True}, "scale.*not True"),
        ({"scale": 255, "mean": 120.0}, "scale=255.*not 120.0"),
        ({"x": VALUES, "scale": 1}, "uint8.*255, not 1$"),
        ({"x": VALUES, "scale": 255, "mean": 120.0}, "not 120.0"),
        ({"x": VALUES, "x_test": VALUES.astype(float), "scale": 1}, "uint8.*floats up to 255"),
    ],
)
def test_a_scale_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**{"x": VALUES.astype(np.float32), **changes})


def test_bytes_may_say_that_their_scale_is_255():
    assert torch.equal(everything(make(VALUES, scale=255).test), everything(make(VALUES).test))


def test_a_task_in_one_line():
    task = make(VALUES, valid=0.25)
    assert repr(task) == "Task(0, 'mine', 3 classes, images 3x4x4: 9 for training, 3 for validation, 12 for test)"
    assert repr(task.test) == "Split(12 examples of task 0, images 3x4x4)"
    assert "vectors of 7:" in repr(make(images(12, 7)))
    assert repr(Split.join([task.test, replace(task.test, task=1)])) == "Split(24 examples of several tasks, images 3x4x4)"


# Bad input

BYTES = np.arange(84, dtype=np.uint8).reshape(12, 7)


def test_replace_gives_a_task_and_its_data_another_number():
    task = toy_tasks(1)[0]
    moved = replace(task, index=3)
    assert [part.task for part in (moved.train, moved.valid, moved.test)] == [3, 3, 3]
    assert moved.train.x is task.train.x
    assert task.train.task == 0
    mixed = replace(task.train, task=torch.zeros(len(task.train), dtype=torch.int64))
    assert replace(task, index=3, train=mixed).train is mixed, "data of several tasks keep their numbers"


def test_bytes_and_floats_of_the_same_units_may_be_mixed():
    task = make(x=BYTES, x_test=BYTES / 255)
    torch.testing.assert_close(task.test.inputs(torch.arange(12)), torch.from_numpy(BYTES / 255).float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.where(Y == 2, 7, Y), "classes": 3}, r"training.*label 7.*3 classes"),
        ({"y": np.where(Y == 2, -1, Y), "classes": 3}, r"training.*label -1.*3 classes"),
        ({"y_test": np.where(Y == 2, 3, Y)}, r"test.*label 3.*3 classes"),
        ({"y": np.where(Y == 1, 0, Y)}, r"training.*class 1 of 3 has no example"),
        ({"classes": 5}, r"training.*class 3 of 5 has no example"),
        ({"y": np.where(Y == 1, 0.5, Y)}, r"training.*0\.5.*whole numbers|training.*whole numbers.*0\.5"),
        ({"y": np.where(Y == 1, np.nan, Y)}, r"training.*nan.*whole numbers|training.*whole numbers.*nan"),
        ({"y": np.where(Y == 1, np.inf, Y)}, r"training.*inf.*whole numbers|training.*whole numbers.*inf"),
        ({"y": np.array(["cat", "dog", "cow"] * 4)}, r"training.*labels.*whole numbers"),
        ({"y": Y[:11]}, r"training.*12 images.*\(11,\).*one label per image"),
        ({"y": np.eye(3)[Y]}, r"training.*12 images.*\(12, 3\).*one label per image"),
        ({"x_test": images(5, 7), "y_test": Y[:4]}, r"test.*5 images.*\(4,\).*one label per image"),
        ({"x_test": images(12, 6)}, r"\(7,\).*\(6,\)"),
        ({"x_test": images(12, 7, 1)}, r"\(7,\).*\(1, 7, 1\)"),
        ({"x": images(12)}, r"training.*2 to 4 dimensions, not 1"),
        ({"x": images(12, 2, 2, 2, 2)}, r"training.*2 to 4 dimensions, not 5"),
        ({"x": images(0, 7), "y": np.zeros(0, int)}, r"training.*no images"),
        ({"x": np.full((12, 7), "a")}, r"training.*images"),
        ({"valid": 1.0}, r"valid.*0 to below 1.*1\.0"),
        ({"valid": -0.1}, r"valid.*0 to below 1.*-0\.1"),
        ({"classes": 3.0}, r"classes must be a whole number, not 3\.0"),
        ({"name": 2024}, r"the name of a task is text, not 2024"),
        ({"x": BYTES, "x_test": 255 * images(12, 7)}, r"bytes.*scaled to 0 to 1.*floats up to"),
        ({"x": 255 * images(12, 7), "x_test": BYTES, "mean": 40, "std": 60}, r"bytes.*scaled to 0 to 1.*floats up to"),
        ({"x": BYTES, "x_test": BYTES, "mean": 33, "std": 79}, r"mean and std are in these units, not 33"),
        ({"std": 0.0}, r"std.*greater than 0.*0\.0"),
        ({"std": float("nan")}, r"std.*greater than 0.*nan"),
        ({"mean": float("nan")}, r"mean.*finite.*nan"),
        ({"x": images(12, 5, 4, 3), "mean": (0.1, 0.2)}, r"mean.*3.*\(0\.1, 0\.2\)|mean.*\(0\.1, 0\.2\).*3"),
        ({"x": images(12, 5, 4, 3), "std": (0.1, 0.2)}, r"std.*3.*\(0\.1, 0\.2\)|std.*\(0\.1, 0\.2\).*3"),
    ],
)
def test_bad_arrays_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**{"x": images(12, 7), **changes})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["x", "x_test"])
def test_values_that_are_not_finite_are_named(value, part):
    arrays = {"x": images(12, 7), "x_test": images(12, 7)}
    arrays[part][[3, 3, 5], [0, 1, 2]] = value
    with pytest.raises(ValueError, match=r"(training|test): NaN or infinite values in 2 images"):
        make(**arrays)


# View


def plain_view(raw, pixels, mean, std, scale):
    """One image as a list of (value of its raw pixel, or 0 for a blank, less the mean, by the standard deviation)."""
    return [((raw[p] / scale if p >= 0 else 0) - mean) / std for p in pixels]


@pytest.mark.parametrize(("dtype", "scale"), [(np.uint8, 255), (np.float32, 1)])
def test_a_view_maps_pixels(dtype, scale):
    raw = images(6, 9, dtype=dtype)
    pixels = [8, 0, -1, 3, 3, 7, 2, 1, -1, 4, 5, 6]  # twelve pixels from nine: blanks, one twice
    transform = Transform((1, 3, 4), torch.tensor([[0.2]]), torch.tensor([[0.5]]), torch.tensor([pixels]))
    seen = transform(torch.from_numpy(raw))
    assert seen.shape == (6, 1, 3, 4)
    expected = [plain_view(image, pixels, 0.2, 0.5, scale) for image in raw.astype(np.float64)]
    np.testing.assert_allclose(seen.flatten(1), expected, atol=1e-5)


def test_a_view_with_a_row_per_task():
    raw = images(6, 4, dtype=np.uint8)
    pixels, mean, std = [[0, 1, 2, 3], [3, -1, 1, 0]], [0.1, 0.4], [1.0, 0.5]
    transform = Transform((4,), torch.tensor(mean)[:, None], torch.tensor(std)[:, None], torch.tensor(pixels))
    rows = [1, 0, 1, 1, 0, 0]
    seen = transform(torch.from_numpy(raw), torch.tensor(rows))
    expected = [plain_view(raw[n].astype(np.float64), pixels[r], mean[r], std[r], 255) for n, r in enumerate(rows)]
    np.testing.assert_allclose(seen, expected, atol=1e-5)


def test_gray_to_colour_is_a_view():
    raw = torch.tensor([[10.0, 20.0]])
    transform = Transform(
        (3, 1, 2), torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 10.0, 100.0]]), torch.tensor([[0, 1] * 3])
    )
    # channel 0: 9, 19; channel 1: 8/10, 18/10; channel 2: 7/100, 17/100
    np.testing.assert_allclose(transform(raw)[0], [[[9, 19]], [[0.8, 1.8]], [[0.07, 0.17]]], rtol=1e-6)


# Split


def test_take():
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10) % 4
    split = Split(x, y[2:], 3, normalisation((2,), 0, 1), torch.arange(2, 10))
    batch = split.take(torch.tensor([5, 0]), torch.tensor(2), torch.tensor(4), 2)
    assert batch.x.tolist() == [[14, 15], [4, 5]]  # images 7 and 2
    assert batch.y.tolist() == [3, 2]
    assert batch.task == 3
    assert (batch.step.item(), batch.steps.item()) == (2, 4)
    assert batch.seen.item() == pytest.approx(2 * 2 / 8)  # two batches of two came before, of eight examples


def test_part_of_a_part():
    task = toy_tasks(1)[0]
    index = torch.tensor([7, 3, 11])
    some = task.train.part(index).part(torch.tensor([2, 0]))
    assert len(some) == 2
    assert torch.equal(everything(some), everything(task.train)[[11, 7]])
    assert torch.equal(some.y, task.train.y[[11, 7]])
    assert some.x.data_ptr() == task.train.x.data_ptr()


def permuted(x, y, index, order, mean=0.0, std=1.0):
    transform = replace(normalisation((len(order),), mean, std), pixels=torch.tensor([order]))
    return Split(x, y, index, transform, torch.arange(len(x)))


def assert_joined(joined, splits):
    """The joined split holds the examples of each in turn, as each of them sees its own."""
    assert torch.equal(everything(joined), torch.cat([everything(s) for s in splits]))
    assert torch.equal(joined.y, torch.cat([s.y for s in splits]))
    assert joined.task.tolist() == [s.task for s in splits for _ in range(len(s))]


def test_join_of_tasks_that_share_images():
    x, y = torch.from_numpy(images(6, 4, dtype=np.uint8)), torch.arange(6) % 2
    splits = [permuted(x, y, 0, [3, 2, 1, 0], 0.1, 2.0), permuted(x, y, 1, [1, -1, 0, 0], 0.3, 0.5)]
    splits[1] = splits[1].part(torch.tensor([4, 1, 1]))
    joined = Split.join(splits)
    assert_joined(joined, splits)
    assert joined.x.data_ptr() == x.data_ptr()
    batch = joined.take(torch.tensor([7, 2]), torch.tensor(0), torch.tensor(5), 2)
    assert batch.task.tolist() == [1, 0]
    assert torch.equal(batch.x, torch.stack([everything(splits[1])[1], everything(splits[0])[2]]))


def test_join_of_tasks_of_different_raw_widths():
    narrow, wide = (
        torch.from_numpy(images(5, 3, dtype=np.uint8)),
        torch.from_numpy(images(4, 1, 2, 3, dtype=np.uint8, seed=1)),
    )
    splits = [
        permuted(narrow, torch.arange(5), 0, [-1, 2, 0, 1, -1, 0]),
        Split(wide, torch.arange(4), 1, normalisation((6,), 0.5, 1), torch.arange(4)),
        permuted(wide, torch.arange(4), 2, [5, 4, 3, 2, 1, 0], 0.5, 3.0),
    ]
    joined = Split.join(splits)
    assert_joined(joined, splits)
    assert len(joined.x) == 9  # the wide images are kept once


def test_join_of_tasks_out_of_order():
    x, y = torch.rand(4, 3), torch.arange(4)
    splits = [permuted(x, y, 4, [2, 1, 0]), permuted(x, y, 1, [0, 0, 0])]
    assert_joined(Split.join(splits), splits)


def test_join_of_bytes_and_floats():
    a, b = toy_tasks(1, shape=(4,))[0].train, images(6, 4, dtype=np.uint8)
    bytes_ = Split(torch.from_numpy(b), torch.arange(6) % 3, 1, normalisation((4,), 0, 1), torch.arange(6))
    splits = [replace(a, task=0), bytes_]
    assert_joined(Split.join(splits), splits)


def test_join_of_arrays_that_begin_at_the_same_place():
    x = torch.arange(24.0).reshape(12, 2)
    views = [x[:3], x, x[::2], x[:6]]
    splits = [
        Split(v, torch.arange(len(v)), k, normalisation((2,), 0, 1), torch.arange(len(v))) for k, v in enumerate(views)
    ]
    assert_joined(Split.join(splits), splits)


def test_join_refuses_different_shapes():
    a, b = toy_tasks(1, shape=(4,))[0].train, toy_tasks(1, shape=(2, 2))[0].train
    with pytest.raises(ValueError, match=r"\(4,\).*\(1, 2, 2\)"):
        Split.join([a, replace(b, task=1)])


# hold_out and move


@pytest.mark.parametrize(("count", "share", "seed"), [(100, 0.15, 0), (101, 0.15, 3), (7, 0.5, 1), (5, 0.0, 2), (6, 0.1, 0)])
def test_hold_out_draws_as_the_authors_do(count, share, seed):
    held, rest = hold_out(count, share, seed)
    # sklearn.utils.shuffle(numpy.arange(count), random_state=seed) gives this order
    order = np.arange(count)
    np.random.RandomState(seed).shuffle(order)
    assert held.tolist() == order[: int(share * count)].tolist()
    assert rest.tolist() == order[int(share * count) :].tolist()
    assert sorted(held.tolist() + rest.tolist()) == list(range(count))


def test_move_keeps_tasks_and_sharing():
    x, y = torch.from_numpy(images(6, 4, dtype=np.uint8)), torch.arange(6) % 2
    splits = [permuted(x, y, k, [3, 2, 1, 0]) for k in range(2)]
    tasks = [Task(k, f"task {k}", 2, s, s.part(torch.arange(2)), s) for k, s in enumerate(splits)]
    moved = all_to_device(tasks, "meta")
    assert {t.train.x.device.type for t in moved} == {"meta"}
    assert moved[0].train.x is moved[1].test.x
    for before, after in zip(tasks, all_to_device(tasks, "cpu"), strict=True):
        assert (after.index, after.name, after.classes) == (before.index, before.name, before.classes)
        for a, b in ((before.train, after.train), (before.valid, after.valid), (before.test, after.test)):
            assert torch.equal(everything(a), everything(b))
            assert torch.equal(a.y, b.y)


def test_what_is_on_the_device_is_returned_as_it_is():
    task = toy_tasks(1)[0]
    assert to_device(task, "cpu") is task
    assert split_to_device(task.test, torch.device("cpu")) is task.test


def test_a_task_or_a_split_goes_to_a_device():
    task = toy_tasks(1)[0]
    moved, split = to_device(task, "meta"), split_to_device(task.test, "meta")
    for part in (moved.train, moved.valid, moved.test, split):
        tensors = (part.x, part.y, part.rows, part.transform.mean, part.transform.std)
        assert {t.device.type for t in tensors} == {"meta"}
    assert (len(split), split.transform.shape) == (len(task.test), task.shape)


def test_move_does_not_take_one_array_for_another():
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    tasks = [Task.from_arrays(k, "mine", v, Y[:6], v, Y[:6], valid=0, scale=1) for k, v in enumerate((x[:6], x[::2]))]
    for before, after in zip(tasks, all_to_device(tasks, "cpu"), strict=True):
        assert torch.equal(everything(before.test), everything(after.test))


def test_store_gives_plain_tensors():
    x = to_inputs("here", np.zeros((2, 3, 4), np.uint8), np.array([0, 1], np.uint8))
    assert (x.shape, x.dtype) == ((2, 1, 3, 4), torch.uint8)
