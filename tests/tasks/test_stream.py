"""Streamed tasks: what is read when, random transforms by the seed, workers, stopping, and what is refused in one line."""

import contextlib
import copy
import gc
import os

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler, get_worker_info

from hatrack import HAT, Method, Network, Regime, Task, Trainer, evaluate
from hatrack.networks.mlp import mlp
from hatrack.training.fit_loop import FitLoop
from tests.helpers.learning import learn, make
from tests.helpers.streams import Pairs, streamed, streamed_toys
from tests.helpers.tiers import every_value
from tests.helpers.toys import toy_tasks

NOISES = ("torch", "numpy", "python")


class Witness(Method):
    """Keeps the images of every step."""

    def loss(self, batch):
        self.__dict__.setdefault("seen", []).append(batch.x.clone())
        return super().loss(batch)


def watched(task, *, seed=0, epochs=2, **trainer):
    """Learn a task; return the images of its steps, and the state."""
    torch.manual_seed(0)
    method = Witness(Network(mlp(task.shape, widths=(8,), dropout=0.5), [task.classes], torch.zeros(1, *task.shape)))
    method.learn(task, Trainer(Regime(epochs=epochs, batch=16, lr=0.1), seed=seed, **trainer))
    return method.seen, method.state_dict()


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("noise", NOISES)
def test_random_transforms_are_drawn_anew_and_by_the_seed(noise):
    task = toy_tasks(1)[0]
    seen, state = watched(streamed(task, noise=noise))
    again, same_state = watched(streamed(task, noise=noise, workers=2))
    other, _ = watched(streamed(task, noise=noise), seed=1)
    assert same(seen, again), "neither a second run nor workers change what is drawn"
    assert same(state.values(), same_state.values())
    assert not same(seen, other)
    plain, _ = watched(streamed(task))
    added = [(a - b).flatten(1) for a, b in zip(seen, plain, strict=True)]
    assert all(torch.allclose(a, a[:, :1].expand_as(a), atol=1e-6) for a in added), "one number per image"
    assert len({round(float(v), 4) for a in added for v in a[:, 0]}) > 90, "another one for every image and epoch"


def test_reading_leaves_the_generators_alone():
    task = streamed(toy_tasks(1)[0], noise="torch")
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = (task.train.inputs(torch.arange(5)) for _ in range(2))
    assert torch.equal(first, second), "outside of epochs the draws of an image stay"
    assert torch.equal(task.train.inputs(torch.tensor([3])), first[3:4])
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize(("stop", "workers"), every_value([(0, 2), (1, 0), (1, 3)], [0, 2]))  # epochs and steps
def test_a_fit_that_was_stopped_goes_on_to_the_same_bits(workers, stop):
    task, regime = streamed(toy_tasks(1, train=100)[0], noise="numpy", workers=workers), Regime(epochs=2, batch=16, lr=0.1)

    def stop_there(loop):
        if (len(loop.result.epochs), loop.step_index) == stop:
            saved.append(copy.deepcopy(loop.state()))
            raise KeyboardInterrupt

    def new_loop():
        torch.manual_seed(0)
        net = Network(mlp(task.shape, widths=(8,), dropout=0.5), tasks=[task])
        return FitLoop(Method(net), task, regime, {}, seed=5)

    whole, saved = new_loop(), []
    while not whole.finished:
        whole.epoch()
    stopped = new_loop()
    stopped.after_step = stop_there
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            stopped.epoch()
            stop_there(stopped)
    again = new_loop()
    again.load_state(*saved[0])
    reads = task.train.stream.reader.items.data
    reads.reads = 0
    while not again.finished:
        again.epoch()
    steps = 2 * 5 - 5 * stop[0] - stop[1]
    assert workers or reads.reads <= 16 * steps + 2 * 15, "batches that were done are not read again"
    assert same(whole.method.state_dict().values(), again.method.state_dict().values())
    assert whole.result.epochs == again.result.epochs


@pytest.mark.parametrize(
    ("engine", "watch"), [("eager", False), ("eager", True), pytest.param("compiled", False, marks=pytest.mark.slow)]
)
def test_every_engine_takes_streamed_images(engine, watch):
    found = []
    for task in (toy_tasks(1)[0], streamed_toys(1)[0]):
        method = make("hat", [task])
        fit = learn(method, [task], Trainer(Regime(epochs=2, batch=16, lr=0.1), engine=engine, watch=watch))
        assert fit.fits[0].engine == engine
        found.append(method.state_dict())
    assert same(found[0].values(), found[1].values())


