"""Check which rows of a model's matrices each rank has, and which numbers of ranks are refused."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import CONFIGS

from mie.checkpoint.config import model_config_from_hf
from mie.checkpoint.tensors import expected_tensors
from mie.checkpoint.weights import RandomWeights
from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.load.opened import open_model
from mie.load.settings import LoadSettings
from mie.ranks.share import Share, check_divides


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("number", [5, 6, 16, 49153])
def test_parts_cover_all_outputs_once(number, num_ranks):
    parts = [Share(rank, num_ranks).part(number, begin=7) for rank in range(num_ranks)]
    assert [each for part in parts for each in part] == [*range(7, number + 7)]


def test_ranks_share_a_kv_head_if_there_are_fewer_heads():
    heads = [Share(rank, 6).heads(2, size=4) for rank in range(6)]
    assert heads == [range(4)] * 3 + [range(4, 8)] * 3
    assert [Share(rank, 2).heads(6, size=4) for rank in range(2)] == [range(12), range(12, 24)]


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_oss", "qwen3_moe", "qwen35", "granite4"])
def test_a_part_has_the_shapes_of_its_configuration(name):
    """Attention, MLPs and experts have the tensors that a model of the smaller sizes has.

    Matrices that give hidden states or logits have fewer rows instead of fewer columns.
    """
    model = model_config_from_hf(CONFIGS[name])
    for rank in range(2):
        share = Share(rank, 2)
        own = share.checkpoint(RandomWeights(model), model)
        smaller, whole = expected_tensors(share.config(model)), expected_tensors(model)
        for tensor, shape in own.shapes.items():
            blocks = list(own.blocks(tensor, 64))
            assert np.concatenate(blocks).shape == shape == own.read(tensor).shape
            is_vocabulary = tensor in ("model.embed_tokens.weight", "lm_head.weight")
            if is_vocabulary or (len(shape) == 2 and shape != smaller[tensor]):
                assert shape == (whole[tensor][0] // 2, *whole[tensor][1:])
            elif shape != smaller[tensor]:  # a bias
                assert shape == (whole[tensor][0] // 2,)


def test_the_rows_of_all_ranks_are_the_rows_of_the_matrix():
    model = model_config_from_hf(CONFIGS["llama"])
    weights = RandomWeights(model)
    parts = [Share(rank, 2).checkpoint(weights, model) for rank in range(2)]
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert np.array_equal(np.concatenate([own.read(name) for own in parts]), weights.read(name))


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message"),
    [
        ({"num_heads": 6}, 4, "the model has 6 attention heads, which 4 does not divide"),
        ({"num_heads": 12, "num_kv_heads": 2}, 3, "of the numbers 2 and 3 neither divides"),
        ({"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 3}, 4, "has only 3 outputs"),
    ],
)
def test_a_number_of_ranks_that_does_not_divide_is_refused(changes, num_ranks, message):
    model = replace(model_config_from_hf(CONFIGS["llama"]), **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        check_divides(model, num_ranks)
    assert str(caught.value).startswith(f"tensor_parallel_size is {num_ranks}; ")
    assert "(choose from: 1, 2" in str(caught.value)
    check_divides(model, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"backend": "cupy", "engine": EngineConfig(async_scheduling=True)},
            "async_scheduling=True is not supported with tensor_parallel_size=2 on backend 'cupy'",
        ),
        (
            {"backend": "cupy-emulated", "engine": EngineConfig(enable_lora=True)},
            "enable_lora=True is not supported with",
        ),
    ],
)
def test_settings_without_ranks_are_refused_before_loading(changes, message):
    from mie.load.backends import check_ranks

    with pytest.raises(ConfigError, match=message):
        check_ranks(LoadSettings(tensor_parallel_size=2, **changes))


def test_a_rank_opens_its_part(tiny):
    settings, model = LoadSettings(tensor_parallel_size=2, backend="numpy"), tiny["llama"]
    opened = [open_model(model.directory, settings, rank=rank) for rank in range(2)]
    assert [each.config.num_heads for each in opened] == [model.parsed.num_heads // 2] * 2
    assert [each.whole for each in opened] == [model.parsed] * 2
    assert [each.share for each in opened] == [Share(0, 2), Share(1, 2)]
