"""Let the tests of the page use the live server of the tests of the HTTP routes."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "serve"))
