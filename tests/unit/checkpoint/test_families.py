"""Load the configurations of published models, and compare the table of families with the docs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import python
from model_files import GOLDEN, golden_values, greedy
from tables import quick_third
from tiny_models import QWEN3_TIED, random_weights, write_model

from mie import LLM, SamplingParams
from mie.checkpoint.config import load_model_config, model_config_from_hf
from mie.checkpoint.tensors import num_parameters
from mie.cli import main
from mie.errors import UnsupportedModelError
from mie.model.weights import ordered
from mie.ops.weights.quantised import Form, QuantisedRows, dequantise

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
RUN = [model for model in PUBLISHED if "refused" not in model]
REFUSED = [model for model in PUBLISHED if "refused" in model]
TESTS = Path(__file__).parents[2]
DOCS = TESTS.parent / "docs" / "models.md"
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)


def config_of(model: dict[str, Any]) -> dict[str, Any]:
    sizes = [int(size) for size in model.get("sizes", "64 64 64 6 4 2").split()]
    return {
        "architectures": [model["architecture"]],
        **dict(zip(SIZES, sizes, strict=True)),
        **model["config"],
    }


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tiny model with the same flags."""
    layers = 6
    small = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    small |= {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"bos_token_id": 1, "eos_token_id": 2}
    for key in ("num_experts", "num_local_experts"):
        if config.get(key):
            small |= {key: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    small = {key: value for key, value in small.items() if key[:4] != "moe_" or key in config}
    if "mamba_n_heads" in config:
        small |= {"mamba_n_heads": 4, "mamba_d_head": 32, "shared_intermediate_size": 64}
    if config.get("sliding_window"):
        small["sliding_window"] = 4
    for key in ("layer_types", "no_rope_layers"):
        if key in config:
            small[key] = config[key][:layers]
    if "text_config" in config:
        return {**config, "text_config": shrunk(config["text_config"])}
    return {**config, **small}


@pytest.mark.parametrize("model", quick_third((model,) for model in RUN), ids=lambda m: m["name"])
def test_a_published_model_loads(model: dict[str, Any], tmp_path: Path) -> None:
    """Its sizes as published, and then its flags in a tiny model with random weights."""
    values = config_of(model)
    config = model_config_from_hf(values)
    assert config.context_length == model["context"]
    if "parameters" in model:
        assert num_parameters(config) == model["parameters"]
    (tmp_path / "config.json").write_text(json.dumps(shrunk(values)))
    settings = {"load_format": "dummy", "max_model_len": 32, "num_threads": 1}
    assert len(greedy(tmp_path, 2, prompt=range(3, 12), **settings)) == 2


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model["name"])
def test_a_published_model_is_refused_by_name(model: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="not supported") as error:
        model_config_from_hf(config_of(model))
    assert model["refused"] in str(error.value)


def test_a_llama_under_another_name_runs_only_if_that_is_asked_for() -> None:
    config = config_of({"architecture": "FooForCausalLM", "config": {"rms_norm_eps": 1e-5}})
    hint = r'hf_overrides=\{"architectures": \["LlamaForCausalLM"\]\}'
    with pytest.raises(UnsupportedModelError, match=hint):
        model_config_from_hf(config)
    forced = model_config_from_hf({**config, "architectures": ["LlamaForCausalLM"]})
    assert forced.architecture == "LlamaForCausalLM"
    for other in ({"num_experts": 8}, {"rms_norm_eps": None}):
        with pytest.raises(UnsupportedModelError) as error:
            model_config_from_hf({**config, **other})
        assert "hf_overrides" not in str(error.value)


WITH_A_ROW = """
import json, sys
from pathlib import Path

read_text = Path.read_text

def with_a_row(path, **options):
    text = read_text(path, **options)
    if path.parts[-2:] != ("checkpoint", "families.json"):
        return text
    table = json.loads(text)
    table["families"] |= json.loads(sys.argv[1])
    return json.dumps(table)

Path.read_text = with_a_row
from model_files import greedy
from mie.cli import main
assert main(["inspect", "--families"]) == 0
print(greedy(Path(sys.argv[2])))
"""


