"""Talk with published models, where MIE_PUBLISHED_MODELS names a folder of their files."""

import os
from pathlib import Path

import pytest
from command_line import mie

FOLDER = os.environ.get("MIE_PUBLISHED_MODELS")


@pytest.mark.slow
@pytest.mark.skipif(FOLDER is None, reason="MIE_PUBLISHED_MODELS names no folder")
def test_a_small_model_names_a_capital_at_the_first_try() -> None:
    [path] = Path(str(FOLDER)).rglob("SmolLM2-135M-Instruct.Q4_1.gguf")
    process = mie("run", path, "What is the capital of France?", "--max-tokens", "60")
    assert process.returncode == 0
    assert b"Paris" in process.stdout
    first = process.stderr.decode().splitlines()[0]
    assert first.startswith("[sampling defaults of conversations, as the model recommends none: ")
