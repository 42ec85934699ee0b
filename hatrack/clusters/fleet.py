"""The driver of a fleet: it hands runs to an engine, keeps what they send, and writes their records.

The engine (Ray) decides where a run is carried out and tries it again when a worker is lost. The driver holds the lock of
every run that it has handed over, so that no other process takes it, and its folder always has the states to go on from: a
driver that is killed loses nothing but what was learned since the last save.
"""

import json
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hatrack.clusters.engine import Engine, Failed, Lost
from hatrack.clusters.jobs import Files, Job, Result, read_files, write_files
from hatrack.clusters.mailbox import Message
from hatrack.clusters.plan import LEFT, Plan
from hatrack.clusters.sent_data import files_of_set
from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of
from hatrack.experiments.run_folder import RunFolder
from hatrack.experiments.spec import Run
from hatrack.methods.divergence import Diverged
from hatrack.training.checkpoint import Stopped, stopping

POLL = 0.2  # seconds between two looks for messages
Show = Callable[[int, float, str], None]  # the number of a run, how much of it is done, and where it stands


class Fleet:
    """The runs of a command on an engine.

    Args:
        todo: the runs by name.
        out: the folder of the records.
        how: keyword arguments of `run`.
        engine: carries out jobs.
        show: shows how far each run is.
        plan: is told what is queued, running, done and failed.
        notes: how the options of runs were chosen, by name.
        shared: whether the workers have the folder `out`, too.
        threads: of torch, in every worker.
        send: whether data sets that a node lacks are sent to it.
        moves: how often a run is moved away from nodes that are to blame, such as those with a full disk.
    """

    def __init__(
        self,
        todo: Mapping[str, Run],
        out: Path,
        how: Mapping[str, Any],
        engine: Engine,
        show: Show,
        plan: Plan,
        *,
        notes: Mapping[str, Mapping[str, Any]] | None = None,
        shared: bool = False,
        threads: int = 1,
        send: bool = False,
        moves: int = 3,
    ) -> None:
        self.todo, self.out, self.how, self.engine, self.show, self.plan = dict(todo), out, dict(how), engine, show, plan
        self.notes, self.shared, self.moves = notes or {}, shared, moves
        self.each: dict[str, Any] = {"threads": threads, "send": send}
        self.again = bool(self.how.pop("again", False))
        self.numbers = {name: number for number, name in enumerate(todo)}
        self.waiting = deque(todo)
        self.flying: dict[Any, str] = {}
        self.locks: dict[str, tuple[ExitStack, RunFolder]] = {}
        self.begun: set[str] = set()
        self.attempts = dict.fromkeys(todo, 0)
        self.avoid: dict[str, list[str]] = {name: [] for name in todo}
        self.found: dict[str, Record | Diverged | Failed] = {}
        self.said: set[str] = set()  # warnings that were shown
        self.stopping = False

    def run(self) -> dict[str, Record | Diverged | Failed]:
        """Carry out all runs; return the outcome of each by name. Raise Stopped if it was asked to stop."""
        try:
            while self.flying or (self.waiting and not self.stopping):
                self.step()
                if self.stopping and not self.begun & set(self.flying.values()):
                    break  # the others have not begun, and will not
        finally:
            self.close()
        if len(self.found) < len(self.todo):
            raise Stopped("stopped, and saved")
        return self.found

    def add(self, spec: Run) -> None:
        """Add a run, or one that has ended and is to go on."""
        self.todo[spec.name] = spec
        self.numbers.setdefault(spec.name, len(self.numbers))
        self.attempts.setdefault(spec.name, 0)
        self.avoid[spec.name] = []
        self.plan.note(spec.name, "waiting")
        self.waiting.append(spec.name)

    def step(self) -> None:
        """Hand runs over, take messages and results; wait for them a little."""
        if stopping.is_set() and not self.stopping:
            self.stopping = True
            self.engine.stop()
        self._hand_over()
        for message in self.engine.take():
            self._receive(message)
        for handle in self.engine.wait(list(self.flying), POLL) if self.flying else ():
            self._land(handle)
        self.plan.keep()

    def close(self) -> None:
        """Let all locks go and write the plan for the last time."""
        for name in list(self.locks):
            self._release(name)
        self.plan.end(self.stopping)

    # Handing over

    def _hand_over(self) -> None:
        """Hand over as many runs as the engine has room for. A run that has its record is done."""
        room = 0 if self.stopping else self.engine.room() - len(self.flying)
        while self.waiting and room > 0:
            name = self.waiting.popleft()
            try:
                job = self._job(name)
            except (ValueError, OSError) as error:  # another process has the run, or nothing can be written
                self._end(name, Failed(str(error)), note=False)
                self.plan.note(name, LEFT)
                continue
            if job is not None:
                self.flying[self.engine.submit(job, self.avoid[name])] = name
                self.plan.note(name, "queued")
                room -= 1

    def _job(self, name: str) -> Job | None:
        """Return the job of a run, whose lock is then held; None if it has its record."""
        spec = self.todo[name]
        folder, how = folder_of(spec, self.out), {**self.how, "tuned": self.notes.get(name)}
        models = how.get("keep_model") or how.get("keep_each")
        if folder.done and not self.again and not models:
            folder.tidy()
            self._end(name, Record.load(folder.record))
            return None
        if self.shared:  # the worker takes the lock; a second attempt must not begin anew
            if self.again:
                with folder:
                    folder.start_anew()
            return Job(name, spec, how, str(self.out), self.out, **self.each)
        if name not in self.locks:
            stack = ExitStack()
            stack.enter_context(folder)
            self.locks[name] = stack, folder
            if self._is_there(folder):
                self._end(name, Record.load(folder.record))
                return None
            if self.again or folder.record.exists():  # as `run` does
                folder.start_anew()
            folder.remember_kept(bool(how.get("keep_model")), bool(how.get("keep_each")))
            folder.keep_note(self.notes.get(name))
        return Job(name, spec, how, str(self.out), None, read_files(folder), self.attempts[name] + 1, **self.each)

    def _is_there(self, folder: RunFolder) -> bool:
        """Whether a run needs nothing more: it has its record, and the models that are to be kept."""
        if not folder.done or self.again:
            return False
        models = [folder.model] if self.how.get("keep_model") else []
        if self.how.get("keep_each"):
            models += [folder.task_model(number) for number in range(len(Record.load(folder.record).tasks))]
        return all(model.exists() for model in models)

    # Messages

    def _receive(self, message: Message) -> None:
        name = message.name
        if message.kind == "began":
            self.attempts[name] = message.attempt
            self.begun.add(name)
            self.plan.note(name, "running", node=message.content, attempts=message.attempt)
        elif message.kind == "progress" and message.content:
            self.show(self.numbers[name], *message.content)
            self.plan.note(name, "running", share=message.content[0], line=message.content[1])
        elif message.kind == "files":
            self._keep(name, *message.content)
        elif message.kind == "warning" and message.content not in self.said:
            self.said.add(message.content)
            warnings.warn(message.content, stacklevel=2)
        elif message.kind == "question":
            self.answer(name, message.attempt, *message.content)

    def _keep(self, name: str, files: Files, names: list[str]) -> None:
        """Keep the files that a run has saved, so that any worker can go on from them."""
        if name in self.locks and name not in self.found:
            try:
                write_files(self.locks[name][1], files, names)
            except OSError as error:  # the disk of this machine is full: the run goes on, from older states if it must
                self._say(f"the states of runs can't be kept in {self.out}: {error.strerror}")

    def answer(self, name: str, attempt: int, question: str, content: Any) -> None:
        """Answer a worker: with the files of its run, if an attempt before it was lost, or those of a data set."""
        if question == "set":
            self.engine.give(name, attempt, files_of_set(content))
        else:
            assert question == "files", question
            self.engine.give(name, attempt, read_files(self.locks[name][1]) if name in self.locks else {})

    def _say(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            warnings.warn(text, stacklevel=2)

    # Results

    def _land(self, handle: Any) -> None:
        """Take the result of a job that has ended."""
        name = self.flying.pop(handle)
        try:
            result = self.engine.result(handle)
        except Lost as error:
            self._end(name, Failed(str(error)))
            return
        match result.end:
            case "record":
                self._take_record(name, result)
            case "diverged":
                self._store(name, result.files)
                self._end(name, Diverged(result.text))
            case "stopped":
                self._store(name, result.files)
                self.plan.note(name, "stopped")
                self._release(name)
            case "node" if self._may_move(name, result.node):
                self._store(name, result.files)
                self.avoid[name].append(result.node)
                self._say(f"{result.text}, on node {result.node}; its runs are moved to other nodes")
                self.waiting.appendleft(name)
            case _:
                self._store(name, result.files)
                self._end(name, Failed(f"{result.text} (on node {result.node})"))

    def _may_move(self, name: str, node: str) -> bool:
        """Whether a run is moved away from a node: not too often, and only if another node is there to take it."""
        avoid = self.avoid[name]
        return len(avoid) < self.moves and not self.stopping and self.engine.has_others([*avoid, node])

    def _take_record(self, name: str, result: Result) -> None:
        record = Record.from_dict(json.loads(result.text))
        if not self.shared:
            folder = self.locks[name][1]
            try:
                beside = {file: content for file, content in result.files.items() if "/" not in file}
                write_files(folder, beside)
                record.save(self.out)
            except OSError as error:
                self._end(name, Failed(f"can't write the record to {self.out}: {error.strerror}"), note=False)
                return
            folder.remove_states()
        self._end(name, record)

    def _store(self, name: str, files: Files) -> None:
        """Keep the last files of a run that has no record."""
        if not self.shared and files:
            self._keep(name, files, list(files))

    def _end(self, name: str, outcome: Record | Diverged | Failed, *, note: bool = True) -> None:
        """Note how a run ended, and let its lock go."""
        self.found[name] = outcome
        why = "" if isinstance(outcome, Record) else str(outcome)
        if why and note:
            self._note_failure(name, why)
        self.plan.note(name, "failed" if why else "done", why=why, share=1.0)
        self.show(self.numbers[name], 1.0, "")
        self._release(name)

    def _note_failure(self, name: str, why: str) -> None:
        with suppress(ValueError, OSError), ExitStack() as stack:
            mine = self.locks.get(name)
            folder = mine[1] if mine else stack.enter_context(folder_of(self.todo[name], self.out))
            folder.note_failure(why)

    def _release(self, name: str) -> None:
        if name in self.locks:
            self.locks.pop(name)[0].close()
