"""Run the command line with ``python -m mie``."""

import sys

from mie.cli import main

if __name__ == "__main__":
    sys.exit(main())
