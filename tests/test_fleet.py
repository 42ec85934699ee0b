"""Several runs at once."""

import json

import pytest

from hatrack.fleet import carry_out
from tests.test_run import small


def test_side_by_side_gives_the_same_records(tmp_path):
    """Every run has one thread here, alone or in company, so that the results are the same to the bit."""
    runs = [small(seed=seed) for seed in range(2)]
    one, two = (carry_out(runs, tmp_path / str(n), parallel=n) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert b.versions["threads"] == 1
        assert json.dumps(a.accuracy) == json.dumps(b.accuracy)
        assert a.loss == b.loss
        assert a.curves == b.curves
    assert sorted(p.name for p in (tmp_path / "1").iterdir()) == sorted(p.name for p in (tmp_path / "2").iterdir())


def test_an_error_in_one_process_reaches_the_user(tmp_path):
    (tmp_path / "out").write_text("a file, not a folder")
    with pytest.raises(ValueError, match="can't write to the folder"):
        carry_out([small(seed=seed) for seed in range(3)], tmp_path / "out", parallel=2)
