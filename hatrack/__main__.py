"""`python -m hatrack`: the command line."""

import sys

from hatrack.cli import main

if __name__ == "__main__":
    sys.exit(main())
