"""Declare the settings of an engine, and check the values of settings."""

import difflib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from mie.base.refusals import NEUTRAL
from mie.base.reprs import changed_repr
from mie.config.params.values import integer, real
from mie.config.settings import Setting, declared_in, settings_of
from mie.config.speculation import speculation_of
from mie.errors import ConfigError, shown, shown_text


@dataclass(frozen=True, kw_only=True)
class ClientQuota:
    """The weight of a client's share, and the maximum number of its sequences that run at once.

    A client of weight 2 gets twice the share of a client of weight 1. Without ``max_num_seqs``, a
    client may take every seat that no other client needs.
    """

    weight: float = 1
    max_num_seqs: int | None = None

    def __post_init__(self) -> None:
        check_real("weight", self.weight, 0, above_low=True)
        if self.max_num_seqs is not None:
            check_integer("max_num_seqs", self.max_num_seqs, 1)


def quotas_of(value: object) -> dict[str, ClientQuota]:
    """Return the quotas that the setting ``client_quotas`` declares, by client.

    Raises:
        ConfigError: the value does not map clients to quotas.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"client_quotas must map clients to quotas; got {shown(value)}")
    return {name: _quota(name, quota) for name, quota in value.items()}


def _quota(name: object, value: Any) -> ClientQuota:
    if not isinstance(name, str):
        raise ConfigError(f"client_quotas has the client {shown(name)}; a client is a string")
    if isinstance(value, ClientQuota):
        return value
    what, known = f"client_quotas of {shown(name)}", ("weight", "max_num_seqs")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be an object of {' and '.join(known)}; got {shown(value)}")
    refuse_unknown(what, map(str, value), known)
    try:
        return ClientQuota(**value)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


T = TypeVar("T")


def refuse_unknown(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` for the first of ``names`` that is not ``known``, with a suggestion."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise ConfigError(f"{what} has no parameter {name!r}; {hint}")


def keyword_checked(cls: type[T]) -> type[T]:
    """Make a dataclass raise `ConfigError` for an unknown keyword. This is a class decorator."""
    original = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # cls is a dataclass
    known += NEUTRAL.get(cls.__name__, {})

    @functools.wraps(original)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, known)
        original(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[assignment]  # same keywords, checked first
    return cls


check_integer, check_real = integer, real


def check_switch(name: str, value: object) -> None:
    """Raise `ConfigError` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False; got {shown(value)}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ConfigError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {shown(value)}")


def check_settings(values: object) -> None:
    """Raise `ConfigError` unless every setting of a dataclass has an allowed value."""
    for name, default, declared in settings_of(type(values)):
        value = getattr(values, name)
        check_setting(name, value, default, declared)
        for other, needed in declared.needs.items():
            if value != default and getattr(values, other) != needed:
                got = getattr(values, other)
                raise ConfigError(f"{name} needs {other}={needed!r}; got {shown(got)}")


def check_setting(name: str, value: Any, default: Any, declared: Setting) -> None:
    """Raise `ConfigError` unless the value is allowed for the setting ``name``."""
    low, high = declared.low, declared.high
    if value is None and default is None:
        return
    if declared.kind in ("integer", "size"):
        check_integer(name, value, int(low), None if high is None else int(high))
    elif declared.kind == "number":
        high = math.inf if high is None else high
        check_real(name, value, low, high, above_low=declared.above_low)
    elif declared.kind == "choice":
        check_choice(name, value, declared.choices)
    elif declared.kind == "switch":
        check_switch(name, value)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine. `EngineConfig` checks them."""

    SETTINGS: ClassVar[Mapping[str, Setting]] = declared_in(__file__, "EngineSettings")

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_chunk: int | None = None
    enable_chunked_prefill: bool = True
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    partial_block_sharing: bool = True
    max_cached_blocks: int | None = None
    prefix_cache_dir: str | None = None
    prefix_cache_disk: int = 20 << 30
    state_memory: int | None = None
    state_snapshot_distance: int = 16
    scheduling_policy: str = "fcfs"
    sjf_ageing: int | None = None
    fair_turn: int | None = None
    client_quotas: Mapping[str, Any] | None = None
    speculative_config: Mapping[str, Any] | None = None
    batching: str = "continuous"
    watermark: float = 0.01
    admit_after_preemption: bool = False
    preemption_mode: str = "recompute"
    swap_space: int | None = None
    event_log_steps: int = 2000
    seed: int = 0
    max_logprobs: int = -1
    max_forced_run: int = 32
    kv_cache_dtype: str = "auto"
    async_scheduling: bool | None = None
    num_threads: int | None = None
    batch_invariant: bool = False
    weight_dtype: str = "auto"
    activations: str = "float32"
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.9
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16


POLICIES = EngineSettings.SETTINGS["scheduling_policy"].choices


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineSettings):
    """The size of an engine and the limits of a step. None means that the model determines it.

    The KV cache has ``num_blocks`` blocks of ``block_size`` tokens, or as many blocks as fit
    ``kv_cache_memory_bytes``. A step computes at most ``max_num_batched_tokens`` tokens, including
    decodes, for at most ``max_num_seqs`` sequences. docs/settings.md explains every field.
    """

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        check_settings(self)
        quotas_of(self.client_quotas)
        speculation_of(self.speculative_config)
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "num_blocks and kv_cache_memory_bytes both size the KV cache; give one"
            )
        if self.activations == "int8" and self.weight_dtype == "float32":
            raise ConfigError(
                "activations is 'int8' and weight_dtype is 'float32'; products with float32 "
                "weights take no rounded activations (leave one out)"
            )


CHARS_PER_TOKEN = 8
"""Characters per token. Ordinary text has three to five."""
MIN_PROMPT_CHARS = 2**16


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of a single request, checked before any work is done for it.

    The defaults are far above normal requests, and far too low to harm an engine. They apply to
    every `SamplingParams`. The engine setting ``request_limits`` lowers them, for servers with
    untrusted callers. docs/settings.md explains every field.
    """

    SETTINGS: ClassVar = declared_in(__file__, "RequestLimits")

    __repr__ = changed_repr

    max_prompt_chars: int | None = None
    max_n: int = 1024
    max_stop_strings: int = 256
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 4096
    max_allowed_token_ids: int = 2**20
    max_logit_bias: int = 2**20
    max_traced_tokens: int = 2**20
    max_bad_words: int = 1024
    max_bad_word_length: int = 256
    max_grammar_chars: int = 2**16
    max_extra_args: int = 1024
    max_request_id_chars: int = 1024
    max_cache_salt_chars: int = 1024

    def __post_init__(self) -> None:
        check_settings(self)

    def prompt_chars(self, max_model_len: int) -> int:
        """Return the maximum number of characters of a prompt for a context length in tokens."""
        if self.max_prompt_chars is not None:
            return self.max_prompt_chars
        return max(CHARS_PER_TOKEN * max_model_len, MIN_PROMPT_CHARS)


DEFAULT_LIMITS = RequestLimits()


def limits_of(value: RequestLimits | Mapping[str, Any] | None) -> RequestLimits:
    """Return the limits of the setting ``request_limits``. The setting lowers some by name.

    Raises:
        ConfigError: a limit is unknown or out of range.
    """
    if isinstance(value, RequestLimits):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(
            f"request_limits must be a dictionary or RequestLimits; got {shown(value)}"
        )
    return RequestLimits(**{shown_text(name): limit for name, limit in (value or {}).items()})
