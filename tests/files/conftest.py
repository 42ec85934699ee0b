"""Fixtures of the tests of files."""

from tests.helpers.fuzzing import pristine
from tests.helpers.publishing import digits, folder, publish, site

__all__ = ["digits", "folder", "pristine", "publish", "site"]
