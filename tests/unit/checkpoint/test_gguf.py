"""Check how the weights and the configuration of GGUF files are read."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import tiny_models
from safetensors.numpy import save_file

from mie import LLM, SamplingParams
from mie.checkpoint.config import load_model_config, model_config_from_hf
from mie.checkpoint.generation import GenerationConfig
from mie.checkpoint.gguf.architectures import ARCHITECTURES, split_names
from mie.checkpoint.gguf.blocks import FORMS, decode
from mie.checkpoint.gguf.header import read_gguf
from mie.checkpoint.locate import BUNDLED_DIRECTORY, locate_model
from mie.checkpoint.safetensors_header import weights_digest
from mie.checkpoint.weights import Checkpoint, expected_tensors, non_finite_tensors
from mie.cli.inspect import inspect_model
from mie.errors import ConfigError, ModelError, UnsupportedModelError, WeightsError
from mie.load.backends import load_backend
from mie.load.sizing import cache_shape
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.ops.backend import StepBatch
from mie.ops.weights.quantised import QuantisedRows, dequantise
from mie.text.tokenizer import Tokenizer

TESTS = Path(__file__).parents[2]
MODELS = TESTS / "golden/models"
NOT_IN_GGUF = (
    *("qwen2_windows", "qwen3_layer_types"),  # windows of Qwen
    *("qwen2_yarn_mscale", "qwen3_yarn_attention_factor"),
    "ernie45_interleaved",  # biases
    "granite4_mamba",
    *("qwen2_moe_shared", "qwen3_moe_dense_layer"),  # layers without experts
)
LOST_IN_GGUF: dict[str, dict[str, Any]] = {
    "gemma2_soft_caps": {"query_pre_attn_scalar": 16},  # the head size, as in llama.cpp
    "gemma3_two_ropes": {"query_pre_attn_scalar": 16, "layer_types": None},
    "hunyuan_rotated_norms": {"max_position_embeddings": 262144},
    "smollm3_no_rope": {"no_rope_layers": None},  # every fourth layer, as in llama.cpp
}
"""Values of golden models that a GGUF file does not hold, and what stands for them."""
FAMILIES = {"GraniteMoeHybridForCausalLM"}.union(*(row.families for row in ARCHITECTURES.values()))
NAMES = [
    path.parent.name
    for path in sorted(MODELS.glob("*/config.json"))
    if json.loads(path.read_text())["architectures"][0] in FAMILIES
    and path.parent.name not in NOT_IN_GGUF
]


def opened(path: Path) -> Checkpoint:
    config = load_model_config(path)
    return Checkpoint.open(path, expected_tensors(config), config.quantisation)


# Numbers


@pytest.mark.parametrize("kind", FORMS)
def test_blocks_have_the_weights_of_the_gguf_package(kind: str) -> None:
    golden = np.load(TESTS / "data/gguf_blocks.npz")
    rows = decode(kind, golden[f"{kind}.raw"])
    assert rows.form == FORMS[kind]
    assert np.array_equal(dequantise(rows), golden[f"{kind}.weights"])
    least, most = (0, 15) if rows.form.has_offsets else (-8, 7)
    if rows.form.codes == "int4":
        assert least <= rows.codes.min() <= rows.codes.max() <= most
    assert rows.scales.shape == (3, 256 // rows.form.group)
    assert rows.codes.dtype == np.int8
    assert rows.scales.dtype == np.float32


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "Q8_0")
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    entry = read_gguf(tmp_path / "model.gguf").tensors["blk.0.attn_q.weight"]
    data[entry.start : entry.start + 2] = np.float16(np.nan).tobytes()
    (tmp_path / "model.gguf").write_bytes(data)
    assert non_finite_tensors(opened(tmp_path / "model.gguf")) == {
        "model.layers.0.self_attn.q_proj.weight": 32
    }
    with pytest.raises(WeightsError, match=r"q_proj.weight' holds NaN or infinite"):
        LLM(tmp_path / "model.gguf", skip_tokenizer_init=True, backend="numpy")


def test_mxfp4_scales_are_finite_if_their_weights_are() -> None:
    blocks = np.full((256, 17), 0x77, np.uint8)  # the largest number, 6
    blocks[:, 0] = np.arange(256)
    rows = decode("MXFP4", blocks)
    with np.errstate(over="ignore"):
        assert np.array_equal(np.isfinite(rows.scales), np.isfinite(dequantise(rows))[:, :1])
    assert dequantise(rows)[127, 0] == 6


# Files

MODEL = tiny_models.LLAMA | {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}


def write(directory: Path, kind: str = "F32", **changes: Any) -> Path:
    """Write a small Llama as a directory and as model.gguf, and return the latter."""
    config = MODEL | changes
    weights = tiny_models.random_weights(config)
    tiny_models.write_model(directory / "model", config, weights)
    return gguf_files.convert(directory / "model", directory / "model.gguf", kind)


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_model_equals_the_original(name: str, tmp_path: Path) -> None:
    """Its configuration, its weights, and its logits bit for bit."""
    path = gguf_files.convert(MODELS / name, tmp_path / "model.gguf")
    own = load_model_config(path)
    wanted = load_model_config(MODELS / name, LOST_IN_GGUF.get(name))
    # A GGUF file tells neither Mistral from Llama, nor Granite 4 from Granite 3.
    if name in ("mistral_full", "granite4_dense"):
        wanted = dataclasses.replace(wanted, architecture=own.architecture, names=own.names)
    if name == "hunyuan_rotated_norms":  # the base of RoPE is rounded to float32
        [rope] = {*own.layer_ropes}
        assert rope is not None
        assert wanted.rope is not None
        assert rope.theta == pytest.approx(wanted.rope.theta, rel=1e-7)
        wanted = dataclasses.replace(wanted, layer_ropes=own.layer_ropes)
    wanted = dataclasses.replace(wanted, names=split_names(wanted.names))
    assert dataclasses.replace(own, dtype=wanted.dtype) == wanted
    with opened(path) as found:
        assert not found.forms
        logits = logits_of(own, found)
    original = load_model_config(MODELS / name)
    with Checkpoint.open(MODELS / name, expected_tensors(original)) as checkpoint:
        names = original.names
        assert np.array_equal(
            logits, logits_of(dataclasses.replace(wanted, names=names), checkpoint)
        )


SPARSE_QWEN: dict[str, dict[str, Any]] = {
    "qwen2": tiny_models.QWEN3_MOE
    | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
    | {"norm_topk_prob": False, "shared_expert_intermediate_size": 24},
    "qwen3": tiny_models.QWEN3_MOE | {"norm_topk_prob": True},  # as in llama.cpp, whatever it was
}


def write_random(directory: Path, config: dict[str, Any]) -> Path:
    generator = np.random.default_rng(0)
    shapes = expected_tensors(model_config_from_hf(config))
    weights = {
        name: generator.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()
    }
    return tiny_models.write_model(directory, config, weights)


@pytest.mark.parametrize("config", SPARSE_QWEN.values(), ids=SPARSE_QWEN)
def test_a_sparse_qwen_equals_the_original(config: dict[str, Any], tmp_path: Path) -> None:
    source = write_random(tmp_path / "m", config)
    path = gguf_files.convert(source, tmp_path / "model.gguf")
    own, wanted = load_model_config(path), load_model_config(source)
    assert dataclasses.replace(own, dtype=wanted.dtype) == wanted
    with opened(path) as found, opened(source) as original:
        assert np.array_equal(logits_of(own, found), logits_of(wanted, original))


def test_mxfp4_experts_of_gpt_oss_equal_those_of_the_original(tmp_path: Path) -> None:
    """The two formats order the 32 numbers of a block differently."""
    config = json.loads((MODELS / "gpt_oss_sinks/config.json").read_text())
    config |= {"intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    generator, heads = np.random.default_rng(0), config["num_attention_heads"]
    shapes = expected_tensors(model_config_from_hf(config))
    weights: dict[str, Any] = {
        name: generator.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
        if ".experts." not in name
    }
    tensors = {}
    for layer, (own, rows) in itertools.product(
        range(config["num_hidden_layers"]), {"gate_up_proj": 64, "down_proj": 32}.items()
    ):
        stack, number = f"model.layers.{layer}.mlp.experts.{own}", config["num_local_experts"]
        codes = generator.integers(0, 16, (number, rows, 1, 32), np.uint8)
        scales = generator.integers(120, 126, (number, rows, 1), np.uint8)
        weights[f"{stack}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        weights[f"{stack}_scales"] = scales
        weights[f"{stack}_bias"] = generator.normal(0, 1, (number, rows)).astype(np.float32)
        blocks = np.concatenate((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), 3)
        cut = {"gate": blocks[:, ::2], "up": blocks[:, 1::2]} if rows == 64 else {"down": blocks}
        for name, each in cut.items():
            shape = (32, each.shape[1], number)
            data = gguf_files.NUMBERS["MXFP4"], shape, each.tobytes()
            tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = data
    assert weights["model.layers.0.self_attn.sinks"].shape == (heads,)
    source = tiny_models.write_model(tmp_path / "m", config, weights)
    (tmp_path / "floats").mkdir()
    (tmp_path / "floats/config.json").write_text(json.dumps(config))
    floats = {name: each for name, each in weights.items() if each.dtype != np.uint8}
    save_file(floats, tmp_path / "floats/model.safetensors")
    tensors |= gguf_files.tensors_of(tmp_path / "floats", "F32")
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_files.gguf_bytes(gguf_files.values_of(source, None), tensors))
    own_config, wanted = load_model_config(path), load_model_config(source)
    with opened(path) as found, opened(source) as original:
        assert np.array_equal(logits_of(own_config, found), logits_of(wanted, original))


def logits_of(config: ModelConfig, checkpoint: Checkpoint) -> np.ndarray:
    """Return the logits after each of 24 tokens."""
    decoder = Decoder(config, load_backend("numpy"), checkpoint, num_positions=64)
    positions = np.arange(24)
    batch = StepBatch(
        token_ids=positions * 7 % config.vocab_size,
        positions=positions,
        slot_mapping=positions,
        cu_seqlens_q=np.array([0, 24]),
        seq_lens=np.array([24]),
        block_tables=np.arange(3)[None],
        logits_rows=positions,
    )
    cache = decoder.backend.new_kv_cache(cache_shape(config, 3, 8))
    return np.array(decoder.forward(batch, cache))


def test_a_quantised_model_has_forms_and_blocks_of_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "Q4_0")
    with opened(path) as checkpoint, opened(tmp_path / "model") as original:
        name = "model.layers.0.self_attn.k_proj.weight"
        assert checkpoint.forms[name] == FORMS["Q4_0"]
        assert "model.norm.weight" not in checkpoint.forms
        assert checkpoint.dtypes[name] == "Q4_0"
        blocks = list(checkpoint.blocks(name, max_bytes=3 * 36))
        assert [len(block) for block in blocks] == [3] * 10 + [2]
        assert all(isinstance(block, QuantisedRows) for block in blocks)
        whole, wanted = checkpoint.read(name), original.read(name)
        assert np.array_equal(np.concatenate([dequantise(block) for block in blocks]), whole)
        assert np.abs(whole - wanted).max() < np.abs(wanted).max() / 7


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_a_file_writes_the_text_of_the_directory(kind: str, tmp_path: Path) -> None:
    """The bundled weights are in bfloat16, so both are exact."""
    path = gguf_files.convert(BUNDLED_DIRECTORY, tmp_path / "model.gguf", kind, "gpt-2")
    prompts = ["Once upon a time", "Tell me about <|user|> é 猫"]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=3)
    outputs = []
    for model in (path, BUNDLED_DIRECTORY):
        llm = LLM(model, backend="numpy", num_blocks=32)
        found = llm.generate(prompts, params, use_tqdm=False)
        found += llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
        outputs.append([each.outputs[0] for each in found])
    assert outputs[0] == outputs[1]


def test_the_setting_quantization_may_name_the_format(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "backend": "numpy", "num_blocks": 4}
    LLM(write(tmp_path, "Q8_0"), quantization="gguf", **settings)
    with pytest.raises(ConfigError, match="quantization is 'gptq'; the files are gguf"):
        LLM(tmp_path / "model.gguf", quantization="gptq", **settings)
    with pytest.raises(ConfigError, match="quantization is 'gguf'; the files are not quantised"):
        LLM(tmp_path / "model", quantization="gguf", **settings)


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole = write(tmp_path)
    values = gguf_files.values_of(tmp_path / "model", None)
    tensors = list(gguf_files.tensors_of(tmp_path / "model", "F32").items())
    for number in range(3):
        own = values if number == 0 else {}
        own = own | {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)}
        shard = tmp_path / f"part-{number + 1:05}-of-00003.gguf"
        shard.write_bytes(gguf_files.gguf_bytes(own, dict(tensors[number::3])))
    first = tmp_path / "part-00001-of-00003.gguf"
    assert load_model_config(first) == load_model_config(whole)
    with opened(first) as found, opened(whole) as original:
        assert all(np.array_equal(found.read(name), original.read(name)) for name in original)
    assert weights_digest(first) == weights_digest(whole)
    second, third = (first.with_name(f"part-0000{n}-of-00003.gguf") for n in (2, 3))
    with pytest.raises(WeightsError, match="not the first file of its model; pass part-00001"):
        read_gguf(second)
    data = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(WeightsError, match="is not file 2 of 3"):
        read_gguf(first)
    second.write_bytes(data)
    third.unlink()
    with pytest.raises(WeightsError, match=r"1 of 3 files are missing: 'part-00003"):
        read_gguf(first)


# Refusals


def with_values(path: Path, **changes: Any) -> Path:
    """Write the small Llama with changed metadata. Ellipsis removes a key."""
    write(path.parent)
    values = gguf_files.values_of(path.parent / "model", None)
    values |= {key.replace("__", "."): item for key, item in changes.items()}
    kept = {key: item for key, item in values.items() if item is not ...}
    tensors = gguf_files.tensors_of(path.parent / "model", "F32")
    path.write_bytes(gguf_files.gguf_bytes(kept, tensors))
    return path


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"general__architecture": "gemma3n"}, UnsupportedModelError, "architecture 'gemma3n'"),
        ({"general__architecture": ...}, ModelError, "does not name its architecture"),
        ({"llama__expert_count": 8}, ModelError, "'num_experts_per_tok' is missing"),
        ({"llama__expert_count": 2**31}, ModelError, "num_local_experts must be"),
        ({"llama__embedding_length": ...}, ModelError, "required key 'hidden_size' is missing"),
        ({"llama__attention__head_count": [4, 4]}, ModelError, "num_attention_heads must be"),
        ({"llama__rope__dimension_count": 8}, UnsupportedModelError, "partial RoPE"),
        (
            {"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 4.0},
            UnsupportedModelError,
            "RoPE type 'longrope'",
        ),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__attn_factor": 1.3},
            UnsupportedModelError,
            "attn_factor 1.3 is not supported",
        ),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(changes, error, message, tmp_path):
    path = with_values(tmp_path / "model.gguf", **changes)
    with pytest.raises(error, match=message) as caught:
        load_model_config(path)
    assert str(path) in str(caught.value)


def golden(name: str, path: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a golden model with changed metadata and tensors. None removes a tensor."""
    values = gguf_files.sizes_of(MODELS / name)
    prefix = f"{values['general.architecture']}."
    values |= {prefix + key.replace("__", "."): item for key, item in changes.items()}
    found = gguf_files.tensors_of(MODELS / name, "F32") | (tensors or {})
    found = {key: tensor for key, tensor in found.items() if tensor is not None}
    path.write_bytes(gguf_files.gguf_bytes(values, found))
    return path


