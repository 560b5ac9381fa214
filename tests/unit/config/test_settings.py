"""Check that everything that names settings agrees with their declarations."""

import argparse
import dataclasses
import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from audit import actions_of

from mie import LLM, AsyncEngineArgs, EngineArgs, EngineConfig
from mie.base.refusals import NEUTRAL
from mie.cli import main
from mie.cli.options import add_engine_options, engine_options
from mie.config.arguments import option
from mie.config.engine import EngineSettings, check_setting
from mie.config.settings import BACKENDS, Setting, settings_of
from mie.errors import ConfigError
from mie.load.backends import SETTINGS

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "doc_tables.py"))

NAMES_OF_VLLM = NEUTRAL["EngineArgs"]
DECLARED = {name: (default, declared) for name, default, declared in settings_of(EngineArgs)}
ENGINE = {name for name, *_ in settings_of(EngineSettings)}


def refused(message: str, **arguments: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineArgs(**arguments)


# The declarations.


@pytest.mark.parametrize("name", DECLARED)
def test_every_setting_is_declared_completely(name: str) -> None:
    default, declared = DECLARED[name]
    check_setting(name, default, default, declared)
    assert declared.help
    assert not declared.help.endswith(".")
    assert set(declared.backends) <= set(BACKENDS)
    assert not declared.alias_of or declared.alias_of in DECLARED


def test_every_field_is_a_setting_or_the_model() -> None:
    names = {each.name for each in dataclasses.fields(EngineArgs)}
    assert names == {"model", *DECLARED}
    assert not set(DECLARED) & set(NAMES_OF_VLLM)
    assert {each.name for each in dataclasses.fields(EngineConfig)} == ENGINE


# Consequences.


@pytest.mark.parametrize("front", [LLM, LLM.__init__, AsyncEngineArgs])
def test_the_constructors_have_every_setting_as_a_keyword(front: Any) -> None:
    theirs = dict(inspect.signature(front).parameters)
    theirs.pop("self", None)
    expected = inspect.signature(EngineArgs).parameters
    assert list(theirs) == list(expected)
    for name, parameter in expected.items():
        assert theirs[name].default == parameter.default
        assert theirs[name].annotation == parameter.annotation


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in actions_of(parser) for name in action.option_strings}


def test_every_setting_has_an_option_with_its_help_and_no_default() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    options = commands(parser)
    for name, (default, declared) in DECLARED.items():
        if declared.kind == "object" or name == "seed":
            assert option(name) not in options
        elif declared.alias_of:
            assert options[option(name)].dest == declared.alias_of
        else:
            action = options[option(name)]
            assert action.dest == name
            assert action.default is None
            assert declared.help in (action.help or "").replace("%%", "%")
            if default is not None and default is not True and default is not False:
                assert str(default) in (action.help or "")
    assert engine_options(parser.parse_args([])) == {}


def test_vllms_other_options_are_known_but_not_shown() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    shown = parser.format_help()
    for name in NAMES_OF_VLLM.keys() - {"device"}:
        assert commands(parser)[option(name)].dest == name
        assert f"{option(name)} " not in shown
    words = "--pipeline-parallel-size 1 --trust-remote-code --no-enable-lora"
    given = engine_options(parser.parse_args(words.split()))
    assert given == {"pipeline_parallel_size": 1, "trust_remote_code": True, "enable_lora": False}
    EngineArgs(**given)


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: str(path.name)
)
def test_the_tables_of_the_docs_equal_the_declarations(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert SCRIPT["rewritten"](text) == text, "run scripts/doc_tables.py"


# The simulator.

SIMULATED = ("bench", "throughput", "--device", "h200", "--num-prompts", "2")
VALUES: dict[str, tuple[str, ...]] = {"integer": ("1",), "size": ("1GiB",), "number": ("0.5",)}


def arguments_of(name: str, declared: Setting) -> list[str]:
    """Return an option with an allowed value."""
    if declared.kind == "switch":
        return [option(name)]
    if declared.kind == "mapping":
        return [option(name), "{}"]
    if declared.kind == "list":
        return [option(name), "poet=path"]
    return [option(name), *VALUES.get(declared.kind, (declared.choices or ("x",))[-1:])]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (_, declared) in DECLARED.items()
        if declared.kind != "object"
        and (name not in ENGINE or declared.backends or not declared.is_simulated)
        and not declared.alias_of
    ],
)
def test_settings_without_effect_on_a_simulation_are_refused(name, capsys) -> None:
    assert main([*SIMULATED, *arguments_of(name, DECLARED[name][1])]) == 2
    assert f"{option(name)} has no effect on a simulated engine" in capsys.readouterr().err


