"""A search for options on a cluster of Ray: several trials at a time, each in a thread here that waits for its runs there.

The journal of the search and the records stay on this machine, so that no node needs the folder. A search that is stopped,
or whose driver is killed, goes on as one of this machine does.
"""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatrack.clusters.fleet import Fleet
from hatrack.clusters.plan import Plan
from hatrack.clusters.ray_cluster import connected
from hatrack.clusters.ray_engine import RayEngine
from hatrack.clusters.request import Request
from hatrack.experiments.record import Record
from hatrack.experiments.spec import Run
from hatrack.experiments.tuned import Tuned
from hatrack.experiments.tuning import Show, ShowRun, conclude, tune
from hatrack.experiments.tuning_journal import Journal
from hatrack.experiments.tuning_protocols import Search
from hatrack.methods.divergence import Diverged
from hatrack.training.checkpoint import Stopped, stopping

Inbox = queue.SimpleQueue[tuple[str, Any]]
WAIT = 0.2  # seconds to wait for runs if there are none


class TrialFleet:
    """A fleet whose runs come one by one from threads, each of which waits for its own.

    Args:
        fleet: the fleet, without runs at first.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.new: queue.SimpleQueue[tuple[Run, Inbox]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self.inboxes: dict[str, Inbox] = {}
        fleet.answer = self._pass_on  # type: ignore[method-assign]
        fleet.show = self._show

    def carry(
        self, spec: Run, records: Path, *, after_task: Callable[[Any], None], show: ShowRun | None, **how: Any
    ) -> Record:
        """Carry out a run on the cluster and wait for it: `run_here` for trials of a fleet."""
        inbox: Inbox = queue.SimpleQueue()
        self.new.put((spec, inbox))
        failure: BaseException | None = None
        while True:
            kind, content = inbox.get()
            if kind == "question":
                attempt, rows = content
                try:
                    after_task(rows)
                except Exception as error:
                    failure = error
                self.answers.put((spec.name, attempt, str(failure) or "ended" if failure else ""))
            elif kind == "progress" and show:
                show(*content)
            elif kind == "end":
                if failure:
                    raise failure
                if isinstance(content, Record):
                    return content
                raise content if isinstance(content, Diverged | Stopped) else ValueError(str(content))

    def step(self) -> None:
        """Take new runs, answer, and let the fleet go on."""
        fleet = self.fleet
        while not self.new.empty():
            spec, inbox = self.new.get()
            if spec.name in self.inboxes and spec.name not in fleet.found:  # two trials have the same options
                self.new.put((spec, inbox))
                break
            self.inboxes[spec.name] = inbox
            fleet.add(spec)
        while not self.answers.empty():
            fleet.engine.give(*self.answers.get())
        fleet.step()
        for name in [name for name in self.inboxes if name in fleet.found]:
            self.inboxes.pop(name).put(("end", fleet.found.pop(name)))
        if fleet.stopping and not fleet.begun & set(fleet.flying.values()):
            for inbox in self.inboxes.values():
                inbox.put(("end", Stopped("stopped, and saved")))
            self.inboxes.clear()

    def _pass_on(self, name: str, attempt: int, question: str, content: Any) -> None:
        """Pass a question of a worker on to the thread of its trial."""
        if question == "after_task" and name in self.inboxes:
            self.inboxes[name].put(("question", (attempt, content)))
        else:
            Fleet.answer(self.fleet, name, attempt, question, content)

    def _show(self, number: int, done: float, text: str) -> None:
        for name, inbox in self.inboxes.items():
            if self.fleet.numbers[name] == number and text:
                inbox.put(("progress", (done, text)))


def tune_on_ray(
    search: Search,
    out: Path,
    trials: int,
    request: Request,
    *,
    show: Show | None = None,
    tell: Callable[..., None] | None = None,
    **how: Any,
) -> Tuned | None:
    """Carry out a search on a cluster of Ray, as many trials at a time as it has places.

    Args:
        search: what is searched.
        out: the folder of the search, on this machine.
        trials: how many trials there are in all.
        request: the cluster, and what every run asks of it.
        show: is told how far a trial is.
        tell: is told of every trial that ends, and of the best one so far.
        how: engine, precision and save_every.

    Returns:
        The outcome; None if another process has not finished its trials.
    """
    how |= {"device": request.device}
    errors: list[BaseException] = []
    Journal(out / search.name, search)  # an error now, before a cluster is started
    records = out / search.name / "records"
    with connected(request) as ray, Plan(records, "ray", ()) as plan:
        engine = RayEngine(ray, request)
        threads_each = max(1, int(request.cpus))
        fleet = Fleet({}, records, {**how, "after_task": True}, engine, lambda *_: None, plan, threads=threads_each)
        trial_fleet = TrialFleet(fleet)

        def work() -> None:
            try:
                tune(search, out, trials, show=show, tell=tell, carry=trial_fleet.carry, **how)
            except BaseException as error:
                errors.append(error)

        count = max(1, min(search.limit(trials), engine.places()))
        workers = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for worker in workers:
            worker.start()
        try:
            while any(worker.is_alive() for worker in workers):
                trial_fleet.step()
                if errors and not all(isinstance(error, Stopped) for error in errors):
                    stopping.set()  # the other trials save and stop
                if not fleet.flying:
                    workers[0].join(WAIT)
        finally:
            fleet.close()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Stopped))
    return conclude(Journal(out / search.name, search), out, trials)
