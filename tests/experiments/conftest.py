"""Fixtures of the tests of experiments."""

import json

import pytest

from hatrack.engine import helpers


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """The jobs that helpers would be given, instead of helpers."""
    given = {}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(helpers, "COUNT", 1)
    monkeypatch.setattr(helpers, "start", lambda name, function, job: given.setdefault(name, json.loads(json.dumps(job))))
    return given
