"""Check that the CUDA kernels give each family's tokens."""

import json
from pathlib import Path

import pytest
from emulated import needs_compiler

from mie import LLM, SamplingParams
from mie.checkpoint.config import model_config_from_hf

MODELS = Path(__file__).parent.parent / "golden" / "models"
NAMES = sorted(
    each.parent.name
    for each in MODELS.glob("*/config.json")
    if model_config_from_hf(json.loads(each.read_text())).head_dim % 8 == 0
)
"""Models with a head size that has a kernel. `test_cupy_backend` tests the refusal of others."""
PROMPTS = [{"prompt_token_ids": ids} for ids in ([*range(3, 23)], [5, 9, 2])]


def tokens(name: str, backend: str) -> list[list[int]]:
    llm = LLM(
        str(MODELS / name),
        backend=backend,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        num_blocks=32,
    )
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_the_tokens_of_numpy(name: str) -> None:
    assert tokens(name, "cupy-emulated") == tokens(name, "numpy")
