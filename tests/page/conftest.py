"""Give the tests of the page a browser, and the fixtures of others: live servers, random runs."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium

for folder in ("serve", "property"):
    sys.path.append(str(Path(__file__).parent.parent / folder))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser
