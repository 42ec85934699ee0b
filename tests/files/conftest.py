"""Fixtures of the tests of files."""

from tests.helpers.fuzzing import pristine

__all__ = ["pristine"]
