"""What a run does not need before its first step is not imported before it."""

import subprocess
import sys

import pytest

NOT_NEEDED = {"scipy", "matplotlib", "bokeh", "jinja2", "optuna", "ray", "submitit", "torch._dynamo", "torch._inductor"}


@pytest.mark.parametrize("module", ["hatrack.cli.execute", "hatrack.experiments.ahead", "hatrack.methods.hat"])
def test_carrying_out_a_run_imports_nothing_for_later(module):
    code = f"import sys, {module}; print(sorted({NOT_NEEDED} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
