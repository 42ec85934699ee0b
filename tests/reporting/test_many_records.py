"""A report of 2,000 records, in a process of its own: its time and its memory."""

import json
import subprocess
import sys

import pytest

from tests.helpers.many_records import settings_of
from tests.helpers.records import save

CODE = """
import json, resource, sys, time
from hatrack.reporting.report import report
page = report(sys.argv[1])
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([time.process_time(), most, page.stat().st_size / 1e6]))
"""


@pytest.mark.slow
def test_two_thousand_records(tmp_path):
    """The time is that of the processor, which other programs beside it hardly change."""
    save(tmp_path, settings_of(10, methods=20, seeds=10, tasks=10, epochs=20))
    assert len(list(tmp_path.glob("*.json"))) == 2000
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, check=True)
    seconds, megabytes, size = json.loads(done.stdout)
    assert seconds <= 20
    assert megabytes <= 500
    assert size < 15
