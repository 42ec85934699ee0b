"""Serving the page of `hatrack watch`, and starting it beside runs. Imported when one of them begins."""

import os
import signal
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from hatrack.reporting.page import collect, page_json, render_page
from hatrack.text import say
from hatrack.watching.folder import WatchedFolder
from hatrack.watching.server import PORT, WatchServer

LOOK = 1.0  # seconds between two looks whether the process that started this one goes on


def watch(folder: Path, port: int | None, *, browser: bool, parent: int | None = None) -> None:
    """Serve the page of a folder until Ctrl-C.

    Args:
        folder: the folder of the records.
        port: the port; None for the usual one, or another if it is taken.
        browser: open the page.
        parent: the process with which this one ends.
    """
    server = make_server(folder, port)
    _end_quietly(server)
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent, server), daemon=True).start()
    say(f"{folder} is shown at {server.address} (on this machine only); Ctrl-C ends this, not the runs")
    if browser:
        with suppress(Exception):  # a machine may have none
            webbrowser.open(server.address)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()


def make_server(folder: Path, port: int | None) -> WatchServer:
    """Return the server of a folder; raise a ValueError if the port that was asked for is taken."""
    make = partial(WatchServer, WatchedFolder(folder, collect), partial(render_page, live=True), page_json)
    if port is not None:
        try:
            return make(port=port)
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror}; without it, a port that is free is taken") from None
    try:
        return make(port=PORT)
    except OSError:
        return make(port=0)


def _end_quietly(server: WatchServer) -> None:
    """From now on Ctrl-C and a request to end stop the server."""

    def stop(number: int, frame: object) -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()  # which waits for the loop that was interrupted

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)


def _end_with(parent: int, server: WatchServer) -> None:
    """Stop the server when another process, the parent of this one, has ended."""
    ended = threading.Event()
    while os.getppid() == parent:
        ended.wait(LOOK)
    server.shutdown()


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Within it, a process of its own shows the page of a folder, so that training is not slowed down.

    Args:
        folder: the folder of the records; it is made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "hatrack", "watch", str(folder), "--parent", str(os.getpid())]
    process = subprocess.Popen(words, start_new_session=True)  # Ctrl-C is for the runs
    try:
        yield
    finally:
        process.terminate()
        process.wait()
