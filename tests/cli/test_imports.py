"""What a run does not need before its first step is not imported before it."""

import subprocess
import sys

NOT_NEEDED = {"scipy", "matplotlib", "bokeh", "jinja2", "optuna", "ray", "submitit", "torch._dynamo", "torch._inductor"}


def test_carrying_out_a_run_imports_nothing_for_later():
    code = "import sys\n"
    for module in ("hatrack.methods.hat", "hatrack.experiments.ahead", "hatrack.cli.execute"):
        code += f"import {module}\nprint({module!r}, *sorted({NOT_NEEDED} & set(sys.modules)))\n"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["hatrack.methods.hat", "hatrack.experiments.ahead", "hatrack.cli.execute"]
