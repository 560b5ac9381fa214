"""Compare logits and greedy tokens with those of Hugging Face transformers.

The models are tiny and random. `scripts/make_golden.py` made them, and each has a provenance. A
relative difference is the largest difference of logits divided by the largest logit.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from compiled import needs_numba
from numpy.typing import NDArray

from mie import LLM, SamplingParams
from mie.checkpoint.config import load_model_config
from mie.checkpoint.families import FAMILIES
from mie.checkpoint.weights import Checkpoint, expected_tensors
from mie.load.backends import load_backend
from mie.load.sizing import cache_shape
from mie.model.config import RopeConfig
from mie.model.decoder import Decoder
from mie.ops.backend import StepBatch

MODELS = Path(__file__).parent / "models"
NAMES = sorted(path.name for path in MODELS.iterdir())
TOLERANCE = 3e-5  # transformers' own rounding moves none of these models by more than 1e-5
BLOCK_SIZE = 8
SIDES = [
    ("numpy", "float32"),
    pytest.param("numpy", "float64", marks=pytest.mark.slow),
    pytest.param("jit", "float32", marks=needs_numba),
]
"""Backends and their dtypes."""

Floats = NDArray[np.floating]


def load_decoder(name: str, dtype: str, *, backend: str = "numpy", **changes: object) -> Decoder:
    """Return the model's decoder, with some fields of its configuration changed after loading."""
    config = load_model_config(MODELS / name)
    with Checkpoint.open(MODELS / name, expected_tensors(config)) as checkpoint:
        changed = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
        machine = load_backend(backend, dtype)
        return Decoder(changed, machine, checkpoint, max_model_len(name) or 192)


def max_model_len(name: str) -> int | None:
    """Return a length beyond LongRoPE's original context, for the model that is about it."""
    return 256 if "_long" in name else None


def all_logits(decoder: Decoder, token_ids: list[int], chunk_sizes: Sequence[int]) -> Floats:
    """Return the logits after every token, computed in chunks through a paged cache.

    The sizes of the chunks are taken in turns.
    """
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = decoder.backend.new_kv_cache(cache_shape(decoder.config, num_blocks, BLOCK_SIZE))
    states, recurrent = None, decoder.config.recurrent
    if recurrent is not None:
        num_layers = decoder.config.layers_recurrent.count(True)
        states = decoder.backend.recurrent.new_state_cache(recurrent.shape, num_layers, 3)
    table = np.arange(num_blocks)[::-1]  # an order that cannot arise by accident
    logits, start = [], 0
    for size in itertools.cycle(chunk_sizes):
        positions = np.arange(start, min(start + size, len(token_ids)))
        batch = StepBatch(
            token_ids=np.asarray(token_ids)[positions],
            positions=positions,
            slot_mapping=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            cu_seqlens_q=np.array([0, len(positions)]),
            seq_lens=positions[-1:] + 1,
            block_tables=table[None],
            logits_rows=np.arange(len(positions)),
            slots=np.array([1]),
            fresh=np.array([start == 0]),
        )
        logits.append(np.array(decoder.forward(batch, cache, states)))
        start += size
        if start >= len(token_ids):
            break
    return np.concatenate(logits)


