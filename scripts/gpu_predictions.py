"""Write the predicted times of kernels and steps into docs/gpu/predictions.md and aims.md.

    python scripts/gpu_predictions.py

Run it after a change of tests/kernels/sass.json. A test checks that both pages are up to date.
"""

import argparse

from gpu.predictions import PAGES, rewritten

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
