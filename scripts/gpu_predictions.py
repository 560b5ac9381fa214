"""Write the predicted times of kernels and steps into docs/gpu/predictions.md.

    python scripts/gpu_predictions.py

Run it after a change of tests/kernels/sass.json. A test checks that the page is up to date.
"""

import argparse

from gpu.predictions import PAGE, rewritten

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