def difference(decoder: Decoder, name: str, prompt: str, *chunk_sizes: int) -> float:
    """Return the relative difference from the golden logits for a prompt and its greedy tokens."""
    golden = np.load(MODELS / name / "golden.npz")
    token_ids = [*golden[f"{prompt}.ids"].tolist(), *golden[f"{prompt}.greedy"].tolist()]
    logits = all_logits(decoder, token_ids, chunk_sizes or [1000])[golden[f"{prompt}.rows"]]
    wanted = golden[f"{prompt}.logits"]
    return float(np.abs(logits - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(
    ("prompt", "backend", "dtype"),
    [
        ("long", "numpy", "float32"),
        pytest.param("long", "jit", "float32", marks=needs_numba),
        *(
            pytest.param(*case, marks=[*marks, pytest.mark.slow])
            for *case, marks in (
                ("short", "numpy", "float64", []),
                ("short", "numpy", "float32", []),
                ("long", "numpy", "float64", []),
                ("short", "jit", "float32", [needs_numba]),
            )
        ),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(
    name: str, prompt: str, backend: str, dtype: str
) -> None:
    decoder = load_decoder(name, dtype, backend=backend)
    assert difference(decoder, name, prompt) < TOLERANCE
    assert difference(decoder, name, prompt, 1, 13, 1, 30, 2) < TOLERANCE


@pytest.mark.few
@pytest.mark.parametrize(("backend", "dtype"), SIDES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_transformers(name: str, backend: str, dtype: str) -> None:
    """Both prompts at once, in chunks of at most 24 tokens a step."""
    golden = np.load(MODELS / name / "golden.npz")
    llm = LLM(
        str(MODELS / name),
        skip_tokenizer_init=True,
        backend=backend,
        dtype=dtype,
        max_num_batched_tokens=24,
        max_num_seqs=2,
        max_model_len=max_model_len(name),
    )
    prompts = [{"prompt_token_ids": golden[f"{key}.ids"].tolist()} for key in ("short", "long")]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    short, long = llm.generate(prompts, params, use_tqdm=False)
    assert short.outputs[0].token_ids == golden["short.greedy"].tolist()
    assert long.outputs[0].token_ids == golden["long.greedy"].tolist()


@pytest.mark.parametrize("name", [n for n in NAMES if "yarn" in n or "linear" in n or "31" in n])
def test_a_wrong_rope_scaling_is_noticed(name: str) -> None:
    ropes = load_model_config(MODELS / name).layer_ropes
    changed = tuple(rope and RopeConfig(theta=rope.theta) for rope in ropes)
    decoder = load_decoder(name, "float32", layer_ropes=changed)
    assert difference(decoder, name, "long") > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["mistral_window", "qwen2_windows", "qwen3_layer_types"])
@pytest.mark.parametrize("wider", [1, 1000])
def test_a_wrong_window_is_noticed(name: str, wider: int) -> None:
    windows = load_model_config(MODELS / name).layer_windows
    assert any(windows)
    changed = tuple(window and window + wider for window in windows)
    decoder = load_decoder(name, "float32", layer_windows=changed)
    assert difference(decoder, name, "long") > 100 * TOLERANCE


def test_a_wrong_epsilon_is_noticed() -> None:
    decoder = load_decoder("llama2_mha", "float32", rms_norm_eps=1e-3)
    assert difference(decoder, "llama2_mha", "long") > TOLERANCE


def test_the_models_cover_every_family_and_flag() -> None:
    configs = [load_model_config(MODELS / name) for name in NAMES]
    assert len(configs) >= 12
    assert {config.architecture for config in configs} == {*FAMILIES}
    ropes = {rope for config in configs for rope in config.layer_ropes}
    assert None in ropes
    types = {"default", "linear", "llama3", "yarn", "longrope"}
    assert {rope.rope_type for rope in ropes if rope} == types
    for flag in ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "rope_is_interleaved"):
        assert {getattr(config, flag) for config in configs} == {False, True}
    assert {config.qk_norm for config in configs} == {None, "head", "projection", "rotated head"}
    assert {config.num_heads == config.num_kv_heads for config in configs} == {False, True}
    widths = {c.num_heads * c.head_dim == c.hidden_size for c in configs}
    assert widths == {False, True}
    assert any(None in c.layer_windows and any(c.layer_windows) for c in configs)
    assert {config.dtype for config in configs} == {"float32", "float16", "bfloat16"}
    indexed = [name for name in NAMES if (MODELS / name / "model.safetensors.index.json").exists()]
    assert indexed


@pytest.mark.parametrize("name", NAMES)
def test_every_model_has_a_provenance(name: str) -> None:
    provenance = json.loads((MODELS / name / "provenance.json").read_text())
    assert provenance["name"] == name
    assert provenance["script"] == "scripts/make_golden.py"
    assert isinstance(provenance["seed"], int)
    assert {"torch", "transformers", "numpy"} <= provenance["versions"].keys()
    assert provenance["greedy_min_gap"] > 1e-3
    assert max(path.stat().st_size for path in (MODELS / name).iterdir()) < 200_000
