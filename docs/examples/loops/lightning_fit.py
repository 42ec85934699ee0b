"""Two tasks by Lightning: Trainer.fit per task, automatic optimization, and the best checkpoint of each."""

import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hatrack as hr

EPOCHS = 5


def made_up_data(seed, count=384):
    """Made-up images 1x8x8 of four classes in place of yours: loaders for training and for validation."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=draw)
    x = (torch.randn(4, 64, generator=draw)[y] + 0.5 * torch.randn(count, 64, generator=draw)).view(-1, 1, 8, 8)
    train = DataLoader(TensorDataset(x[128:], y[128:]), batch_size=16, shuffle=True, generator=draw)
    return train, DataLoader(TensorDataset(x[:128], y[:128]), batch_size=64)


class Classifier(L.LightningModule):
    """One task: the backbone, which all tasks share, and a head of its own."""

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=0.05)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("valid_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        return self.optimizer  # the one that the guard knows; an optimizer that is made here needs guard.add_optimizer


def make_backbone():
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


def make_trainer(folder, device):
    best = ModelCheckpoint(folder, monitor="valid_loss")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return best, L.Trainer(accelerator=device, max_epochs=EPOCHS, gradient_clip_val=1.0, callbacks=[best], **quiet)


def main(folder, device="cpu"):
    L.seed_everything(0, verbose=False)
    data = {name: made_up_data(seed) for seed, name in enumerate(["digits", "letters"])}
    backbone = make_backbone()
    models = {name: Classifier(backbone, nn.Linear(128, 4)) for name in data}
    example = data["digits"][1].dataset.tensors[0][:2]
    guard = hr.protect(backbone, [model.optimizer for model in models.values()], example=example)
    before = {}
    for name, (train, valid) in data.items():
        best, trainer = make_trainer(Path(folder) / name, device)
        with guard.learn(name, steps=len(train), own=[models[name].head], settle=train):
            trainer.fit(models[name], train, valid)
            models[name].load_state_dict(torch.load(best.best_model_path)["state_dict"])  # within the block
        with guard.use(name):
            before[name] = torch.cat(trainer.predict(models[name], valid))

    after = {}
    for name, (_, valid) in data.items():
        with guard.use(name):
            after[name] = torch.cat(make_trainer(folder, device)[1].predict(models[name], valid))
        right = (after[name].argmax(1) == valid.dataset.tensors[1]).float().mean()
        print(f"{name}: {right:.0%} right, {'the same bits' if torch.equal(before[name], after[name]) else 'changed'}")
    guard.verify()
    guard.save(Path(folder) / "v1.safetensors")
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
