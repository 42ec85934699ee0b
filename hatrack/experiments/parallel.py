"""Several runs, in sequence or in parallel: on a CPU in worker processes, on a GPU in threads with a stream each."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hatrack.engine.choice import Engine, Precision
from hatrack.engine.interleaving import run_interleaved
from hatrack.engine.precision import precision_scope
from hatrack.experiments.progress import Display, RunStatus
from hatrack.experiments.record import Record
from hatrack.experiments.run import Run, folder_of, run
from hatrack.experiments.signals import stop_by_signal
from hatrack.experiments.spec import step_spec
from hatrack.experiments.worker_pool import Outcome, WorkerPool
from hatrack.methods import METHODS
from hatrack.methods.divergence import Diverged
from hatrack.tracking.lines import Line
from hatrack.training.checkpoint import Stopped, stopping

SHUFFLED = ("cifar", "mixture", "mixture-open")  # benchmarks whose tasks differ in classes, in the order of the seed


def run_all(
    runs: Sequence[Run],
    out: Path,
    *,
    again: bool = False,
    device: str = "cpu",
    engine: Engine = "auto",
    precision: Precision = "tf32",
    save_every: float = 5.0,
    parallel: int = 1,
    stack: bool = False,
    keep_model: bool = False,
    keep_each: bool = False,
    notes: Mapping[str, Mapping[str, Any]] | None = None,
    log: Sequence[str] = (),
) -> list[Record]:
    """Carry out runs, in sequence or in parallel, with progress on a terminal.

    A run that diverges does not stop the others; it is an error when they have their records.

    Args:
        runs: what to run; a run that has its record in `out` is not run again.
        out: the folder of the records.
        again: run even what has a record.
        device: "cpu" or "cuda".
        engine: how steps run.
        precision: how matrix products are computed.
        save_every: minutes between two saves of a run's state.
        parallel: how many runs at a time: processes on a CPU, threads with a stream each on a GPU.
        stack: do the steps of parallel runs as one step, as far as they have the same form; in one process, also on a CPU.
        keep_model: save the model of every run beside its record.
        keep_each: save the model of every run after each of its tasks, beside its record.
        notes: how the options of runs were chosen, by their names, for the field `tuned` of new records.
        log: the names of trackers that are given every epoch: "tensorboard", "wandb".

    Returns:
        The records in the order of the runs.
    """
    if stack and parallel < 2:
        raise ValueError(
            f"--stack needs --parallel of at least 2, not {parallel}: it stacks runs that are under way together"
        )
    how = {"out": out, "again": again, "device": device, "engine": engine, "precision": precision, "save_every": save_every}
    how |= {"keep_model": keep_model, "keep_each": keep_each, "log": tuple(log)}
    notes = notes or {}
    names = [spec.name for spec in runs]
    todo, found = dict(zip(names, runs, strict=True)), dict[str, Outcome]()
    again_for_models = again or keep_model or keep_each  # at most
    kinds = [kind_of(spec) if again_for_models or not folder_of(spec, out).done else None for spec in todo.values()]
    workers = min(parallel, sum(kind is not None for kind in kinds))
    with stop_by_signal(), Display(len(todo), workers) as display:
        work = [
            partial(_one, name, spec, {**how, "tuned": notes.get(name)}, display, number, found)
            for number, (name, spec) in enumerate(todo.items())
        ]
        try:
            if workers < 2:
                for item in work:
                    item()
            elif stack or torch.device(device).type == "cuda":
                with precision_scope(precision, torch.device(device)):  # until the last is done: it holds for all threads
                    _in_threads(work, torch.device(device), workers, kinds if stack else None)
            else:
                WorkerPool(todo, how, display, found, notes).run(workers)
        except Stopped as error:
            left = [spec for name, spec in todo.items() if name not in found]
            raise Stopped(_how_to_continue(str(error), left, len(todo), out, again, notes)) from None
        except KeyboardInterrupt:
            raise Stopped("stopped at once; the same command goes on from what was saved before") from None
    return _records([found[name] for name in names], out)


def _records(outcomes: Sequence[Outcome], out: Path) -> list[Record]:
    records = [outcome for outcome in outcomes if isinstance(outcome, Record)]
    diverged = [outcome for outcome in outcomes if isinstance(outcome, Diverged)]
    if diverged:
        others = [f"{len(records)} of {len(outcomes)} runs have their records in {out}"] if records else []
        raise Diverged("\n".join([*map(str, diverged), *others]))
    return records


def _one(name: str, spec: Run, how: Mapping[str, Any], display: Display, number: int, found: dict[str, Outcome]) -> None:
    status = RunStatus()

    def show(line: Line) -> None:
        done, text, left = status(line)
        if line["kind"] == "end":
            return
        display.show(number, done, text, left)
        if line["kind"] == "run":
            display.begin(number, done)

    try:
        found[name] = run(spec, **{**how, "log": (*how["log"], show)})
    except Diverged as error:
        found[name] = Diverged(str(error))  # its traceback would hold the whole run in memory
    display.show(number, 1.0, "")


def kind_of(spec: Run) -> str:
    """Return what runs have in common whose steps are likely to have the same operations and shapes.

    A step that has the heads of earlier tasks in it has them in the order of its seed. Where tasks of different numbers of
    classes are shuffled, no other run has that step, and the places that a stack had for other seeds would stay empty.
    """
    own = spec.benchmark in SHUFFLED and METHODS.find(spec.method).step_forms == "many"
    seed = {"seed": spec.seed} if own else {}
    return json.dumps({**step_spec(spec), **seed, "regime": [spec.regime.batch, spec.regime.optimizer]}, sort_keys=True)


def _in_threads(
    work: Sequence[Callable[[], None]], device: torch.device, workers: int, kinds: Sequence[str | None] | None = None
) -> None:
    """Carry out runs in parallel in one process, stacked if kinds are given. If one fails, the others save and stop."""

    def or_stop_all(item: Callable[[], None]) -> None:
        try:
            item()
        except BaseException:
            stopping.set()
            raise

    try:
        runs = [partial(or_stop_all, item) for item in work]
        run_interleaved(runs, device, workers, stack=kinds is not None, kinds=kinds)
    except Stopped:
        raise
    except BaseException:
        stopping.clear()  # nobody asked for an end: later runs are not meant
        raise


def _how_to_continue(
    said: str, left: Sequence[Run], count: int, out: Path, again: bool, notes: Mapping[str, Mapping[str, Any]]
) -> str:
    """Say in one line how to continue. With `again`, runs that have not begun are marked, so that they are not taken for
    finished."""
    for spec in left if again else ():
        with suppress(ValueError, OSError), folder_of(spec, out) as folder:
            folder.start_anew()
            folder.keep_note(notes.get(spec.name))
    command = "the same command" + " without --again" * again
    if count == 1:
        return f"{said}; {command} goes on from there"
    return f"stopped, and saved: {count - len(left)} of {count} runs are finished, and {command} goes on with the others"
