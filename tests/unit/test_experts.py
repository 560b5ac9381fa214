"""Test routing, stacks of experts in files, and their settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled import needs_numba
from safetensors.numpy import load_file, save_file
from tiny_models import QWEN3_MOE, random_weights, write_model

from mie import LLM, SamplingParams
from mie.checkpoint.config import ModelConfig
from mie.errors import ModelError, WeightsError
from mie.load.quantisation import rounded_forms
from mie.ops.experts import by_expert, experts, route

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


def test_the_largest_logits_are_chosen_and_of_equal_ones_the_lowest_number() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, 7.0, -2.0]])
    routed = route(logits, 3, True)
    assert routed[:, 0].tolist() == [[1, 2, 3], [0, 1, 2], [2, 0, 1]]
    np.testing.assert_allclose(routed[:, 1].sum(1), 1)
    np.testing.assert_allclose(routed[1, 1], 1 / 3)
    among_all = route(logits, 3, False)
    assert among_all[1, 1].tolist() == [0.25] * 3
    np.testing.assert_allclose(route(logits, 4, False), route(logits, 4, True))


def test_each_expert_computes_its_tokens_once_and_their_rows_come_back() -> None:
    x, calls = np.arange(8.0).reshape(4, 2), []
    chosen = np.array([[2, 0], [0, 1], [2, 1], [0, 2]])
    weights = np.array([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])

    def compute(expert: int, rows: Any) -> Any:
        calls.append((expert, rows[:, 0].tolist()))
        return rows * 10**expert

    y = experts(x, np.stack([chosen, weights], axis=1), compute, np.ones_like(x))
    assert calls == [(0, [0.0, 2.0, 6.0]), (1, [2.0, 4.0]), (2, [0.0, 4.0, 6.0])]
    factors = (weights * 10.0**chosen).sum(1)
    np.testing.assert_allclose(y, 1 + x * factors[:, None])
    assert [(e, pairs.tolist()) for e, pairs in by_expert(chosen)][1] == (1, [3, 5])


def changed(name: str, **changes: Any) -> ModelConfig:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return ModelConfig.from_hf({**config, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok must be at most 5"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be at least 1"),
        ({"num_local_experts": 1025}, "must be at most 1024"),
        ({"num_local_experts": 1024, "num_hidden_layers": 40}, "at most 32768 in all layers"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers must be numbers of layers, 0 … 2"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
)
def test_bad_numbers_of_experts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        changed("qwen3_moe_dense_layer", **changes)


def test_which_layers_are_sparse() -> None:
    def sparse(**changes: Any) -> list[bool]:
        config = changed("qwen3_moe_dense_layer", num_hidden_layers=4, **changes)
        return [config.has_experts(layer) for layer in range(4)]

    assert sparse() == [False, True, True, True]
    assert sparse(mlp_only_layers=None) == [True] * 4
    assert sparse(mlp_only_layers=[], decoder_sparse_step=2) == [False, True, False, True]
    config = changed("granitemoe_shared")
    assert config.has_experts(0)
    assert config.has_mlp(0)
    assert not changed("granitemoe_shared", shared_intermediate_size=0).has_mlp(0)


def test_both_names_of_the_number_of_experts_are_read() -> None:
    config = json.loads((GOLDEN / "qwen3_moe_dense_layer" / "config.json").read_text())
    number = config.pop("num_local_experts")
    four = ModelConfig.from_hf({**config, "num_experts": number})
    assert four == changed("qwen3_moe_dense_layer")


def test_clipped_queries_are_refused() -> None:
    with pytest.raises(ModelError, match="clip_qkv"):
        changed("olmoe_experts", clip_qkv=8.0)


@pytest.mark.parametrize("number", [3, 5])
def test_a_stack_of_another_number_of_experts_is_refused(tmp_path: Path, number: int) -> None:
    source = GOLDEN / "granitemoe_stacked"
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.output_linear.weight"
    tensors[name] = tensors[name][np.arange(number) % 4].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(WeightsError, match=r"output_linear\.\d\.weight"):
        LLM(str(tmp_path), skip_tokenizer_init=True, backend="numpy")


def test_routers_are_not_rounded() -> None:
    forms = rounded_forms(ModelConfig.from_hf(QWEN3_MOE), "int4")
    assert not [name for name in forms if name.endswith("mlp.gate.weight")]
    assert len([name for name in forms if ".experts." in name]) == 2 * 5 * 3


@needs_numba
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_small_weights_of_experts_agree_on_the_backends(tmp_path: Path, quantization: str) -> None:
    config = QWEN3_MOE | {"hidden_size": 72, "moe_intermediate_size": 48}
    directory = write_model(tmp_path, config, random_weights(config))

    def logprobs(backend: str) -> Any:
        llm = LLM(
            str(directory),
            skip_tokenizer_init=True,
            backend=backend,
            quantization=quantization,
            max_model_len=32,
        )
        params = SamplingParams(max_tokens=1, prompt_logprobs=-1, temperature=0)
        [out] = llm.generate([{"prompt_token_ids": [*range(4, 28)]}], params, use_tqdm=False)
        return [[each[token].logprob for token in range(40)] for each in out.prompt_logprobs[1:]]

    wanted = logprobs("numpy-plain")
    np.testing.assert_allclose(logprobs("numpy"), wanted, atol=2e-5)
    np.testing.assert_allclose(logprobs("jit"), wanted, atol=2e-5)
