"""Declare `EngineArgs`, the arguments of `LLM` and `AsyncLLM`, spelled as in vLLM."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TextIO, cast

from mie.base.refusals import NEUTRAL, neutral_accepted, refuses_names
from mie.config.adapters import LoRARequest, lora_modules_of
from mie.config.arguments import add_neutral_names, add_settings, given
from mie.config.engine import (
    EngineConfig,
    EngineSettings,
    RequestLimits,
    check_setting,
    keyword_checked,
    limits_of,
    refuse_unknown,
)
from mie.config.settings import AUTO_BACKENDS, Setting, declared_in, settings_of
from mie.errors import ConfigError, shown

P = ParamSpec("P")

_DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings of the model, of its source, and of loading it."""

    SETTINGS: ClassVar = declared_in(__file__, "ModelSettings")

    tokenizer: str | os.PathLike[str] | None = None
    skip_tokenizer_init: bool = False
    backend: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    head_dtype: str = "auto"
    hf_overrides: Mapping[str, Any] | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "none"
    ignore_prompt_lines: str | None = None
    generation_config: str | os.PathLike[str] = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | os.PathLike[str] | None = None
    use_tqdm_on_load: bool = True
    tensor_parallel_size: int = 1
    num_gpu_blocks_override: int | None = None
    lora_modules: Mapping[str, str] | Sequence[str | Mapping[str, str]] | None = None
    trace: TextIO | None = None
    request_limits: RequestLimits | Mapping[str, Any] | None = None


if TYPE_CHECKING:

    @dataclass(frozen=True, kw_only=True)
    class _OftenPassed:
        """The arguments without effect that programs for vLLM pass most often.

        `neutral_accepted` accepts all of them at run time.
        """

        trust_remote_code: bool = False
        pipeline_parallel_size: int = 1
        data_parallel_size: int = 1
        distributed_executor_backend: str | None = None
        device: str = "auto"
        runner: str = "auto"
        task: str | None = None
        tokenizer_mode: str = "auto"
        hf_token: bool | str | None = None
        rope_scaling: Mapping[str, Any] | None = None
        cpu_offload_gb: float = 0
        compilation_config: Any = None
        limit_mm_per_prompt: Mapping[str, Any] | None = None
        mm_processor_kwargs: Mapping[str, Any] | None = None
        max_seq_len_to_capture: int = 8192
        disable_custom_all_reduce: bool = False
        disable_log_stats: bool = True
        enable_sleep_mode: bool = False
        logits_processors: Any = None
        served_model_name: str | None = None

else:

    class _OftenPassed:
        """Nothing at run time."""


@refuses_names
@neutral_accepted
@keyword_checked
@dataclass(frozen=True, repr=False)
class EngineArgs(_OftenPassed, EngineSettings, ModelSettings):
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
        if self.reasoning_parser == "":  # vLLM's default
            object.__setattr__(self, "reasoning_parser", "none")
        for name, default, declared in settings_of(ModelSettings):
            check_setting(name, getattr(self, name), default, declared)
        for name in ("hf_overrides", "override_generation_config"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"{name} must be a dictionary; got {shown(value)}")
        if self.ignore_prompt_lines is not None:
            _check_pattern(self.ignore_prompt_lines)
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
        """Return the settings of the engine, without settings that have no effect there."""
        values: dict[str, Any] = {"num_blocks": self._num_blocks()}
        for name, default, declared in settings_of(EngineSettings):
            value = getattr(self, name)
            if value is None or name in values:
                continue
            if declared.is_ignorable and not self._means_something(declared):
                if declared.kind != "size":  # swap_space is in GiB, as in vLLM, and may be 0
                    check_setting(name, value, default, declared)
                value = default
            values[name] = value
        if self.loras:
            values["max_loras"] = max(values["max_loras"], len(self.loras))
        return EngineConfig(**values)

    @property
    def loras(self) -> dict[str, LoRARequest]:
        """The adapters that are loaded at start, by name."""
        return lora_modules_of(self.lora_modules)

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
        """Add an option for each argument except for ``omit``.

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

    def _means_something(self, declared: Setting) -> bool:
        own = AUTO_BACKENDS if self.backend == "auto" else (self.backend,)
        is_needed = all(getattr(self, name) == value for name, value in declared.needs.items())
        return is_needed and (not declared.backends or not {*own}.isdisjoint(declared.backends))


def _check_pattern(pattern: object) -> None:
    """Raise `ConfigError` unless this is a regex for lines that are not empty."""
    what = f"ignore_prompt_lines must be a regex in Python's syntax; got {shown(pattern)}"
    if not isinstance(pattern, str):
        raise ConfigError(what)
    try:
        regex = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{what}: {error}") from error
    if regex.search(""):
        raise ConfigError(
            f"ignore_prompt_lines {shown(pattern)} is found in an empty line, so the model would "
            "miss lines that do not change (write more of the line, such as '^x-anthropic-')"
        )


@neutral_accepted
@keyword_checked
@dataclass(frozen=True, repr=False)
class AsyncEngineArgs(EngineArgs):
    """All arguments of `AsyncLLM`, the same as `LLM`'s."""


def with_arguments_of(
    arguments: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an ``__init__`` the parameters of the dataclass ``arguments``. This is a decorator.

    Type checkers, editors and ``help`` show the dataclass's parameters. An unknown parameter raises
    `ConfigError` with the name of the class that was called.
    """
    parameters = inspect.signature(arguments).parameters
    known = [*parameters, *NEUTRAL[arguments.__name__]]

    def decorate(original: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            refuse_unknown(type(self).__name__, kwargs, known)
            original(self, *args, **kwargs)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.Signature([own, *parameters.values()], return_annotation=None)
        __init__.__signature__ = signature  # type: ignore[attr-defined]  # help() reads it
        return cast("Callable[Concatenate[Any, P], None]", __init__)

    return decorate
