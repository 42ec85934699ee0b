"""Two tasks of a YOLO-like detector: objectness, boxes and classes on a grid, in one backbone with a head per task."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import hatrack as hr

SIZE, GRID, EPOCHS = 32, 4, 6
CELL = SIZE // GRID
SHAPES = {"round": ["disc", "ring"], "straight": ["square", "cross"]}


def draw_shape(kind, size):
    """A shape of size x size pixels, 0 or 1."""
    y, x = (torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")) - (size - 1) / 2).abs()
    radius = (x**2 + y**2).sqrt() / (size / 2)
    thin = torch.minimum(x, y) <= 1
    return {"disc": radius < 1, "ring": (radius < 1) & (radius > 0.6), "square": x >= 0, "cross": thin}[kind].float()


def made_up_images(task, seed, count):
    """Images 3x32x32 with one or two shapes, and targets (count, 6, 4, 4): objectness, box and class of every cell."""
    draw = torch.Generator().manual_seed(seed)
    images, targets = 0.2 * torch.rand(count, 3, SIZE, SIZE, generator=draw), torch.zeros(count, 6, GRID, GRID)
    for image, target in zip(images, targets, strict=True):
        for cell in torch.randperm(GRID * GRID, generator=draw)[: torch.randint(1, 3, (), generator=draw)].tolist():
            size, label = (torch.randint(low, high, (), generator=draw).item() for low, high in ((6, 11), (0, 2)))
            row, column = divmod(cell, GRID)
            y, x = (min(SIZE - size, max(0, k * CELL + CELL // 2 - size // 2)) for k in (row, column))
            shape = draw_shape(SHAPES[task][label], size)
            image[:, y : y + size, x : x + size] += shape * torch.rand(3, 1, 1, generator=draw).clamp(min=0.5)
            centre = [(k + size / 2 - j * CELL) / CELL for k, j in ((x, column), (y, row))]
            target[:, row, column] = torch.tensor([1.0, *centre, size / SIZE, size / SIZE, label])
    return images, targets


def detector_loss(out, target):
    """Objectness in all cells; boxes and classes in those that have an object. `out` is (batch, 5 + 2, 4, 4)."""
    there = target[:, 0] > 0
    found, wanted = out.movedim(1, -1)[there], target.movedim(1, -1)[there]
    objects = F.binary_cross_entropy_with_logits(out[:, 0], target[:, 0], pos_weight=torch.tensor(4.0))
    boxes = F.smooth_l1_loss(found[:, 1:5].sigmoid(), wanted[:, 1:5], beta=0.1)
    return objects + 2 * boxes + F.cross_entropy(found[:, 5:], wanted[:, 5].long())


def quality(out, target):
    """The share of cells whose objectness is right, of objects whose class is right, and the error of boxes in pixels."""
    there = target[:, 0] > 0
    found, wanted = out.movedim(1, -1)[there], target.movedim(1, -1)[there]
    boxes = (found[:, 1:5].sigmoid() - wanted[:, 1:5]).abs() * torch.tensor([CELL, CELL, SIZE, SIZE])
    classes = found[:, 5:].argmax(1) == wanted[:, 5]
    return ((out[:, 0] > 0) == there).float().mean(), classes.float().mean(), boxes.mean()


def make_backbone():
    """From images (batch, 3, 32, 32) to maps (batch, 64, 4, 4)."""
    layers = []
    for before, after in ((3, 24), (24, 48), (48, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.SiLU()]
    return nn.Sequential(*layers)


def main(folder):
    torch.manual_seed(0)
    train = {name: made_up_images(name, seed, 512) for seed, name in enumerate(SHAPES)}
    valid = {name: made_up_images(name, 10 + seed, 128) for seed, name in enumerate(SHAPES)}
    backbone, heads = make_backbone(), {name: nn.Conv2d(64, 5 + 2, 1) for name in SHAPES}
    held = [*backbone.parameters(), *(p for head in heads.values() for p in head.parameters())]
    optimizer = torch.optim.SGD(held, lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    guard = hr.protect(backbone, optimizer, example=train["round"][0][:2])
    before = {}
    for name, (images, targets) in train.items():
        batches = list(zip(images.split(32), targets.split(32), strict=True))
        with guard.learn(name, steps=len(batches), own=[heads[name]], settle=batches):
            backbone.train()
            for _ in range(EPOCHS):
                for x, y in batches:
                    optimizer.zero_grad()
                    detector_loss(heads[name](backbone(x)), y).backward()
                    optimizer.step()
        with guard.use(name), torch.no_grad():
            before[name] = heads[name](backbone(valid[name][0]))

    after = {}
    for name, (images, targets) in valid.items():
        with guard.use(name), torch.no_grad():
            after[name] = heads[name](backbone(images))
        cells, classes, boxes = quality(after[name], targets)
        same = "the same bits" if torch.equal(before[name], after[name]) else "changed"
        print(f"{name}: {cells:.0%} of cells and {classes:.0%} of classes right, boxes {boxes:.1f} pixels off, {same}")
    guard.verify()
    guard.save(Path(folder) / "v1.safetensors")
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
