"""How many random cases a test tries: few by default, all of them with `make test-long`."""

import os


def cases(few: int, all_of_them: int) -> int:
    """Return the number of cases to try."""
    return all_of_them if os.environ.get("HATRACK_TEST_LONG") else few
