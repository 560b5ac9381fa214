"""Test default sampling parameters, the ids that end a text, and `EngineArgs`."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_tokenizers
import tiny_models
from audit import backend_of
from gguf_files import gguf_bytes

from mie import LLM, EngineArgs, SamplingParams
from mie.checkpoint.generation import GenerationConfig
from mie.cli.options import (
    add_engine_options,
    add_sampling_options,
    load_llm,
    report_sampling_defaults,
)
from mie.errors import ConfigError, ModelError, RequestError
from mie.load.parts import load_parts

RECOMMENDED = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "max_new_tokens": 3,
    "do_sample": True,
    "transformers_version": "4.52.0",
}
AS_PARAMETERS = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "max_tokens": 3,
}


def model(directory: Path, generation: dict[str, Any] | None, **config: Any) -> Path:
    """Return a directory with a config.json, and a generation_config.json if there is one."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**tiny_models.LLAMA, **config}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def loaded(directory: Path, **settings: Any) -> LLM:
    settings = {"skip_tokenizer_init": True, "num_blocks": 16, "num_threads": 1, **settings}
    return LLM(directory, load_format="dummy", **settings)


# Recommended defaults.


def test_the_models_generation_config_is_the_default(tmp_path: Path) -> None:
    llm = loaded(model(tmp_path, RECOMMENDED))
    assert llm.get_default_sampling_params() == SamplingParams(**AS_PARAMETERS)
    assert llm.get_default_sampling_params() is not llm.get_default_sampling_params()


def test_vllm_means_neutral_and_a_directory_means_its_file(tmp_path: Path) -> None:
    directory = model(tmp_path / "model", RECOMMENDED)
    other = model(tmp_path / "other", {"temperature": 0.3})
    neutral = loaded(directory, generation_config="vllm")
    assert neutral.get_default_sampling_params() == SamplingParams()
    for where in (other, str(other)):
        llm = loaded(directory, generation_config=where)
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.3)


def test_an_override_replaces_a_key(tmp_path: Path) -> None:
    directory = model(tmp_path, RECOMMENDED)
    overrides = {"temperature": 0.2, "max_new_tokens": 9, "top_k": None}
    llm = loaded(directory, override_generation_config=overrides)
    expected = {**AS_PARAMETERS, "temperature": 0.2, "max_tokens": 9}
    del expected["top_k"]
    assert llm.get_default_sampling_params() == SamplingParams(**expected)
    alone = loaded(directory, generation_config="vllm", override_generation_config={"top_p": 0.5})
    assert alone.get_default_sampling_params() == SamplingParams(top_p=0.5)


@pytest.mark.parametrize(
    ("generation", "settings", "error", "message"),
    [
        ({"temperature": -1}, {}, ConfigError, r"generation_config.json: temperature must be"),
        ({"top_p": "x"}, {}, ConfigError, "pass generation_config='vllm'"),
        (None, {"generation_config": "nowhere"}, ModelError, "'nowhere' is not a directory with"),
        (
            None,
            {"override_generation_config": {"temprature": 1}},
            ConfigError,
            "has no key 'temprature'; it takes temperature, top_p",
        ),
        (
            None,
            {"override_generation_config": {"top_k": -7}},
            ConfigError,
            "override_generation_config: top_k must be",
        ),
    ],
)
def test_mistakes_are_named_before_weights_are_read(generation, settings, error, message, tmp_path):
    directory = model(tmp_path, generation)
    with pytest.raises(error, match=message):
        LLM(directory, skip_tokenizer_init=True, **settings)


CONVERSATION = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@pytest.mark.parametrize("sets", [set(), *({name} for name in CONVERSATION), {*CONVERSATION}])
@pytest.mark.parametrize(
    "others", [{}, {"max_new_tokens": 9}, {"repetition_penalty": 1.2}, {"do_sample": True}]
)
def test_a_conversation_has_defaults_of_its_own_only_where_the_file_has_none(
    sets: set[str], others: dict[str, Any], tmp_path: Path
) -> None:
    own = {name: RECOMMENDED[name] for name in sets}
    directory = model(tmp_path, {**own, **others, "eos_token_id": 2})
    found = GenerationConfig.load(directory)
    assert found.conversation == {**(own or CONVERSATION), **found.sampling}
    assert found.sampling.items() >= own.items()
    assert found.sampling.keys().isdisjoint(CONVERSATION.keys() - sets)
    assert GenerationConfig.load(directory, "vllm").conversation == {}
    overridden = GenerationConfig.load(directory, "auto", {"top_k": 3})
    assert overridden.conversation == overridden.sampling


