"""Where workers and the driver of a fleet leave words for each other. On Ray it is an actor; in tests an object.

This module needs no torch, so that the actor is there at once.
"""

from collections import Counter
from typing import Any, NamedTuple


class Message(NamedTuple):
    """A word of a worker to the driver.

    Attributes:
        name: the run.
        attempt: the attempt of the worker.
        kind: "began", "progress", "files", "warning", "question".
        content: a node, a share and a line, files, a text, a question with its argument.
    """

    name: str
    attempt: int
    kind: str
    content: Any


class Mailbox:
    """Messages of workers, answers of the driver, and which attempt of a run counts.

    Only the latest attempt of a run is heard. A worker that was taken for lost, and was not, is told to stop as soon as it
    speaks, and what it sends is dropped.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.progress: dict[str, Message] = {}  # only the last word of each run counts
        self.attempts: Counter[str] = Counter()
        self.answers: dict[tuple[str, int], Any] = {}
        self.stopping = False

    # For workers

    def begin(self, name: str, node: str) -> tuple[int, bool]:
        """Begin an attempt of a run on a node; return its number, from 1, and whether the worker is to stop."""
        if self.stopping:
            return self.attempts[name], True
        self.attempts[name] += 1
        self.messages.append(Message(name, self.attempts[name], "began", node))
        return self.attempts[name], False

    def post(self, name: str, attempt: int, kind: str, content: Any) -> bool:
        """Leave a message; return whether the worker is to stop."""
        if attempt != self.attempts[name]:
            return True
        message = Message(name, attempt, kind, content)
        if kind == "progress":
            self.progress[name] = message
        else:
            self.messages.append(message)
        return self.stopping

    def answer(self, name: str, attempt: int) -> tuple[bool, Any]:
        """Return whether a question was answered, and the answer, which is then forgotten."""
        if attempt != self.attempts[name]:
            return True, None
        found = (name, attempt) in self.answers
        return found, self.answers.pop((name, attempt), None)

    # For the driver

    def take(self) -> list[Message]:
        """Return all messages since the last call, in their order, and the latest progress of every run."""
        found = [*self.messages, *self.progress.values()]
        self.messages, self.progress = [], {}
        return found

    def give(self, name: str, attempt: int, content: Any) -> None:
        """Answer a question."""
        self.answers[name, attempt] = content

    def stop(self) -> None:
        """Tell all workers to save and stop, and let none begin."""
        self.stopping = True
