"""The page's part about capacity: its numbers are the means of the records', and it is absent without masks."""

import re

import numpy as np
import pytest

from hatrack import Regime, report, run
from hatrack.reporting.page import collect
from tests.helpers.runs import small

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


def test_the_reuse_table_has_the_means_over_seeds(tmp_path):
    records = [run(small("hat", seed, regime=Regime(epochs=1)), tmp_path) for seed in range(2)]
    text = report(tmp_path).read_text()
    part = text[text.index("Capacity and reuse</h3>") : text.index("Learning curves</h3>")]
    cells = [int(value) for value in re.findall(r"<td data-share=[^>]*>(\d+)</td>", part)]
    own, reuse = (np.mean([r.weights_used[name] for r in records], axis=0) for name in ("own", "reuse"))
    assert cells == [round(100 * value) for i in range(len(own)) for value in (own[i], *reuse[i])]
    (chart,) = [m["capacity"] for m in collect(records)["sections"][0]["chart"]["methods"]]
    layer = records[0].weights_used["layers"][0]
    both = np.mean([r.weights_used["layers"][0]["used"] for r in records], axis=0)
    assert chart["layers"][1] == {
        "name": layer["title"],
        "used": [round(10_000 * v) for v in both],
        "own": chart["layers"][1]["own"],
    }


def test_methods_without_masks_have_no_such_part(tmp_path):
    run(small("sgd", regime=Regime(epochs=1)), tmp_path)
    assert "Capacity and reuse" not in report(tmp_path).read_text()
