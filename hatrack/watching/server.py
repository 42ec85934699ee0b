"""The server of `hatrack watch`: it answers on the loopback only, reads only, and gives away only pages and records.

A page of another site must not read results through the reader's browser: a request whose Host is not ours is refused,
because a site could let its own name point to this machine (DNS rebinding). Nothing is written, and parameters of an
address are not read.
"""

import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from hatrack.files.atomic import read_bytes
from hatrack.watching.folder import WatchedFolder

HOST = "127.0.0.1"
PORT = 6116  # if nothing else has it
AGE = 0.5  # seconds for which an answer holds: several browsers cost no more than one
HTML, JSON = "text/html; charset=utf-8", "application/json"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class WatchServer(ThreadingHTTPServer):
    """Serves the page of a folder while runs go on.

    Args:
        folder: what is shown.
        render: makes the page of the data, `hatrack.reporting.page.render_page`.
        to_json: makes what the page asks for again and again, `hatrack.reporting.page.page_json`.
        port: where; 0 for any port that is free.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, folder: WatchedFolder, render: Callable[[Any], str], to_json: Callable[[Any], str], port: int = 0
    ) -> None:
        self.folder, self.render, self.to_json = folder, render, to_json
        self._lock = threading.Lock()
        self._answers: dict[str, tuple[float, bytes]] = {}
        super().__init__((HOST, port), Handler)

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def answer(self, path: str) -> tuple[bytes, str] | None:
        """Return what an address has and its type; None if there is nothing."""
        if path in ("/", "/data.json"):
            return self._made(path), HTML if path == "/" else JSON
        with self._lock:
            file = self.folder.record_file(unquote(path).removeprefix("/"))
        try:
            return (read_bytes(file), JSON) if file else None
        except ValueError:  # it was removed just now
            return None

    def _made(self, path: str) -> bytes:
        with self._lock:
            when, known = self._answers.get(path, (-AGE, b""))
            if time.monotonic() - when < AGE:
                return known
            data = self.folder.data()
            made = (self.render(data) if path == "/" else self.to_json(data)).encode()
            self._answers[path] = time.monotonic(), made
            return made

    def is_ours(self, host: str) -> bool:
        """Return whether the Host of a request is this server by its address or as localhost."""
        return host.lower() in {f"{name}:{self.server_address[1]}" for name in (HOST, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that goes away is no error, and others are answered with a status."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    server: WatchServer
    timeout = 30  # seconds for a request to arrive
    server_version, sys_version = "hatrack", ""

    def do_GET(self) -> None:
        """Answer with a page, with data or with a record."""
        self._reply(whole=True)

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self._reply(whole=False)

    def _reply(self, *, whole: bool) -> None:
        if not self.server.is_ours(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "this address is for the machine itself")
            return
        try:
            found = self.server.answer(self.path.partition("?")[0])
        except Exception as error:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, type(error).__name__)
            return
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body, kind = found
        self.send_response(HTTPStatus.OK)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if whole:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
