"""Fixtures of the tests of data sets."""

from tests.helpers.publishing import digits, folder, publish, site

__all__ = ["digits", "folder", "publish", "site"]
