"""Adapters are read as PEFT and llama.cpp read them, or refused by name."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import MODULES, Arrays, merged, random_adapter, write_gguf, write_peft
from safetensors.numpy import load_file, save_file
from tiny_models import LLAMA, random_weights

from mie.checkpoint.adapters import AdapterFile, read_adapter
from mie.checkpoint.config import model_config_from_hf
from mie.checkpoint.tensors import expected_tensors
from mie.errors import ModelError, UnsupportedModelError, WeightsError
from mie.model.layers.adapters import adapted_matrices
from mie.ops.adapters.low_rank import LowRank

MODEL = model_config_from_hf(LLAMA)
WEIGHTS = random_weights(LLAMA)
ADAPTED = {name for matrix in adapted_matrices(MODEL) for name in matrix}
SHAPES = {name: shape for name, shape in expected_tensors(MODEL).items() if name in ADAPTED}
HEADS = {"q_proj": 4, "k_proj": 2}
Q = "model.layers.0.self_attn.q_proj"


def read(path: Path, max_rank: int = 16) -> AdapterFile:
    return read_adapter(path, SHAPES, MODEL, max_rank)


def assert_changes(found: AdapterFile, arrays: Arrays, scale: float) -> None:
    assert found.changes.keys() == {f"{module}.weight" for module in arrays}
    zeros = {name: np.zeros(SHAPES[name]) for name in found.changes}
    for name, wanted in merged(zeros, arrays, scale).items():
        change: LowRank = found.changes[name]
        np.testing.assert_allclose(change.scale * change.b @ change.a, wanted, atol=1e-6)


def test_a_directory_of_peft_is_read(tmp_path: Path) -> None:
    arrays = random_adapter(WEIGHTS, 0)
    path = write_peft(tmp_path, arrays, lora_alpha=10)
    assert_changes(read(path), arrays, 10 / 4)
    assert read(path).rank == 4


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    arrays = random_adapter(WEIGHTS, 0)
    assert_changes(read(write_peft(tmp_path, arrays, lora_alpha=10, use_rslora=True)), arrays, 5.0)


def test_the_first_pattern_that_fits_chooses_rank_and_alpha(tmp_path: Path) -> None:
    arrays = random_adapter(WEIGHTS, 0, modules=["self_attn.q_proj"], rank=2)
    arrays |= random_adapter(WEIGHTS, 1, modules=["mlp.up_proj"], rank=3)
    alphas = {"^model.layers.1.self_attn.q_proj": 7, "self_attn.q_proj": 9, "q_proj": 11}
    path = write_peft(
        tmp_path, arrays, r=3, lora_alpha=6, rank_pattern={"q_proj": 2}, alpha_pattern=alphas
    )
    scales = {name: change.scale for name, change in read(path).changes.items()}
    assert scales == {
        f"{Q}.weight": 9 / 2,
        "model.layers.1.self_attn.q_proj.weight": 7 / 2,
        "model.layers.0.mlp.up_proj.weight": 6 / 3,
        "model.layers.1.mlp.up_proj.weight": 6 / 3,
    }


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_names_of_a_larger_model_are_those_of_its_text_part(tmp_path: Path, prefix: str) -> None:
    arrays = random_adapter(WEIGHTS, 0)
    larger = {module.replace("model.", prefix, 1): pair for module, pair in arrays.items()}
    assert_changes(read(write_peft(tmp_path, larger)), arrays, 1.0)


def test_a_gguf_adapter_equals_the_one_of_peft(tmp_path: Path) -> None:
    arrays = random_adapter(WEIGHTS, 0)
    found = read(write_gguf(tmp_path / "a.gguf", arrays, HEADS))
    assert_changes(found, arrays, 8 / 4)
    of_peft = read(write_peft(tmp_path / "peft", arrays, lora_alpha=8))
    assert found.digest == of_peft.digest


def test_llama_cpp_takes_an_alpha_of_zero_as_a_scale_of_one(tmp_path: Path) -> None:
    arrays = random_adapter(WEIGHTS, 0)
    path = write_gguf(tmp_path / "a.gguf", arrays, HEADS, adapter__lora__alpha=0.0)
    assert_changes(read(path), arrays, 1.0)


def test_a_digest_depends_on_every_number(tmp_path: Path) -> None:
    arrays = random_adapter(WEIGHTS, 0)
    first = read(write_peft(tmp_path / "1", arrays)).digest
    assert read(write_peft(tmp_path / "2", arrays, lora_alpha=5)).digest != first
    for index in (0, 1):
        arrays = random_adapter(WEIGHTS, 0)
        arrays[Q][index][-1, -1] += 1
        assert read(write_peft(tmp_path / f"3{index}", arrays)).digest != first
    arrays = random_adapter(WEIGHTS, 0)
    assert read(write_peft(tmp_path / "4", arrays)).digest == first


REFUSED_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    ({"peft_type": ...}, "required key 'peft_type' is missing"),
    ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS'"),
    ({"bias": "all"}, "bias 'all'"),
    ({"use_dora": True}, "use_dora True is not supported"),
    ({"lora_bias": True}, "lora_bias"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"target_parameters": ["experts"]}, "target_parameters"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'.*convert"),
    ({"a_setting_of_the_future": 1}, "a_setting_of_the_future"),
    ({"alpha_pattern": {"(a+)+b": 1}}, "alpha_pattern .*only names"),
    ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern must be a number"),
    ({"rank_pattern": {"q_proj": 3}}, "states rank 3 for .*q_proj; its tensors have 4"),
    ({"r": 5}, "states rank 5"),
    ({"r": "4"}, "r must be an integer"),
    ({"lora_alpha": float("nan")}, "lora_alpha"),
    ({"use_rslora": "yes"}, "use_rslora must be true or false"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED_SETTINGS)
def test_a_setting_that_changes_the_result_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    path = write_peft(tmp_path, random_adapter(WEIGHTS, 0), **settings)
    with pytest.raises(ModelError, match=message):
        read(path)


REFUSED_TENSORS = [
    ("base_model.model.model.embed_tokens.lora_embedding_A", "adapters of embeddings"),
    ("base_model.model.lm_head.lora_A.weight", "adapters of the output head"),
    (f"base_model.model.{Q}.lora_magnitude_vector", "DoRA"),
    ("base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight", "experts"),
    (f"base_model.model.{Q}.lora_B.bias", "biases"),
    ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "changes 1 tensors that"),
    (f"{Q}.lora_A.weight", "changes 1 tensors that"),
]


@pytest.mark.parametrize(("name", "message"), REFUSED_TENSORS)
def test_a_tensor_that_is_no_change_of_a_matrix_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    path = write_peft(tmp_path, random_adapter(WEIGHTS, 0))
    file = path / "adapter_model.safetensors"
    save_file({**load_file(file), name: np.zeros((4, 24), np.float32)}, file)
    with pytest.raises(ModelError, match=message):
        read(path)


def test_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    for index, change in enumerate(("rows of A", "rows of B", "columns of A")):
        arrays = random_adapter(WEIGHTS, 0)
        a, b = arrays[Q]
        arrays[Q] = {
            "rows of A": (a[:-1], b),
            "rows of B": (a, b[:-1]),
            "columns of A": (a[:, :-1], b),
        }[change]
        with pytest.raises(WeightsError, match=r"A and B of .*q_proj\.weight have the shapes"):
            read(write_peft(tmp_path / str(index), arrays, r=4))


def test_two_tensors_for_one_place_are_refused(tmp_path: Path) -> None:
    arrays = random_adapter(WEIGHTS, 0)
    arrays[Q.replace("model.", "model.language_model.", 1)] = arrays[Q]
    with pytest.raises(WeightsError, match=r"are both [AB] of model\.layers\.0.*q_proj"):
        read(write_peft(tmp_path, arrays))


def test_half_a_change_is_refused(tmp_path: Path) -> None:
    path = write_peft(tmp_path, random_adapter(WEIGHTS, 0))
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[f"base_model.model.{Q}.lora_B.weight"]
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"the change of .*q_proj\.weight has only"):
        read(path)


def test_a_rank_above_the_setting_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = write_peft(tmp_path, random_adapter(WEIGHTS, 0))
    with pytest.raises(ModelError, match=r"rank 4; max_lora_rank is 3 .*at least 4"):
        read(path, max_rank=3)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("index", [0, 1])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, number: float, index: int) -> None:
    arrays = random_adapter(WEIGHTS, 0)
    arrays[Q][index][0, 0] = number
    with pytest.raises(WeightsError, match="NaN or infinite"):
        read(write_peft(tmp_path, arrays))


def test_an_absent_or_incomplete_adapter_is_refused(tmp_path: Path) -> None:
    for path in ("x" * 4000, "a\0b", "~nobody-has-this-name/x"):
        with pytest.raises(ModelError, match="does not exist; an adapter is a directory"):
            read(Path(path))
    with pytest.raises(ModelError, match="does not exist; an adapter is a directory"):
        read(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read(tmp_path)
    path = write_peft(tmp_path, random_adapter(WEIGHTS, 0))
    file = path / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="truncated"):
        read(path)
    file.rename(path / "adapter_model.bin")
    with pytest.raises(UnsupportedModelError, match="pickles are not read"):
        read(path)
    (path / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match="adapter_config"):
        read(path)


def test_no_tensor_at_all_is_refused(tmp_path: Path) -> None:
    path = write_peft(tmp_path, random_adapter(WEIGHTS, 0))
    save_file({}, path / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match="holds no change"):
        read(path)


REFUSED_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"general__type": "model"}, "general.type 'model' is not supported"),
    ({"general__type": ...}, "general.type None"),
    ({"adapter__type": "ia3"}, "adapter.type 'ia3'"),
    ({"adapter__lora__alpha": ...}, "adapter.lora.alpha"),
    ({"adapter__lora__task_name": "x"}, "adapter.lora.task_name"),
    ({"general__architecture": "clip"}, "general.architecture 'clip'"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED_VALUES)
def test_a_gguf_file_of_another_kind_is_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "a.gguf", random_adapter(WEIGHTS, 0), HEADS, **values)
    with pytest.raises(ModelError, match=message):
        read(path)


def test_a_quantised_or_truncated_gguf_adapter_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", random_adapter(WEIGHTS, 0), HEADS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    with pytest.raises(WeightsError, match="truncated or corrupt"):
        read(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(ModelError, match=r"general\.type None"):
        read(path)


def test_every_module_of_a_layer_is_read(tmp_path: Path) -> None:
    for number, module in enumerate(MODULES):
        arrays = random_adapter(WEIGHTS, number, modules=[module])
        assert len(read(write_peft(tmp_path / module, arrays)).changes) == 2
