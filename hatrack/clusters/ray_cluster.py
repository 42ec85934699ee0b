"""A cluster of Ray: one that is started on this machine and stopped at the end, or one that is there."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hatrack
from hatrack.clusters.request import Request

MISSING = "--on ray needs Ray, which is not installed: pip install 'hatrack[ray]'"
LOOPBACK = "127.0.0.1"


def load_ray() -> Any:
    """Import Ray and return it; raise a ValueError with the command that installs it if it is missing."""
    try:
        import ray
    except ImportError:
        raise ValueError(MISSING) from None
    return ray


@contextmanager
def connected(request: Request) -> Iterator[Any]:
    """Within it this process is connected to a cluster. Without an address one is started here, and stopped at the end.

    Args:
        request: the address, and what a run asks for.

    Yields:
        The module `ray`.
    """
    ray = load_ray()
    if ray.is_initialized():
        raise ValueError("this process is connected to a cluster of Ray already; ray.shutdown() ends that")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": _environment(request)}
    try:
        if request.address:
            ray.init(address=request.address, **common)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(address="local", include_dashboard=False, _node_ip_address=LOOPBACK, num_cpus=os.cpu_count(), **common)
    except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())
        where = f"no cluster of Ray can be reached at {request.address}" if request.address else "Ray can't be started here"
        raise ValueError(f"{where}: {said}") from None
    _restore(handlers)  # Ray takes SIGTERM for itself
    try:
        yield ray
    finally:
        ray.shutdown()
        _restore(handlers)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        try:
            signal.signal(number, handler)
        except ValueError:  # not the main thread
            return


def _environment(request: Request) -> dict[str, Any]:
    """Return the environment of workers: on this machine the same code, whatever folder it lies in."""
    if request.address:
        return {}
    return {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(hatrack.__file__).parent.parent), *_python_path()])}}


def _python_path() -> list[str]:
    return [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
