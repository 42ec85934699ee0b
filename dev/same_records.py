"""Small runs of every method, and whether two versions of the code leave the same records, bit for bit.

A change that should not move results is checked with it: `make FOLDER` before and after (the code is the one on the path),
then `compare BEFORE AFTER`. Times, versions and the digest of the whole file may differ; nothing else may.

    PYTHONPATH=old python dev/same_records.py make before
    PYTHONPATH=new python dev/same_records.py make after
    python dev/same_records.py compare before after
"""

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path

MAY_DIFFER = ("seconds", "versions", "digest")
SMALL = ["--data", "sample", "--train-examples", "500", "--device", "cpu", "--engine", "eager"]
METHODS = [
    *("sgd", "frozen", "independent", "joint", "random", "hat", "pmask", "ewc", "imm-mean", "imm-mode", "si", "mas", "lwf"),
    *("lfl", "agem", "er", "stable-sgd", "packnet", "den", "pathnet", "pnn"),
]
LARGE = ["sgd", "hat", "pmask"]  # on a network of 14 million weights
SETTINGS = {  # each with the methods that are run in it; a method that refuses a setting must refuse it in both versions
    "smnist {} --tasks 5 --widths 40,40 --epochs 3 --batch 32": METHODS,
    "rmnist {} --tasks 3 --heads shared --widths 40,40 --epochs 2 --optimizer momentum --keep-state": METHODS,
    "pmnist {} --tasks 3 --network cnn --epochs 1 --optimizer adam --lr 0.001 --keep-state --batch 256": LARGE,
    "digits-and-clothes {} --network resnet18 --width 4 --epochs 1 --batch 128 --dropout 0.1": METHODS,
    "smnist {} --masks soft --protect exact --tasks 5 --widths 40,40 --epochs 2 --optimizer adamw --lr 0.001": ["hat"],
    "smnist {} --norms shared --network resnet18 --width 4 --epochs 1": ["hat"],
    "smnist {} --widths 40,40 --epochs 3 --lr 50 --on-divergence halve": ["sgd", "hat", "ewc"],
    "smnist {} --tasks 5 --widths 40,40 --epochs 2 --anchors online --importance ones": ["ewc"],
}  # fmt: skip


def make(folder: Path) -> None:
    """All the runs; what a refused one said is kept in a file of its own."""
    import torch

    from hatrack.__main__ import main

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    refused: dict[str, int] = {}
    for setting, methods in SETTINGS.items():
        for method in methods:
            command = [*setting.format(method).split(), *SMALL, "--out", str(folder)]
            if method == "stable-sgd":  # it has an option of its own for the learning rate
                command = [word for word in command if word not in ("--lr", "0.001")]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                code = main(["run", *command])
            print(f"{code} {setting.format(method)}", flush=True)
            if code:
                refused[setting.format(method)] = code
    (folder / "refused.txt").write_text(json.dumps(refused, indent=1))


def compare(before: Path, after: Path) -> int:
    """The number of records that differ, each with the fields that do; also those that one side lacks."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.json")})
    wrong = 0
    for name in names:
        if not (before / name).exists() or not (after / name).exists():
            print(f"{name}: only in {before if (before / name).exists() else after}")
            wrong += 1
            continue
        old, new = (json.loads((folder / name).read_text()) for folder in (before, after))
        differ = [key for key in old.keys() | new.keys() if key not in MAY_DIFFER and old.get(key) != new.get(key)]
        if differ:
            print(f"{name}: {', '.join(sorted(differ))}")
            wrong += 1
    said = [(folder / "refused.txt").read_text() for folder in (before, after)]
    if said[0] != said[1]:
        print(f"refused runs: {said[0]} before, {said[1]} after")
        wrong += 1
    methods = {json.loads((before / name).read_text())["spec"]["method"] for name in names if (before / name).exists()}
    print(f"{len(names)} records of {len(methods)} methods, {wrong} differ")
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"] and len(sys.argv) == 3:
        make(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["compare"] and len(sys.argv) == 4:
        sys.exit(min(1, compare(Path(sys.argv[2]), Path(sys.argv[3]))))
    else:
        sys.exit(__doc__)