def test_a_conversation_without_any_file_has_these_defaults(tmp_path: Path) -> None:
    assert GenerationConfig.load(model(tmp_path / "model", None)).conversation == CONVERSATION
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(gguf_bytes({"general.architecture": "llama"}, {}))
    assert GenerationConfig.load(gguf).conversation == CONVERSATION
    gguf.write_bytes(
        gguf_bytes({"general.architecture": "llama", "general.sampling.temp": 0.25}, {})
    )
    assert GenerationConfig.load(gguf).conversation == {"temperature": 0.25}


# They are used only where no parameters are given.


def test_generate_and_stream_use_it_only_without_parameters(tmp_path: Path) -> None:
    generation = {"temperature": 0.0, "max_new_tokens": 3}
    llm = loaded(model(tmp_path, generation, eos_token_id=None))
    prompt = [1, 2, 3]

    def tokens(*params: Any) -> list[int]:
        return llm.generate([prompt], *params, use_tqdm=False)[0].outputs[0].token_ids

    greedy = SamplingParams(temperature=0, max_tokens=3)
    assert tokens() == tokens(None) == tokens(greedy)
    assert len(tokens()) == 3
    assert len(tokens(SamplingParams(seed=1))) == 16
    assert [*llm.stream(prompt)][-1].outputs[0].token_ids == tokens()


# The command line.


def arguments(*words: str, max_tokens: int | None = 256) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=max_tokens)
    return parser.parse_args(words)


def test_the_command_line_prints_the_defaults_in_use(tmp_path, capsys) -> None:
    generation = {"temperature": 0.6, "top_p": 1.0, "top_k": 20}
    model_options = ("--model", str(model(tmp_path, generation)), "--load-format", "dummy")
    fixed = (*model_options, "--skip-tokenizer-init", "--num-blocks", "16", "--num-threads", "1")

    def said(*words: str) -> str:
        args = arguments(*fixed, *words)
        report_sampling_defaults(args, load_llm(args))
        return capsys.readouterr().err

    note = "--generation-config vllm ignores them"
    assert said() == f"[sampling defaults of the model: temperature=0.6, top_k=20 · {note}]\n"
    warm = f"[sampling defaults of the model: top_k=20 · {note}]\n"
    assert said("--temperature", "0.1") == warm
    assert said("--temperature", "0") == ""
    assert said("--generation-config", "vllm") == ""


def test_the_first_line_of_a_conversation_gives_the_defaults_in_use(tmp_path, capsys) -> None:
    def said(generation: dict[str, Any], *words: str) -> str:
        source = ("--model", str(model(tmp_path, generation)), "--load-format", "dummy")
        fixed = ("--skip-tokenizer-init", "--num-blocks", "16", "--num-threads", "1")
        args = arguments(*source, *fixed, *words)
        report_sampling_defaults(args, load_llm(args), is_conversation=True)
        return capsys.readouterr().err

    note = "--generation-config vllm ignores them"
    opening = "[sampling defaults of conversations, as the model recommends none"
    values = "top_k=40, top_p=0.95, min_p=0.05"
    assert said({}) == f"{opening}: temperature=0.8, {values} · {note}]\n"
    assert said({}, "--temperature", "0.7") == f"{opening}: {values} · {note}]\n"
    assert said({}, "--temperature", "0") == ""
    greedy = {"temperature": 0, "top_k": 7}
    assert said(greedy) == f"[sampling defaults of the model: temperature=0 · {note}]\n"
    assert said({"top_k": 7}) == f"[sampling defaults of the model: top_k=7 · {note}]\n"
    assert said({}, "--generation-config", "vllm") == ""


# The end of a text.


def with_tokenizer(directory: Path) -> int:
    """Add a tokenizer to a model directory, and return its end-of-sequence id."""
    tokenizer = small_tokenizers.byte_level()
    backend_of(tokenizer).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    assert tokenizer.eos_token_id is not None
    return tokenizer.eos_token_id


