"""How well could any router do with the features of a kept model? A linear discriminant on the data of all tasks at once.

No router can have it: the features of later tasks on the data of earlier ones are known only while that data is at hand.

hatrack run cifar100-5 hat --seed 0 --keep-model --out runs
python docs/examples/router_ceiling.py cifar100-5 runs/cifar100-5-hat-seed0-*.safetensors --seed 0
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

import hatrack as hr
from hatrack.methods.method import Method
from hatrack.methods.modes import evaluation_mode
from hatrack.methods.router import features_and_logits
from hatrack.tasks.split import Split

DIRECTIONS = 128  # leading principal directions of each task's features
SHRINKAGE = 0.1  # of the covariance that classes share, towards its mean variance


def answers(method: Method, split: Split, rows: Tensor, tasks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the features and the logits that every task's network has for some images of one task."""
    found = []
    for task in range(tasks):
        parts = [features_and_logits(method, method.net.preprocess(split.raw(part), task), task) for part in rows.split(500)]
        found.append((torch.cat([one for one, _ in parts]), torch.cat([two for _, two in parts])))
    return [features for features, _ in found], [logits for _, logits in found]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="How well could any router do with the features of a kept model?")
    parser.add_argument("benchmark")
    parser.add_argument("model", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=2500, help="training images per task, for the discriminant")
    given = parser.parse_args()
    method, tasks = hr.load(given.model), hr.BENCHMARKS[given.benchmark](given.seed)
    with evaluation_mode(method):
        train = []
        for task in tasks:
            rows = torch.arange(min(given.images, len(task.train))) * len(task.train) // min(given.images, len(task.train))
            train.append((answers(method, task.train, rows, len(tasks))[0], task.train.y[rows]))
        bases = []  # centre and directions of each task's features on its own images
        for number, (features, _) in enumerate(train):
            centre = features[number].mean(0)
            bases.append((centre, torch.pca_lowrank(features[number] - centre, DIRECTIONS, center=False)[2]))

        def reduced(features: list[Tensor]) -> Tensor:
            return torch.cat([(one - centre) @ basis for one, (centre, basis) in zip(features, bases, strict=True)], 1)

        classes = [(number, label) for number, task in enumerate(tasks) for label in range(task.classes)]
        x = [reduced(features) for features, _ in train]
        means = torch.stack([x[number][train[number][1] == label].mean(0) for number, label in classes])
        starts = [classes.index((number, 0)) for number in range(len(tasks))]
        rest = torch.cat([one - means[labels + start] for one, (_, labels), start in zip(x, train, starts, strict=True)])
        covariance = rest.T @ rest / len(rest)
        variance = covariance.diagonal().mean()
        covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * variance * torch.eye(len(covariance))
        weights = torch.linalg.solve(covariance, means.T)  # (features, classes)
        offset = -0.5 * (means.T * weights).sum(0)
        of_task = torch.tensor([number for number, _ in classes])

        right: dict[str, list[float]] = {
            "task id": [],
            "best logit": [],
            "discriminant": [],
            "best logit + discriminant / 2": [],
        }
        for number, task in enumerate(tasks):
            features, logits = answers(method, task.test, torch.arange(len(task.test)), len(tasks))
            scores = reduced(features) @ weights + offset
            best = torch.stack([one.max(1).values for one in logits], 1)
            found = torch.stack([scores[:, of_task == other].logsumexp(1) for other in range(len(tasks))], 1).log_softmax(1)
            labels = torch.stack([one.argmax(1) for one in logits], 1)
            choices = (torch.full((len(best),), number), best.argmax(1), found.argmax(1), (best + found / 2).argmax(1))
            for name, choice in zip(right, choices, strict=True):
                label = labels.gather(1, choice[:, None])[:, 0]
                right[name].append(((choice == number) & (label == task.test.y)).double().mean().item())
    for name, values in right.items():
        print(f"{name:30} {100 * sum(values) / len(values):5.1f} %")


if __name__ == "__main__":
    main()
