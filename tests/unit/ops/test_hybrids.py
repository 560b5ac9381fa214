"""Run models with recurrent layers: what they share, what they refuse, and their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled import needs_numba
from model_files import GOLDEN, golden_config, greedy
from safetensors.numpy import load_file, save_file

from mie import LLM, BeamSearchParams, SamplingParams
from mie.checkpoint.config import load_model_config
from mie.checkpoint.families import FAMILIES
from mie.checkpoint.tensors import recurrent_tensors
from mie.errors import ConfigError, WeightsError
from mie.memory.layers.states import States
from mie.model.layers.config import RecurrentConfig
from mie.ops.layers.recurrent_shape import RecurrentShape

NAMES = ("lfm2_short_convs", "qwen35_delta", "olmo_hybrid", "granite4_mamba", "qwen3_next_experts")
BACKENDS = ["numpy", pytest.param("jit", marks=needs_numba)]
PROMPTS = [{"prompt_token_ids": [*range(3, 3 + size)]} for size in (1, 7, 30, 12)]
PARAMS = [
    SamplingParams(temperature=1.0, seed=size, n=n, max_tokens=9, ignore_eos=True, logprobs=1)
    for size, n in enumerate((1, 3, 2, 1))
]


def load(name: str | Path, **settings: Any) -> LLM:
    settings = {"max_model_len": 64, "num_threads": 1, **settings}
    if settings["backend"] not in ("numpy", "jit"):
        del settings["num_threads"]
    return LLM(str(GOLDEN / name), skip_tokenizer_init=True, **settings)


def answers(llm: LLM) -> list[Any]:
    """Return the tokens and the bits of the log-probabilities of each choice."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(c.token_ids, c.cumulative_logprob) for each in outputs for c in each.outputs]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few
def test_no_schedule_changes_a_bit(name: str, backend: str) -> None:
    """Chunks, batches, forks, preemptions and threads, against one choice at a time."""
    alone = load(name, backend=backend, batch_invariant=True, max_num_seqs=1)
    wanted = answers(alone)
    small = {"num_blocks": 9, "block_size": 8, "max_num_seqs": 6}
    for settings in ({"max_num_batched_tokens": 5, "num_threads": 4}, small):
        llm = load(name, backend=backend, batch_invariant=True, **settings)
        assert answers(llm) == wanted
    assert llm.llm_engine.engine.stats.num_preemptions > 0


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few
def test_quantised_weights_serve_every_matrix(name: str, form: str) -> None:
    """Products with the dequantised weights give the same tokens, in float64 too."""
    wanted, got = (
        greedy(GOLDEN / name, prompt=range(3, 33), backend="numpy", quantization=form, dtype=dtype)
        for dtype in ("float64", "float32")
    )
    assert got == wanted


@pytest.mark.parametrize("name", NAMES)
def test_beams_equal_those_of_an_engine_without_room(name: str) -> None:
    """A beam's state is computed again, whatever the engine keeps."""
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    found = []
    for settings in ({}, {"max_num_seqs": 1, "num_blocks": 3, "block_size": 16}):
        [out] = load(name, backend="numpy", **settings).beam_search([PROMPTS[1]], params)
        found.append([each.tokens for each in out.sequences])
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few
def test_a_hit_changes_no_bit(name: str, backend: str) -> None:
    """The second turns of conversations begin with a snapshot, and so do repeated prompts."""
    found = []
    for caches in (False, True):
        llm = load(
            name, backend=backend, batch_invariant=True, block_size=4, enable_prefix_caching=caches
        )
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        first = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        turns = [
            {"prompt_token_ids": [*each.prompt_token_ids, *each.outputs[0].token_ids, 9, 8, 7]}
            for each in first
        ]
        second = llm.generate(turns, PARAMS, use_tqdm=False)
        hits = [each.num_cached_tokens for each in (*first, *second)]
        assert hits == ([0, 4, 28, 8, 8, 12, 36, 20] if caches else [0] * 8)
        bits = [[c.token_ids, c.cumulative_logprob] for each in second for c in each.outputs]
        found.append(bits)
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few
def test_a_swapped_sequence_goes_on_with_its_state(name: str, backend: str) -> None:
    small: dict[str, Any] = {"num_blocks": 9, "block_size": 8, "max_num_seqs": 6}
    small |= {"preemption_mode": "swap", "swap_space": 1 << 20}
    wanted = answers(load(name, backend=backend, batch_invariant=True, max_num_seqs=1))
    for caches in (False, True):
        llm = load(
            name, backend=backend, batch_invariant=True, enable_prefix_caching=caches, **small
        )
        assert answers(llm) == wanted
        assert llm.llm_engine.engine.scheduler.manager.stats.num_imported > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"async_scheduling": True}, "async_scheduling=True is not supported with recurrent"),
        ({"enable_chunked_prefill": False}, "needs enable_chunked_prefill=True"),
        ({"state_memory": 100}, "state_memory is 100; the recurrent states of one sequence take"),
    ],
)
def test_what_states_do_not_allow_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load("lfm2_short_convs", backend="numpy", **settings)


def test_a_model_without_recurrent_layers_refuses_memory_for_states() -> None:
    with pytest.raises(ConfigError, match="state_memory is 4096; the model has no recurrent"):
        LLM("bundled", backend="numpy", state_memory=4096)