def test_nothing_is_read_but_what_is_needed():
    x, y = torch.rand(500, 1, 4, 4), torch.arange(500) % 2
    told, silent = Pairs(x, y), Pairs(x, y)
    told.targets = y.tolist()
    for data, expected in ((told, 64), (silent, 564)):
        Task.from_dataset(0, "a", data, Pairs(x[:10], y[:10]), stream=True)
        assert data.reads == expected, "labels are found by one pass, unless the data set tells them"
    assert Task.from_dataset(0, "a", told, told, stream=True).train.x.is_meta


@pytest.mark.parametrize("noise", NOISES)
def test_random_transforms_that_are_drawn_once_are_told(noise):
    data = Pairs(torch.rand(20, 3), torch.arange(20) % 2, noise)
    with pytest.warns(UserWarning, match="training: images differ from read to read.*stream=True"):
        Task.from_dataset(0, "a", data, DATA)


def test_hold_out_and_normalisation_are_those_of_a_task_in_memory():
    x, y = torch.randint(0, 256, (40, 6, 6, 3), dtype=torch.uint8), torch.arange(40) % 3
    data, how = Pairs(x.numpy(), y), {"mean": (0.4, 0.5, 0.6), "std": 0.25, "seed": 3}
    memory, stream = (Task.from_dataset(0, "a", data, data, stream=kind, **how) for kind in (False, True))
    assert repr(memory) == repr(stream)
    for part in ("train", "valid", "test"):
        one, two = getattr(memory, part), getattr(stream, part)
        every = torch.arange(len(one))
        assert torch.equal(one.inputs(every), two.inputs(every))
        assert torch.equal(one.raw(every), two.raw(every))
        assert torch.equal(one.y, two.y)
        batches = [(index.tolist(), x.sum()) for index, x in two.read(torch.split(every, 7))]
        assert batches == [(index.tolist(), one.inputs(index).sum()) for index in torch.split(every, 7)]


def test_a_collate_function_of_the_user():
    def pad(items):  # sequences of different lengths
        x = torch.zeros(len(items), 4)
        for row, (sequence, _) in zip(x, items, strict=True):
            row[: len(sequence)] = sequence
        return x, torch.tensor([label for _, label in items])

    data = [(torch.rand(1 + k % 4), k % 2) for k in range(30)]
    loader = DataLoader(data, collate_fn=pad)
    task = Task.from_loaders(0, "lengths", loader, 0.2, loader)
    assert task.shape == (4,)
    assert (task.test.inputs(torch.arange(4)) != 0).sum(1).tolist() == [1, 2, 3, 4]
    learn(make("hat", [task]), [task])


