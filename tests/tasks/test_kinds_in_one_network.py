"""Classes, several labels, numbers and words in one network of the user's, in memory and streamed: saved, loaded."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hatrack import HAT, METHODS, Network, Regime, Task, Trainer, evaluate, load, save
from tests.helpers.learning import logits

WIDTH, WORDS = 12, 9


class Either(nn.Module):
    """Takes vectors or words: the first number of an input says which, and the others are these."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.numbers = nn.Embedding(WORDS, 40), nn.Linear(WIDTH, 40)
        self.layer = nn.Linear(40, 40)

    def forward(self, x):
        words, rest = x[:, :1], x[:, 1:]
        read = self.table((rest * words).long()).mean(1)
        return self.layer(torch.where(words > 0, read, self.numbers(rest * (1 - words))).relu()).relu()


def items(seed, label, *, words=False, count=120):
    """Return items that are dicts with a flag, an input and a label, which is a function of the input."""
    draw = torch.Generator().manual_seed(seed)
    shape = (count, WIDTH)
    x = torch.randint(0, WORDS, shape, generator=draw).float() if words else torch.randn(shape, generator=draw)
    return [{"words": torch.tensor([float(words)]), "x": row, "y": label(row), "file": "a"} for row in x]


def make_task(index, name, label, *, words=False, stream=False, **how):
    train, test = items(index, label, words=words), items(100 + index, label, words=words)
    keys = {"input": ("words", "x"), "label": "y", "scale": 1, **how}
    if stream:
        return Task.from_loaders(index, name, DataLoader(train), 0.2, DataLoader(test), **keys)
    return Task.from_dataset(index, name, train, test, valid=0.2, **keys)


def five_tasks():
    return [
        make_task(0, "classes", lambda x: int(x[0] > 0)),
        make_task(1, "labels", lambda x: (x[:3] > 0).float(), target="multi-label", stream=True),
        make_task(2, "numbers", lambda x: x[:2].sum() + 5, target="regression"),
        make_task(3, "words", lambda x: int((x == 3).any()), words=True, stream=True),
        make_task(4, "grades", lambda x: int(x[0] > -0.5) + int(x[0] > 0.5), target="ordinal", stream=True),
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:task .* finds under")
@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_four_kinds_are_learned_saved_loaded_and_stay_when_a_fifth_comes(name, tmp_path):
    tasks, regime = five_tasks(), Regime(epochs=25, batch=16, lr=0.05, optimizer="momentum", schedule="constant")
    method = METHODS[name](Network(Either(), tasks=tasks[:4]), **({"smax": 50.0} if name == "hat" else {}))
    for task in tasks[:4]:
        method.learn(task, Trainer(regime))
    scores = [evaluate(method, task.test).accuracy for task in tasks[:4]]
    chance = [0.6, 0.6, 0.2, 0.6]
    assert all(score > least for score, least in zip(scores, chance, strict=True)), scores
    before = [logits(method, task) for task in tasks[:4]]
    used = {k: {key: t.clone() for key, t in method.used_by(k).items()} for k in range(4)}
    save(method, tmp_path / "method")
    again = load(tmp_path / "method", Either())
    assert all(torch.equal(logits(again, task), one) for task, one in zip(tasks, before, strict=False))
    again.net.add_task(tasks[4].classes)
    again.learn(tasks[4], Trainer(regime))
    assert all(torch.equal(logits(again, task), one) for task, one in zip(tasks, before, strict=False))
    for k, tensors in used.items():
        now = again.used_by(k)
        assert all(torch.equal(tensor, now[key]) for key, tensor in tensors.items())
    raw = torch.stack([torch.cat([item["words"], item["x"]]) for item in items(102, lambda x: 0)])
    assert (again.predict(raw, 2) - 5).abs().mean() < 2, "numbers are in the units of the labels"
    assert again.predict(raw, 1).dtype == torch.bool
    assert isinstance(again, HAT) == (name == "hat")
