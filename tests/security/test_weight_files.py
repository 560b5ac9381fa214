"""Check that hostile weights files and indexes are refused by name at little cost."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny_models
from hostile_files import HUGE, entry, model_directory, nested, safetensors, with_config
from measured import Zygote
from safetensors.numpy import save_file
from tables import quick_third

TENSOR = "model.norm.weight"


def many(count: int, value: str, last: str = "") -> str:
    """Return a header of many tensors, whose names are numbers."""
    return "{" + ",".join(f'"{n}":{value}' for n in range(count)) + last + "}"


# Created when needed, because some are large.
TENSORS: dict[str, tuple[Callable[[], str], str]] = {
    "a shape of 99,000 factors": (lambda: entry(f"[{('1' * 20 + ',') * 98_999}1]"), "overflow"),
    "factors whose product overflows": (lambda: entry(str([2**64 - 1] * 99)), "overflow"),
    "a factor of 401 digits": (lambda: entry(f"[{HUGE}]"), "out of range"),
    "a nested shape": (lambda: entry(nested(900)), "recursion limit"),
    "NaN in a shape": (lambda: entry("[NaN]"), "invalid JSON"),
    "offsets beyond the file": (lambda: entry(f"[{2**61}]", offsets=f"[0, {2**63}]"), "truncated"),
    "a dtype that is a list": (lambda: entry(dtype="[]"), "invalid type"),
    "a dtype of a megabyte": (lambda: entry(dtype=f'"{"F" * 10**6}"'), "unknown variant"),
    "a key twice": (lambda: entry()[:-1] + ', "dtype": "F16"}', "duplicate field"),
}
"""The only tensor of a header, which is named a."""
SIZE_ZERO = entry("[0]", offsets="[0, 0]")
HEADERS: dict[str, tuple[Callable[[], str], str]] = {
    **{
        name: (lambda make=make: f'{{"a": {make()}}}', word)
        for name, (make, word) in TENSORS.items()
    },
    "20,000 names and one of them again": (
        lambda: many(20_000, SIZE_ZERO, f',"19999":{SIZE_ZERO},"a":{entry()}'),
        "20001 unexpected"),
    "96 MB of []": (lambda: "[" + "[]," * 32_000_000 + "1]", "header of 96000003 bytes"),
    "2 MB of []": (lambda: "[" + "[]," * 690_000 + "1]", "invalid type"),
    "2 MB of objects": (lambda: '{"a": [' + '{"":{}},' * 250_000 + "1]}", "unknown variant"),
    "1.5 million tensors of size zero": (lambda: many(1_500_000, SIZE_ZERO), "header of"),
    "30,000 tensors of size zero": (
        lambda: many(30_000, SIZE_ZERO, f',"a":{entry()}'), "30001 unexpected"),
    "a name of 2 million letters": (
        lambda: f'{{"{"a" * 2_000_000}": {entry()}}}', "unexpected: 'aaa"),
    "control characters in a name": (lambda: f'{{"\\u001b[2J\\u0007": {entry()}}}', "\\x1b[2J"),
    "an unpaired surrogate in a name": (
        lambda: f'{{"\\ud800": {entry()}}}', "unexpected end of hex"),
    "metadata of 2 MB": (
        lambda: f'{{"__metadata__": {{"a": "{"x" * 2_000_000}"}}, "a": {entry()}}}', "missing"),
    "deep nesting": (lambda: nested(1_000_000), "invalid type"),
    "2 MiB and a byte": (lambda: "{" + " " * (2 << 20) + "}", "may have 2097152 bytes"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", quick_third((name,) for name in HEADERS))
def test_a_hostile_header_is_refused(zygote: Zygote, model: Path, name: str) -> None:
    header, word = HEADERS[name]
    (model / "model.safetensors").write_bytes(safetensors(header(), bytes(4)))
    zygote.run("weights", model).check_refused(str(model), word)


def test_a_header_of_2_to_the_63_bytes_is_refused(zygote: Zygote, model: Path) -> None:
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    zygote.run("weights", model).check_refused(str(model), "truncated")


def test_the_command_line_refuses_a_hostile_header(zygote: Zygote, model: Path) -> None:
    header, word = HEADERS["factors whose product overflows"]
    (model / "model.safetensors").write_bytes(safetensors(header(), bytes(4)))
    result = zygote.run("cli", "inspect", model)
    result.check_cost()
    assert result.code == 1
    assert word in result.stdout


# Indexes.


def index_of(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors").unlink(missing_ok=True)
    text = weight_map if isinstance(weight_map, str) else json.dumps(weight_map)
    (directory / "model.safetensors.index.json").write_text(f'{{"weight_map": {text}}}')


INDEXES: dict[str, tuple[object, str]] = {
    "a name of 300 letters": ({TENSOR: "x" * 300 + ".safetensors"}, "not the name of"),
    "a NUL": ({TENSOR: "a\0.safetensors"}, "not the name of"),
    "an unpaired surrogate": ({TENSOR: "\ud800.safetensors"}, "not the name of"),
    "the folder above": ({TENSOR: "../model.safetensors"}, "not the name of"),
    "a nested value": (f'{{"{TENSOR}": {nested(900)}}}', "not the name of"),
    "an empty map": ({}, "weight_map must be an object"),
    "a file that is not there": ({TENSOR: "a.safetensors"}, "is missing"),
    "2,000 files": ({str(n): f"{n}.safetensors" for n in range(2000)}, "names 2000 files"),
    "150,000 tensors in one file": (
        {str(n): "a.safetensors" for n in range(150_000)},
        "the file a.safetensors",
    ),
    "a tensor twice": (f'{{"{TENSOR}": "a.safetensors", "{TENSOR}": "b.safetensors"}}', "twice"),
    "4 MB of []": ("[" + "[]," * 1_390_000 + "1]", "must be an object"),
    "5 MB": ({"x" * 5_000_000: "a.safetensors"}, "more than 4,194,304 bytes"),
    "a tensor's name of 2 million letters": ({"x" * 2_000_000: "a.safetensors"}, "a.safetensors"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_a_hostile_index_is_refused(zygote: Zygote, tmp_path: Path, name: str) -> None:
    weight_map, word = INDEXES[name]
    index_of(model_directory(tmp_path), weight_map)
    zygote.run("weights", tmp_path).check_refused(str(tmp_path), word)


def test_a_pipe_as_index_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    index_of(model_directory(tmp_path), {})
    (tmp_path / "model.safetensors.index.json").unlink()
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    zygote.run("weights", tmp_path).check_refused("index.json", "it is a pipe")


def test_a_pipe_as_shard_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    index_of(model_directory(tmp_path), {TENSOR: "a.safetensors"})
    os.mkfifo(tmp_path / "a.safetensors")
    zygote.run("weights", tmp_path).check_refused("a.safetensors", "it is a pipe")


def linked_shards(directory: Path, data: bytes) -> None:
    """Create 1,000 shards that are links to one file."""
    (directory / "shard").write_bytes(data)
    for number in range(1000):
        (directory / f"{number:04}.safetensors").symlink_to("shard")
    index_of(directory, {f"t{n}": f"{n:04}.safetensors" for n in range(1000)})


def test_the_headers_of_all_shards_are_limited_together(zygote: Zygote, tmp_path: Path) -> None:
    model_directory(tmp_path)
    header = many(20_000, '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}')
    linked_shards(tmp_path, safetensors(header))
    zygote.run("weights", tmp_path).check_refused(".safetensors", "those of a model 6291456")


def test_shards_of_metadata_alone_are_refused(zygote: Zygote, tmp_path: Path) -> None:
    model_directory(tmp_path)
    linked_shards(tmp_path, safetensors(f'{{"__metadata__": {{"a": "{"x" * 2_000_000}"}}}}'))
    zygote.run("weights", tmp_path).check_refused("0000.safetensors holds no tensor")


# A configuration and weights that contradict each other.


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 1024},
        {"architectures": ["OlmoeForCausalLM"], "num_experts": 1024, "num_hidden_layers": 32},
        {"vocab_size": 1 << 24, "hidden_size": 1 << 20, "intermediate_size": 1 << 20},
        {"max_position_embeddings": 2**31 - 1, "num_hidden_layers": 1024},
        {"num_attention_heads": 1 << 20, "num_key_value_heads": 1 << 20, "head_dim": 1 << 20},
        {"rope_scaling": {"rope_type": "linear", "factor": 1e6}, "max_position_embeddings": 2000},
    ],
    ids=str,
)
def test_sizes_at_the_limits_cost_little(zygote, tmp_path, sizes) -> None:
    """Sizes that fit the limits but not the weights are refused before memory is allocated."""
    with_config(model_directory(tmp_path), **sizes)
    zygote.run("config", tmp_path).check_cost()
    zygote.run("cli", "inspect", tmp_path).check_cost()
    result = zygote.run("generate", tmp_path)
    result.check_cost()
    assert result.error is not None or sizes.keys() & {"rope_scaling"}


# Numbers that are not finite.


def with_value(directory: Path, name: str, value: float, dtype: object, first: bool) -> None:
    weights = tiny_models.random_weights(tiny_models.LLAMA)
    with np.errstate(over="ignore"):
        changed = weights[name].astype(dtype)
    changed.reshape(-1)[0 if first else -1] = value
    save_file({**weights, name: changed}, directory / "model.safetensors")


MATRIX = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "dtype", "value"),
    [
        ("model.embed_tokens.weight", np.float32, float("nan")),
        ("model.embed_tokens.weight", np.float16, -float("inf")),
        (MATRIX, ml_dtypes.bfloat16, -float("nan")),
        (MATRIX, np.float32, float("inf")),
        (TENSOR, np.float16, float("nan")),
        ("lm_head.weight", ml_dtypes.bfloat16, -float("inf")),
    ],
)
def test_a_weight_that_is_not_finite_is_named_at_load(zygote, tmp_path, name, dtype, value) -> None:
    model_directory(tmp_path)
    with_value(tmp_path, name, value, dtype, first=value > 0)
    result = zygote.run("generate", tmp_path)
    result.check_refused(name, "NaN or infinite")
    assert result.error == "WeightsError"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_largest_and_the_smallest_finite_weights_are_loaded(zygote, tmp_path, dtype) -> None:
    model_directory(tmp_path)
    largest = float(ml_dtypes.finfo(dtype).max)
    for value in (largest, -largest, 0.0, -0.0, float(ml_dtypes.finfo(dtype).smallest_subnormal)):
        with_value(tmp_path, "lm_head.weight", value, dtype, first=True)
        result = zygote.run("generate", tmp_path)
        result.check_cost()
        assert result.error is None, result.message