def test_a_plain_dense_family_needs_one_row(tmp_path: Path) -> None:
    """The row has defaults, a flag and a name. The same weights give the tokens of Qwen3."""
    row = {
        "title": "Plain, one row",
        "model_type": "plain",
        "defaults": {"head_dim": QWEN3_TIED["head_dim"], "tie_word_embeddings": True},
        "qk_norm": "head",
        "names": {"q_norm": "self_attn.query_norm"},
    }
    weights = random_weights(QWEN3_TIED)
    known = write_model(tmp_path / "known", QWEN3_TIED, weights)
    config = {key: value for key, value in QWEN3_TIED.items() if key not in row["defaults"]}
    config |= {"architectures": ["PlainForCausalLM"], "model_type": "plain"}
    renamed = {name.replace("q_norm", "query_norm"): each for name, each in weights.items()}
    new = write_model(tmp_path / "new", config, renamed)
    with pytest.raises(UnsupportedModelError, match="PlainForCausalLM"):
        load_model_config(new)
    process = python("-c", WITH_A_ROW, json.dumps({"PlainForCausalLM": row}), new, cwd=TESTS)
    *listed, tokens = process.stdout.splitlines()
    assert any("Plain, one row" in line for line in listed)
    assert json.loads(tokens) == greedy(known)


def test_the_docs_have_the_table_of_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--families"]) == 0
    table = capsys.readouterr().out
    assert table.count("\n") > 20
    assert table in DOCS.read_text()


@pytest.mark.parametrize("arguments", [[], ["bundled", "--families"]])
def test_inspect_takes_a_model_or_the_list(arguments, capsys) -> None:
    assert main(["inspect", *arguments]) != 0
    assert "either a MODEL or --families" in capsys.readouterr().err


def test_long_rope_ends_at_the_original_context_unless_a_longer_one_is_asked_for() -> None:
    config = load_model_config(GOLDEN / "phi3_long")
    assert (config.default_context_length, config.context_length) == (32, 256)
    llm = LLM(str(GOLDEN / "phi3_long"), skip_tokenizer_init=True, backend="numpy")
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    [out] = llm.generate([{"prompt_token_ids": [3] * 30}], params, use_tqdm=False)
    assert (len(out.outputs[0].token_ids), out.outputs[0].finish_reason) == (2, "length")


def test_scores_that_grow_with_the_position_end_the_context_at_the_original_one() -> None:
    assert load_model_config(GOLDEN / "ministral3_yarn").context_length == 128


def test_layers_without_rope_are_listed_or_counted() -> None:
    config = golden_values("smollm3_no_rope")
    del config["no_rope_layers"]
    counted = model_config_from_hf({**config, "layer_types": None, "num_hidden_layers": 8})
    assert [rope is None for rope in counted.layer_ropes] == [False, False, False, True] * 2


def test_both_spellings_of_rope_by_layer_type_agree() -> None:
    five = golden_values("gemma3_two_ropes")
    four = {key: value for key, value in five.items() if key != "rope_parameters"}
    four |= {"rope_theta": 500.0, "rope_local_base_freq": 1e4, "rope_scaling": None}
    assert model_config_from_hf(four) == model_config_from_hf(five)
    scaled = model_config_from_hf({**four, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    kinds = [rope.rope_type for rope in scaled.layer_ropes if rope is not None]
    assert kinds == ["default", "linear"]
    assert scaled.context_length == five["max_position_embeddings"]


def test_quantised_rows_are_ordered_with_their_scales() -> None:
    form = Form(codes="int8", group=16, has_offsets=True)
    rows = [
        QuantisedRows(
            form=form,
            codes=np.full((2, 16), n, np.int8),
            scales=np.full((2, 1), n, np.float32),
            offsets=np.array([[n], [n + 0.5]], np.float32),
        )
        for n in (1, 2)
    ]
    got = ordered(rows, np.array([2, 0, 3, 1]))
    assert isinstance(got, QuantisedRows)
    wanted = np.concatenate([dequantise(each) for each in rows])[[2, 0, 3, 1]]
    np.testing.assert_array_equal(dequantise(got), wanted)
