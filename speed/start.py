"""Where the time before the first steps goes: python -m speed.start [--device cuda] [--network alexnet] [--engines compiled]

For each engine a process of its own starts, builds HAT on random images and takes the first step of three tasks. A compiled
step is measured twice: with an empty cache of compiled code, and with the cache that the first process left. The steps of
later tasks take the code of the first one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

TASKS = ("first step", "second task", "third task")
PARTS = (
    "import torch", "import hatrack", "device", "network and method",
    "first step", "  of it capturing", "second task", "  of it finding code", "third task",
)  # fmt: skip


def measure(engine: str, device: str, network: str) -> dict[str, float]:
    """The seconds of every part, in this process."""
    clock, found = time.perf_counter, {}
    start = clock()
    import torch

    found["import torch"] = clock() - start
    start = clock()
    from hatrack import HAT, NETWORKS, Network, Regime, Trainer
    from hatrack.engine import compiled
    from speed.step import random_task

    found["import hatrack"] = clock() - start
    start = clock()
    torch.zeros(1, device=device).item()
    found["device"] = clock() - start
    tasks = [random_task(k, (3, 32, 32)) for k in range(len(TASKS))]
    start = clock()
    trunk = NETWORKS[network](tasks[0].shape).to(device)
    example = tasks[0].train.inputs(torch.arange(2)).to(device)
    method = HAT(Network(trunk, [task.classes for task in tasks], example)).to(device)
    found["network and method"] = clock() - start
    capture, find, captured, finding = compiled.capture, compiled.Compiled._compile, [], []

    def timed(function, times):
        def call(*given):
            start = clock()
            result = function(*given)
            times.append(clock() - start)
            return result

        return call

    compiled.capture, compiled.Compiled._compile = timed(capture, captured), timed(find, finding)
    seconds = []

    def one_step(method, task, **how):
        loop = Trainer(Regime(), engine=engine).start(method, task, **how)
        method.train()
        start = clock()
        loop.step(torch.arange(64, device=device), torch.zeros((), dtype=torch.int64, device=device))
        loop.losses.sum().item()
        seconds.append(clock() - start)
        return loop.close()

    for task in tasks:
        method.learn(task, one_step)
    found.update(zip(TASKS, seconds, strict=True))
    if captured:
        found["  of it capturing"], found["  of it finding code"] = captured[0], finding[1]
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--network", default="alexnet")
    parser.add_argument("--engines", default="eager,compiled", help="by commas")
    parser.add_argument("--here", action="store_true", help="measure in this process, and print JSON")
    return parser.parse_args()


def main() -> None:
    words = arguments()
    if words.here:
        print(json.dumps(measure(words.engines, words.device, words.network)))
        return
    with tempfile.TemporaryDirectory() as cache:
        for engine in words.engines.split(","):
            for what in ("cold", "code from the disk") if engine == "compiled" else ("",):
                command = [sys.executable, "-m", "speed.start", "--here", "--engines", engine]
                command += ["--device", words.device, "--network", words.network]
                env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/code", "TRITON_CACHE_DIR": f"{cache}/triton"}
                lines = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()
                found = json.loads(lines[-1])
                print(f"{engine} {what}".strip())
                for part in PARTS:
                    if part in found:
                        print(f"  {part:20s} {found[part]:6.2f} s")


if __name__ == "__main__":
    main()
