"""Tasks in a plain PyTorch loop with a schedule, accumulation, clipping and a best checkpoint; one more after loading."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hatrack as hr

EPOCHS, ACCUMULATE = 6, 2


def made_up_data(seed, count=384):
    """Made-up images 1x8x8 of four classes in place of yours: for training and for validation."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=draw)
    x = (torch.randn(4, 64, generator=draw)[y] + 0.5 * torch.randn(count, 64, generator=draw)).view(-1, 1, 8, 8)
    train = DataLoader(TensorDataset(x[128:], y[128:]), batch_size=16, shuffle=True, generator=draw)
    return train, (x[:128], y[:128])


def make_backbone():
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


def make_optimizer(backbone, heads):
    held = [*backbone.parameters(), *(p for head in heads.values() for p in head.parameters())]
    return torch.optim.AdamW(held, lr=5e-3, weight_decay=0.05)


def train(guard, optimizer, name, head, loader, valid):
    """Learn one task with a schedule of its own; keep the epoch with the lowest validation loss."""
    steps = len(loader) // ACCUMULATE
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=EPOCHS * steps)
    model, best = nn.Sequential(guard.backbone, head), (float("inf"), {})
    with guard.learn(name, steps=steps, own=[head], settle=loader):
        for _ in range(EPOCHS):
            model.train()
            for number, (x, y) in enumerate(loader, 1):
                (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
                if number % ACCUMULATE == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
            model.eval()  # the gates are binary now, as they would be if the task ended here
            with torch.no_grad():
                loss = F.cross_entropy(model(valid[0]), valid[1]).item()
            if loss < best[0]:
                best = loss, {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(best[1])  # the gates are among its values


@torch.no_grad()
def answer(guard, name, head, x):
    with guard.use(name):
        return head(guard.backbone(x))


def main(folder):
    torch.manual_seed(0)
    data = {name: made_up_data(seed) for seed, name in enumerate(["digits", "letters", "signs"])}
    heads, backbone = {name: nn.Linear(128, 4) for name in data}, make_backbone()
    optimizer, before = make_optimizer(backbone, heads), {}
    guard = hr.protect(backbone, optimizer, example=data["digits"][1][0][:2])
    for name in ("digits", "letters"):
        train(guard, optimizer, name, heads[name], *data[name])
        before[name] = answer(guard, name, heads[name], data[name][1][0])
    file = Path(folder) / "v1.safetensors"
    guard.save(file)

    # Perhaps on another day: the same architecture, other values
    backbone, heads = make_backbone(), {name: nn.Linear(128, 4) for name in data}
    optimizer = make_optimizer(backbone, heads)
    guard = hr.load_guard(file, backbone, optimizer, own={name: [heads[name]] for name in before})
    train(guard, optimizer, "signs", heads["signs"], *data["signs"])

    after = {name: answer(guard, name, heads[name], data[name][1][0]) for name in before}
    guard.verify()
    for name, logits in after.items():
        right = (logits.argmax(1) == data[name][1][1]).float().mean()
        print(f"{name}: {right:.0%} right, {'the same bits' if torch.equal(before[name], logits) else 'changed'}")
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
