"""HAT on a network that hatrack has never seen: a classifier with shortcuts, concatenation and batch norm."""

import torch
from torch import Tensor, nn

import hatrack as hr
from hatrack.benchmarks.mixture import digits_and_clothes


class Stranger(nn.Module):
    """Somebody's classifier, as it comes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.inner, self.outer = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)
        self.classifier = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + torch.sigmoid(self.outer(x).mean((2, 3), keepdim=True)) * self.inner(x)
        return self.classifier(torch.cat([x.amax((2, 3)), x.mean((2, 3))], 1))


def main() -> None:
    tasks = digits_and_clothes(seed=0, data="sample")[:3]
    example = tasks[0].train.inputs(torch.arange(2))
    net = hr.Network.from_classifier(Stranger(10), [tasks[0].classes], example)  # its last layer becomes a head per task
    method = hr.HAT(net)
    fit = hr.Trainer(hr.Regime(epochs=8, optimizer="adam", lr=0.003))
    method.learn(tasks[0], fit)
    images = tasks[0].test.inputs(torch.arange(100))
    before = method.eval()(images, task=0)
    for task in tasks[1:]:
        net.add_task(task.classes)
        method.learn(task, fit)
        print(f"{task.name}: {hr.evaluate(method, task.test).accuracy:.1%}, capacity taken: {method.usage()}")
    assert torch.equal(before, method.eval()(images, task=0))  # the first task, bit for bit as it was
    method.release(1)  # the second task is not needed any more: what it alone used is free again


if __name__ == "__main__":
    main()
