"""What a user asks of an engine: `--on ray:ADDRESS` or `--on slurm`, and `--ask gpus=0.25,cpus=2`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from hatrack.options import nearest

ENGINES = {"ray": "Ray, here or at ray:ADDRESS", "slurm": "Slurm, by job arrays"}


class Submitted(Exception):  # noqa: N818
    """Runs were handed to a scheduler, and the command ends before they do."""


def _number(low: float) -> Callable[[str, str], float]:
    def read(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value < math.inf:
            raise ValueError(f"--ask {name}= must be a number from {low:g}, not {text!r}")
        return value

    return read


def _whole(low: int) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        if not text.isdigit() or int(text) < low:
            raise ValueError(f"--ask {name}= must be a whole number from {low}, not {text!r}")
        return int(text)

    return read


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text not in choices:
            raise ValueError(f"--ask {name}= must be {' or '.join(choices)}, not {text!r}")
        return text

    return read


def _text(name: str, text: str) -> str:
    return text


@dataclass(frozen=True)
class Request:
    """An engine, and what every run asks of it.

    Attributes:
        engine: "ray", "slurm", or "" for this process.
        address: of an existing cluster of Ray; "" to start one here.
        gpus: GPUs of a run; a fraction lets several runs share one.
        cpus: processors of a run, which are also its threads.
        memory: gigabytes of a run; 0 for no limit.
        retries: how often a run is tried again when its worker is lost.
        files: "store" if saved states and records travel through Ray, "folder" if all nodes have the folder of the records.
        data: "node" if every node has the data sets, "send" to send those that a node lacks, once.
        partition: of Slurm.
        time: minutes of a job of Slurm, after which it is requeued.
        signal: seconds before this limit at which a job saves and stops.
        requeues: how often a job may be requeued.
        group: runs per job of Slurm, which run beside each other as --parallel says.
        at_once: jobs of an array at a time.
        account: of Slurm.
        wait: "yes" to wait for the jobs of Slurm, "no" to hand them over and end.
        cluster: "slurm", or "local" for processes of this machine that stand for jobs.
    """

    engine: str = ""
    address: str = ""
    gpus: float = 0.0
    cpus: float = 1.0
    memory: float = 0.0
    retries: int = 3
    files: str = "store"
    data: str = "node"
    partition: str = ""
    time: float = 240.0
    signal: int = 90
    requeues: int = 100
    group: int = 1
    at_once: int = 256
    account: str = ""
    wait: str = "no"
    cluster: str = "slurm"

    @property
    def device(self) -> str:
        """Where the runs compute: on a GPU if they ask for one."""
        return "cuda" if self.gpus else "cpu"


READERS: dict[str, Callable[[str, str], Any]] = {
    "gpus": _number(0),
    "cpus": _number(0.01),
    "memory": _number(0),
    "retries": _whole(0),
    "files": _one_of("store", "folder"),
    "data": _one_of("node", "send"),
    "partition": _text,
    "time": _number(0.1),
    "signal": _whole(1),
    "requeues": _whole(0),
    "group": _whole(1),
    "at_once": _whole(1),
    "account": _text,
    "wait": _one_of("no", "yes"),
    "cluster": _one_of("slurm", "local"),
}
OWNERS = {
    **dict.fromkeys(("retries", "files", "data"), "ray"),
    **dict.fromkeys(("partition", "time", "signal", "requeues", "group", "at_once", "account", "wait", "cluster"), "slurm"),
}  # the others belong to both


def parse_request(on: str, ask: str = "", device: str = "auto") -> Request:
    """Return what the options --on and --ask stand for.

    Args:
        on: "ray", "ray:ADDRESS", "slurm", or "" for this process.
        ask: "name=value" by commas.
        device: "auto", "cpu" or "cuda"; a GPU is asked for if it is "cuda".
    """
    engine, _, address = on.partition(":")
    if on and engine not in ENGINES:
        raise ValueError(f"--on must be ray, ray:ADDRESS or slurm, not {on!r}")
    if address and engine != "ray":
        raise ValueError(f"--on {on}: only ray has an address")
    if on.endswith(":"):
        raise ValueError(f"--on {on}: the address is missing, such as ray:10.0.0.1:6379; --on ray starts a cluster here")
    given: dict[str, Any] = {}
    for word in filter(None, (word.strip() for word in ask.split(","))):
        name, equals, text = (part.strip() for part in word.partition("="))
        if name not in READERS or not equals:
            raise ValueError(f"--ask takes NAME=VALUE by commas, not {word!r}; {nearest(name, READERS)}")
        if not engine:
            raise ValueError(f"--ask {word} does nothing without --on ray or --on slurm")
        if OWNERS.get(name, engine) != engine:
            raise ValueError(f"--ask {name}= is for --on {OWNERS[name]}, not for --on {engine}")
        given[name] = READERS[name](name, text)
    if device == "cuda" and engine:
        given.setdefault("gpus", 1.0)
    if device == "cpu" and given.get("gpus"):
        raise ValueError(f"--ask gpus={given['gpus']:g} contradicts --device cpu")
    return Request(engine, address, **given)


assert set(READERS) == {field.name for field in fields(Request)} - {"engine", "address"}
