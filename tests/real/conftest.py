"""Give the tests published models, and a server of one."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from published_models import published, widened

from mie import AsyncLLM

sys.path.append(str(Path(__file__).parent.parent / "serve"))

from live_server import live


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of an instruct model with a chat template, of 98 MB."""
    return published("smollm2")


@pytest.fixture(scope="session")
def smollm2_f32(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in float32."""
    return widened(smollm2, tmp_path_factory.mktemp("wide") / "smollm2.gguf")


@pytest.fixture(scope="module")
def url(smollm2: Path) -> Iterator[str]:
    """The address of a server of the instruct model."""
    engine = AsyncLLM(str(smollm2), max_model_len=1024, max_num_seqs=8, num_blocks=512)
    try:
        with live(engine) as address:
            yield address
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx2.Client]:
    """An HTTP client of the server."""
    with httpx2.Client(base_url=url, timeout=240) as client:
        yield client
