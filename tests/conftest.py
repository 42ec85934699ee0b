"""Fixtures and settings of all tests."""

import gc
import signal
import sys

import pytest
import torch

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job of a shell; the tests send interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup; the tests close terminals
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

gc.disable()  # until all tests are imported: what they import stays, and looking at it again and again took 7 seconds
torch.set_num_threads(1)  # the networks of the tests are small: threads would only wait for each other


def pytest_collection_finish():
    """Let collections of garbage leave out what was imported, torch and thousands of tests: each took half a second."""
    gc.freeze()
    gc.enable()


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
