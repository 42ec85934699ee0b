"""Helper processes: one for each job, and none that dies, is missing or outlives this process does any harm."""

import subprocess
import sys
import threading
import time

import pytest

from hatrack.engine import helpers


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No jobs, and an empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HELPER_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(helpers, "_jobs", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "jobs.py").write_text(
        "import os, sys\n"
        "def work():\n    open(os.environ['HELPER_LOG'], 'a').write(sys.stdin.readline())\n"
        "def fail():\n    raise ValueError\n"
        "def die():\n    os.kill(os.getpid(), 9)\n"
    )
    return tmp_path


def test_a_helper_does_its_job_once(fresh):
    for _ in range(2):
        helpers.start("one", "jobs:work", "a message")
    helpers.wait("one")
    assert (fresh / "log").read_text() == "a message\n"
    assert helpers.is_known("one")
    assert not helpers.is_known("two")


@pytest.mark.parametrize("entry", ["jobs:fail", "jobs:die", "jobs:missing", "nowhere:work"])
def test_a_helper_that_dies(entry):
    helpers.start("one", entry, "")
    helpers.wait("one")
    assert helpers._jobs["one"].is_set()
    assert not helpers.is_known("one")


def test_a_helper_that_can_t_be_started(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    helpers.start("one", "jobs:work", "")
    helpers.wait("one")
    assert not helpers.is_known("one")


def test_nobody_waits_for_a_job_that_was_not_given():
    helpers.wait("nothing")


def test_a_helper_that_hangs_is_waited_for_so_long(monkeypatch):
    monkeypatch.setattr(helpers, "PATIENCE", 0.1)
    monkeypatch.setitem(helpers._jobs, "one", threading.Event())
    start = time.monotonic()
    helpers.wait("one")
    assert 0.1 <= time.monotonic() - start < 10


def test_a_helper_ends_when_its_input_ends():
    """It does not outlive a killed run: the job here would never end by itself."""
    code = (
        "import time\nfrom hatrack.experiments import ahead\n"
        "ahead.compile_step = lambda job: time.sleep(600)\nprint('ready', flush=True)\nahead.main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("{}\n")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.stdin.close()
        assert process.wait(30) == 1
