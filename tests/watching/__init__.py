"""Tests of what shows runs while they go on."""
