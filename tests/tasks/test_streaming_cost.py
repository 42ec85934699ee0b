"""The time and memory of training on a streamed folder of images, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from /proc")
def test_streaming_takes_little_memory_and_the_time_of_a_plain_loop():
    call = [sys.executable, "-m", "tests.helpers.streaming_cost", "--images", "20000"]
    done = subprocess.run(call, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same bits"] == 1
    assert found["accuracy streamed"] == found["accuracy in memory"] > 0.9
    assert found["MB above (PSS with workers)"] < 200, "the images alone take 59 MB, twice that while they are stacked"
    assert found["ratio of computing"] < 1.5, "whatever else the machine does"
    assert found["ratio"] < 4, "about 1 on a quiet machine"
