"""A cluster of Ray: one that is started on this machine and stopped at the end, or one that is there."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hatrack import _version
from hatrack.clusters.request import Request

MISSING = "--on ray needs Ray, which is not installed: pip install 'hatrack[ray]'"
LOOPBACK = "127.0.0.1"
STARTS = 3  # how often it is tried to start Ray
PATIENCE = 10.0  # seconds to wait for an address to answer
# How a client of HTTP/2, which gRPC speaks, greets (RFC 9113, 3.4), and the type of the frame that answers.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS = 4
_held: list[Request] = []  # the cluster that this process is connected to by `connected`


def load_ray() -> Any:
    """Import Ray and return it; raise a ValueError with the command that installs it if it is missing."""
    try:
        import ray
    except ImportError:
        raise ValueError(MISSING) from None
    return ray


@contextmanager
def connected(request: Request) -> Iterator[Any]:
    """Within it this process is connected to a cluster. Without an address one is started here, and stopped at the end. A
    block within a block for the same request uses the same cluster.

    Args:
        request: the address, and what a run asks for.

    Yields:
        The module `ray`.
    """
    ray = load_ray()
    if _held == [request]:  # an outer block has it
        yield ray
        return
    if ray.is_initialized():
        raise ValueError("this process is connected to a cluster of Ray already; ray.shutdown() ends that")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if request.address:
        _check_port(request.address)
        _start(ray, request, address=request.address, **common)
    else:
        here = {"include_dashboard": False, "_node_ip_address": LOOPBACK, "num_cpus": os.cpu_count()}
        with _same_code():
            _start(ray, request, address="local", **here, **common)
    _restore(handlers)  # Ray takes SIGTERM for itself
    _held[:] = [request]
    try:
        yield ray
    finally:
        _held.clear()
        ray.shutdown()
        _restore(handlers)


def _check_port(address: str) -> None:
    """Raise a ValueError if nothing listens at an address with a port, or what does is not Ray: Ray itself would try for
    minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE) as there:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return  # the greeting would have to be encrypted
            there.sendall(GREETING)
            answer = there.recv(9)
    except OSError as error:
        raise ValueError(f"no cluster of Ray can be reached at {address}: {error.strerror or error}") from None
    if len(answer) < 4 or answer[3] != SETTINGS:
        raise ValueError(f"no cluster of Ray can be reached at {address}: something else answers there")


def _start(ray: Any, request: Request, **how: Any) -> None:
    """Connect to a cluster or start one. On a busy machine a start may take longer than Ray waits for its own parts."""
    for attempt in range(1 if request.address else STARTS):
        try:
            ray.init(**how)
            return
        except Exception as error:  # Ray has no type of its own for a start that took too long
            ray.shutdown()
            if request.address or attempt == STARTS - 1:
                said = " ".join(str(error).split())
                at = (
                    f"no cluster of Ray can be reached at {request.address}"
                    if request.address
                    else "Ray can't be started here"
                )
                raise ValueError(f"{at}: {said}") from None


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        try:
            signal.signal(number, handler)
        except ValueError:  # not the main thread
            return


@contextmanager
def _same_code() -> Iterator[None]:
    """Within it processes are started that import the same code as this one, whatever folder it lies in. They have the same
    priority as this one, and send nothing to the makers of Ray."""
    before = dict(os.environ)
    paths = [str(Path(_version.__file__).parent.parent), os.getcwd(), before.get("PYTHONPATH", "")]
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", **before}
    os.environ.update({**own, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
