"""Images that stay in the host's memory, and images as they come."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from hatrack import Method, Network, Regime, Task, Trainer, evaluate
from hatrack.benchmarks import BENCHMARKS
from hatrack.networks.mlp import mlp
from hatrack.tasks.device import all_to_device
from hatrack.tasks.transform import crop_and_flip, draw_crops
from hatrack.training.prefetch import Prefetcher
from tests.helpers.learning import learn, make
from tests.helpers.toys import toy_tasks


@pytest.mark.parametrize("name", ["sgd", "joint", "hat"])
def test_staged_images_train_to_the_same_bits(name):
    tasks = toy_tasks(3)
    on_host = all_to_device(tasks, "cpu", room=1)
    assert all(task.train.on_host for task in on_host)
    assert not any(task.train.on_host for task in all_to_device(tasks, "cpu"))
    states = []
    for world in (tasks, on_host):
        method = make(name, world)
        learn(method, world)
        states.append((method.state_dict(), evaluate(method, world[0].test)))
    assert states[0][1] == states[1][1]
    assert all(torch.equal(states[0][0][key], states[1][0][key]) for key in states[0][0])


def test_a_feed_brings_every_image_once_in_order():
    split = replace(toy_tasks(1, train=100, valid=0.0)[0].train, on_host=True)
    feed = Prefetcher(split, 8, ahead=3)  # parts of 24 examples, the last of 4
    assert len(feed.split.x) == 25  # room for one that is left over
    for _ in range(2):
        order = torch.randperm(100)
        seen = []
        for index in feed(order):
            seen.append(index)
            torch.testing.assert_close(feed.split.inputs(index), split.inputs(index))
        assert [len(index) for index in seen] == [8] * 12 + [4]
        assert torch.equal(torch.cat(seen), order)


def test_raw_images_are_seen_as_the_task_sees_them():
    """A permuted, normalised task and raw uint8 digits in the layout they have on disk."""
    task = BENCHMARKS["pmnist"](0, data="sample", tasks=2)[1]
    net = Network(mlp((1, 28, 28), widths=(20,)), [10, 10], torch.zeros(1, 1, 28, 28))
    method = Method(net)
    method.learn(task, Trainer(Regime(epochs=1)))
    method.eval()
    index = torch.arange(50)
    raw = task.test.x[task.test.rows[index]]  # (50, 1, 28, 28), uint8
    expected = method(task.test.inputs(index), 1)
    assert torch.equal(method(net.preprocess(raw, 1), 1), expected)
    assert torch.equal(method(x=net.preprocess(raw, 1), task=torch.ones(50, dtype=torch.int64)), expected)
    assert torch.equal(method.predict(raw[:, 0].numpy(), 1), expected.argmax(1))
    assert torch.equal(method.predict(raw.float() / 255, 1), expected.argmax(1))
    with pytest.warns(UserWarning, match=r"up to \d+ standard deviations off those that were learned"):
        method.predict(raw.float(), 1)
    assert not torch.equal(net.preprocess(raw, 0), net.preprocess(raw, 1)), "task 0 has a transform of its own"
    with pytest.raises(ValueError, match="784 values each, not 1024"):
        method.predict(torch.zeros(2, 32, 32, dtype=torch.uint8), 1)


def test_raw_images_of_a_float_task():
    draw = np.random.RandomState(0)
    x, y = draw.normal(5, 2, (40, 6)).astype(np.float32), np.arange(40) % 2
    task = Task.from_arrays(0, "vectors", x, y, x, y, mean=5.0, std=2.0)
    method = Method(Network(mlp((6,), widths=(4,)), [2], torch.zeros(1, 6)))
    method.learn(task, Trainer(Regime(epochs=1)))
    method.eval()
    expected = method((torch.from_numpy(x) - 5) / 2, 0).argmax(1)
    assert torch.equal(method.predict(x, 0), expected)


class Pairs(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.images[number], self.labels[number]


def test_a_task_from_data_sets():
    draw = np.random.RandomState(0)
    images, labels = draw.randint(0, 256, (30, 8, 8, 3), dtype=np.uint8), np.arange(30) % 3
    from PIL import Image

    data = Pairs([Image.fromarray(i) for i in images], labels.tolist())
    task = Task.from_dataset(0, "pictures", data, Pairs(list(images), labels), valid=0.0, mean=0.5)
    arrays = Task.from_arrays(0, "pictures", images, labels, images, labels, valid=0.0, mean=0.5)
    assert task.train.x.dtype == torch.uint8
    for one, two in ((task.train, arrays.train), (task.test, arrays.test)):
        assert torch.equal(one.inputs(torch.arange(30)), two.inputs(torch.arange(30)))
        assert torch.equal(one.y, two.y)
    tensors = Pairs(list(torch.rand(12, 3, 8, 8)), (np.arange(12) % 3).tolist())
    assert Task.from_dataset(1, "tensors", tensors, tensors, valid=0.0).shape == (3, 8, 8)


def test_a_data_set_of_different_sizes_is_refused():
    data = Pairs([torch.zeros(1, 4, 4), torch.zeros(1, 4, 5)], [0, 1])
    with pytest.raises(ValueError, match=r"image 1 is of shape \(1, 4, 5\), the first of \(1, 4, 4\)"):
        Task.from_dataset(0, "odd", data, data)
    with pytest.raises(ValueError, match="there are no images"):
        Task.from_dataset(0, "none", Pairs([], []), data)


def test_crops_and_flips():
    """Every result is one of the 9 x 9 x 2 windows of the padded image, and many of them come up."""
    image = torch.arange(1.0, 31.0).view(1, 5, 6) + torch.tensor([0.0, 100.0]).view(2, 1, 1)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    windows = {}
    for down in range(9):
        for right in range(9):
            window = padded[:, down : down + 5, right : right + 6]
            windows[tuple(window.flatten().tolist())] = (down, right, False)
            windows[tuple(padded[:, down : down + 5, right : right + 6].flip(2).flatten().tolist())] = (down, right, True)
    out = crop_and_flip(image.expand(500, -1, -1, -1), draw_crops(500, torch.Generator().manual_seed(0)))
    assert out.shape == (500, 2, 5, 6)
    found = [windows[tuple(one.flatten().tolist())] for one in out]
    assert len(set(found)) > 100
    assert 200 < sum(mirrored for *_, mirrored in found) < 300


def test_only_training_is_augmented():
    task = toy_tasks(1, shape=(1, 8, 8))[0]
    split = replace(task.train, augment=True, crops=draw_crops(48, torch.Generator().manual_seed(0)))
    index = torch.arange(10)
    assert torch.equal(split.inputs(index), task.train.inputs(index))
    batch = split.take(index, torch.tensor(0), torch.tensor(1), 10)
    assert not torch.equal(batch.x, task.train.inputs(index))
    seen = []
    for dropout in (0.0, 0.5):  # crops draw from a generator of their own

        class Witness(Method):
            def loss(self, batch):
                seen.append(batch.x)
                return super().loss(batch)

        net = Network(mlp(task.shape, widths=(8,), dropout=dropout), [3], torch.zeros(1, *task.shape))
        Witness(net).learn(replace(task, train=split), Trainer(Regime(epochs=2, batch=16), watch=True))
    assert all(torch.equal(a, b) for a, b in zip(seen[:6], seen[6:], strict=True))
    assert not torch.equal(torch.cat(seen[:3]).sum(), torch.cat(seen[3:6]).sum()), "every epoch has crops of its own"


def test_images_that_were_not_meant_are_not_answered_in_silence():
    """Bytes in another type, values that are no numbers, axes in another order."""
    images, labels = np.random.RandomState(0).randint(0, 256, (40, 5, 8, 8)).astype(np.uint8), np.arange(40) % 2
    task = Task.from_arrays(0, "bytes", images, labels, images, labels)
    method = Method(Network(mlp((5, 8, 8), widths=(8,)), [2], task.train.inputs(torch.arange(2))))
    method.learn(task, Trainer(Regime(epochs=1)))
    for kind in (np.int32, np.int64, np.float32):
        with pytest.warns(UserWarning, match="standard deviations off"):
            method.predict(images.astype(kind), 0)
    broken = images.astype(np.float32) / 255
    broken[3, 0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="images hold values that are NaN or infinite"):
        method.predict(broken, 0)
    with pytest.raises(ValueError, match=r"images are of shape \(8, 8, 5\), but the network takes \(5, 8, 8\)"):
        method.predict(images.transpose(0, 2, 3, 1), 0)


@pytest.mark.parametrize("label", [0.9, "a", None, np.float32(1.5), torch.tensor([0, 1])])
def test_labels_of_a_data_set_are_whole_numbers(label):
    data = Pairs([torch.zeros(1, 4, 4)] * 2, [0, label])
    with pytest.raises(ValueError, match="labels must be whole numbers"):
        Task.from_dataset(0, "labels", data, data)
    words = Pairs([torch.zeros(1, 4, 4)] * 2, ["0", np.int64(1)])
    assert Task.from_dataset(0, "labels", words, words).classes == 2
