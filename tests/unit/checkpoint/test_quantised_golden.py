"""Compare quantised weights with those that compressed-tensors decompresses, bit for bit.

`scripts/make_quantised_golden.py` made the models, and each has a provenance.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from model_files import greedy

from mie.checkpoint.config import load_model_config
from mie.checkpoint.weights import Checkpoint, expected_tensors
from mie.ops.weights.quantised import QuantisedRows, dequantise

MODELS = Path(__file__).parents[2] / "data" / "quantised"
NAMES = sorted(path.name for path in MODELS.iterdir())


def opened(name: str) -> Checkpoint:
    model = load_model_config(MODELS / name)
    return Checkpoint.open(MODELS / name, expected_tensors(model), model.quantisation)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_bytes", [1, 1500])
def test_every_matrix_has_the_bits_of_compressed_tensors(name: str, max_bytes: int):
    digests = json.loads((MODELS / name / "provenance.json").read_text())["weights_sha256"]
    with opened(name) as checkpoint:
        assert checkpoint.forms.keys() == digests.keys()
        for matrix, wanted in digests.items():
            blocks = list(checkpoint.blocks(matrix, max_bytes))
            assert len(blocks) > 1
            assert all(isinstance(block, QuantisedRows) for block in blocks)
            weights = np.concatenate([dequantise(block) for block in blocks])
            assert hashlib.sha256(weights.tobytes()).hexdigest() == wanted, matrix


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("w4_group", "int4 in groups of 32"),
        ("w4_group_zeros", "int4 in groups of 32 with offsets"),
        ("w4_float32_zeros", "int8 in groups of 16"),
        ("w4_channel", "int4 in groups of 128"),
        ("w8_group", "int8 in groups of 32"),
        ("w8_channel_zeros", "int8 in groups of 128 with offsets"),
        ("int8_channel_zeros", "int8 in groups of 128 with offsets"),
        ("fp8_tensor", "float8_e4m3fn in groups of 128"),
    ],
)
def test_the_form_is_the_smallest_that_is_exact(name: str, form: str):
    assert {str(each) for each in opened(name).forms.values()} == {form}


def test_ignored_modules_stay_as_they_are():
    assert "lm_head.weight" in opened("w8_group").forms
    assert "lm_head.weight" not in opened("w4_group").forms
    assert "lm_head.weight" not in opened("w4_group_zeros").forms  # "re:.*head"
    forms = opened("w4_float32_zeros").forms  # "re:.*[kv]_proj$"
    assert {name.split(".")[4] for name in forms} == {
        *("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_generates_from_it(name: str):
    assert len(greedy(MODELS / name)) == 8
