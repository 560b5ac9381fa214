"""Test checkpoints: reading, refusals before anything is read, and peak memory."""

import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from command_line import python
from hypothesis import given
from hypothesis import strategies as st
from model_files import (
    hf_config,
    random_tensors,
    safetensors_bytes,
    write_index,
    write_model,
    write_shards,
)
from numpy.typing import DTypeLike, NDArray
from safetensors import SafetensorError
from safetensors.numpy import save, save_file

from mie.checkpoint.config import model_config_from_hf
from mie.checkpoint.entries import TensorEntry
from mie.checkpoint.safetensors_header import read_header
from mie.checkpoint.tensors import num_parameters
from mie.checkpoint.weights import Checkpoint, check_tied_head, expected_tensors, non_finite_tensors
from mie.errors import WeightsError
from mie.model.config import ModelConfig

CONFIG = model_config_from_hf(hf_config())
EXPECTED = expected_tensors(CONFIG)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def opened(directory: Path) -> Checkpoint:
    return Checkpoint.open(directory, EXPECTED)


def refused(directory: Path, *named: str) -> str:
    """Return the message of a checkpoint's refusal, after checking the names in it."""
    with pytest.raises(WeightsError) as error:
        opened(directory)
    message = str(error.value)
    for name in named:
        assert name in message
    return message


# The tensors of a model.


def shapes(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, tuple[int, ...]]:
    return expected_tensors(model_config_from_hf(hf_config(architecture, **changes)))


