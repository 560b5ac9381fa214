"""List arguments of vLLM for features that `mie` does not have.

Scripts and command lines written for vLLM use them, often at their defaults. Values without effect
are accepted. Any other value is refused by name, with the reason. ``vllm_names.json`` has the
arguments that type checkers need not know: ``{reason: {name: [default, other values]}}``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.errors import ConfigError

_ONE_DEVICE = "mie computes on one device"
_ONE_PROCESS = "mie has no worker processes"
_NO_ADAPTERS = "mie has no LoRA adapters"
_TEXT_ONLY = "mie runs text models only"
_ON_DEVICE = "weights stay on the device"
_NO_SPECULATION = "mie does not speculate"
_NO_SLEEP = "an engine cannot give its memory back for a while"


@dataclass(frozen=True, kw_only=True)
class Neutral:
    """Facts about an argument that only vLLM has: the values without effect."""

    allowed: tuple[Any, ...] | None
    """Allowed values, or None if every value is allowed."""
    why: str
    """Why other values are not supported, or why no value has an effect."""


def neutral(default: object, why: str, *also: object) -> Any:
    """Return a dataclass field that allows only its default and the values in ``also``."""
    return field(default=default, metadata={"neutral": Neutral(allowed=(default, *also), why=why)})


def without_effect(default: object, why: str) -> Any:
    """Return a dataclass field that allows any value, because none has an effect."""
    return field(default=default, metadata={"neutral": Neutral(allowed=None, why=why)})


def _listed() -> type:
    """Return a dataclass of the arguments in ``vllm_names.json``."""
    path = Path(__file__).with_suffix(".json")
    listed = json.loads(path.read_text(encoding="utf-8"))
    declared = [
        (name, Any, neutral(_plain(values[0]), why, *map(_plain, values[1:])))
        for why, names in listed.items()
        for name, values in names.items()
    ]
    return make_dataclass("Listed", declared, frozen=True, kw_only=True)


def _plain(value: object) -> object:
    """Return a list or a set as a tuple, and another value unchanged."""
    return tuple(value) if isinstance(value, (list, set)) else value


if TYPE_CHECKING:

    class _Listed:
        """Type checkers do not know these arguments."""

else:
    _Listed = _listed()


@dataclass(frozen=True, kw_only=True)
class VllmNames(_Listed):
    """Arguments of vLLM's ``EngineArgs`` that have no effect here."""

    # Refused at any value except those listed here.
    tensor_parallel_size: int = neutral(1, _ONE_DEVICE)
    pipeline_parallel_size: int = neutral(1, _ONE_DEVICE)
    data_parallel_size: int = neutral(1, _ONE_DEVICE)
    decode_context_parallel_size: int = neutral(1, _ONE_DEVICE)
    enable_expert_parallel: bool = neutral(False, _ONE_DEVICE)
    distributed_executor_backend: str | None = neutral(None, _ONE_DEVICE, "mp", "uni")
    device: str = neutral("auto", "backend chooses the device")
    runner: str = neutral("auto", "mie generates text only", "generate")
    task: str | None = neutral(None, "mie generates text only", "auto", "generate")
    convert: str = neutral("auto", "mie generates text only", "none")
    enable_prompt_embeds: bool = neutral(False, "prompts are text or token ids")
    tokenizer_mode: str = neutral("auto", "mie reads tokenizer.json only", "hf", "fast")
    config_format: str = neutral("auto", "mie reads config.json only", "hf")
    model_impl: str = neutral("auto", "mie has one implementation of each model", "vllm")
    code_revision: str | None = neutral(None, "mie runs no code from the hub")
    hf_token: bool | str | None = neutral(None, "set the environment variable HF_TOKEN instead")
    hf_config_path: str | None = neutral(None, "config.json lies beside the weights")
    rope_scaling: Mapping[str, Any] | None = neutral(
        None, "pass hf_overrides={'rope_scaling': …} instead"
    )
    rope_theta: float | None = neutral(None, "pass hf_overrides={'rope_theta': …} instead")
    calculate_kv_scales: bool = neutral(False, "an 8-bit KV cache has a scale for each token")
    cpu_offload_gb: float = neutral(0, _ON_DEVICE, None)
    max_parallel_loading_workers: int | None = neutral(None, _ONE_PROCESS)
    model_loader_extra_config: Mapping[str, Any] | None = neutral(None, "there is one loader", {})
    prefix_caching_hash_algo: str = neutral(
        "builtin", "the prefix cache compares tokens, not hashes", "sha256"
    )
    disable_sliding_window: bool = neutral(False, "a model's sliding window is part of it")
    long_prefill_token_threshold: int = neutral(0, "max_prefill_chunk is its name in mie")
    max_num_partial_prefills: int = neutral(1, "max_num_batched_tokens bounds prefills")
    max_long_partial_prefills: int = neutral(1, "max_num_batched_tokens bounds prefills")
    num_scheduler_steps: int = neutral(1, "async_scheduling overlaps steps instead")
    speculative_config: Mapping[str, Any] | None = neutral(None, _NO_SPECULATION)
    enable_lora: bool = neutral(False, _NO_ADAPTERS)
    fully_sharded_loras: bool = neutral(False, _NO_ADAPTERS)
    mm_processor_kwargs: Mapping[str, Any] | None = neutral(None, _TEXT_ONLY, {})
    allowed_local_media_path: str = neutral("", _TEXT_ONLY)
    logprobs_mode: str = neutral("raw_logprobs", "log-probabilities come from the raw logits")
    logits_processors: Sequence[Any] | None = neutral(
        None, "mie takes no functions over logits; see SamplingParams", ()
    )
    guided_decoding_backend: str = neutral("auto", "llguidance computes masks", "guidance")
    worker_cls: str = neutral("auto", _ONE_PROCESS)
    worker_extension_cls: str = neutral("", _ONE_PROCESS)
    additional_config: Mapping[str, Any] | None = neutral(None, "there are no other settings", {})
    enable_sleep_mode: bool = neutral(False, _NO_SLEEP)
    otlp_traces_endpoint: str | None = neutral(None, "--trace writes the event log to a file")
    stream_interval: int = neutral(1, "a stream yields after every token")
    enable_log_requests: bool = neutral(False, "mie does not log requests")
    override_attention_dtype: str | None = neutral(None, "dtype is that of attention too")
    show_hidden_metrics_for_version: str | None = neutral(None, "there are no hidden metrics")

    # Accepted at every value, without effect.
    enable_trace_replay: bool = without_effect(
        False, "SamplingParams.trace_decode_token_ids always works"
    )
    enable_auto_tool_choice: bool = without_effect(
        False, "tool_choice='auto' works wherever the format of calls is known"
    )
    trust_remote_code: bool = without_effect(False, "mie never runs code from a model directory")
    disable_custom_all_reduce: bool = without_effect(False, _ONE_DEVICE)
    disable_log_requests: bool = without_effect(True, "mie does not log requests")
    disable_log_stats: bool = without_effect(True, "an LLM logs no statistics by itself")
    max_seq_len_to_capture: int = without_effect(8192, "CUDA graphs do not depend on the length")
    disable_cascade_attn: bool = without_effect(False, "mie has one attention algorithm")
    disable_hybrid_kv_cache_manager: bool = without_effect(False, "mie has one cache manager")
    use_v2_block_manager: bool = without_effect(True, "mie has one block manager")
    served_model_name: str | Sequence[str] | None = without_effect(
        None, "it names the model of a server"
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = without_effect(None, _TEXT_ONLY)
    mm_processor_cache_gb: float = without_effect(4, _TEXT_ONLY)
    skip_mm_profiling: bool = without_effect(False, _TEXT_ONLY)
    max_loras: int = without_effect(1, _NO_ADAPTERS)
    max_lora_rank: int = without_effect(16, _NO_ADAPTERS)
    max_cpu_loras: int | None = without_effect(None, _NO_ADAPTERS)
    ignore_patterns: str | Sequence[str] | None = without_effect(
        None, "only the files that mie reads are fetched"
    )


def refuse_what_vllm_has(values: VllmNames) -> None:
    """Raise `ConfigError` for an argument with a value that would need an effect."""
    for each in fields(values):
        declared = each.metadata.get("neutral")
        value = getattr(values, each.name)
        if declared is None or declared.allowed is None or _is_among(value, declared.allowed):
            continue
        allowed = " or ".join(map(repr, declared.allowed))
        raise ConfigError(
            f"{each.name}={value!r} is not supported: {declared.why} (leave it out, or pass "
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
