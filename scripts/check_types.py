"""Run mypy in the only environment its result is pinned for: on the package and on the rest.

    python scripts/check_types.py

The package is checked strictly, and tests and scripts as `tests/mypy.toml` says.
The verdict of mypy depends on the type stubs that NumPy ships. So it runs where NumPy has the
pinned version (`constraints.txt`: Python 3.11 and later). Elsewhere it reports that it did not run.
"""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
TESTS = str(ROOT / "tests/mypy.toml")


def main() -> int:
    pinned = re.findall(r"^numpy==([\d.]+)", CONSTRAINTS.read_text(), re.MULTILINE)[0]
    if version("numpy") != pinned:
        print(f"mypy not run: NumPy is {version('numpy')}; types are checked with {pinned}")
        return 0
    command = [sys.executable, "-m", "mypy"]
    package = subprocess.Popen(command)
    rest = subprocess.run([*command, "--config-file", TESTS], check=False)
    package.wait()
    return package.returncode or rest.returncode


if __name__ == "__main__":
    sys.exit(main())