def test_a_family_that_follows_from_a_key_is_the_other_one_without_it(tmp_path: Path) -> None:
    path = golden("olmo3_windows", tmp_path / "m.gguf", attention__sliding_window=0)
    assert load_model_config(path).architecture == "Olmo2ForCausalLM"
    path = golden("ministral3_yarn", tmp_path / "m.gguf", attention__temperature_scale=0.0)
    assert load_model_config(path).architecture == "MistralForCausalLM"


def test_windows_by_layer_are_a_list_or_a_period(tmp_path: Path) -> None:
    for pattern, windows in (([False, True], (None, 9)), (1, (None, None)), (4, (9, 9))):
        changes = {"attention__sliding_window_pattern": pattern}
        path = golden("exaone4_hybrid", tmp_path / "m.gguf", **changes)
        assert load_model_config(path).layer_windows == windows
    for bad in ("LG", [True], -1.5):
        path = golden("olmo3_windows", tmp_path / "m.gguf", attention__sliding_window_pattern=bad)
        if bad == "LG":
            assert load_model_config(path).layer_windows == (9, None)
            continue
        with pytest.raises(ModelError, match=r"(layer_types|sliding_window_pattern) must"):
            load_model_config(path)


@pytest.mark.parametrize("layers", [2, 46])
def test_scores_of_gemma_2_follow_from_the_number_of_layers(layers: int, tmp_path: Path) -> None:
    path = golden("gemma2_soft_caps", tmp_path / "m.gguf", block_count=layers)
    assert load_model_config(path).attention_scale == 1 / math.sqrt(16 if layers == 2 else 8)


