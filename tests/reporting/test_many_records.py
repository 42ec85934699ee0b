"""A report of 2,000 records, in a process of its own: its time and its memory."""

import json
import subprocess
import sys

import pytest

from tests.helpers.many_records import settings_of
from tests.helpers.records import save

CODE = """
import json, pathlib, sys, time
from hatrack.reporting.report import report
page = report(sys.argv[1])
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
most = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
print(json.dumps([time.process_time(), most, page.stat().st_size / 1e6]))
"""


@pytest.mark.slow
def test_two_thousand_records(tmp_path):
    """The time is the processor's, which other programs hardly change; getrusage's memory would count the parent's too."""
    save(tmp_path, settings_of(10, methods=20, seeds=10, tasks=10, epochs=20))
    assert len(list(tmp_path.glob("*.json"))) == 2000
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, check=True)
    seconds, megabytes, size = json.loads(done.stdout)
    assert seconds <= 20
    assert megabytes <= 500
    assert size < 15
