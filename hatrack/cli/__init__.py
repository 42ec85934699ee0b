"""The command line, built with click: one file per command, each imported when it is used.

Nothing is imported here, so that `hatrack.__main__` can import `interrupts.py` first.
"""
