"""What a run does not need before its first step is not imported before it, and no time is lost by looking for garbage."""

import gc
import subprocess
import sys

import pytest

from hatrack.registry import load

NOT_NEEDED = {"scipy", "matplotlib", "bokeh", "jinja2", "optuna", "ray", "submitit", "torch._dynamo", "torch._inductor"}


def test_carrying_out_a_run_imports_nothing_for_later():
    code = "import sys\n"
    for module in ("hatrack.methods.hat", "hatrack.experiments.ahead", "hatrack.cli.execute"):
        code += f"import {module}\nprint({module!r}, *sorted({NOT_NEEDED} & set(sys.modules)))\n"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["hatrack.methods.hat", "hatrack.experiments.ahead", "hatrack.cli.execute"]


@pytest.mark.parametrize("enabled", [True, False])
def test_python_looks_for_no_garbage_while_a_module_is_imported(tmp_path, monkeypatch, enabled):
    (tmp_path / "module_that_looks.py").write_text("import gc\nfound = gc.isenabled()\n")
    (tmp_path / "module_that_fails.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_that_looks", raising=False)
    if not enabled:
        gc.disable()
    try:
        assert load("module_that_looks:found") is False
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError):
            load("module_that_fails:found")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_python_looks_for_no_garbage_at_the_end_of_the_program():
    code = (
        "import atexit, gc, sys\nfrom hatrack.__main__ import main\natexit.register(lambda: print(gc.get_freeze_count()))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(main())", "--version"], capture_output=True, text=True, check=True
    )
    assert int(found.stdout.splitlines()[-1]) > 1000
