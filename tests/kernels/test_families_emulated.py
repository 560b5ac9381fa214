"""Check that the CUDA kernels give each family's tokens, or that the backend refuses its model."""

from pathlib import Path

import pytest
from emulated import needs_compiler

from mie import LLM, SamplingParams
from mie.errors import UnsupportedModelError

MODELS = Path(__file__).parent.parent / "golden" / "models"
NAMES = sorted(each.parent.name for each in MODELS.glob("*/config.json"))
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
def test_every_family_runs_or_is_refused() -> None:
    wrong, num_equal = [], 0
    for name in NAMES:
        try:
            found = tokens(name, "cupy-emulated")
        except UnsupportedModelError:
            continue
        num_equal += 1
        if found != tokens(name, "numpy"):
            wrong.append(name)
    assert wrong == []
    assert num_equal >= 37
