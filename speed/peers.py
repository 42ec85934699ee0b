"""Avalanche on the same network and data, in an environment of its own that `make peers` sets up.

`Peer` starts that environment's Python on this file. There it learns the earlier tasks, and then trains one epoch of the
last one for every line that it reads, so that its epochs can take turns with those of others; it answers in JSON.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speed.loops import BATCH, LR, noise, perceptron

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
METHODS = ("sgd", "ewc", "si")


class Missing(Exception):  # noqa: N818
    """There is nothing to compare with."""


class Peer:
    """Avalanche at work on one method, as a process on one thread; `epoch()` is the seconds that its next epoch takes."""

    def __init__(self, method: str, *, task: int, steps: int) -> None:
        if method not in METHODS:
            raise Missing(f"it has no {method}, or none that is measured here")
        if not PYTHON.exists():
            raise Missing("`make peers` sets up its environment")
        command = [str(PYTHON), "-W", "ignore", "-m", "speed.peers", method, "--task", str(task), "--steps", str(steps)]
        surroundings = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, cwd=ROOT, env=surroundings, text=True, **pipes)
        self.versions: dict[str, str] = self._answer()

    def epoch(self) -> float:
        self._ask()
        return float(self._answer()["epoch"])

    def _ask(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the answer tells why
            self.process.stdin.write("epoch\n")
            self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise Missing(f"it failed: {self.why or 'it ended without a word'}")
        return json.loads(line)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """The end of its input ends it."""
        if not self.errors.closed:
            self.process.communicate()
            self.errors.seek(0)
            self.why = "".join(self.errors.read().strip().splitlines()[-1:])
            self.errors.close()


# In the other environment


def declare_what_torchvision_expects() -> None:
    """Avalanche imports torchvision, whose registry build is for GPUs: beside a torch for the CPU its own operators don't
    load, and its import fails because two of them are unknown. None of them is used here."""
    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_kept"] = library  # it is undone when the object goes


def serve(method: str, task: int, steps: int) -> None:
    """Learn the tasks before number `task` (from 1); then an epoch of it for every line that is read."""
    declare_what_torchvision_expects()
    import avalanche
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.training import EWC, Naive, SynapticIntelligence
    from avalanche.training.plugins import SupervisedPlugin
    from torch.utils.data import TensorDataset

    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed
    last = task - 1

    class Turns(SupervisedPlugin):
        """The clock. It stands before the method's own plugin, whose work in a step is within the step."""

        def before_training_epoch(self, strategy: Any, **_: Any) -> None:
            if strategy.clock.train_exp_counter == last and not sys.stdin.readline():
                sys.exit()
            self.inside: list[float] = []
            self.start = time.process_time()

        def before_training_iteration(self, strategy: Any, **_: Any) -> None:
            self.step = time.process_time()

        def after_update(self, strategy: Any, **_: Any) -> None:
            self.inside.append(time.process_time() - self.step)

        def after_training_epoch(self, strategy: Any, **_: Any) -> None:
            if strategy.clock.train_exp_counter == last:
                say({"epoch": time.process_time() - self.start, "step": statistics.median(self.inside)})

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    def data(number: int) -> Any:
        x, y = noise(number, BATCH * (steps if number == last else 2), (1, 28, 28))
        tensors = TensorDataset(x.float() / 255, y)
        tensors.targets = y.tolist()
        return as_classification_dataset(tensors)

    net = perceptron()
    strategies = {
        "sgd": (Naive, {}),
        "ewc": (EWC, {"ewc_lambda": 100.0}),
        "si": (SynapticIntelligence, {"si_lambda": 0.1, "eps": 0.1}),
    }
    kind, options = strategies[method]
    strategy = kind(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=LR),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=BATCH,
        train_epochs=1,
        evaluator=None,  # neither metrics nor a log: the fastest that it can be
        plugins=[Turns()],
        **options,
    )
    for experience in benchmark_from_datasets(train=[data(number) for number in range(task)]).train_stream:
        if experience.current_experience == last:
            strategy.train_epochs = sys.maxsize
            say({"avalanche-lib": avalanche.__version__, "torch": torch.__version__})
        strategy.train(experience)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--task", type=int, required=True, help="its number, from 1")
    parser.add_argument("--steps", type=int, required=True, help="in an epoch")
    words = parser.parse_args()
    torch.set_num_threads(1)
    serve(words.method, words.task, words.steps)


if __name__ == "__main__":
    main()
