"""Several runs, one after the other or side by side: on a CPU each in a process, on a GPU each in a thread with a stream."""

import multiprocessing
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch

from hatrack.checkpoint import stopping
from hatrack.graph import Engine, Precision
from hatrack.progress import Display, describe
from hatrack.record import Record
from hatrack.run import Run, run
from hatrack.trainer import Moment
from hatrack.turns import side_by_side

News = tuple[int, float, str]  # which run, how much of it is done, and a line that says where it stands
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_news: "SimpleQueue[News | None]"  # of a worker: where it says how far it is


def carry_out(
    runs: Sequence[Run],
    out: Path,
    *,
    again: bool = False,
    device: str = "cpu",
    engine: Engine = "auto",
    precision: Precision = "tf32",
    save_every: float = 5.0,
    parallel: int = 1,
) -> list[Record]:
    """All the records, in the order of the runs; with progress on a terminal."""
    how = {"out": out, "again": again, "device": device, "engine": engine, "precision": precision, "save_every": save_every}
    with stop_by_signal(), Display(len(runs)) as display:
        missing = [spec for spec in runs if again or not (out / f"{spec.name}.json").exists()]
        workers = min(parallel, len(missing))
        work = [partial(_one, spec, number, how, display) for number, spec in enumerate(runs)]
        if workers < 2:
            return [item() for item in work]
        if torch.device(device).type == "cuda":
            return side_by_side(work, torch.device(device), workers)
        return _in_processes(runs, how, workers, display)


@contextmanager
def stop_by_signal() -> Iterator[None]:
    """Ctrl-C or a request to end finishes the step, saves and stops; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _stop) for number in SIGNALS}
    try:
        yield
    finally:
        stopping.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: object) -> None:
    if stopping.is_set():
        raise KeyboardInterrupt
    stopping.set()
    for child in multiprocessing.active_children():
        child.terminate()  # asks it to end: it saves, too


def _one(spec: Run, number: int, how: dict[str, Any], display: Display) -> Record:
    def show(moment: Moment) -> None:
        display.show(number, *describe(spec, moment))

    record = run(spec, **how, progress=show)
    display.show(number, 1.0, "")
    return record


def _in_processes(runs: Sequence[Run], how: dict[str, Any], workers: int, display: Display) -> list[Record]:
    context = multiprocessing.get_context("spawn")
    news: SimpleQueue[News | None] = context.SimpleQueue()

    def listen() -> None:
        while (item := news.get()) is not None:
            display.show(*item)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    threads = max(1, torch.get_num_threads() // workers)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(news, threads)) as pool:
        futures = [pool.submit(_work, number, spec, how) for number, spec in enumerate(runs)]
        try:
            records = [future.result() for future in futures]
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise OSError("a run's process ended abruptly; was there enough memory? Try a smaller --parallel") from None
            raise
        finally:
            news.put(None)
    listener.join()
    return records


def _start(news: Any, threads: int) -> None:
    global _news
    _news = news
    for number in SIGNALS:
        signal.signal(number, _stop)
    torch.set_num_threads(threads)


def _work(number: int, spec: Run, how: dict[str, Any]) -> Record:
    record = run(spec, **how, progress=lambda moment: _news.put((number, *describe(spec, moment))))
    _news.put((number, 1.0, ""))
    return record