def test_states_are_a_part_of_the_memory_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="mie"):
        load("granite4_mamba", backend="numpy", max_num_seqs=7)
        llm = load("granite4_mamba", backend="numpy", max_num_seqs=7, state_memory=40_000)
    assert "28 slots of states" in caplog.text
    engine = llm.llm_engine.engine
    states = engine.scheduler.manager.part(States)
    assert states is not None
    num_slots = states.num_states
    assert f"{num_slots} slots of states" in caplog.text
    assert engine.config.max_num_seqs == num_slots < 7
    assert f"max_num_seqs is lowered to {num_slots}" in caplog.text


def test_the_text_part_of_a_larger_qwen_is_loaded_alone(tmp_path: Path) -> None:
    """Vision and the layers that predict several tokens are skipped by name."""
    source = GOLDEN / "qwen35_delta"
    text = json.loads((source / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**text, "architectures": None},
        "vision_config": {"hidden_size": 16},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: x
        for name, x in load_file(source / "model.safetensors").items()
    }
    for name in ("model.visual.patch.weight", "mtp.layers.0.mlp.up_proj.weight"):
        tensors[name] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_model_config(tmp_path).left_out == ("vision_config",)
    assert answers(load(tmp_path, backend="numpy")) == answers(load(source, backend="numpy"))


DELTA = RecurrentShape(
    kind="delta", kernel_size=4, num_groups=2, num_heads=4, key_dim=3, value_dim=5
)


def test_matrices_that_hold_several_parts_are_cut_as_qwen_orders_them() -> None:
    """Each key head has its query, key, values and gates together, and its b and a."""
    family = FAMILIES["Qwen3_5ForCausalLM"].recurrent
    assert family is not None
    named = {"mixed": ("qkvz",), "gate": ("qkvz",), "small": ("ba",), "layout": "by group"}
    config = RecurrentConfig(
        shape=DELTA,
        family=type(family)(**{**vars(family), **named}),
        conv_bias=False,
        bias=False,
        largest_beta=1.0,
        norm_eps=1e-6,
    )
    rows = {
        part: [row for _, ranges in chosen for each in ranges for row in each]
        for part, chosen in config.projections().items()
    }
    of_group = np.arange(2 * 26).reshape(2, 26)
    wanted = np.split(of_group, [3, 6, 16], axis=1)
    assert rows["mixed"] == np.concatenate([each.ravel() for each in wanted[:3]]).tolist()
    assert rows["gate"] == wanted[3].ravel().tolist()
    assert rows["small"] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert recurrent_tensors(config, 7)["qkvz.weight"] == (52, 7)
    assert recurrent_tensors(config, 7)["ba.weight"] == (8, 7)


def test_layers_follow_from_the_interval_where_no_types_are_given() -> None:
    changes = {"layer_types": None, "num_hidden_layers": 8, "full_attention_interval": 3}
    config = golden_config("qwen35_delta", **changes)
    assert config.layers_recurrent == (True, True, False, True, True, False, True, True)


def published(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return OLMo hybrid's tensors as published files have them."""
    named = {**tensors}
    for name in tensors:
        if ".self_attn.q_proj." in name:
            layer = name.partition(".self_attn.")[0]
            norm = named.pop(f"{layer}.feedforward_layer_norm.weight")
            named[f"{layer}.post_attention_layernorm.weight"] = norm
        if name.endswith("q_conv1d.weight"):
            parts = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
            kernels = np.concatenate([tensors[part] for part in parts])
            sizes = [len(tensors[part.replace("conv1d", "proj")]) for part in parts]
            cuts = np.split(kernels, np.cumsum(sizes)[:-1])
            named |= dict(zip(parts, map(np.ascontiguousarray, cuts), strict=True))
    return named


def under_own_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the published tensors with the names of norms that transformers uses in memory."""
    return {
        name.replace(".attention_layer_norm.", ".input_layernorm.").replace(
            ".feedforward_layer_norm.", ".post_attention_layernorm."
        ): tensor
        for name, tensor in published(tensors).items()
    }


@pytest.mark.parametrize("spelling", [dict, published, under_own_names])
def test_olmo_hybrid_runs_from_every_spelling_of_its_tensors(tmp_path: Path, spelling: Any) -> None:
    """The golden file is spelled as transformers 5.24 saves it."""
    tensors = load_file(GOLDEN / "olmo_hybrid" / "model.safetensors")
    assert "model.layers.1.feedforward_layer_norm.weight" in tensors
    save_file(spelling(tensors), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDEN / "olmo_hybrid" / "config.json").read_bytes())
    golden = np.load(GOLDEN / "olmo_hybrid" / "golden.npz")
    wanted = golden["short.greedy"].tolist()[:8]
    found = greedy(tmp_path, prompt=golden["short.ids"].tolist(), backend="numpy")
    assert found[:8] == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.attention_layer_norm.weight"), "1 missing"),
        (
            lambda t: t.update(
                {"model.layers.0.input_layernorm.weight": t["model.norm.weight"].copy()}
            ),
            "1 unexpected",
        ),
        (
            lambda t: t.update(
                {
                    "model.layers.0.linear_attn.v_conv1d.weight": t[
                        "model.layers.0.linear_attn.v_conv1d.weight"
                    ][:-1].copy()
                }
            ),
            "config.json asks for",
        ),
    ],
)
def test_tensors_that_no_spelling_explains_are_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    tensors = load_file(GOLDEN / "olmo_hybrid" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDEN / "olmo_hybrid" / "config.json").read_bytes())
    with pytest.raises(WeightsError, match=message):
        LLM(str(tmp_path), skip_tokenizer_init=True, backend="numpy")
