"""Serving the page of `hatrack watch`, and starting it beside runs. Imported when one of them begins."""

import multiprocessing
import signal
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from hatrack.experiments.worker_pool import without_ctrl_c
from hatrack.reporting.page import collect, page_json, render_page
from hatrack.text import say
from hatrack.watching.folder import WatchedFolder
from hatrack.watching.server import PORT, WatchServer


def watch(folder: Path, port: int | None, *, browser: bool) -> None:
    """Serve the page of a folder until Ctrl-C.

    Args:
        folder: the folder of the records.
        port: the port; None for the usual one, or another if it is taken.
        browser: open the page.
    """
    server = make_server(folder, port)

    def stop(number: int, frame: object) -> None:
        threading.Thread(target=server.shutdown, daemon=True).start()  # it waits for the loop that was interrupted

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
    _serve(server, f"{folder} is shown at {server.address} (on this machine only); Ctrl-C ends this, not the runs", browser)


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


def _serve(server: WatchServer, text: str, browser: bool) -> None:
    say(text)
    if browser:
        with suppress(Exception):  # a machine may have none
            webbrowser.open(server.address)
    with server:
        server.serve_forever()


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Within it, a process of its own shows the page of a folder, so that training is not slowed down.

    Args:
        folder: the folder of the records; it is made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("spawn").Process(target=_watch_beside, args=(folder,), daemon=True)
    with without_ctrl_c():  # which is for the runs
        process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _watch_beside(folder: Path) -> None:
    """The main function of the process beside runs: it ends when the process with the runs does, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = make_server(folder, None)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    _serve(server, f"{folder} is shown at {server.address} (on this machine only) while the runs go on", browser=True)


def _end_with_parent(server: WatchServer) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    server.shutdown()
