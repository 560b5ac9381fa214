"""List arguments of vLLM for features that `mie` does not have.

Scripts and command lines written for vLLM use them, often at their defaults. Values without effect
are accepted. Any other value is refused by name, with the reason. ``vllm_names.json`` declares them
as ``{reason: {name: values}}``. The first value of an untyped one, which type checkers need not
know, is its default. A typed one has the values beside its default, or null if any may be given.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from mie.errors import ConfigError, shown

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_UNTYPED, _TYPED = (
    {name: (why, values) for why, names in _TABLES[key].items() for name, values in names.items()}
    for key in ("untyped", "typed")
)


def _plain(value: object) -> object:
    """Return a list or a set as a tuple, and another value unchanged."""
    return tuple(value) if isinstance(value, (list, set)) else value


if TYPE_CHECKING:

    class _Listed:
        """Type checkers do not know these arguments."""

else:
    _Listed = make_dataclass(
        "Listed",
        [(name, Any, field(default=_plain(values[0]))) for name, (_, values) in _UNTYPED.items()],
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class VllmNames(_Listed):
    """Arguments of vLLM's ``EngineArgs`` that have no effect here."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_executor_backend: str | None = None
    device: str = "auto"
    runner: str = "auto"
    task: str | None = None
    convert: str = "auto"
    enable_prompt_embeds: bool = False
    tokenizer_mode: str = "auto"
    config_format: str = "auto"
    model_impl: str = "auto"
    code_revision: str | None = None
    hf_token: bool | str | None = None
    hf_config_path: str | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_theta: float | None = None
    calculate_kv_scales: bool = False
    cpu_offload_gb: float = 0
    max_parallel_loading_workers: int | None = None
    model_loader_extra_config: Mapping[str, Any] | None = None
    prefix_caching_hash_algo: str = "builtin"
    disable_sliding_window: bool = False
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    num_scheduler_steps: int = 1
    speculative_config: Mapping[str, Any] | None = None
    enable_lora: bool = False
    fully_sharded_loras: bool = False
    mm_processor_kwargs: Mapping[str, Any] | None = None
    allowed_local_media_path: str = ""
    logprobs_mode: str = "raw_logprobs"
    logits_processors: Sequence[Any] | None = None
    guided_decoding_backend: str = "auto"
    worker_cls: str = "auto"
    worker_extension_cls: str = ""
    additional_config: Mapping[str, Any] | None = None
    enable_sleep_mode: bool = False
    otlp_traces_endpoint: str | None = None
    stream_interval: int = 1
    enable_log_requests: bool = False
    override_attention_dtype: str | None = None
    show_hidden_metrics_for_version: str | None = None
    enable_trace_replay: bool = False
    enable_auto_tool_choice: bool = False
    trust_remote_code: bool = False
    disable_custom_all_reduce: bool = False
    disable_log_requests: bool = True
    disable_log_stats: bool = True
    max_seq_len_to_capture: int = 8192
    disable_cascade_attn: bool = False
    disable_hybrid_kv_cache_manager: bool = False
    use_v2_block_manager: bool = True
    served_model_name: str | Sequence[str] | None = None
    limit_mm_per_prompt: Mapping[str, Any] | None = None
    mm_processor_cache_gb: float = 4
    skip_mm_profiling: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    ignore_patterns: str | Sequence[str] | None = None


class Neutral(NamedTuple):
    """Facts about an argument that only vLLM has."""

    allowed: tuple[Any, ...] | None
    """The values without effect, or None if every value is allowed."""
    why: str
    """Why other values are not supported, or why no value has an effect."""


def _neutral() -> Mapping[str, Neutral]:
    found = {}
    for each in fields(VllmNames):
        why, values = _TYPED.get(each.name) or _UNTYPED[each.name]
        others = values if each.name in _TYPED else values[1:]
        allowed = None if others is None else (each.default, *map(_plain, others))
        found[each.name] = Neutral(allowed, why)
    return MappingProxyType(found)


NEUTRAL = _neutral()


def refuse_what_vllm_has(values: VllmNames) -> None:
    """Raise `ConfigError` for an argument with a value that would need an effect."""
    for each in fields(values):
        declared, value = NEUTRAL.get(each.name), getattr(values, each.name)
        if declared is None or declared.allowed is None or _is_among(value, declared.allowed):
            continue
        allowed = " or ".join(map(repr, declared.allowed))
        raise ConfigError(
            f"{each.name}={shown(value)} is not supported: {declared.why} (leave it out, or pass "
            f"{allowed})"
        )


def _is_among(value: object, allowed: Sequence[object]) -> bool:
    """Return whether ``value`` is allowed. Lists and sets are compared as tuples."""
    value = _plain(value)
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
    )


def parse_neutral(text: str) -> Any:
    """Parse a command-line value as JSON, or return the text if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
