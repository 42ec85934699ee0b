"""Fetch a file from a server, within limits of size and time: a server may send any amount of data, or a byte a minute."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT = 30.0  # seconds to wait for a server's answer
PATIENCE, SLOWEST = 60.0, 20_000  # a file may take so many seconds, and one more for so many bytes
SPARE = 1_000_000  # bytes by which a file may be larger than its published size
CHUNK = 1 << 16


class Refused(ValueError):  # noqa: N818
    """A server sends too much, or too slowly."""


def fetch(size: int, progress: Any = None) -> Callable[[str, str, Any], None]:
    """Return a function that fetches a file for pooch.

    Args:
        size: the published size of the file, in bytes.
        progress: a progress bar with the interface that pooch asks for; None or False for none.

    Returns:
        A function of an address, the path of the file to write, and an argument of pooch's that is not used. It raises
        Refused for more than the published size (and a little) and after the longest time that such a file may take.
    """
    most = size + size // 10 + SPARE
    seconds = PATIENCE + size / SLOWEST

    def download(address: str, path: str, _: Any) -> None:
        import requests  # only downloads need it
        from urllib3.exceptions import HTTPError

        end, got = time.monotonic() + seconds, 0
        with requests.get(address, stream=True, timeout=TIMEOUT, headers={"Accept-Encoding": "identity"}) as answer:
            answer.raise_for_status()
            total = int(answer.headers.get("content-length") or 0)
            _check_size(total, most)
            if progress:
                progress.total = total
            with Path(path).open("wb") as file:
                try:
                    while chunk := answer.raw.read1(CHUNK, decode_content=True):  # what has come, not all that was asked for
                        got += len(chunk)
                        _check_size(got, most)
                        if time.monotonic() > end:
                            raise Refused(f"it is too slow: {got:,} of {size:,} bytes in {seconds:.0f} seconds")
                        file.write(chunk)
                        if progress:
                            progress.update(len(chunk))
                except HTTPError as error:
                    raise requests.ConnectionError(error) from None

    return download


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise Refused(f"it sends more than {most:,} bytes, more than the published file has")