def test_one_tensor_may_hold_queries_keys_and_values(tmp_path: Path) -> None:
    arrays = gguf_files.arrays_of(MODELS / "glm_interleaved")
    changes: dict[str, Any] = {}
    for layer, kind in ((0, "weight"), (0, "bias"), (1, "weight"), (1, "bias")):
        names = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
        joined = np.concatenate([arrays[name] for name in names])
        changes |= dict.fromkeys(names)
        changes[f"blk.{layer}.attn_qkv.{kind}"] = gguf_files.encoded(joined, "F32")
    whole = golden("glm_interleaved", tmp_path / "whole.gguf")
    path = golden("glm_interleaved", tmp_path / "fused.gguf", changes)
    config = load_model_config(path)
    assert config == load_model_config(whole)
    with opened(path) as fused, opened(whole) as parts:
        assert np.array_equal(logits_of(config, fused), logits_of(config, parts))
    changes["blk.0.attn_qkv.weight"] = gguf_files.encoded(np.ones((60, 32)), "F32")
    with pytest.raises(WeightsError, match=r"shape \[60, 32\], the metadata asks for \[128, 32\]"):
        opened(golden("glm_interleaved", path, changes))


def test_long_rope_has_its_own_factor_of_scores(tmp_path: Path) -> None:
    def factor(**changes: Any) -> float | None:
        rope = load_model_config(golden("phi3_long", tmp_path / "m.gguf", **changes)).rope
        assert rope is not None
        return rope.attention_factor

    assert factor() is None
    assert factor(rope__scaling__attn_factor=1.5) == 1.5
    with pytest.raises(WeightsError, match=r"rope_factors_short.weight must be a vector of F32"):
        load_model_config(
            golden("phi3_long", tmp_path / "m.gguf", {"rope_factors_short.weight": None})
        )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("granite_multipliers", {"rope__scaling__finetuned": False}, "layers without RoPE"),
        ("granite_multipliers", {"expert_count": 8}, "mixture of experts"),
        ("llama_yarn", {"rope__scaling__yarn_attn_factor": 1.3}, "yarn_attn_factor 1.3 is not"),
        ("llama_yarn", {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor 0.5 is not"),
        ("ernie45_interleaved", {}, "attention biases of this family"),
    ],
)
def test_features_that_a_family_lacks_are_refused(name, changes, message, tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_model_config(golden(name, tmp_path / "m.gguf", **changes))


def test_tensors_of_an_unknown_architecture_are_not_read(tmp_path: Path) -> None:
    path = with_values(tmp_path / "model.gguf", general__architecture="llama5")
    config = load_model_config(MODELS / "llama2_mha")
    with pytest.raises(
        WeightsError, match="architecture 'llama5' have no known names; known: llama"
    ):
        Checkpoint.open(path, expected_tensors(config))


def test_other_frequencies_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    tensors = gguf_files.tensors_of(tmp_path / "model", "F32")
    tensors["rope_freqs.weight"] = gguf_files.encoded(np.linspace(1, 9, 8), "F32")
    values = gguf_files.values_of(tmp_path / "model", None)
    (tmp_path / "model.gguf").write_bytes(gguf_files.gguf_bytes(values, tensors))
    with pytest.raises(UnsupportedModelError, match="is not Llama 3's scaling"):
        load_model_config(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("blk.0.attn_q.weight", None, "lacks|has 1 tensors"),
        ("blk.0.attn_qkv.weight", (0, (64,), bytes(256)), "'blk.0.attn_qkv.weight'"),
        ("model.norm.weight", (0, (64,), bytes(256)), "'model.norm.weight'"),
        ("blk.9.attn_q.weight", (0, (64,), bytes(256)), "'blk.9.attn_q.weight'"),
        ("output_norm.weight", (0, (32,), bytes(128)), r"has shape \[32\]"),
        ("output_norm.weight", (8, (64,), bytes(68)), "'output_norm.weight' is in Q8_0"),
        ("output_norm.weight", (16, (64,), bytes(68)), "in type IQ2_XXS; mie reads F32, F16"),
        ("output_norm.weight", (99, (64,), bytes(68)), "in type number 99"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, change, message, tmp_path) -> None:
    config = load_model_config(write(tmp_path))
    tensors = gguf_files.tensors_of(tmp_path / "model", "F32") | {name: change}
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    values = gguf_files.values_of(tmp_path / "model", None)
    (tmp_path / "model.gguf").write_bytes(gguf_files.gguf_bytes(values, kept))
    with pytest.raises(WeightsError, match=message):
        Checkpoint.open(tmp_path / "model.gguf", expected_tensors(config))


def test_version_2_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\x02" + data[5:])
    assert load_model_config(path).num_layers == 2


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    path = with_values(
        tmp_path / "model.gguf", general__sampling__temp=0.7, general__sampling__top_k=20
    )
    found = GenerationConfig.load(path)
    assert found.sampling == {"temperature": 0.7, "top_k": 20}
    assert found.source == str(path)
    assert GenerationConfig.load(path, "vllm").sampling == {}


def test_ends_of_texts_are_found_by_their_names(tmp_path: Path) -> None:
    for first, expected in (
        (["a", "</s>", "<|im_end|>", "<|eot_id|>"], (1, 9, 2, 3)),
        (["<|end|>", "</s>", "<|call|>", "x"], (1, 9, 0, 2)),
        (["<|end|>", "</s>", "<|call|>", "<|return|>"], (1, 9, 2, 3)),  # a message's, in harmony
    ):
        path = with_values(
            tmp_path / "model.gguf",
            tokenizer__ggml__tokens=[*first, *(f"t{index}" for index in range(36))],
            tokenizer__ggml__eos_token_id=1,
            tokenizer__ggml__eom_token_id=9,
        )
        assert load_model_config(path).eos_token_ids == expected


NONE = gguf_files.Signed(-1)


@pytest.mark.parametrize("value", [NONE, 2**32 - 1])
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"])
def test_an_id_of_minus_one_is_no_token(key: str, value: int, tmp_path: Path) -> None:
    path = with_values(tmp_path / "model.gguf", **{f"tokenizer__ggml__{key}": value})
    config = load_model_config(path)
    assert value not in (config.bos_token_id, *config.eos_token_ids)


def test_other_ends_of_texts_may_lie_beyond_the_vocabulary(tmp_path: Path) -> None:
    tokens = [f"t{index}" for index in range(40)]
    for key, is_fine in (("eot_token_id", True), ("eom_token_id", True), ("eos_token_id", False)):
        path = with_values(
            tmp_path / "model.gguf",
            tokenizer__ggml__tokens=tokens,
            **{"tokenizer__ggml__eos_token_id": 2, f"tokenizer__ggml__{key}": 10**6},
        )
        if is_fine:
            assert load_model_config(path).eos_token_ids == (2,)
            continue
        with pytest.raises(ModelError, match="eos_token_id must lie in 0"):
            load_model_config(path)


def test_booleans_may_be_written_as_integers(tmp_path: Path) -> None:
    path = with_values(tmp_path / "model.gguf", llama__rope__scaling__finetuned=1)
    assert load_model_config(path).rope is not None


# Names of models


@pytest.mark.parametrize(
    ("names", "named", "unnamed"),
    [
        (["a.gguf"], ["a.gguf"], []),
        (["a-Q4.gguf", "a-Q8.gguf"], ["a-Q4.gguf or ", "a-Q8.gguf"], []),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], ["a-00001"], ["a-00002"]),
        (["mmproj-a.gguf", "a.gguf"], ["/a.gguf"], ["mmproj"]),
        ([f"{letter}.gguf" for letter in "abcdefghij"], ["/h.gguf or 2 other files"], ["/i.gguf"]),
        ([], [], ["GGUF"]),
    ],
)
def test_the_gguf_files_of_a_directory_are_named(
    names: list[str], named: list[str], unnamed: list[str], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    failing: list[Callable[[Path], Any]] = [
        load_model_config,
        lambda path: LLM(path, backend="numpy"),
        lambda path: inspect_model(str(path)),
        lambda path: Tokenizer.load(path, None),
    ]
    for fail in failing:
        with pytest.raises(ModelError) as caught:
            fail(tmp_path)
        message = str(caught.value)
        assert all(name in message for name in named), message
        assert not any(name in message for name in unnamed), message


def test_a_gguf_file_is_a_model_without_revisions(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert locate_model(path) == path
    with pytest.raises(ConfigError, match="is a file"):
        locate_model(path, revision="v2")
