"""Run mypy in the one environment its result is pinned for.

mypy's verdict depends on the type stubs that NumPy ships, so it runs where NumPy is the pinned
version (`constraints.txt`: Python 3.11 and later) and says so where it does not.
"""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


def main() -> int:
    pinned = re.findall(r"^numpy==([\d.]+)", CONSTRAINTS.read_text(), re.MULTILINE)[0]
    if version("numpy") != pinned:
        print(f"mypy not run: NumPy is {version('numpy')}; types are checked with {pinned}")
        return 0
    return subprocess.run([sys.executable, "-m", "mypy"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
