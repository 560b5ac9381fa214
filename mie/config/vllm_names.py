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
_ATTENTION_ONLY = "mie has no recurrent layers"
_ONE_KERNEL = "the backend has one kernel for each operator"
_GRAPHS = "CUDA graphs are captured for the batches that occur"
_NOT_COMPILED = "mie does not compile models"
_METRICS = "get_metrics() and the event log of --trace have what is measured"
_LOGGING = "configure the logger 'mie' of Python's logging"
_ON_DEVICE = "weights stay on the device"
_NO_SPECULATION = "mie does not speculate"
_MAPPED = "safetensors files are mapped into memory"
_ONE_MODEL = "mie has one implementation of each model, and reads the weights in its directory"
_NO_SLEEP = "an engine cannot give its memory back for a while"
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
    scheduler_cls: Any = neutral(None, "scheduling_policy chooses the scheduler's order")
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
    compilation_config: Any = neutral(None, _NOT_COMPILED, 0, {})
    kv_transfer_config: Any = neutral(None, "engines do not exchange KV blocks")
    kv_events_config: Any = neutral(None, "the event log of --trace tells what blocks do")
    worker_cls: str = neutral("auto", _ONE_PROCESS)
    worker_extension_cls: str = neutral("", _ONE_PROCESS)
    additional_config: Mapping[str, Any] | None = neutral(None, "there are no other settings", {})
    enable_sleep_mode: bool = neutral(False, _NO_SLEEP)
    otlp_traces_endpoint: str | None = neutral(None, "--trace writes the event log to a file")
    collect_detailed_traces: Any = neutral(None, "--trace writes the event log to a file")
    stream_interval: int = neutral(1, "a stream yields after every token")
    enable_log_requests: bool = neutral(False, "mie does not log requests")
    pooler_config: Any = neutral(None, "mie generates text only")
    structured_outputs_config: Any = neutral(None, "SamplingParams say what an output must be", {})
    override_attention_dtype: str | None = neutral(None, "dtype is that of attention too")
    show_hidden_metrics_for_version: str | None = neutral(None, "there are no hidden metrics")
    all2all_backend: Any = neutral("allgather_reducescatter", _ONE_DEVICE)
    cp_kv_cache_interleave_size: Any = neutral(None, _ONE_DEVICE)
    cpu_distributed_timeout_seconds: Any = neutral(None, _ONE_DEVICE)
    data_parallel_address: Any = neutral(None, _ONE_DEVICE)
    data_parallel_backend: Any = neutral("mp", _ONE_DEVICE)
    data_parallel_external_lb: Any = neutral(False, _ONE_DEVICE)
    data_parallel_hybrid_lb: Any = neutral(False, _ONE_DEVICE)
    data_parallel_multi_port_external_lb: Any = neutral(False, _ONE_DEVICE)
    data_parallel_rank: Any = neutral(None, _ONE_DEVICE)
    data_parallel_rpc_port: Any = neutral(None, _ONE_DEVICE)
    data_parallel_size_local: Any = neutral(None, _ONE_DEVICE)
    data_parallel_start_rank: Any = neutral(None, _ONE_DEVICE)
    dbo_decode_token_threshold: Any = neutral(32, _ONE_DEVICE)
    dbo_prefill_token_threshold: Any = neutral(512, _ONE_DEVICE)
    dcp_comm_backend: Any = neutral(None, _ONE_DEVICE)
    dcp_kv_cache_interleave_size: Any = neutral(1, _ONE_DEVICE)
    dcp_q_replicate: Any = neutral(None, _ONE_DEVICE)
    disable_nccl_for_dp_synchronization: Any = neutral(None, _ONE_DEVICE)
    distributed_timeout_seconds: Any = neutral(None, _ONE_DEVICE)
    dp_sync_interval: Any = neutral(16, _ONE_DEVICE)
    elastic_ep_max_dp_size: Any = neutral(None, _ONE_DEVICE)
    enable_batch_sharded_sampling: Any = neutral(None, _ONE_DEVICE)
    enable_dbo: Any = neutral(False, _ONE_DEVICE)
    enable_elastic_ep: Any = neutral(False, _ONE_DEVICE)
    enable_ep_weight_filter: Any = neutral(False, _ONE_DEVICE)
    enable_eplb: Any = neutral(False, _ONE_DEVICE)
    enable_fault_tolerance: Any = neutral(False, _ONE_DEVICE)
    enable_hc_sp: Any = neutral(False, _ONE_DEVICE)
    enable_nccl_comm_suspend: Any = neutral(False, _ONE_DEVICE)
    eplb_config: Any = neutral(None, _ONE_DEVICE, {})
    expert_placement_strategy: Any = neutral("linear", _ONE_DEVICE)
    fault_tolerance_config: Any = neutral(None, _ONE_DEVICE, {})
    master_addr: Any = neutral("127.0.0.1", _ONE_DEVICE)
    master_port: Any = neutral(29501, _ONE_DEVICE)
    nnodes: Any = neutral(1, _ONE_DEVICE)
    node_rank: Any = neutral(0, _ONE_DEVICE)
    prefill_context_parallel_size: Any = neutral(1, _ONE_DEVICE)
    ubatch_size: Any = neutral(0, _ONE_DEVICE)
    device_ids: Any = neutral(None, "select a GPU with CUDA_VISIBLE_DEVICES")
    numa_bind: Any = neutral(False, "start the process under numactl")
    numa_bind_cpus: Any = neutral(None, "start the process under numactl")
    numa_bind_nodes: Any = neutral(None, "start the process under numactl")
    enable_shm_tensor_arena: Any = neutral(False, _ONE_PROCESS)
    ray_workers_use_nsight: Any = neutral(False, _ONE_PROCESS)
    shutdown_timeout: Any = neutral(0, _ONE_PROCESS)
    watchdog_config: Any = neutral(None, _ONE_PROCESS, {})
    allowed_media_domains: Any = neutral(None, _TEXT_ONLY)
    disable_chunked_mm_input: Any = neutral(False, _TEXT_ONLY)
    ec_manager_config: Any = neutral(None, _TEXT_ONLY, {})
    ec_transfer_config: Any = neutral(None, _TEXT_ONLY)
    enable_mm_embeds: Any = neutral(False, _TEXT_ONLY)
    enable_mm_processor_stats: Any = neutral(False, _TEXT_ONLY)
    interleave_mm_strings: Any = neutral(False, _TEXT_ONLY)
    io_processor_plugin: Any = neutral(None, _TEXT_ONLY)
    language_model_only: Any = neutral(False, _TEXT_ONLY)
    media_io_kwargs: Any = neutral(None, _TEXT_ONLY, {})
    mm_device_do_normalize: Any = neutral(True, _TEXT_ONLY)
    mm_encoder_attn_backend: Any = neutral(None, _TEXT_ONLY)
    mm_encoder_attn_dtype: Any = neutral(None, _TEXT_ONLY)
    mm_encoder_fp8_scale_path: Any = neutral(None, _TEXT_ONLY)
    mm_encoder_fp8_scale_save_margin: Any = neutral(1.5, _TEXT_ONLY)
    mm_encoder_fp8_scale_save_path: Any = neutral(None, _TEXT_ONLY)
    mm_encoder_only: Any = neutral(False, _TEXT_ONLY)
    mm_encoder_tp_mode: Any = neutral("weights", _TEXT_ONLY)
    mm_hasher_algorithm: Any = neutral("blake3", _TEXT_ONLY)
    mm_ipc_gpu_memory_gb: Any = neutral(0, _TEXT_ONLY)
    mm_processor_cache_type: Any = neutral("lru", _TEXT_ONLY)
    mm_processor_device: Any = neutral("auto", _TEXT_ONLY)
    mm_shm_cache_max_object_size_mb: Any = neutral(128, _TEXT_ONLY)
    mm_tensor_ipc: Any = neutral("direct_rpc", _TEXT_ONLY)
    video_pruning_method: Any = neutral("evs", _TEXT_ONLY)
    video_pruning_rate: Any = neutral(None, _TEXT_ONLY)
    default_mm_loras: Any = neutral(None, _NO_ADAPTERS)
    enable_mixed_moe_lora_format: Any = neutral(False, _NO_ADAPTERS)
    enable_moe_shared_loras: Any = neutral(False, _NO_ADAPTERS)
    enable_tower_connector_lora: Any = neutral(False, _NO_ADAPTERS)
    lora_dtype: Any = neutral("auto", _NO_ADAPTERS)
    lora_target_modules: Any = neutral(None, _NO_ADAPTERS)
    max_lora_cls_labels: Any = neutral(None, _NO_ADAPTERS)
    specialize_active_lora: Any = neutral(False, _NO_ADAPTERS)
    enable_mamba_cache_stochastic_rounding: Any = neutral(False, _ATTENTION_ONLY)
    enable_mamba_shared_prefix_checkpoint: Any = neutral(False, _ATTENTION_ONLY)
    engram_config: Any = neutral(None, _ATTENTION_ONLY)
    gdn_prefill_backend: Any = neutral(None, _ATTENTION_ONLY)
    kda_decode_backend: Any = neutral(None, _ATTENTION_ONLY)
    kda_prefill_backend: Any = neutral(None, _ATTENTION_ONLY)
    mamba_backend: Any = neutral(None, _ATTENTION_ONLY, "triton")
    mamba_block_size: Any = neutral(None, _ATTENTION_ONLY)
    mamba_cache_dtype: Any = neutral("auto", _ATTENTION_ONLY)
    mamba_cache_mode: Any = neutral(None, _ATTENTION_ONLY)
    mamba_cache_philox_rounds: Any = neutral(0, _ATTENTION_ONLY)
    mamba_config: Any = neutral(None, _ATTENTION_ONLY, {})
    mamba_ssm_cache_dtype: Any = neutral("auto", _ATTENTION_ONLY)
    mamba_ssu_algorithm: Any = neutral(None, _ATTENTION_ONLY)
    replayssm_buffer_len: Any = neutral(16, _ATTENTION_ONLY)
    swa_bounded_replay: Any = neutral(True, _ATTENTION_ONLY)
    use_replayssm: Any = neutral(False, _ATTENTION_ONLY)
    attention_backend: Any = neutral(None, _ONE_KERNEL)
    attention_config: Any = neutral(None, _ONE_KERNEL, {})
    enable_flashinfer_autotune: Any = neutral(None, _ONE_KERNEL)
    ir_op_priority: Any = neutral(None, _ONE_KERNEL, {})
    kernel_config: Any = neutral(None, _ONE_KERNEL, {})
    linear_backend: Any = neutral("auto", _ONE_KERNEL)
    moe_backend: Any = neutral("auto", _ONE_KERNEL)
    monokernel: Any = neutral(False, _ONE_KERNEL)
    sparse_indexer_topk_backend: Any = neutral("auto", _ONE_KERNEL)
    use_fp64_gumbel: Any = neutral(False, _ONE_KERNEL)
    cudagraph_capture_sizes: Any = neutral(None, _GRAPHS)
    max_cudagraph_capture_size: Any = neutral(None, _GRAPHS)
    jit_monitor_mode: Any = neutral("warn", _NOT_COMPILED)
    jit_monitor_verbose: Any = neutral(False, _NOT_COMPILED)
    optimization_level: Any = neutral(2, _NOT_COMPILED, None)
    performance_mode: Any = neutral("balanced", _NOT_COMPILED)
    aggregate_engine_logging: Any = neutral(False, _METRICS)
    cudagraph_metrics: Any = neutral(False, _METRICS)
    custom_histogram_buckets: Any = neutral(None, _METRICS)
    enable_layerwise_nvtx_tracing: Any = neutral(False, _METRICS)
    enable_logging_iteration_details: Any = neutral(False, _METRICS)
    enable_mfu_metrics: Any = neutral(False, _METRICS)
    kv_cache_metrics: Any = neutral(False, _METRICS)
    kv_cache_metrics_sample: Any = neutral(0.01, _METRICS)
    profiler_config: Any = neutral(None, _METRICS, {})
    log_config_file: Any = neutral(None, _LOGGING)
    log_level: Any = neutral(None, _LOGGING)
    logging_config: Any = neutral(None, _LOGGING)
    cpu_offload_params: Any = neutral(None, _ON_DEVICE, set())
    offload_backend: Any = neutral("auto", _ON_DEVICE)
    offload_group_size: Any = neutral(0, _ON_DEVICE)
    offload_num_in_group: Any = neutral(1, _ON_DEVICE)
    offload_params: Any = neutral(None, _ON_DEVICE, set())
    offload_prefetch_step: Any = neutral(1, _ON_DEVICE)
    kv_offloading_backend: Any = neutral(
        "native", "preemption_mode='swap' moves blocks to the host"
    )
    kv_offloading_size: Any = neutral(None, "preemption_mode='swap' moves blocks to the host")
    per_request_spec_decode_metrics: Any = neutral("none", _NO_SPECULATION)
    spec_method: Any = neutral(None, _NO_SPECULATION)
    spec_model: Any = neutral(None, _NO_SPECULATION)
    spec_tokens: Any = neutral(None, _NO_SPECULATION)
    allow_deprecated_quantization: Any = neutral(False, _FULL_PRECISION)
    quantization_config: Any = neutral(None, _FULL_PRECISION)
    pt_load_map_location: Any = neutral("cpu", _MAPPED)
    safetensors_load_strategy: Any = neutral(None, _MAPPED)
    safetensors_prefetch_block_size: Any = neutral(1 << 24, _MAPPED, None)
    safetensors_prefetch_num_threads: Any = neutral(8, _MAPPED, None)
    model_class_overrides: Any = neutral(None, _ONE_MODEL, {})
    model_weights: Any = neutral("", _ONE_MODEL)
    max_num_queued_reqs: Any = neutral(None, "a server bounds what waits; see `mie serve --help`")
    max_num_queued_tokens: Any = neutral(None, "a server bounds what waits; see `mie serve --help`")
    max_num_active_seqs: Any = neutral(None, "max_num_seqs is its name in mie")
    max_num_scheduled_tokens: Any = neutral(None, "max_num_batched_tokens is its name in mie")
    long_prefill_token_threshold_adaptive: Any = neutral(
        False, "max_prefill_chunk bounds the chunk of a prompt"
    )
    prefill_schedule_interval: Any = neutral(1, "max_prefill_chunk bounds the chunk of a prompt")
    scheduler_reserve_full_isl: Any = neutral(True, "admission reserves blocks for a whole prompt")
    kv_cache_dtype_skip_layers: Any = neutral(None, "the KV cache of all layers has one dtype", ())
    kv_sharing_fast_prefill: Any = neutral(False, "layers do not share their keys and values")
    prefix_cache_retention_interval: Any = neutral(0, "max_cached_blocks bounds the prefix cache")
    prefix_match_unit: Any = neutral(None, "max_cached_blocks bounds the prefix cache")
    reasoning_config: Any = neutral(None, "reasoning_parser selects the format")
    reasoning_parser_plugin: Any = neutral(None, "reasoning_parser selects the format")
    renderer_num_workers: Any = neutral(1, "one worker process renders templates")
    return_sampling_mask: Any = neutral(False, "logprobs has the log-probabilities of tokens")
    enable_return_routed_experts: Any = neutral(False, "routed experts are not returned")
    tokens_only: Any = neutral(False, "skip_tokenizer_init is its name in mie")
    watermark_config: Any = neutral(None, "tokens are not watermarked")
    diffusion_config: Any = neutral(None, "mie generates one token after another")
    enable_cumem_allocator: Any = neutral(False, _NO_SLEEP)
    sleep_mode_backend: Any = neutral("cumem", _NO_SLEEP)
    sleep_mode_offload_cudagraph: Any = neutral(False, _NO_SLEEP)
    sleep_preserve_parameter_names: Any = neutral(None, _NO_SLEEP, ())
    weight_transfer_config: Any = neutral(None, "load a new LLM from the new checkpoint")
    fail_on_environ_validation: Any = neutral(False, "mie reads no environment variables of vLLM")
    aux_output_config: Any = neutral(
        None, "outputs have tokens, text and log-probabilities only", {}
    )
    chat_template: Any = neutral(None, "pass chat_template to LLM.chat")

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
