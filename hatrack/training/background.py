"""Work in a thread while training goes on: one job at a time, whose error is raised in the thread that waits for it."""

import threading
from collections.abc import Callable


class Background:
    """Calls functions in a thread, one at a time. The process does not end before the last one has returned."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the last job raised an error that nobody has seen yet."""
        return self._error is not None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the last job, then start this one.

        Args:
            job: a function that uses nothing that the caller goes on to change.
        """
        self.wait()
        self._thread = threading.Thread(target=self._work, args=(job,))
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last job has ended, and raise its error if it failed."""
        if self._thread is not None:
            if self._thread.ident is not None:  # otherwise Ctrl-C came before it was started
                self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # it is raised by `wait`
            self._error = error
