"""The page on scenarios says of every method where it is defined."""

import re
from pathlib import Path

from hatrack import METHODS

PAGE = Path(__file__).parent.parent / "docs" / "scenarios.md"


def test_the_table_of_methods():
    text = PAGE.read_text().partition("## Where methods are defined")[2].partition("What the methods do")[0]
    rows = re.findall(r"^\| (`.*?) \| (\w+).*? \| (\w+).*? \| (\w+).*?\|$", text, re.M)
    found = {
        name: tuple(s for s, said in zip(("task", "domain", "class"), answers, strict=True) if said == "yes")
        for names, *answers in rows
        for name in re.findall(r"`([\w-]+)`", names)
        if name in METHODS
    }
    assert found == {name: METHODS[name].scenarios for name in METHODS}
