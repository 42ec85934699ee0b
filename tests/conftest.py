"""Fixtures and settings of all tests."""

import pytest
import torch

torch.set_num_threads(1)  # the networks of the tests are small: threads would only wait for each other


@pytest.fixture(autouse=True)
def no_full_data(monkeypatch):
    """Tests see the samples only, whatever data this machine has."""
    monkeypatch.setenv("HATRACK_DATA", "/nonexistent/hatrack-data")
