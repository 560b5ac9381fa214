"""Declare `EngineArgs`, the arguments of `LLM` and `AsyncLLM`, spelled as in vLLM."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Concatenate, ParamSpec, TextIO, cast

from mie.config.arguments import add_neutral_names, add_settings, given
from mie.config.engine import (
    EngineConfig,
    EngineSettings,
    check_setting,
    keyword_checked,
    refuse_unknown,
)
from mie.config.request_limits import RequestLimits, limits_of
from mie.config.settings import AUTO_BACKENDS, BACKENDS, setting, settings_of
from mie.config.vllm_names import VllmNames, refuse_what_vllm_has
from mie.errors import ConfigError
from mie.refusals import refuses_names

P = ParamSpec("P")

LOAD_FORMATS = ("auto", "safetensors", "dummy")
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "hf", "none")
REASONING_PARSERS = ("none", "auto", "deepseek_r1", "qwen3", "mistral", "hf")
_DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Declarations of the model, its source, and how it is loaded."""

    tokenizer: str | os.PathLike[str] | None = setting(
        None,
        "text",
        "directory or hub id of the tokenizer",
        "model",
        default_text="the model's",
    )
    skip_tokenizer_init: bool = setting(
        False, "switch", "load no tokenizer; prompts are token ids, outputs have no text", "model"
    )
    backend: str = setting(
        "auto",
        "choice",
        "compute backend: compiled kernels on the CPU, NumPy, its plain reference operators, an "
        "NVIDIA GPU, or the GPU's kernels emulated on the CPU; auto is jit where it can run and "
        "has the other settings, else numpy",
        "model",
        choices=("auto", *BACKENDS),
    )
    dtype: str = setting(
        "auto",
        "text",
        "data type to compute in: float32 or float64 on a CPU; float16, bfloat16 or float32 on a "
        "GPU. On a CPU, bfloat16 and float16 (half) keep weights and KV cache in 16 bits and "
        "compute in float32",
        "model",
        default_text="auto: float32 on a CPU; on a GPU bfloat16 if the model's is, else float16",
    )
    load_format: str = setting(
        "auto",
        "choice",
        "source of the weights: safetensors files (also auto), or random numbers drawn from the "
        "seed, which need config.json only",
        "model",
        choices=LOAD_FORMATS,
    )
    hf_overrides: Mapping[str, Any] | None = setting(
        None, "mapping", "values that replace those in config.json", "model"
    )
    tool_call_parser: str = setting(
        "auto",
        "choice",
        "format in which the model calls tools: that of vLLM's parser, hf (the model's "
        "response_template), auto (found in the model's files), or none (calls are text)",
        "model",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = setting(
        "none",
        "choice",
        "tags of the model's reasoning in answers to chats: those of vLLM's parser, hf (the "
        "model's response_template), auto (found in the model's files), or none (it is text)",
        "model",
        choices=REASONING_PARSERS,
    )
    generation_config: str | os.PathLike[str] = setting(
        "auto",
        "text",
        "source of default sampling parameters: auto (the model's generation_config.json), vllm "
        "(neutral defaults) or a directory with such a file",
        "model",
    )
    override_generation_config: Mapping[str, Any] | None = setting(
        None, "mapping", "values that replace those in the generation config", "model"
    )
    revision: str | None = setting(
        None, "text", "branch, tag or commit of a hub id", "model", default_text="main"
    )
    tokenizer_revision: str | None = setting(
        None,
        "text",
        "branch, tag or commit of the tokenizer's hub id",
        "model",
        default_text="main, or revision where the tokenizer is the model's",
    )
    download_dir: str | os.PathLike[str] | None = setting(
        None,
        "text",
        "cache directory for files from the hub",
        "model",
        default_text="that of huggingface_hub",
    )
    use_tqdm_on_load: bool = setting(
        True, "switch", "show a progress bar while weights load, on a terminal", "model"
    )
    num_gpu_blocks_override: int | None = setting(
        None, "integer", "vLLM's name for num_blocks", "KV cache", low=1, alias_of="num_blocks"
    )
    trace: TextIO | None = setting(
        None,
        "object",
        "text file that gets the event log as JSON lines; the caller closes it",
        "engine",
    )
    request_limits: RequestLimits | Mapping[str, Any] | None = setting(
        None,
        "mapping",
        "lower limits for each request, by their names in RequestLimits",
        "engine",
        default_text="those of RequestLimits",
    )


@refuses_names
@keyword_checked
@dataclass(frozen=True, repr=False)
class EngineArgs(VllmNames, EngineSettings, ModelSettings):
    """All arguments of `LLM`, from which a model and an `EngineConfig` follow.

    An engine setting that is None has its default. ``gpu_memory_utilization`` is accepted
    without a GPU and has no effect there, and so are ``enforce_eager`` with NumPy and
    ``swap_space`` if nothing is swapped. Arguments that only vLLM has are accepted at
    values without effect. docs/settings.md lists everything.

    Raises:
        ConfigError: an argument is unknown, out of range, or refused with the reason.
    """

    model: str | os.PathLike[str] = "bundled"
    """"bundled", a directory in Hugging Face format, or a hub id."""

    def __post_init__(self) -> None:
        refuse_what_vllm_has(self)
        if self.reasoning_parser == "":  # vLLM's default
            object.__setattr__(self, "reasoning_parser", "none")
        for name, _, declared in settings_of(ModelSettings):
            check_setting(name, getattr(self, name), declared)
        for name in ("hf_overrides", "override_generation_config"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"{name} must be a dictionary; got {value!r}")
        self.engine_config()
        _ = self.limits  # reading the property checks them

    def __repr__(self) -> str:
        """Return the model and all values that differ from the defaults."""
        changed = [
            f", {each.name}={value!r}"
            for each in fields(self)
            if (value := getattr(self, each.name)) != each.default and each.name != "model"
        ]
        return f"{type(self).__name__}({self.model!r}{''.join(changed)})"

    def engine_config(self) -> EngineConfig:
        """Return the settings of the engine, without those that have no effect there."""
        values = {name: getattr(self, name) for name, *_ in settings_of(EngineSettings)}
        values = {name: value for name, value in values.items() if value is not None}
        values["num_blocks"] = self._num_blocks()
        for name, default, declared in settings_of(EngineSettings):
            if declared.is_ignorable and name in values and not self._means_something(name):
                if declared.kind != "size":  # swap_space is in GiB, as in vLLM, and may be 0
                    check_setting(name, values[name], declared)
                values[name] = default
        return EngineConfig(**values)

    @property
    def limits(self) -> RequestLimits:
        """Limits of a single request."""
        return limits_of(self.request_limits)

    @property
    def dtype_name(self) -> str:
        """The name of ``dtype`` in the backends.

        vLLM also accepts "half", "float" and PyTorch's dtypes.
        """
        name = str(self.dtype).removeprefix("torch.")
        return _DTYPES.get(name, name)

    @classmethod
    def add_cli_args(
        cls, parser: argparse.ArgumentParser, omit: Collection[str] = ()
    ) -> argparse.ArgumentParser:
        """Add an option for each argument except those in ``omit``.

        Options that only vLLM has are hidden from the help.
        """
        if "model" not in omit:
            parser.add_argument(
                "--model",
                default="bundled",
                metavar="MODEL",
                help="'bundled' (default), a directory in Hugging Face format, or a hub id",
            )
        add_settings(parser, cls, omit)
        add_neutral_names(parser, cls, omit)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Return the arguments from the given options, with defaults for the others."""
        return cls(**given(args, cls))

    def _num_blocks(self) -> int | None:
        override = self.num_gpu_blocks_override
        if override is not None and self.num_blocks not in (None, override):
            raise ConfigError(
                f"num_blocks is {self.num_blocks} and num_gpu_blocks_override, its alias, "
                f"is {override}; give one"
            )
        return self.num_blocks if override is None else override

    def _means_something(self, name: str) -> bool:
        if name == "swap_space":
            return self.preemption_mode == "swap"
        own = AUTO_BACKENDS if self.backend == "auto" else (self.backend,)
        return any(
            not set(own).isdisjoint(declared.backends)
            for each, _, declared in settings_of(EngineSettings)
            if each == name
        )


@keyword_checked
@dataclass(frozen=True, repr=False)
class AsyncEngineArgs(EngineArgs):
    """All arguments of `AsyncLLM`, which are those of `LLM`."""


def with_arguments_of(
    arguments: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an ``__init__`` the parameters of the dataclass ``arguments``. This is a decorator.

    Type checkers, editors and ``help`` see the dataclass's parameters. An unknown parameter raises
    `ConfigError` with the name of the class that was called.
    """
    parameters = inspect.signature(arguments).parameters

    def decorate(original: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            refuse_unknown(type(self).__name__, kwargs, parameters)
            original(self, *args, **kwargs)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.Signature([own, *parameters.values()], return_annotation=None)
        __init__.__signature__ = signature  # type: ignore[attr-defined]  # help() reads it
        return cast("Callable[Concatenate[Any, P], None]", __init__)

    return decorate
