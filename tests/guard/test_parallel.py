"""Two processes that train one backbone by DistributedDataParallel: both end with the same bits and forget nothing."""

import os
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hatrack as hr
from tests.helpers.guarded import BACKBONES, PROBE, WIDTH, data


class Model(nn.Module):
    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x):
        return self.head(self.backbone(x))


def work(rank: int, folder: str, method: str) -> None:
    """Learn two tasks, each process on its own half of the data; write what the first task answered, and digests."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    backbone, heads = BACKBONES["cnn"](), {name: nn.Linear(WIDTH, 3) for name in "ab"}
    held = [*backbone.parameters(), *(p for head in heads.values() for p in head.parameters())]
    optimizer = torch.optim.AdamW(held, lr=0.01, weight_decay=0.1)
    guard = hr.protect(backbone, optimizer, example=PROBE[:2], method=method)
    answers, bits = [], []
    for number, (name, head) in enumerate(heads.items()):
        model = DistributedDataParallel(Model(backbone, head))
        x, y = (t[rank::2] for t in data(number))
        with guard.learn(name, steps=4, own=[head], settle=[x]):
            model.train()
            for _ in range(2):
                for part in torch.arange(24).split(6):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x[part]), y[part]).backward()
                    optimizer.step()
            bits.append(guard.module.embedding.detach().clone())
        with guard.use("a"), torch.no_grad():
            answers.append(heads["a"](backbone(PROBE)))
    late = BACKBONES["mlp"]()
    wrapped = DistributedDataParallel(late)
    own = torch.optim.SGD(late.parameters(), lr=0.1)
    other, said = hr.protect(late, own, example=PROBE[:2]), ""
    try:
        with other.learn("a", steps=1):
            wrapped(PROBE)
    except ValueError as error:
        said = str(error)
    result = {"answers": answers, "bits": bits, "digests": guard.verify(), "said": said}
    torch.save(result, Path(folder) / f"rank{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("method", ["hat", "pmask"])
def test_two_processes(tmp_path, method, monkeypatch):
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    multiprocessing.spawn(work, (str(tmp_path), method), nprocs=2)
    one, two = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert torch.equal(*one["answers"])
    assert torch.equal(*two["answers"])
    assert torch.equal(one["answers"][0], two["answers"][0])
    assert one["digests"] == two["digests"]
    assert all(map(torch.equal, one["bits"], two["bits"]))
    assert "before DistributedDataParallel wraps it" in one["said"]
