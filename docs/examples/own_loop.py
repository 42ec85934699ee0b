"""Three tasks of different kinds in one backbone, in a plain PyTorch loop: classes, a regression, and several labels."""

import torch
from torch import nn
from torch.nn import functional as F

import hatrack as hr


def make_loader(number, kind):
    """Made-up data in place of yours: batches of 32 images 1x8x8 with targets."""
    draw = torch.Generator().manual_seed(number)
    y = torch.randint(4, (512,), generator=draw)
    x = (torch.randn(4, 64, generator=draw)[y] + 0.5 * torch.randn(512, 64, generator=draw)).view(-1, 1, 8, 8)
    targets = {"classes": y, "values": x.flatten(1)[:, :4], "labels": F.one_hot(y, 4).float()}[kind]
    return list(zip(x.split(32), targets.split(32), strict=True))


def main():
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip
    tasks = {"digits": F.cross_entropy, "depth": F.mse_loss, "tags": F.binary_cross_entropy_with_logits}
    kinds = {"digits": "classes", "depth": "values", "tags": "labels"}
    loaders = {name: make_loader(number, kinds[name]) for number, name in enumerate(tasks)}
    heads = {name: nn.Linear(256, 4) for name in tasks}

    optimizer = torch.optim.AdamW(backbone.parameters(), lr=3e-3, weight_decay=0.05)
    guard = hr.protect(backbone, optimizer, example=loaders["digits"][0][0][:2])
    answers = {}
    for name, loss_of in tasks.items():
        optimizer.add_param_group({"params": heads[name].parameters()})
        loader = loaders[name]
        with guard.learn(name, steps=len(loader), own=[heads[name]], settle=loader):
            backbone.train()
            for _ in range(5):
                for x, y in loader:
                    loss = loss_of(heads[name](backbone(x)), y)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(backbone.parameters(), 1.0)
                    optimizer.step()
        with guard.use(name), torch.no_grad():
            answers[name] = heads[name](backbone(x))
        print(f"{name}: loss {loss.item():.3f}, capacity taken {max(guard.usage().values()):.0%}")

    for name, before in answers.items():
        with guard.use(name), torch.no_grad():
            x = loaders[name][-1][0]
            print(f"{name}: {'the same bits' if torch.equal(before, heads[name](backbone(x))) else 'changed'}")
    guard.verify()


if __name__ == "__main__":
    main()
