"""List arguments of vLLM for features that `mie` does not have.

Scripts and command lines written for vLLM use them, often at their defaults. Values without effect
are accepted. Any other value is refused by name, with the reason.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mie.config.settings import neutral, without_effect
from mie.errors import ConfigError

_ONE_DEVICE = "mie computes on one device"
_ONE_PROCESS = "mie has no worker processes"
_NO_ADAPTERS = "mie has no LoRA adapters"
_TEXT_ONLY = "mie runs text models only"
_FULL_PRECISION = "mie reads checkpoints that are not quantized"


@dataclass(frozen=True, kw_only=True)
class VllmNames:
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
    quantization: str | None = neutral(None, _FULL_PRECISION)
    calculate_kv_scales: bool = neutral(False, "an 8-bit KV cache has a scale for each token")
    cpu_offload_gb: float = neutral(0, "weights stay on the device", None)
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
    scheduler_cls: Any = neutral(None, "scheduling_policy chooses the scheduler's order")
    speculative_config: Mapping[str, Any] | None = neutral(None, "mie does not speculate")
    enable_lora: bool = neutral(False, _NO_ADAPTERS)
    fully_sharded_loras: bool = neutral(False, _NO_ADAPTERS)
    mm_processor_kwargs: Mapping[str, Any] | None = neutral(None, _TEXT_ONLY, {})
    allowed_local_media_path: str = neutral("", _TEXT_ONLY)
    logprobs_mode: str = neutral("raw_logprobs", "log-probabilities come from the raw logits")
    logits_processors: Sequence[Any] | None = neutral(
        None, "mie takes no functions over logits; see SamplingParams", ()
    )
    guided_decoding_backend: str = neutral("auto", "llguidance computes masks", "guidance")
    compilation_config: Any = neutral(None, "mie does not compile models", 0, {})
    kv_transfer_config: Any = neutral(None, "engines do not exchange KV blocks")
    kv_events_config: Any = neutral(None, "the event log of --trace tells what blocks do")
    worker_cls: str = neutral("auto", _ONE_PROCESS)
    worker_extension_cls: str = neutral("", _ONE_PROCESS)
    additional_config: Mapping[str, Any] | None = neutral(None, "there are no other settings", {})
    enable_sleep_mode: bool = neutral(False, "an engine cannot give its memory back for a while")
    otlp_traces_endpoint: str | None = neutral(None, "--trace writes the event log to a file")
    collect_detailed_traces: Any = neutral(None, "--trace writes the event log to a file")
    stream_interval: int = neutral(1, "a stream yields after every token")
    enable_log_requests: bool = neutral(False, "mie does not log requests")
    pooler_config: Any = neutral(None, "mie generates text only")
    structured_outputs_config: Any = neutral(None, "SamplingParams say what an output must be", {})
    override_attention_dtype: str | None = neutral(None, "dtype is that of attention too")
    show_hidden_metrics_for_version: str | None = neutral(None, "there are no hidden metrics")

    # Accepted at every value, without effect.
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
    """Return whether ``value`` is allowed. A list is compared as a tuple."""
    value = tuple(value) if isinstance(value, list) else value
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
    )


def parse_neutral(text: str) -> Any:
    """Parse a command-line value as JSON, or return the text if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
