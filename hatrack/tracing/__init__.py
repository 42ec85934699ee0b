"""Tracing: which units feed which weights, found by running a network on an example."""
