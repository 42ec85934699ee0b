"""Tests of the lines of runs and of trackers."""