def test_expected_tensors_follow_the_flags() -> None:
    assert EXPECTED.keys() - shapes(tie_word_embeddings=True).keys() == {"lm_head.weight"}
    biases = {n.split(".", 3)[3] for n in shapes("Qwen2ForCausalLM") if n.endswith(".bias")}
    assert biases == {f"self_attn.{x}_proj.bias" for x in "qkv"}
    biases = {n.split(".", 3)[3] for n in shapes(attention_bias=True) if n.endswith(".bias")}
    assert biases == {f"self_attn.{x}_proj.bias" for x in "qkvo"}
    biases = {n.split(".", 3)[3] for n in shapes(mlp_bias=True) if n.endswith(".bias")}
    assert biases == {f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")}
    wide = shapes("Qwen3ForCausalLM", head_dim=6)
    assert wide["model.layers.0.self_attn.q_norm.weight"] == (6,)
    assert wide["model.layers.0.self_attn.k_norm.weight"] == (6,)
    assert wide["model.layers.0.self_attn.o_proj.weight"] == (16, 24)


# Reading.


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_dtype_is_read_exactly(tmp_path: Path, dtype: DTypeLike) -> None:
    tensors = random_tensors(CONFIG, dtype)
    write_model(tmp_path, tensors=tensors)
    with opened(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            got = checkpoint.read(name)
            assert got.dtype == tensor.dtype
            np.testing.assert_array_equal(got, tensor)
            checkpoint.release(name)
            np.testing.assert_array_equal(got, tensor)


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    write_shards(tmp_path, tensors, num_shards=3)
    with opened(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(checkpoint.read(name), tensor)


# Harmless extras.


def test_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    write_model(tmp_path, tensors=tensors)
    with opened(tmp_path) as checkpoint:
        assert list(checkpoint) == list(EXPECTED)
        assert checkpoint.ignored == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
        assert checkpoint.nbytes == 4 * num_parameters(CONFIG)


def write_tied_with_head(directory: Path, head: NDArray[Any] | None = None) -> Checkpoint:
    config = hf_config(tie_word_embeddings=True)
    tensors = random_tensors(model_config_from_hf(config))
    tensors["lm_head.weight"] = (
        tensors["model.embed_tokens.weight"].copy() if head is None else head
    )
    write_model(directory, config, tensors)
    return Checkpoint.open(directory, expected_tensors(model_config_from_hf(config)))


def test_a_copy_of_the_tied_embedding_is_ignored(tmp_path: Path) -> None:
    with write_tied_with_head(tmp_path) as checkpoint:
        assert checkpoint.ignored == ("lm_head.weight",)
        check_tied_head(checkpoint)


@pytest.mark.parametrize(
    "head", [np.ones((24, 16), np.float32), np.ones((24, 16), np.float16), np.ones(3, np.float32)]
)
def test_a_head_that_contradicts_the_tied_embedding_is_refused(tmp_path, head) -> None:
    with (
        write_tied_with_head(tmp_path, head) as checkpoint,
        pytest.raises(WeightsError, match="tie_word_embeddings"),
    ):
        check_tied_head(checkpoint)


# Refused from the headers.


DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({Q_PROJ: None}, ("1 missing", Q_PROJ)),
        ({"model.layers.2.x": np.ones(1, np.float32)}, ("1 unexpected", "model.layers.2.x")),
        ({DOWN_PROJ: np.ones((32, 16), np.float32)}, (DOWN_PROJ, "[32, 16]", "[16, 32]")),
        ({Q_PROJ: np.ones(256, np.float32)}, ("model.safetensors", Q_PROJ, "[256]", "[16, 16]")),
        ({Q_PROJ: np.ones((16, 16), np.float64)}, (Q_PROJ, "dtype", "F32, F16, BF16")),
        ({Q_PROJ: np.ones((16, 16), np.int8)}, (Q_PROJ, "dtype", "F32, F16, BF16")),
    ],
    ids=["missing", "unexpected", "transposed", "flat", "wide", "integers"],
)
def test_a_tensor_that_differs_is_named(tmp_path, changes, named) -> None:
    tensors = {**random_tensors(CONFIG), **changes}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    refused(write_model(tmp_path, tensors=given), str(tmp_path), *named)


@pytest.mark.parametrize("keep", [0, 8, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if keep >= 0 else len(whole) + keep])
    refused(tmp_path, str(path))


def entry(begin: int, end: int, dtype: str = "F32", shape: object = None) -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "header too small"),
        (safetensors_bytes(b"not json"), "invalid JSON"),
        (safetensors_bytes({"a": {"dtype": "F32"}}), "missing field `shape`"),
        (safetensors_bytes({"a": entry(0, 4, dtype="F99")}, bytes(4)), "`F99`"),
        (safetensors_bytes({"a": entry(0, 4, dtype="F\n9")}, bytes(4)), r"`F\n9`"),
        (safetensors_bytes({"a": entry(4, 0, shape=[0])}, bytes(4)), "`a`"),
        (safetensors_bytes({"a": entry(0, 4, shape=[2])}, bytes(4)), "invalid shape"),
        (safetensors_bytes({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)), "invalid offset"),
        (safetensors_bytes({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "`b`"),
        (safetensors_bytes({"a": entry(0, 4)}, bytes(7)), "not fully covered"),
    ],
)
def test_a_corrupt_header_is_refused(tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    refused(tmp_path, str(path), named)
    with pytest.raises(WeightsError):
        read_header(path)


DTYPES = [
    *(np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint64),
    *(np.uint32, np.uint16, np.uint8, np.bool_, ml_dtypes.bfloat16),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
with suppress(SafetensorError):  # safetensors 0.6 writes no complex numbers
    save({"a": np.zeros(1, np.complex64)})
    DTYPES.append(np.complex64)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(
    layout=st.dictionaries(
        st.text(max_size=3), st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=6
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3)),
)
def test_every_tensor_is_found_where_the_library_wrote_it(tmp_path_factory, layout, metadata):
    path = tmp_path_factory.getbasetemp() / "written.safetensors"
    draw = np.random.default_rng(len(layout))
    tensors = {
        name: draw.integers(0, 2, (*shape, np.dtype(dtype).itemsize), np.uint8)
        for name, (dtype, shape) in layout.items()
    }
    save_file({n: t.view(layout[n][0])[..., 0] for n, t in tensors.items()}, path, metadata)
    data = path.read_bytes()
    entries = read_header(path)
    assert entries.keys() == tensors.keys()
    assert sum(entry.nbytes for entry in entries.values()) == sum(t.size for t in tensors.values())
    for name, found in entries.items():
        assert found.shape == layout[name][1]
        assert data[found.start : found.stop] == tensors[name].tobytes()


# Refused from the directory and the index.


def test_an_empty_or_missing_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "model.safetensors")
    refused(tmp_path / "nowhere", "nowhere does not exist")


