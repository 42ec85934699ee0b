"""Serving the page of `hatrack watch`, and starting it beside runs. Imported when one of them begins."""

import multiprocessing
import signal
import socket
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
from hatrack.watching.server import HOST, PORT, WatchServer


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
    say(f"{folder} is shown at {server.address} (on this machine only); Ctrl-C ends this, not the runs")
    _serve(server, browser)


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


def _serve(server: WatchServer, browser: bool) -> None:
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
    port = _free_port()  # known before the process is there: nothing is printed into the bar of the runs later
    say(f"{folder} is shown at http://{HOST}:{port}/ (on this machine only) while the runs go on")
    process = multiprocessing.get_context("spawn").Process(target=_watch_beside, args=(folder, port), daemon=True)
    with without_ctrl_c():  # which is for the runs
        process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _free_port() -> int:
    """Return the usual port, or another if it is taken."""
    for port in (PORT, 0):
        with socket.socket() as one, suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((HOST, port))
            return int(one.getsockname()[1])
    raise ValueError("there is no port that is free")


def _watch_beside(folder: Path, port: int) -> None:
    """The main function of the process beside runs: it ends when the process with the runs does, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = make_server(folder, port)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    _serve(server, browser=True)


def _end_with_parent(server: WatchServer) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    server.shutdown()
