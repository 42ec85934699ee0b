"""Tracing: find out, by running a network once on an example, which units feed which weights."""
