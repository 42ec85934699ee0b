"""Fixtures and settings of all tests."""

import signal
import sys

import pytest
import torch

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job of a shell; the tests send interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # the networks of the tests are small: threads would only wait for each other


@pytest.fixture(autouse=True)
def no_full_data(monkeypatch):
    """Tests see the samples only, whatever data this machine has."""
    monkeypatch.setenv("HATRACK_DATA", "/nonexistent/hatrack-data")


@pytest.fixture(autouse=True)
def no_imports_left():
    """A run that ends early may leave a thread that still imports torch's compiler, which disturbs pytest between tests."""
    yield
    compiled = sys.modules.get("hatrack.engine.compiled")
    for thread in compiled._importing if compiled else ():
        thread.join()
