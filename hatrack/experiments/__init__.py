"""Experiments: runs, their records and metrics, several runs in parallel."""