# vLLM's names.


def test_arguments_without_effect_do_not_reach_the_engine() -> None:
    for backend in BACKENDS:
        args = EngineArgs(backend=backend, enforce_eager=True, gpu_memory_utilization=0.5)
        config = args.engine_config()
        assert config.enforce_eager == ("enforce_eager" in SETTINGS[backend])
        assert (config.gpu_memory_utilization == 0.5) == (backend == "cupy")
    automatic = EngineArgs(enforce_eager=True, gpu_memory_utilization=0.5).engine_config()
    assert automatic == EngineConfig(enforce_eager=True)
    refused("gpu_memory_utilization must be a number in (0, 1]; got 2", gpu_memory_utilization=2)
    refused("enforce_eager must be True or False; got 'x'", enforce_eager="x")


def test_swap_space_is_converted_to_bytes_if_swapping_is_on() -> None:
    for value in (0, 0.5, 4, 1 << 30):
        assert EngineArgs(swap_space=value).engine_config().swap_space is None
    swaps = EngineArgs(swap_space=1 << 30, preemption_mode="swap")
    assert swaps.engine_config().swap_space == 1 << 30
    for value in (0, 0.5):
        refused(
            "swap_space must be an integer at least 1", swap_space=value, preemption_mode="swap"
        )


def test_the_number_of_blocks_has_two_names() -> None:
    assert EngineArgs(num_gpu_blocks_override=7).engine_config().num_blocks == 7
    assert EngineArgs(num_gpu_blocks_override=7, num_blocks=7).engine_config().num_blocks == 7
    refused("give one", num_gpu_blocks_override=7, num_blocks=8)
    refused("num_gpu_blocks_override must be an integer at least 1", num_gpu_blocks_override=0)


@pytest.mark.parametrize(
    ("given", "name"),
    [("half", "float16"), ("float", "float32"), ("torch.bfloat16", "bfloat16"), ("auto", "auto")],
)
def test_a_dtype_is_spelled_as_in_vllm(given: str, name: str) -> None:
    assert EngineArgs(dtype=given).dtype_name == name


# Wrong names.


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("block_sise", "block_size"),
    ],
)
def test_a_typing_error_suggests_the_nearest_name(name: str, near: str) -> None:
    for front in (EngineArgs, AsyncEngineArgs, LLM):
        message = f"{front.__name__} has no parameter {name!r}; did you mean {near!r}?"
        with pytest.raises(ConfigError) as raised:
            front("bundled", **{name: 1})
        assert str(raised.value) == message
    with pytest.raises(ConfigError) as raised:
        LLM("bundled", xyzzy=1)  # type: ignore[call-arg]
    assert str(raised.value) == "LLM has no parameter 'xyzzy'; leave it out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer at least 1; got 0"),
        ({"backend": "cuda"}, "backend must be one of auto, jit, numpy, cupy"),
        ({"load_format": "gguf"}, "load_format must be one of auto, safetensors, dummy"),
        ({"skip_tokenizer_init": 1}, "skip_tokenizer_init must be True or False; got 1"),
        ({"hf_overrides": "x"}, "hf_overrides must be a dictionary; got 'x'"),
        ({"override_generation_config": []}, "must be a dictionary; got []"),
        ({"max_logprobs": -2}, "max_logprobs must be an integer at least -1; got -2"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    refused(message, **arguments)


# Round trips.


def test_engine_args_survive_the_command_line() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    words = (
        "--model m --max-num-seqs 8 --seed 5 --no-enable-prefix-caching --load-format dummy"
        " --kv-cache-memory-bytes 1MiB --tensor-parallel-size 1 --watermark 0.5"
    )
    options = [*words.split(), "--hf-overrides", '{"rope_theta": 2.0}']
    args = EngineArgs.from_cli_args(parser.parse_args(options))
    assert args == EngineArgs(
        "m",
        max_num_seqs=8,
        seed=5,
        enable_prefix_caching=False,
        load_format="dummy",
        kv_cache_memory_bytes=1 << 20,
        watermark=0.5,
        hf_overrides={"rope_theta": 2.0},
    )
    assert AsyncEngineArgs.from_cli_args(parser.parse_args([])) == AsyncEngineArgs()
