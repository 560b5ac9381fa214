"""A digest tells weights apart, and reads little of them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from model_files import hf_config, random_tensors, write_model, write_shards

from mie.checkpoint import digest
from mie.checkpoint.config import ModelConfig
from mie.checkpoint.digest import SAMPLE_BYTES, weights_digest
from mie.errors import WeightsError

TENSORS = random_tensors(ModelConfig.from_hf(hf_config()))


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


def test_a_tensor_is_read_at_three_places_only(tmp_path):
    large = np.zeros(1 << 18, np.float32)
    sizes = []
    original = digest._digest

    def counted(name, entry, file):
        whole = mock.Mock(wraps=file)
        whole.read.side_effect = lambda size: sizes.append(size) or file.read(size)
        return original(name, entry, whole)

    with mock.patch.object(digest, "_digest", counted):
        written(tmp_path / "model", large=large)
    assert max(sizes) == SAMPLE_BYTES
    assert len(sizes) == 3 * (len(TENSORS) + 1)


def test_weights_that_are_gone_are_an_error_with_their_name(tmp_path):
    with pytest.raises(WeightsError, match=str(tmp_path)):
        weights_digest(tmp_path)
