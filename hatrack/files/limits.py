"""Limits on what is read: files are small, but what they claim or decompress to may be of any size."""

import math

TEXT = 32_000_000  # bytes of the largest text (JSON, TOML): a record of thousands of epochs has less than a tenth of it
IMAGE = 2**22  # the largest number of values of an image
FREE = 2**26  # bytes that any file may decompress to
GAIN = 250  # the factor by which images are compressed at most, beyond these bytes; a file of zeros reaches 1,032


def check_unpacked(what: str, size: int, stored: int) -> None:
    """Raise a ValueError if data would decompress to far more than the file has. Call it before memory is allocated.

    Args:
        what: the data, for the error message.
        size: its bytes when it is decompressed.
        stored: its bytes in the file.
    """
    if size > max(FREE, GAIN * stored):
        raise ValueError(
            f"{what} would decompress {stored:,} bytes to {size:,}, more than {GAIN} times as many; "
            "data that is really so regular can be stored without compression"
        )


def check_image(what: str, shape: tuple[int, ...]) -> None:
    """Raise a ValueError if an image of this shape has more values than are accepted."""
    if math.prod(shape) > IMAGE:
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"{what} has images of {sizes} = {math.prod(shape):,} numbers; at most {IMAGE:,} are accepted")
