"""A digest tells weights apart, and reads little of them."""

from pathlib import Path

import numpy as np
import pytest
from model_files import hf_config, random_tensors, write_model, write_shards

from mie.checkpoint.config import model_config_from_hf
from mie.checkpoint.safetensors_header import weights_digest
from mie.errors import WeightsError

TENSORS = random_tensors(model_config_from_hf(hf_config()))


def written(directory: Path, **changes: np.ndarray) -> str:
    return weights_digest(write_model(directory, tensors={**TENSORS, **changes}))


def test_it_is_that_of_the_tensors_and_not_of_their_files(tmp_path):
    (tmp_path / "many").mkdir()
    write_shards(tmp_path / "many", TENSORS)
    assert written(tmp_path / "one") == weights_digest(tmp_path / "many")


@pytest.mark.parametrize("name", TENSORS)
def test_another_training_of_any_tensor_is_another_digest(tmp_path, name):
    before = written(tmp_path / "before")
    assert written(tmp_path / "trained", **{name: TENSORS[name] * np.float32(1.001)}) != before
    assert written(tmp_path / "rounded", **{name: TENSORS[name].astype(np.float16)}) != before


def test_only_some_bytes_of_a_tensor_are_read(tmp_path):
    large = np.zeros(1 << 18, np.float32)
    unread = large.copy()
    unread[1 << 16] = 1
    assert written(tmp_path / "one", large=large) == written(tmp_path / "other", large=unread)


def test_weights_that_are_gone_are_an_error_with_their_name(tmp_path):
    with pytest.raises(WeightsError, match=str(tmp_path)):
        weights_digest(tmp_path)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 18])
def test_the_beginning_the_middle_and_the_end_of_a_tensor_are_read(tmp_path, size, place):
    tensor = np.zeros(size, np.float32)
    other = tensor.copy()
    other[{"first": 0, "middle": size // 2, "last": size - 1}[place]] = 1
    assert written(tmp_path / "one", own=tensor) != written(tmp_path / "other", own=other)
