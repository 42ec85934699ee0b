"""What a fleet asks of an engine, which decides where runs are carried out. `clusters/ray_engine.py` is one."""

from collections.abc import Iterable
from typing import Any, Protocol

from hatrack.clusters.jobs import Job, Result
from hatrack.clusters.mailbox import Message


class Failed(Exception):  # noqa: N818
    """A run has no record, for another reason than that it diverged."""


class Lost(Exception):  # noqa: N818
    """The engine gave a job up: its workers were lost too often."""


class Engine(Protocol):
    """Carries out jobs somewhere. `clusters/ray_engine.py` is one."""

    def submit(self, job: Job, avoid: Iterable[str]) -> Any:
        """Hand a job over; nodes to avoid are named. Return a handle."""

    def has_others(self, avoid: Iterable[str]) -> bool:
        """Return whether there is a node for a run besides those to avoid."""

    def wait(self, handles: list[Any], seconds: float) -> list[Any]:
        """Wait until a job has ended, at most so long; return the handles of those that have."""

    def result(self, handle: Any) -> Result:
        """Return the result of a job that has ended; raise Lost if there is none."""

    def take(self) -> list[Message]:
        """Return new messages of workers."""

    def give(self, name: str, attempt: int, content: Any) -> None:
        """Answer the question of a worker."""

    def stop(self) -> None:
        """Ask all workers to save and stop."""

    def room(self) -> int:
        """Return how many jobs may be handed over at a time."""
