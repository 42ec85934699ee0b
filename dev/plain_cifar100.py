"""Split CIFAR-100 by plain SGD without the library, in the setting of 004's script: a loop to hold the library against.

python -m dev.plain_cifar100 FOLDER/cifar100.npz 0 1    # the file of `hatrack data get cifar100`, and seeds; minutes each
python -m dev.plain_cifar100 FOLDER/cifar100.npz 0 1 --shuffle    # each task in an order of its own, as in the library
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

TASKS, CLASSES, BATCH, LR, MOMENTUM, WIDTH = 20, 5, 10, 0.01, 0.8, 20


class Block(nn.Module):
    """The block of 004's code, without its second convolution, which is never called."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        same = stride == 1 and inputs == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm2(F.relu(self.norm1(F.relu(self.conv(x))) + self.shortcut(x)))
        return found


def network() -> nn.Sequential:
    """Return the residual network with one head for all classes."""
    blocks, inputs = [], WIDTH
    for stage in range(4):
        for number in range(2):
            blocks.append(Block(inputs, WIDTH * 2**stage, 2 if stage and not number else 1))
            inputs = WIDTH * 2**stage
    stem = (nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(inputs, TASKS * CLASSES))


def masked(logits: Tensor, task: int) -> Tensor:
    """Return the logits with those of other tasks out of reach."""
    own = torch.arange(logits.shape[1]) // CLASSES == task
    return torch.where(own, logits, torch.tensor(-1e11))


def in_order(rows: Tensor, source: torch.Generator | None) -> Tensor:
    """Return the examples of a task in the order of training: that of the file, as in 004's code, or a random one."""
    return rows if source is None else rows[torch.randperm(len(rows), generator=source)]


def run(path: str, seed: int, *, shuffle: bool = False) -> np.ndarray:
    """Train all tasks and return the matrix of accuracies: on every task so far after each task."""
    torch.manual_seed(seed)
    source = torch.Generator().manual_seed(1000 + seed) if shuffle else None
    data = np.load(path)
    x, x_test = (torch.from_numpy(data[key]).permute(0, 3, 1, 2).float().div(255) for key in ("x_train", "x_test"))
    y, y_test = (torch.from_numpy(data[key]).long() for key in ("y_train", "y_test"))
    net, accuracy = network(), np.full((TASKS, TASKS), np.nan)
    for task in range(TASKS):
        optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
        net.train()
        for rows in in_order(torch.where(y // CLASSES == task)[0], source).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(masked(net(x[rows]), task), y[rows]).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            for other in range(task + 1):
                rows = torch.where(y_test // CLASSES == other)[0]
                right = masked(net(x_test[rows]), other).argmax(1) == y_test[rows]
                accuracy[task, other] = right.float().mean()
    return accuracy


if __name__ == "__main__":
    torch.set_num_threads(1)  # the order of sums decides which of many outcomes a seed has
    for word in [word for word in sys.argv[2:] if word != "--shuffle"]:
        found = run(sys.argv[1], int(word), shuffle="--shuffle" in sys.argv)
        lost = float((np.nanmax(found[:-1, :-1], axis=0) - found[-1, :-1]).mean())
        print(f"seed {word}: average accuracy {100 * found[-1].mean():.1f} %, learning accuracy "
              f"{100 * np.diag(found).mean():.1f} %, forgetting {lost:.3f}", flush=True)  # fmt: skip
