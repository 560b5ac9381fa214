"""Run mypy in the one environment its result is pinned for.

The verdict of mypy depends on the type stubs that NumPy ships. So it runs where NumPy has the
pinned version (`constraints.txt`: Python 3.11 and later). Elsewhere it says that it did not run.
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
