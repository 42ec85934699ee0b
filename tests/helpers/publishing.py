"""Fixtures: a local server that publishes small image sets, and an empty data folder."""

import numpy as np
import pytest
import torch

from hatrack.datasets import download
from hatrack.datasets.catalog import SETS
from tests.helpers import archives


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the data folder, which does not exist yet."""
    monkeypatch.setenv("HATRACK_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def site(monkeypatch):
    """Return a running server without files."""
    for name in ("HATRACK_MIRROR", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with archives.serve(archives.Site()) as site:
        yield site


@pytest.fixture
def publish(site, monkeypatch):
    """Return a function that puts files on the server and in the catalogue."""

    def put(name, files, train, test):
        site.files |= files
        monkeypatch.setitem(SETS, name, archives.entry(name, files, site.address, train, test))

    return put


@pytest.fixture
def digits(publish):
    """Publish a small MNIST on the server and return its arrays."""
    data = archives.arrays("mnist")
    publish("mnist", archives.mnist(data), 20, 10)
    return data


def assert_same(source, data):
    """Check that a loaded set has the images and labels of these arrays."""
    for part, (x, y) in (("train", source.train), ("test", source.test)):
        expected = data[f"x_{part}"]
        expected = expected[:, None] if expected.ndim == 3 else expected.transpose(0, 3, 1, 2)
        assert (x.dtype, y.dtype) == (torch.uint8, torch.int64)
        np.testing.assert_array_equal(x, expected)
        np.testing.assert_array_equal(y, data[f"y_{part}"])