def test_the_tokenizers_eos_ends_a_text(tmp_path: Path) -> None:
    directory = model(tmp_path, {"eos_token_id": [5, 6]}, vocab_size=420)
    eos = with_tokenizer(directory)
    llm = loaded(directory, skip_tokenizer_init=False)
    assert llm.model_config.eos_token_ids == (5, 6, eos)
    # Only one token is allowed, so it is drawn.
    for token_id in (5, 6, eos, 7):
        params = SamplingParams(allowed_token_ids=[token_id], max_tokens=4)
        [output] = llm.generate("Once", params, use_tqdm=False)
        expected = ("stop", 1) if token_id != 7 else ("length", 4)
        choice = output.outputs[0]
        assert (choice.finish_reason, len(choice.token_ids)) == expected
    ignoring = SamplingParams(allowed_token_ids=[eos], max_tokens=4, ignore_eos=True)
    assert len(llm.generate("Once", ignoring, use_tqdm=False)[0].outputs[0].token_ids) == 4
    without = loaded(directory)
    assert without.model_config.eos_token_ids == (5, 6)


def test_another_generation_config_supplies_its_eos(tmp_path: Path) -> None:
    directory = model(tmp_path / "model", None)
    other = model(tmp_path / "other", {"eos_token_id": [3, 8]})
    assert loaded(directory, generation_config=other).model_config.eos_token_ids == (3, 8)
    for wrong in (-1, 40):
        model(tmp_path / "other", {"eos_token_id": wrong})
        with pytest.raises(ModelError, match=rf"eos_token_id {wrong} must lie in 0 … 39"):
            loaded(directory, generation_config=other)


# max_logprobs.


def test_max_logprobs_limits_log_probabilities(tmp_path: Path) -> None:
    directory = model(tmp_path, None)
    limited, free = loaded(directory, max_logprobs=5), loaded(directory)
    for name in ("logprobs", "prompt_logprobs"):
        for asked, shown in ((6, "6"), (-1, "all")):
            message = rf"^{name} asks for {shown}; max_logprobs is 5 \(raise it\)$"
            params = SamplingParams(**{name: asked})
            with pytest.raises(RequestError, match=message):
                limited.generate([[1, 2]], params, use_tqdm=False)
            free.generate([[1, 2]], params, use_tqdm=False)
        for asked in (0, 5, None):
            limited.generate([[1, 2]], SamplingParams(**{name: asked}), use_tqdm=False)
    assert not limited.has_work
    none = loaded(directory, max_logprobs=0)
    none.generate([[1, 2]], SamplingParams(logprobs=0), use_tqdm=False)


def test_a_separate_tokenizer_can_be_loaded(tmp_path: Path) -> None:
    directory = model(tmp_path / "model", None, vocab_size=420)
    text = tmp_path / "text"
    text.mkdir()
    with_tokenizer(text)
    llm = loaded(directory, tokenizer=text, skip_tokenizer_init=False)
    assert llm.text_directory == text
    assert llm.get_tokenizer().encode("Once")


# `EngineArgs`.


def test_a_revision_needs_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model(tmp_path / "model", None)
    with pytest.raises(
        ConfigError, match=r"revision='v2' needs a hub id; '.*model' is a directory"
    ):
        loaded(directory, revision="v2")
    loaded(directory, revision="main")
    calls = []

    def snapshot_download(repo_id: str, **where: Any) -> str:
        calls.append((repo_id, where.pop("allow_patterns"), where))
        return str(directory)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    args = {"revision": "v2", "tokenizer_revision": "v3", "download_dir": str(tmp_path / "cache")}
    parts = load_parts(
        EngineArgs("org/model", load_format="dummy", skip_tokenizer_init=True, **args)
    )
    assert parts.directory == directory
    (name, patterns, where), (_, for_text, text_where) = calls
    assert name == "org/model"
    assert where == {"revision": "v2", "cache_dir": tmp_path / "cache"}
    assert text_where == {"revision": "v3", "cache_dir": tmp_path / "cache"}
    assert not any("safetensors" in pattern for pattern in (*patterns, *for_text))
