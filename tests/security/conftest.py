"""The warm process whose children run the hostile cases."""

from collections.abc import Iterator

import pytest
from measured import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    warm = Zygote()
    yield warm
    warm.close()
