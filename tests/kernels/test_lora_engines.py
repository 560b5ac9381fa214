"""Check that engines with adapters give the answers of the NumPy backend, on the emulated GPU.

With MIE_GPU_TESTS=1 they also run on a GPU.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import MODULES, random_adapter, write_peft
from emulated import needs_compiler
from test_kernels import DEVICE_MODES
from tiny_models import GEMMA3, LLAMA, QWEN3_TIED, random_weights, write_model

from mie import LLM, LoRARequest, SamplingParams

pytestmark = [needs_compiler, pytest.mark.slow]

MODELS = {"llama": LLAMA, "qwen3": QWEN3_TIED, "gemma3": GEMMA3}
SMALL = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
PATTERN = {"q_proj": 1, "down_proj": 7}
"""Other ranks than the second adapter's 3."""


@pytest.fixture(params=["cupy-emulated", *DEVICE_MODES])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name, config in MODELS.items():
        weights = random_weights(config)
        if name == "gemma3":  # else its layers hardly change the logits
            weights["model.embed_tokens.weight"] *= np.float32(0.1)
        write_model(folder / name / "model", config, weights)
        write_peft(folder / name / "1", random_adapter(weights, 1, rank=4, size=2.0))
        arrays = random_adapter(weights, 2, rank=3, modules=MODULES[:4], size=2.0)
        for module, rank in PATTERN.items():
            own = [each for each in MODULES if each.endswith(module)]
            arrays |= random_adapter(weights, 3, rank=rank, modules=own, size=2.0)
        how: dict[str, Any] = {"use_rslora": True, "lora_alpha": 2, "r": 3}
        write_peft(folder / name / "2", arrays, rank_pattern=PATTERN, **how)
    return folder


def llm_of(folder: Path, backend: str, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_loras": 2, "max_lora_rank": 8}
    sizes |= {"skip_tokenizer_init": True, "enable_lora": True, "dtype": "float32"}
    return LLM(folder / "model", backend=backend, **{**sizes, **options})


def adapter(folder: Path, number: int) -> LoRARequest | None:
    return LoRARequest(f"{number}", number, str(folder / f"{number}")) if number else None


def answers(llm: LLM, folder: Path, numbers: list[int], size: int = 9) -> list[Any]:
    """Return the tokens and their log-probabilities of requests with these adapters."""
    prompts = [{"prompt_token_ids": [5 + i, *range(7, 7 + size)]} for i in range(len(numbers))]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    loras = [adapter(folder, number) for number in numbers]
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False, lora_request=loras):
        own = output.outputs[0]
        rows = zip(own.token_ids, own.logprobs or [], strict=True)
        found.append((own.token_ids, [row[token].logprob for token, row in rows]))
    return found


NUMBERS = [0, 1, 2, 1, 0, 2]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_numpy(folder: Path, device: str, name: str, quantization: str | None):
    """The steps of prompts have many rows, and the steps of decodes are captured."""
    of_model = {"quantization": quantization} if quantization else {}
    own = folder / name
    oracle = llm_of(own, "numpy", **of_model)
    wanted, plain = (answers(oracle, own, each) for each in (NUMBERS, [0] * len(NUMBERS)))
    found = answers(llm_of(own, device, **of_model), own, NUMBERS)
    for number, answer, (tokens, logprobs), other in zip(
        NUMBERS, found, wanted, plain, strict=True
    ):
        assert answer[0] == tokens
        np.testing.assert_allclose(answer[1], logprobs, rtol=0, atol=1e-4)
        assert np.allclose(other[1], logprobs, atol=1e-2) == (number == 0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["auto", "int4"])
def test_captured_steps_have_the_bits_of_eager_ones(
    folder: Path, device: str, dtype: str, stored: str
):
    how: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": stored}
    captured, eager = (
        answers(
            llm_of(folder / "qwen3", device, enforce_eager=is_eager, **how),
            folder / "qwen3",
            NUMBERS,
        )
        for is_eager in (False, True)
    )
    assert captured == eager


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_request_has_the_bits_that_it_has_alone(folder: Path, device: str, dtype: str):
    how: dict[str, Any] = {"dtype": dtype, "batch_invariant": True, "enable_prefix_caching": False}
    llm = llm_of(folder / "llama", device, **how)
    together = answers(llm, folder / "llama", NUMBERS)
    for i, number in enumerate(NUMBERS):
        prompt = {"prompt_token_ids": [5 + i, *range(7, 16)]}
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
        lora = adapter(folder / "llama", number)
        [output] = llm.generate(prompt, params, use_tqdm=False, lora_request=lora)
        own = output.outputs[0]
        logprobs = [
            row[t].logprob for t, row in zip(own.token_ids, own.logprobs or [], strict=True)
        ]
        assert (own.token_ids, logprobs) == together[i]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_requests_without_an_adapter_have_the_bits_of_an_engine_without_slots(
    folder: Path, device: str, dtype: str
):
    with_slots = llm_of(folder / "llama", device, dtype=dtype)
    none: dict[str, Any] = {"enable_lora": False, "max_loras": 1, "max_lora_rank": 16}
    without = llm_of(folder / "llama", device, dtype=dtype, **none)
    found = answers(with_slots, folder / "llama", NUMBERS)
    wanted = answers(without, folder / "llama", [0] * len(NUMBERS))
    for number, own, plain in zip(NUMBERS, found, wanted, strict=True):
        assert (own == plain) == (number == 0)


def test_adapters_are_loaded_and_removed_between_captured_steps(folder: Path, device: str):
    own = folder / "llama"
    llm = llm_of(own, device, max_loras=1, enable_prefix_caching=False)
    wanted = {n: answers(llm_of(own, "numpy"), own, [n] * 2) for n in (0, 1, 2)}
    for number in (1, 2, 0, 1):
        for each in llm.llm_engine.list_loras():
            llm.llm_engine.remove_lora(each)
        tokens = [tokens for tokens, _ in answers(llm, own, [number] * 2)]
        assert tokens == [tokens for tokens, _ in wanted[number]], number
