"""Cut the samples that ship with the package: python dev/make_samples.py FOLDER (with mnist.npz and fashion-mnist.npz).

The first 400 training and 100 test images of every class, in the data set's own order.
"""

import sys
from pathlib import Path

import numpy as np

TRAIN, TEST = 400, 100
OUT = Path(__file__).resolve().parent.parent / "hatrack" / "datasets" / "samples"


def first(labels: np.ndarray, count: int) -> np.ndarray:
    """The rows of the first `count` images of every class, in order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == k)[:count] for k in np.unique(labels)]))


def main() -> None:
    for name in ("mnist", "fashion-mnist"):
        with np.load(Path(sys.argv[1]) / f"{name}.npz") as data:
            rows = {"train": first(data["y_train"], TRAIN), "test": first(data["y_test"], TEST)}
            sample = {f"{part}_{split}": data[f"{part}_{split}"][rows[split]] for part in "xy" for split in rows}
        np.savez_compressed(OUT / f"{name}.npz", **sample)
        print(name, {k: v.shape for k, v in sample.items()}, (OUT / f"{name}.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
