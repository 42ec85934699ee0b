"""Choose how the steps of a fit run: eagerly, compiled or recorded. This module does not import torch."""

import shutil
from importlib.util import find_spec
from typing import Literal

from hatrack.options import choose

Engine = Literal["auto", "eager", "compiled", "recorded"]
ENGINES: dict[str, Engine] = {"auto": "auto", "eager": "eager", "compiled": "compiled", "recorded": "recorded"}
Precision = Literal["tf32", "float32", "bfloat16"]
PRECISIONS: dict[str, Precision] = {"tf32": "tf32", "float32": "float32", "bfloat16": "bfloat16"}
PAYS = {"cpu": 50_000, "cuda": 25_000}  # steps from which on compiling saves more time than it takes; never elsewhere


def choose_engine(engine: Engine, device: str, steps: int) -> tuple[bool, bool]:
    """Decide whether to compile and whether to record the steps of a fit.

    Args:
        engine: what the user asked for.
        device: the type of the device: "cpu", "cuda", or another, such as "mps".
        steps: how many steps at most share one compilation: those of the whole run, if the steps of its tasks are alike.
            Nothing else decides, such as code that is already compiled: compiled steps round differently, and the same run
            must have the same engine every time.

    Returns:
        Two flags: compile, record.
    """
    choose("engine", engine, ENGINES)
    gpu = device == "cuda"
    if engine == "recorded" and not gpu:
        raise ValueError("--engine recorded needs a GPU; on a CPU steps run eagerly or compiled")
    pays = engine == "auto" and device in PAYS and steps >= PAYS[device]
    compiled = engine == "compiled" or (pays and can_compile(gpu))
    return compiled, gpu and engine != "eager"


def can_compile(gpu: bool) -> bool:
    """Return whether this machine has what torch's compiler needs: Triton for a GPU, a C++ compiler for a CPU."""
    return find_spec("triton") is not None if gpu else any(map(shutil.which, ("c++", "g++", "clang++")))