def test_pickles_are_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(tmp_path, "pytorch_model.bin", "convert", "save_pretrained")


def test_a_shard_may_be_a_link_as_in_the_hub_cache(tmp_path: Path) -> None:
    directory, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    directory.mkdir()
    blobs.mkdir()
    save_file(random_tensors(CONFIG), blobs / "0123")
    (directory / "model-1.safetensors").symlink_to("../blobs/0123")
    write_index(directory, dict.fromkeys(EXPECTED, "model-1.safetensors"))
    opened(directory).close()


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, random_tensors(CONFIG))
    other = next(shard for shard in weight_map.values() if shard != weight_map[Q_PROJ])
    write_index(tmp_path, {**weight_map, Q_PROJ: other})
    refused(tmp_path, "index.json", Q_PROJ, other)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    weight_map = write_shards(tmp_path, tensors)
    first = "model-00001-of-00002.safetensors"
    twice = next(name for name, shard in weight_map.items() if shard != first)
    part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == first}
    save_file(part | {twice: tensors[twice]}, tmp_path / first)
    refused(tmp_path, first, twice)


# Values.


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_that_are_not_finite_are_counted_by_tensor(tmp_path: Path, dtype: DTypeLike) -> None:
    tensors = random_tensors(CONFIG, dtype)
    tensors[Q_PROJ][3, 4:6] = math.nan
    tensors["model.norm.weight"][0] = math.inf
    tensors["model.norm.weight"][5] = -math.inf
    write_model(tmp_path, tensors=tensors)
    with opened(tmp_path) as checkpoint:
        assert non_finite_tensors(checkpoint) == {Q_PROJ: 2, "model.norm.weight": 2}


def test_every_bit_pattern_is_classified_like_isfinite() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    for dtype, name in ((np.float16, "F16"), (ml_dtypes.bfloat16, "BF16")):
        entry = TensorEntry(path=Path("x"), dtype=name, shape=(1,), start=0, stop=2)
        checkpoint = Checkpoint({"w": entry})
        values = bits.view(dtype)
        is_finite = np.isfinite(values.astype(np.float32))
        checkpoint.check_values("w", values[is_finite])
        for value in values[~is_finite]:
            with pytest.raises(WeightsError):
                checkpoint.check_values("w", np.array([value]))


# Memory.

ENGINE_LOADER = """
import sys
from pathlib import Path
from mie import EngineConfig
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

def kilobytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))

baseline = kilobytes("VmHWM")
settings = LoadSettings(engine=EngineConfig(num_blocks=1), backend="numpy")
engine = load_engine(Path(sys.argv[1]), settings)
print((kilobytes("VmHWM") - baseline) * 1024 / int(sys.argv[2]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_engine_loads_within_115_percent_of_its_weights(tmp_path, dtype) -> None:
    """Matrices are converted in blocks: the file and its copy are never both held."""
    model = write_large_model(tmp_path, dtype)
    num_bytes = 4 * num_parameters(model)
    assert peak_over_weights(tmp_path, str(num_bytes), ENGINE_LOADER) < 1.15


def write_large_model(directory: Path, dtype: DTypeLike) -> ModelConfig:
    config = hf_config(
        vocab_size=11000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=7,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    model = model_config_from_hf(config)
    tensors = {name: np.ones(shape, dtype) for name, shape in expected_tensors(model).items()}
    write_model(directory, config, tensors)
    return model


def peak_over_weights(directory: Path, argument: str, loader: str) -> float:
    return float(python("-c", loader, directory, argument).stdout)