@pytest.mark.parametrize(
    ("item", "keys"),
    [
        (lambda x, y: {"image": x, "label": y, "file": "a.png"}, {"input": "image", "label": "label"}),
        (lambda x, y: (x, y, {"file": "a.png"}), {"input": 0, "label": 1}),
        (lambda x, y: ("a.png", y, x), {"input": 2, "label": 1}),
        (lambda x, y: {"top": x[:1], "rest": x[1:], "label": y}, {"input": ("top", "rest"), "label": "label"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_dicts_and_longer_tuples(item, keys, stream):
    x, y = torch.rand(20, 5), [k % 2 for k in range(20)]
    data = [item(*pair) for pair in zip(x, y, strict=True)]
    task = Task.from_dataset(0, "a", data, data, stream=stream, valid=0.0, **keys)
    assert torch.equal(task.test.inputs(torch.arange(20)), x)
    assert task.test.y.tolist() == y
    with pytest.raises(ValueError, match=r"^[^\n]*training: item 0[^\n]*input=[^\n]*label=[^\n]*$"):
        Task.from_dataset(0, "a", data, data, stream=stream)


def test_joined_inputs_keep_their_values():
    ids, size = torch.randint(0, 2**40, (6, 3)), torch.rand(6, 1)
    data = [{"ids": ids[k], "more": ids[k, :1], "size": size[k], "y": k % 2} for k in range(6)]
    task = Task.from_dataset(0, "a", data, data, input=("ids", "more"), label="y", tokens=True)
    assert torch.equal(task.test.inputs(torch.arange(6)), torch.cat([ids, ids[:, :1]], 1))
    with pytest.raises(ValueError, match=r"^task 'a', training: whole numbers above 16,777,216[^\n]*$"):
        Task.from_dataset(0, "a", data, data, input=("ids", "size"), label="y")


class Deadly(Pairs):
    def __getitem__(self, number):
        if number > 100 and get_worker_info() is not None:
            os._exit(3)
        return super().__getitem__(number)


def test_a_worker_that_ends_is_an_error_in_one_line():
    data = Deadly(torch.rand(200, 3), torch.arange(200) % 2)
    data.targets = data.y.tolist()
    task = Task.from_dataset(0, "a", data, DATA, stream=True, workers=1, valid=0.0)
    method = Method(Network(mlp((3,), widths=(8,)), [2], torch.zeros(1, 3)))
    with pytest.raises(RuntimeError, match=r"^a worker process that reads images ended: [^\n]*$"):
        method.learn(task, Trainer(Regime(epochs=1, batch=100)))


class Collecting(Pairs):
    """Frees what is left behind whenever an item is read."""

    def __getitem__(self, number):
        if number % 40 == 0:
            gc.collect()
        return super().__getitem__(number)


class LeftBehind:
    """Refers to itself, and notes the process in which it is freed, as the recording of a GPU might abort there."""

    def __init__(self, folder):
        self.itself, self.folder = self, folder

    def __del__(self):
        (self.folder / str(os.getpid())).touch()


@pytest.mark.slow
class CollectOften:
    """In processes that are forked while it is on, garbage is collected at once, and never in the parent."""

    def __init__(self):
        self.on = False
        os.register_at_fork(after_in_child=self.after_fork)

    def after_fork(self):
        if self.on:
            gc.set_threshold(1, 1, 1)

    @contextlib.contextmanager
    def __call__(self):
        before, self.on = gc.get_threshold(), True
        gc.set_threshold(10**9)
        try:
            yield
        finally:
            self.on = False
            gc.set_threshold(*before)


collect_often = CollectOften()


def test_a_worker_frees_nothing_that_it_inherited(tmp_path):
    """Neither while it begins nor when it reads; what comes of it itself it frees."""
    data = Collecting(torch.rand(160, 3), torch.arange(160) % 2)
    data.targets = data.y.tolist()
    task = Task.from_dataset(0, "a", data, DATA, stream=True, workers=1, valid=0.0)
    gc.collect()
    with collect_often():
        LeftBehind(tmp_path)
        for _ in task.train.stream.read_all([torch.arange(160)]):
            pass
        assert not list(tmp_path.iterdir())
    assert gc.isenabled()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_other_targets_are_read_from_items():
    x, y = torch.rand(20, 5), torch.rand(20, 2)
    data = list(zip(x, y, strict=True))
    for stream in (False, True):
        task = Task.from_dataset(0, "a", data, data, stream=stream, target="regression")
        assert task.target.kind == "regression"
        assert torch.equal(task.test.y, y)
        assert task.classes == 2


@pytest.mark.parametrize("shape", [(7, 3), (4, 3, 5, 5), (2, 2, 3)])
@pytest.mark.parametrize("kind", ["floats", "tokens"])
def test_inputs_of_any_shape_reach_the_trunk_in_it(shape, kind):
    shapes = set()

    class Trunk(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(int(np.prod(shape)), 6)

        def forward(self, x):
            shapes.add((tuple(x.shape[1:]), x.dtype))
            return self.layer(x.flatten(1).float()).relu()

    x, y = torch.randint(0, 5, (24, *shape)), torch.arange(24) % 2
    x = x if kind == "tokens" else x / 10
    data = TensorDataset(x, y)
    for stream in (False, True):
        task = Task.from_dataset(0, "a", data, data, stream=stream, images=False, tokens=kind == "tokens")
        method = HAT(Network(Trunk(), tasks=[task]))
        learn(method, [task], Trainer(Regime(epochs=1, batch=8)))
        assert shapes == {(shape, x.dtype)}
        assert method.predict(x, 0).shape == (24,)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(3), 0)])


X, Y = torch.rand(6, 3), torch.arange(6) % 2
DATA = TensorDataset(X, Y)
LOADER = DataLoader(DATA)


class Odd(Pairs):
    """A data set that is not what it was when the task was made."""

    def __init__(self, change):
        super().__init__(torch.rand(200, 3), torch.arange(200) % 2)
        self.targets, self.change = self.y.tolist(), change

    def __getitem__(self, number):
        return super().__getitem__(number) if number < 100 else self.change(*super().__getitem__(number))


def missing(x, y):
    raise OSError("no such file\nand more")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (missing, r"item \d+ can't be read: OSError: no such file"),
        (lambda x, y: (x[:2], y), r"of shape \(2,\)"),
        (lambda x, y: (x, 1 - y), "label of item .* but it was"),
        (lambda x, y: (x * float("nan"), y), "NaN or infinite"),
        (lambda x, y: (x.to(torch.uint8), y), "uint8"),
        (lambda x, y: (x > 0.5, y), "bool"),
        (lambda x, y: x, "must be an .* pair"),
    ],
)
def test_items_that_change_are_an_error_in_one_line(workers, change, said):
    task = Task.from_dataset(0, "odd", Odd(change), DATA, stream=True, workers=workers, valid=0.0)
    method = Method(Network(mlp((3,), widths=(8,)), [2], torch.zeros(1, 3)))
    with pytest.raises(ValueError, match=rf"^task 'odd', training: [^\n]*{said}[^\n]*$"):
        method.learn(task, Trainer(Regime(epochs=1, batch=100)))
    assert not method.history


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Task(LOADER), "Task.from_loaders"),
        (lambda: Task(DATA), "Task.from_dataset"),
        (lambda: Task.from_dataset(0, "a", LOADER, LOADER), "Task.from_loaders"),
        (lambda: Task.from_dataset(0, "a", DATA, DATA, workers=2), "stream=True"),
        (lambda: Task.from_dataset(0, "a", DATA, DATA, stream=True, workers=-1), "-1"),
        (lambda: Task.from_dataset(0, "a", Endless(), DATA, stream=True), "a length"),
        (lambda: Task.from_dataset(0, "a", DATA, DATA, input=0), "both or none"),
        (lambda: Task.from_dataset(0, "a", DATA, DATA, input="x", label="y"), "has no 'x'"),
        (lambda: Task.from_loaders(0, "a", DATA, 0.1, LOADER), "Task.from_dataset"),
        (lambda: Task.from_loaders(0, "a", LOADER, None, LOADER), "validation: a torch DataLoader"),
        (lambda: Task.from_loaders(0, "a", LOADER, 1.5, LOADER), "valid must be a share"),
        (lambda: Task.from_loaders(0, "a", DataLoader(Endless()), 0.1, LOADER), "IterableDataset"),
        (lambda: Task.from_loaders(0, "a", DataLoader(DATA, batch_size=None), 0.1, LOADER), "batches"),
        (
            lambda: Task.from_loaders(0, "a", DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 6, 6)), 0.1, LOADER),
            "WeightedRandomSampler",
        ),
        (lambda: Task.from_loaders(0, "a", LOADER, 0.1, DataLoader(TensorDataset(X[:, :2], Y))), r"shape \(2,\)"),
        (lambda: Task.from_loaders(0, "a", LOADER, 0.1, DataLoader(TensorDataset(X, Y + 5))), "label 6"),
        (lambda: Task.from_loaders(0, "a", LOADER, DataLoader(TensorDataset(X, Y + 5)), LOADER), "label 6"),
        (lambda: Task.from_dataset(0, "a", [({"a": X[0]}, 0)], DATA), "input=\\("),
    ],
)
def test_what_is_no_task_is_explained_in_one_line(call, said):
    with pytest.raises(ValueError, match=rf"^[^\n]*{said}[^\n]*$"):
        call()


def test_a_streamed_task_is_evaluated_by_workers_to_the_same_bits():
    task = toy_tasks(1, test=300)[0]
    method = make("hat", [task])
    learn(method, [task])
    one, two = evaluate(method, task.test), evaluate(method, streamed(task, workers=2).test)
    assert one == two
