"""Two tasks on two processes by DistributedDataParallel (gloo, on the CPU): both end with the same bits."""

import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hatrack as hr

PROCESSES, EPOCHS = 2, 6


def made_up_data(seed, count=384):
    """Made-up images 1x8x8 of four classes in place of yours: for training and for validation."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=draw)
    x = (torch.randn(4, 64, generator=draw)[y] + 0.5 * torch.randn(count, 64, generator=draw)).view(-1, 1, 8, 8)
    return TensorDataset(x[128:], y[128:]), (x[:128], y[:128])


def make_backbone():
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


def work(rank, folder):
    """What each process does: it learns all tasks on its own part of the data, and writes what it has at the end."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)  # the same initial values everywhere
    data = {name: made_up_data(seed) for seed, name in enumerate(["digits", "letters"])}
    backbone, heads = make_backbone(), {name: nn.Linear(128, 4) for name in data}
    held = [*backbone.parameters(), *(p for head in heads.values() for p in head.parameters())]
    optimizer = torch.optim.AdamW(held, lr=5e-3, weight_decay=0.05)
    guard = hr.protect(backbone, optimizer, example=data["digits"][1][0][:2])  # before DistributedDataParallel
    before = {}
    for name, (train, (x, _)) in data.items():
        model = DistributedDataParallel(nn.Sequential(backbone, heads[name]))
        sampler = DistributedSampler(train, PROCESSES, rank)
        loader = DataLoader(train, batch_size=8, sampler=sampler)
        with guard.learn(name, steps=len(loader), own=[heads[name]], settle=loader):
            model.train()
            for epoch in range(EPOCHS):
                sampler.set_epoch(epoch)
                for images, labels in loader:
                    optimizer.zero_grad()
                    F.cross_entropy(model(images), labels).backward()
                    optimizer.step()
        with guard.use(name), torch.no_grad():
            before[name] = heads[name](backbone(x))

    after = {}
    for name, (_, (x, _)) in data.items():
        with guard.use(name), torch.no_grad():
            after[name] = heads[name](backbone(x))
    digests = guard.verify()
    if rank == 0:
        guard.save(Path(folder) / "v1.safetensors")
    torch.save((before, after, digests), Path(folder) / f"rank{rank}.pt")
    distributed.destroy_process_group()


def main(folder):
    multiprocessing.spawn(work, (folder,), nprocs=PROCESSES)
    found = [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(PROCESSES)]
    print(f"digests of the processes: {'the same' if found[0][2] == found[1][2] else 'different'}")
    for name, logits in found[0][1].items():
        right = (logits.argmax(1) == made_up_data(list(found[0][1]).index(name))[1][1]).float().mean()
        same = all(torch.equal(found[0][0][name], after[name]) for _, after, _ in found)
        print(f"{name}: {right:.0%} right, {'the same bits' if same else 'changed'} in both processes")
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
