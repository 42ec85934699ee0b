"""Two tasks in a loop of Accelerate: a prepared model and optimizer, accumulation, clipping, bfloat16, saved state."""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hatrack as hr

EPOCHS, ACCUMULATE = 6, 2


def made_up_data(seed, count=384):
    """Made-up images 1x8x8 of four classes in place of yours: a loader for training, and images for validation."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=draw)
    x = (torch.randn(4, 64, generator=draw)[y] + 0.5 * torch.randn(count, 64, generator=draw)).view(-1, 1, 8, 8)
    return DataLoader(TensorDataset(x[128:], y[128:]), batch_size=16, shuffle=True), x[:128], y[:128]


class Model(nn.Module):
    """The backbone, which all tasks share, and a head per task."""

    def __init__(self, names):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.heads = nn.ModuleDict({name: nn.Linear(128, 4) for name in names})

    def forward(self, x, name):
        return self.heads[name](self.backbone(x))


def main(folder, device="cpu", precision="bf16"):
    torch.manual_seed(0)
    data = {name: made_up_data(seed) for seed, name in enumerate(["digits", "letters"])}
    model = Model(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    guard = hr.protect(model.backbone, optimizer, example=data["digits"][1][:2])  # before prepare

    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, gradient_accumulation_steps=ACCUMULATE)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    before = {}
    for name, (loader, valid, _) in data.items():
        loader = accelerator.prepare(loader)
        with guard.learn(name, steps=len(loader) // ACCUMULATE, own=[model.heads[name]], settle=loader):
            prepared.train()
            for _ in range(EPOCHS):
                for x, y in loader:
                    with accelerator.accumulate(prepared):
                        accelerator.backward(F.cross_entropy(prepared(x, name), y))
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()
        with guard.use(name), torch.no_grad():
            before[name] = prepared(valid.to(accelerator.device), name).cpu()

    after = {}
    for name, (_, valid, y) in data.items():
        with guard.use(name), torch.no_grad():
            after[name] = prepared(valid.to(accelerator.device), name).cpu()
        right = (after[name].argmax(1) == y).float().mean()
        print(f"{name}: {right:.0%} right, {'the same bits' if torch.equal(before[name], after[name]) else 'changed'}")
    guard.verify()
    guard.save(Path(folder) / "v1.safetensors")
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
