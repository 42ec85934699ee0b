"""Token ids: whole numbers that reach the trunk as they are, in training, in prediction, and from a file."""

import numpy as np
import pytest
import torch
from torch import nn

from hatrack import METHODS, Network, Regime, Task, Trainer, load, save
from tests.helpers.learning import logits
from tests.helpers.nets import Lambda
from tests.helpers.toys import toy_tasks

LARGE = 2**40 + 1  # no float32 holds it


def token_task(index=0, length=5, **changes):
    draw = np.random.RandomState(index)
    parts = [draw.randint(0, 9, (24, length)), np.arange(24) % 3, draw.randint(0, 9, (9, length)), np.arange(9) % 3]
    return Task.from_arrays(index, f"words {index}", *parts, **{"tokens": True, "valid": 0.25, **changes})


def reader(kinds=None):
    """Return a trunk that looks token ids up; it adds the types of what it is called with to a set."""

    def forward(own, x):
        if kinds is not None:
            kinds.add(x.dtype)
        return own.layer(own.table(x).mean(1)).relu()

    return Lambda(forward, table=nn.Embedding(9, 6), layer=nn.Linear(6, 8))


def test_token_ids_are_kept_as_they_are():
    ids = np.array([[0, LARGE], [3, 1], [2, 2]])
    task = Task.from_arrays(0, "words", ids, [0, 1, 0], ids, [0, 1, 0], tokens=True, valid=0)
    seen = task.train.inputs(torch.arange(3))
    assert seen.dtype == torch.int64
    assert sorted(seen.tolist()) == sorted(ids.tolist())
    small = Task.from_arrays(0, "words", ids.astype(np.uint8), [0, 1, 0], ids, [0, 1, 0], tokens=True)
    assert small.train.x.dtype == torch.int64, "bytes are token ids like any other whole numbers"


@pytest.mark.parametrize(
    ("x", "how", "said"),
    [
        (np.zeros((3, 2)), {}, r"token ids.*\(n, length\).*float64"),
        (np.zeros((3, 2, 2), int), {}, r"token ids.*\(3, 2, 2\)"),
        (np.array([[0], [-4], [1]]), {}, "count from 0, not -4"),
        (np.zeros((3, 2), int), {"mean": 0.5}, "without mean, std and scale"),
        (np.zeros((3, 2), int), {"std": 2.0}, "without mean, std and scale"),
        (np.zeros((3, 2), int), {"scale": 1}, "without mean, std and scale"),
    ],
)
def test_anything_else_is_an_error_in_one_line(x, how, said):
    with pytest.raises(ValueError, match=rf"^task 'words'[^\n]*{said}[^\n]*$"):
        Task.from_arrays(0, "words", x, [0, 1, 0], x, [0, 1, 0], tokens=True, **how)


def test_whole_numbers_that_are_no_token_ids_are_images_as_before():
    x = np.arange(12).reshape(6, 2) % 2
    assert Task.from_arrays(0, "bits", x, x[:, 0], x, x[:, 0]).train.inputs(torch.arange(2)).dtype == torch.float32
    with pytest.raises(ValueError, match="tokens=True"):
        Task.from_arrays(0, "bits", 5 * x, x[:, 0], x, x[:, 0])


def test_a_task_must_be_of_the_kind_that_the_network_was_built_for():
    words, images = token_task(), toy_tasks(1, shape=(5,))[0]
    with pytest.raises(ValueError, match="images, but the example was token ids"):
        Network(reader(), tasks=[words]).check_task(images)
    with pytest.raises(ValueError, match="token ids, but the example was images"):
        Network(nn.Linear(5, 4), tasks=[images]).check_task(words)


@pytest.mark.filterwarnings("ignore:task .* finds under")
@pytest.mark.parametrize(
    "name", ["hat", "pmask", "packnet", "independent", "sgd", "ewc", "er", "derpp", "agem", "lwf", "joint"]
)
def test_every_kind_of_method_learns_from_token_ids(name, tmp_path):
    torch.manual_seed(0)
    tasks, seen = [token_task(0), token_task(1)], set()
    method = METHODS[name](Network(reader(seen), tasks=tasks))
    fit = Trainer(Regime(epochs=2, batch=8, lr=0.01))
    for task in tasks:
        method.learn(task, fit)
    assert seen == {torch.int64}
    raw = tasks[1].test.x.numpy()
    assert torch.equal(method.predict(raw, 1), method.predict(raw.astype(np.int32), 1))
    assert torch.equal(method.predict(raw, 1), logits(method, tasks[1]).argmax(1))
    save(method, tmp_path / "method")
    again = load(tmp_path / "method", reader())
    assert torch.equal(again.predict(raw, 1), method.predict(raw, 1))
