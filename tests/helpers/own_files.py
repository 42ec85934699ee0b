"""Files of a user's own tasks whose target is not a class."""

from pathlib import Path

import numpy as np


def regression_file(folder: Path, tasks: int = 1, noise: float = 0.0) -> Path:
    """Write tasks of the benchmark `own` with a number per example, and return the TOML file.

    Args:
        folder: where the files are written.
        tasks: how many tasks there are.
        noise: the share of the numbers of training that have nothing to do with the inputs, from 0 to 1.
    """
    draw = np.random.default_rng(0)
    text = ""
    for number in range(tasks):
        direction = draw.normal(size=16)
        arrays = {}
        for part, count in (("train", 200), ("test", 60)):
            x = draw.normal(size=(count, 16)).astype(np.float32)
            arrays[f"x_{part}"] = x
            arrays[f"y_{part}"] = ((1 - noise) * x @ direction + noise * 4 * draw.normal(size=count)).astype(np.float32)
        np.savez(folder / f"task-{number}.npz", **arrays)
        text += f'[[task]]\nname = "task {number}"\ndata = "task-{number}.npz"\ntarget = "regression"\n'
    path = folder / "tasks.toml"
    path.write_text(text)
    return path
