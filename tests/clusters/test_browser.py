"""The page of `hatrack status` in a real browser: on a phone."""

from pathlib import Path
from typing import Any

import pytest

from hatrack.clusters.status import RunStatus, status_page
from tests.helpers.browser import Look, browser

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("default")]
__all__ = ["browser"]


def test_the_page_of_runs_fits_a_phone(browser: Any, tmp_path: Path) -> None:
    run = RunStatus("digits-and-clothes-hat-seed0-5bc53a3fa73c", "running", 0.07, "hat seed 0: task 1/6, epoch 12/30")
    page = tmp_path / "status.html"
    page.write_text(status_page([run], "Runs in live"), encoding="utf-8")
    with Look(browser, page, viewport={"width": 390, "height": 800}, is_mobile=True) as found:
        assert found.page.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [390, 390]
