"""Helper processes: one for each job, and none that dies, is missing or outlives this process does any harm."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hatrack.engine import helpers


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No jobs, and an empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(helpers, "_jobs", {})


def write(path):
    path.open("a").write("done\n")


def fail(argument):
    raise ValueError


def die(argument):
    os.kill(os.getpid(), 9)


def test_a_helper_does_its_job_once(tmp_path):
    for _ in range(2):
        helpers.start("one", write, tmp_path / "log")
    helpers.wait("one")
    assert (tmp_path / "log").read_text() == "done\n"
    assert helpers.is_known("one")
    assert not helpers.is_known("two")


def write_process(path):
    path.open("a").write(f"{os.getpid()}\n")


def test_a_helper_does_one_job_after_the_other_and_then_ends(tmp_path, monkeypatch):
    """A new one takes the place of one that failed."""
    monkeypatch.setattr(helpers, "COUNT", 1)
    for name, job in (("one", write_process), ("two", write_process), ("three", die), ("four", write_process)):
        helpers.start(name, job, tmp_path / "log")
    for name in ("one", "two", "three", "four"):
        helpers.wait(name)
    first, second, fourth = (int(line) for line in (tmp_path / "log").read_text().split())
    assert first == second != fourth
    assert [helpers.is_known(name) for name in ("one", "two", "three", "four")] == [True, True, False, True]
    until = time.monotonic() + 60
    while is_alive(first) or is_alive(fourth):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert helpers._working == 0
    helpers.start("five", write_process, tmp_path / "log")
    helpers.wait("five")
    assert helpers.is_known("five"), "jobs may be given when all helpers have ended"


def test_the_user_s_script_is_put_back_when_several_processes_start_at_once():
    main, inside, ended = sys.modules["__main__"], threading.Event(), threading.Event()

    def start_one():
        with helpers.without_main():
            inside.set()
            ended.wait(0.2)

    def start_another():
        inside.wait(10)
        with helpers.without_main():
            ended.set()
            one.join(10)  # it would put the script back while this one is within

    one, another = (threading.Thread(target=target) for target in (start_one, start_another))
    for thread in (one, another):
        thread.start()
    for thread in (one, another):
        thread.join(20)
    assert sys.modules["__main__"] is main


def test_what_cannot_be_sent_to_a_helper_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "COUNT", 1)
    helpers.start("one", write, threading.Lock())
    helpers.start("two", write, tmp_path / "log")
    for name in ("one", "two"):
        helpers.wait(name)
    assert not helpers.is_known("one")
    assert helpers.is_known("two")


@pytest.mark.slow
@pytest.mark.parametrize("job", [fail, die])
def test_a_helper_that_dies(job, capfd):
    helpers.start("one", job, None)
    helpers.wait("one")
    assert helpers._jobs["one"].is_set()
    assert not helpers.is_known("one")
    assert capfd.readouterr() == ("", "")


def test_a_helper_that_can_t_be_started(monkeypatch):
    def refuse(self):
        raise OSError("no memory")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", refuse)
    helpers.start("one", fail, None)
    helpers.wait("one")
    assert not helpers.is_known("one")


@pytest.mark.parametrize("user", ["ada", "a:b/c", None])
@pytest.mark.parametrize("given", ["cache", None])
def test_marks_lie_in_the_folder_of_the_compiler(user, given, tmp_path, monkeypatch):
    """It is found without importing the compiler, which a run does not wait for."""
    from torch._inductor.runtime import cache_dir_utils

    def getuser():
        if user is None:
            raise KeyError("no such user")
        return user

    monkeypatch.setattr("getpass.getuser", getuser)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    if given:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        assert str(helpers._cache_folder()) == cache_dir_utils.cache_dir()
    else:
        assert str(helpers._cache_folder()) == cache_dir_utils.default_cache_dir()


@pytest.mark.slow
def test_whether_a_job_is_known_is_found_out_without_the_compiler():
    code = "from hatrack.engine import helpers; import sys; helpers.is_known('one'); print('torch._inductor' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_nobody_waits_for_a_job_that_was_not_given():
    helpers.wait("nothing")


def test_a_helper_that_hangs_is_waited_for_so_long(monkeypatch):
    monkeypatch.setattr(helpers, "PATIENCE", 0.1)
    monkeypatch.setitem(helpers._jobs, "one", threading.Event())
    start = time.monotonic()
    helpers.wait("one")
    assert 0.1 <= time.monotonic() - start < 10


SCRIPT = """
import os, sys, time
from pathlib import Path
from hatrack.engine import helpers
from tests.engine.test_helpers import hang
print("started", flush=True)
helpers.start("one", hang, Path(sys.argv[1]))
time.sleep(600)
"""


def hang(path):
    path.write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.slow
def test_a_helper_does_not_import_the_script_and_does_not_outlive_it(tmp_path):
    """The script has no guard: a helper that imported it would print a second line, and start helpers of its own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "pid")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        until = time.monotonic() + 60
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.kill()
        assert process.stdout.read() == "started\n"
    helper = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 60
    while is_alive(helper):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "(zombie)" not in (status.read_text() if (status := Path(f"/proc/{pid}/status")).exists() else "")
