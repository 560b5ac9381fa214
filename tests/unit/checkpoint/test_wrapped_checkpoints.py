"""Load the text part of a larger model, in every spelling of its tensors' names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mie.checkpoint.config import load_model_config
from mie.checkpoint.tensors import expected_tensors
from mie.checkpoint.weights import Checkpoint
from mie.errors import ModelError, UnsupportedModelError, WeightsError

TEXT = Path(__file__).parents[2] / "golden" / "models" / "gemma3_two_ropes"
RENAMES = {
    "transformers 4": lambda name: f"language_model.{name}",
    "transformers 5": lambda name: (
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    ),
}


def wrapped(directory: Path, rename: Any, **changes: Any) -> Path:
    """Write the golden model as the text part of another."""
    text = json.loads((TEXT / "config.json").read_text())
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**text, "architectures": None},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {"hidden_size": 16},
        "mm_tokens_per_image": 4,
    }
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    tensors = {rename(name): each for name, each in load_file(TEXT / "model.safetensors").items()}
    for name in ("vision_tower.patch.weight", "multi_modal_projector.norm.weight"):
        tensors[name] = np.zeros((2, 2), np.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_the_text_part_is_that_of_the_model_alone(rename: Any, tmp_path: Path) -> None:
    directory, alone = wrapped(tmp_path, rename), load_model_config(TEXT)
    config = load_model_config(directory)
    assert config.left_out == ("vision_config",)
    assert config.architecture == "Gemma3ForCausalLM"
    assert expected_tensors(config) == expected_tensors(alone)
    assert (config.layer_ropes, config.layer_windows) == (alone.layer_ropes, alone.layer_windows)
    expected = expected_tensors(config)
    with Checkpoint.open(directory, expected) as own, Checkpoint.open(TEXT, expected) as other:
        assert [*own] == [*other]
        for name in own:
            assert np.array_equal(own.read(name).view("u1"), other.read(name).view("u1"))


def test_a_tensor_of_an_unknown_part_is_refused(tmp_path: Path) -> None:
    directory = wrapped(tmp_path, RENAMES["transformers 4"])
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"audio.weight": np.zeros(2)}, directory / "model.safetensors")
    config = load_model_config(directory)
    with pytest.raises(WeightsError, match=r"unexpected.*audio\.weight"):
        Checkpoint.open(directory, expected_tensors(config))


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    directory = wrapped(tmp_path, RENAMES["transformers 4"])
    tensors = load_file(directory / "model.safetensors")
    again = {"model.language_model.norm.weight": tensors["language_model.model.norm.weight"]}
    save_file(tensors | again, directory / "model.safetensors")
    config = load_model_config(directory)
    with pytest.raises(WeightsError, match=r"are both 'model\.norm\.weight'; leave one out") as why:
        Checkpoint.open(directory, expected_tensors(config))
    assert "'language_model.model.norm.weight'" in str(why.value)
    assert "'model.language_model.norm.weight'" in str(why.value)


def test_a_wrapper_that_is_not_known_is_refused(tmp_path: Path) -> None:
    directory = wrapped(
        tmp_path, RENAMES["transformers 4"], architectures=["PaliGemmaForConditionalGeneration"]
    )
    with pytest.raises(UnsupportedModelError, match="PaliGemmaForConditionalGeneration"):
        load_model_config(directory)


@pytest.mark.parametrize("names", [7, "x", [{}], [["x"]]])
def test_bad_names_are_refused(names: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="architectures"):
        load_model_config(wrapped(tmp_path, RENAMES["transformers 4"], architectures=names))
