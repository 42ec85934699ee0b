"""`hatrack status`: how far runs of this machine are, and records that can't be read."""

import pytest

from hatrack.clusters.status import status, summary
from hatrack.experiments.run_folder import RunFolder
from tests.helpers.lines import about, epoch, learned, write
from tests.helpers.records import make, save


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_lines_tell_how_far_a_run_is(tmp_path, goes_on):
    lines = [about(), *(epoch(0, k) for k in range(4)), *learned(0, [0.9, 0.1, 0.1]), *(epoch(1, k, 0.75) for k in range(2))]
    write(tmp_path, "run", *lines)
    with RunFolder(tmp_path / "run.part", {}) as folder:
        if not goes_on:
            folder.lock.release()
        (found,) = status(tmp_path)
    assert found.state == ("running" if goes_on else "stopped")
    assert found.share == pytest.approx((1 + 2 / 4) / 3)
    assert "task 2/3" in found.text
    assert "epoch 2/10" in found.text
    assert "75.0%" in found.text


def test_a_damaged_record_is_not_done(tmp_path):
    save(tmp_path, [make("sgd", 0), make("hat", 0)])
    path = tmp_path / f"{make('hat', 0).name}.json"
    assert summary(status(tmp_path)) == "2 done"
    path.write_bytes(path.read_bytes()[:500])
    assert summary(status(tmp_path)) == "1 failed, 1 done"
    (found,) = [one for one in status(tmp_path) if one.state == "failed"]
    assert found.name == path.stem
    assert "not a record" in found.text
