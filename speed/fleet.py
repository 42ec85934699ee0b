"""What it costs to carry out many short runs at once: python -m speed.fleet [--runs 200] [--on one,parallel,ray,address]

A command of so many runs, about a second each, is timed from its start to its end. Two numbers tell its cost:

- `wall`: how much longer it took than the seconds of its records, shared by its workers. Both are times of the same
  command, so that a busy machine slows both down. `start` is the time until the first run begins, `end` that after the last
  record, and `between` the mean time from the end of a run to the beginning of the next on the same worker.
- `processor`: how much more processor time all its processes took than the same runs one after the other in one process
  (`one`, without the start of that process). Other work on the machine hardly matters to it.

`ray` starts a Ray and stops it; `address` uses one that is there, as on a cluster. With --parts it lists the processor time
of every kind of process.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hatrack import Record

RUN = ("run", "smnist", "sgd", "--data", "sample", "--widths", "100", "--patience", "1000", "--device", "cpu")
TICKS = os.sysconf("SC_CLK_TCK")
LOOK = 0.25  # seconds between two looks at the processes
MARK = "HATRACK_SPEED_FLEET"


class Processes(threading.Thread):
    """Adds up the processor time of all processes with a mark in their environment, until they are gone."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.mark, self.ours, self.others, self.ended = mark.encode(), {}, set(), threading.Event()

    def run(self) -> None:
        while not self.ended.wait(LOOK):
            for folder in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    self._look(folder)

    def _look(self, folder: Path) -> None:
        if folder.name in self.others:
            return
        if folder.name not in self.ours and self.mark not in (folder / "environ").read_bytes():
            self.others.add(folder.name)
            return
        name, _, rest = (folder / "stat").read_text().rpartition(")")
        user, system = rest.split()[11:13]
        self.ours[folder.name] = name.partition("(")[2], (int(user) + int(system)) / TICKS

    def by_name(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for name, seconds in self.ours.values():
            found[name] += seconds
        return found


class Fleet(NamedTuple):
    """One command: its seconds, those of its runs, and the processor time of its processes."""

    wall: float
    own: list[float]
    start: float
    end: float
    processor: Counter[str]

    def cost(self, workers: int) -> float:
        """How much longer the command took than its runs, as a share."""
        return self.wall / (sum(self.own) / workers) - 1

    def between(self, workers: int) -> float:
        """The seconds between two runs of a worker."""
        idle = (self.wall - self.start - self.end) * workers - sum(self.own)
        return idle / max(1, len(self.own) - workers)


@contextmanager
def options(engine: str, workers: int) -> Iterator[list[str]]:
    """The options of a way to carry out runs; within it the cluster that they name is there."""
    if engine != "address":
        ways = {"one": [], "parallel": ["--parallel", str(workers)], "ray": ["--on", "ray"]}
        yield ways[engine]
        return
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=os.cpu_count(), include_dashboard=False)
        yield ["--on", f"ray:{cluster.address}"]
    finally:
        cluster.shutdown()


def carry_out(way: list[str], words: argparse.Namespace, runs: int, place: Path) -> Fleet:
    """Carry out the command in a folder."""
    command = [sys.executable, "-m", "hatrack", *RUN, "--epochs", str(words.epochs), "--seeds", f"0-{runs - 1}"]
    mark = uuid.uuid4().hex
    processes = Processes(f"{MARK}={mark}")
    processes.start()
    began, clock = time.time(), time.perf_counter()
    with open(place / "said", "w") as said:
        subprocess.run(
            [*command, "--out", str(place / "out"), *way],
            check=True, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark},
        )  # fmt: skip
    wall = time.perf_counter() - clock
    processes.ended.set()
    processes.join()
    files = sorted((place / "out").glob("*.json"))
    own = [Record.load(file).seconds.total for file in files]
    assert len(own) == runs
    ends = [file.stat().st_mtime for file in files]
    first = min(end - seconds for end, seconds in zip(ends, own, strict=True))
    return Fleet(wall, own, first - began, began + wall - max(ends), processes.by_name())


def measure(engine: str, words: argparse.Namespace, runs: int) -> Fleet:
    """Carry out the command in a new folder."""
    place = Path(tempfile.mkdtemp(prefix="hatrack-fleet-"))
    try:
        with options(engine, words.workers) as way:
            return carry_out(way, words, runs, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=8, help="of each of a run's two tasks, for about a second")
    parser.add_argument(
        "--on", default="one,parallel,ray", help="by commas; `one` is what processor times are compared with"
    )
    parser.add_argument("--workers", type=int, default=2, help="for parallel; Ray takes all processors")
    parser.add_argument("--rounds", type=int, default=1, help="the ways take turns so often")
    parser.add_argument("--parts", action="store_true", help="list the processor time of every kind of process")
    words = parser.parse_args()
    itself = 0.0  # the processor time of the runs
    for number in range(words.rounds):
        for engine in words.on.split(","):
            found = measure(engine, words, words.runs)
            workers = {"one": 1, "parallel": words.workers}.get(engine, os.cpu_count() or 1)
            spent = found.processor.total()
            if engine == "one":
                single = measure(engine, words, 1).processor.total()  # the start of the process, and one run
                itself = (spent - single) * words.runs / (words.runs - 1)
            more = f"; processor {spent:.1f} s" + (f", {spent / itself - 1:+.1%}" if itself else "")
            if engine == "address":
                more = ""  # the processes of the cluster are not those of the command
            print(
                f"{number + 1} {engine:9} {words.runs} runs of {statistics.median(found.own):.2f} s (median): "
                f"wall {found.wall:.1f} s, {found.cost(workers):+.1%} (start {found.start:.1f}, end {found.end:.1f}, "
                f"between {found.between(workers):.3f}){more}",
                flush=True,
            )
            for name, seconds in found.processor.most_common() if words.parts else ():
                print(f"    {name:20} {seconds:6.2f} s")


if __name__ == "__main__":
    main()
