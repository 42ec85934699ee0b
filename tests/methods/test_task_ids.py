"""The numbers of tasks that are given for images: one whole number per image, of a task that there is."""

import numpy as np
import pytest
import torch
from torch import nn

from hatrack import Network
from tests.helpers.learning import learn, make
from tests.helpers.toys import toy_tasks

ASK = {
    "predict": lambda method, x, ids: method.predict(x, ids),
    "call": lambda method, x, ids: method(x, ids),
    "preprocess": lambda method, x, ids: method.net.preprocess(x, ids),
}


@pytest.fixture(scope="module", params=["sgd", "hat", "pnn"])
def learned(request):
    tasks = toy_tasks(2)
    method = make(request.param, tasks)
    learn(method, tasks)
    return method, tasks[0].test.x


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("count", [0, 3, 29, 31])
def test_one_number_per_image_is_needed(learned, ask, count):
    method, x = learned
    with pytest.raises(ValueError, match=rf"30 images, numbers of shape \({count},\)"):
        ASK[ask](method, x, torch.zeros(count, dtype=torch.int64))


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.complex64])
def test_numbers_are_whole(learned, ask, kind):
    """Torch takes bools, and bytes, for a choice of images."""
    method, x = learned
    with pytest.raises(ValueError, match=f"whole numbers such as int64, not {str(kind).removeprefix('torch.')}"):
        ASK[ask](method, x, torch.ones(30, dtype=kind))


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_any_type_of_whole_numbers_means_the_same(learned, ask, kind):
    method, x = learned
    ids = torch.arange(30) % 2
    assert torch.equal(ASK[ask](method, x, ids.to(kind)), ASK[ask](method, x, ids))


@pytest.mark.parametrize("ask", ["predict", "preprocess"])
@pytest.mark.parametrize("number", [-1, 2])
def test_there_is_such_a_task(learned, ask, number):
    method, x = learned
    with pytest.raises(IndexError, match=f"no task {number}: the network has 2"):
        ASK[ask](method, x, torch.tensor([0] * 29 + [number]))


@pytest.mark.parametrize("number", ["toy 0", 1.0, None])
@pytest.mark.parametrize("ask", ["preprocess", "release", "forget_task", "weight_masks"])
def test_one_number_is_whole_and_of_a_task_that_there_is(ask, number):
    method = make("hat", toy_tasks(2))
    asked = getattr(method, ask, lambda task: method.net.preprocess(torch.rand(1, 1, 4, 4), task))
    with pytest.raises(ValueError, match="task's number must be a whole number"):
        asked(number)
    with pytest.raises(IndexError, match="no task 2"):
        asked(2)


def test_what_predict_takes_preprocess_takes():
    net = Network(nn.Sequential(nn.Flatten(), nn.Linear(60, 3)), [2], torch.zeros(2, 3, 4, 5))
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    seen = net.preprocess(images, np.int64(0))
    assert torch.equal(seen, net.preprocess(torch.from_numpy(images).permute(0, 3, 1, 2), 0))
    assert torch.equal(seen[0, 1], torch.from_numpy(images[0, :, :, 1]) / 255)
