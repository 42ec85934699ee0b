"""Daemon threads: one that is in torch's C++ code when Python ends aborts the process, so none may call torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hatrack

PACKAGE = Path(hatrack.__file__).parent
WAITING = {  # daemon threads that only wait for a process or read files, and never call torch: (file, function)
    ("cli/watching.py", "server.shutdown"),
    ("cli/watching.py", "_end_with_parent"),
    ("clusters/tune_on_ray.py", "work"),
    ("clusters/worker.py", "reporter.watch"),
    ("engine/helpers.py", "_supervise"),
    ("engine/helpers.py", "_end_when_orphaned"),
    ("experiments/worker_pool.py", "_stop_when_orphaned"),
}


def daemons(text: str) -> set[str]:
    """Return the functions that daemon threads of a module execute."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    threads = [call for call in calls if ast.unparse(call.func).endswith(("Thread", "Timer"))]
    given = [{word.arg: ast.unparse(word.value) for word in call.keywords} for call in threads]
    return {words["target"] for words in given if words.get("daemon", "False") != "False"}


def test_daemon_threads_only_wait():
    found = {(str(file.relative_to(PACKAGE)), name) for file in PACKAGE.rglob("*.py") for name in daemons(file.read_text())}
    assert found == WAITING
    assert daemons("threading.Thread(target=work, daemon=True)\nThread(target=other)") == {"work"}
    assert not any(".daemon = " in file.read_text() for file in PACKAGE.rglob("*.py"))


@pytest.mark.slow
def test_a_process_that_ends_while_the_compiler_is_imported_ends_well():
    """As a worker does whose run is refused at once."""
    program = (
        "from hatrack.engine.compiled import _importing, import_compiler; import_compiler(); assert _importing[0].is_alive()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
