import pytest


@pytest.fixture(autouse=True)
def no_full_data(monkeypatch):
    """Tests see the samples only, whatever data this machine has."""
    monkeypatch.setenv("HATRACK_DATA", "/nonexistent/hatrack-data")
