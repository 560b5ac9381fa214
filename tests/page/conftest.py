"""Let the tests of the page use the fixtures of others: a live server, and random runs."""

import sys
from pathlib import Path

for folder in ("serve", "property"):
    sys.path.append(str(Path(__file__).parent.parent / folder))
