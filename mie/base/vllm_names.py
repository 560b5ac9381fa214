"""List the names of vLLM that mie does not have, in groups with one remedy each.

`mie.base.refusals` reads these tables, and docs/vllm.md explains them to a person who ports a
program.
"""

from collections.abc import Mapping

ONE_DEVICE = (
    "mie computes on one machine, and tensor_parallel_size divides a model among processes; "
    "backend and CUDA_VISIBLE_DEVICES select the device, and numactl binds processes to CPUs"
)
TEXT_ONLY = "mie generates text from text; run embedding, multimodal and other models with vLLM"
LORA = "adapters are loaded into slots in float32, and stay until they are removed"
SPECULATION = "speculative_config says how mie speculates; drafts are looked up, without a model"
WEIGHTS = (
    "weights are read once and stay in memory; load a new LLM from the new checkpoint, and compare "
    "checkpoints by weights_digest()"
)
MEMORY = "an engine keeps its memory; delete the LLM and load another"
FILES = (
    "mie reads config.json, tokenizer.json and the weights of a directory or a GGUF file, and runs "
    "no code from it; hf_overrides changes config.json, and HF_TOKEN is the token of the hub"
)
KERNELS = "the backend chooses its kernels, and compiles no models"
CACHE = (
    "one prefix cache compares tokens in the memory of the engine; kv_cache_dtype is the dtype of "
    "all layers, and preemption_mode='swap' moves blocks to the host"
)
SCHEDULING = (
    "scheduling_policy, max_num_seqs, max_num_batched_tokens and max_prefill_chunk shape a step"
)
MEASUREMENTS = (
    "call get_metrics(), read the event log of --trace, or configure the logger 'mie' of Python's "
    "logging"
)
PROFILE = "use a profiler of Python, or LLM(trace=file) and `mie trace` for the time of each step"
SERVER = "it is for a server; see `mie serve --help`"
ANSWERS = "SamplingParams and the options of LLM.chat and of reasoning_parser shape an answer"
CALLBACKS = "mie calls no functions over logits; use logit_bias, allowed_token_ids or bad_words"
NO_WATERMARK = "tokens are not watermarked"
ROUTING = "routed experts are not returned"
ARGUMENTS = "llm.engine_args has the arguments, and llm.model_config the model"
PLAIN_PROMPT = "pass a text, a list of token ids, a TextPrompt or a TokensPrompt"
OPERATORS = (
    "an operator is a function of mie.ops, and a backend computes it (docs/howto/operator.md)"
)
FAMILIES = "a family is a row in mie.checkpoint.families (docs/howto/model-family.md)"

NEUTRAL: Mapping[str, Mapping[str, str]] = {
    "EngineArgs AsyncEngineArgs": {
        ONE_DEVICE: (
            "device=auto pipeline_parallel_size=1 data_parallel_size=1 "
            "decode_context_parallel_size=1 prefill_context_parallel_size=1 "
            "enable_expert_parallel=False distributed_executor_backend=None|mp|uni "
            "disable_custom_all_reduce=False|* all2all_backend=allgather_reducescatter "
            "cp_kv_cache_interleave_size=None cpu_distributed_timeout_seconds=None "
            "data_parallel_address=None data_parallel_backend=mp data_parallel_external_lb=False "
            "data_parallel_hybrid_lb=False data_parallel_multi_port_external_lb=False "
            "data_parallel_rank=None data_parallel_rpc_port=None data_parallel_size_local=None "
            "data_parallel_start_rank=None dbo_decode_token_threshold=32 "
            "dbo_prefill_token_threshold=512 dcp_comm_backend=None dcp_kv_cache_interleave_size=1 "
            "dcp_q_replicate=None disable_nccl_for_dp_synchronization=None "
            "distributed_timeout_seconds=None dp_sync_interval=16 elastic_ep_max_dp_size=None "
            "enable_batch_sharded_sampling=None enable_dbo=False enable_elastic_ep=False "
            "enable_ep_weight_filter=False enable_eplb=False enable_fault_tolerance=False "
            "enable_hc_sp=False enable_nccl_comm_suspend=False eplb_config=None|{} "
            "expert_placement_strategy=linear fault_tolerance_config=None|{} "
            "master_addr=127.0.0.1 master_port=29501 nnodes=1 node_rank=0 ubatch_size=0 "
            "device_ids=None numa_bind=False numa_bind_cpus=None numa_bind_nodes=None "
            "enable_shm_tensor_arena=False ray_workers_use_nsight=False shutdown_timeout=0 "
            "watchdog_config=None|{} max_parallel_loading_workers=None worker_cls=auto "
            "worker_extension_cls= renderer_num_workers=1"
        ),
        TEXT_ONLY: (
            "runner=auto|generate task=None|auto|generate convert=auto|none pooler_config=None "
            "enable_prompt_embeds=False diffusion_config=None allowed_media_domains=None "
            "disable_chunked_mm_input=False ec_manager_config=None|{} ec_transfer_config=None "
            "enable_mm_embeds=False enable_mm_processor_stats=False interleave_mm_strings=False "
            "io_processor_plugin=None language_model_only=False media_io_kwargs=None|{} "
            "mm_device_do_normalize=True mm_encoder_attn_backend=None mm_encoder_attn_dtype=None "
            "mm_encoder_fp8_scale_path=None mm_encoder_fp8_scale_save_margin=1.5 "
            "mm_encoder_fp8_scale_save_path=None mm_encoder_only=False mm_encoder_tp_mode=weights "
            "mm_hasher_algorithm=blake3 mm_ipc_gpu_memory_gb=0 mm_processor_cache_type=lru "
            "mm_processor_device=auto mm_shm_cache_max_object_size_mb=128 mm_tensor_ipc=direct_rpc "
            "video_pruning_method=evs video_pruning_rate=None mm_processor_kwargs=None|{} "
            "allowed_local_media_path= limit_mm_per_prompt=None|* mm_processor_cache_gb=4|* "
            "skip_mm_profiling=False|*"
        ),
        LORA: (
            "fully_sharded_loras=False max_cpu_loras=None|* default_mm_loras=None "
            "enable_mixed_moe_lora_format=False enable_moe_shared_loras=False "
            "enable_tower_connector_lora=False lora_dtype=auto "
            "lora_target_modules=None max_lora_cls_labels=None specialize_active_lora=False"
        ),
        SPECULATION: (
            "per_request_spec_decode_metrics=none spec_method=None spec_model=None spec_tokens=None"
        ),
        WEIGHTS: (
            "cpu_offload_gb=0|None cpu_offload_params=None|[] offload_params=None|[] "
            "offload_backend=auto offload_group_size=0 offload_num_in_group=1 "
            "offload_prefetch_step=1 weight_transfer_config=None"
        ),
        MEMORY: (
            "enable_sleep_mode=False enable_cumem_allocator=False sleep_mode_backend=cumem "
            "sleep_mode_offload_cudagraph=False sleep_preserve_parameter_names=None|[]"
        ),
        FILES: (
            "trust_remote_code=False|* tokenizer_mode=auto|hf|fast config_format=auto|hf "
            "model_impl=auto|vllm code_revision=None hf_token=None hf_config_path=None "
            "rope_scaling=None rope_theta=None model_loader_extra_config=None|{} "
            "ignore_patterns=None|* allow_deprecated_quantization=False quantization_config=None "
            "pt_load_map_location=cpu safetensors_load_strategy=None "
            "safetensors_prefetch_block_size=16777216|None "
            "safetensors_prefetch_num_threads=8|None model_class_overrides=None|{} "
            "model_weights= tokens_only=False fail_on_environ_validation=False "
            "additional_config=None|{} disable_sliding_window=False"
        ),
        KERNELS: (
            "compilation_config=None|0|{} optimization_level=2|None performance_mode=balanced "
            "jit_monitor_mode=warn jit_monitor_verbose=False attention_backend=None "
            "attention_config=None|{} override_attention_dtype=None disable_cascade_attn=False|* "
            "enable_flashinfer_autotune=None ir_op_priority=None|{} kernel_config=None|{} "
            "linear_backend=auto moe_backend=auto monokernel=False "
            "sparse_indexer_topk_backend=auto use_fp64_gumbel=False "
            "cudagraph_capture_sizes=None max_cudagraph_capture_size=None "
            "max_seq_len_to_capture=8192|* enable_mamba_cache_stochastic_rounding=False "
            "enable_mamba_shared_prefix_checkpoint=False engram_config=None "
            "gdn_prefill_backend=None kda_decode_backend=None kda_prefill_backend=None "
            "mamba_backend=None|triton mamba_block_size=None mamba_cache_dtype=auto "
            "mamba_cache_mode=None mamba_cache_philox_rounds=0 mamba_config=None|{} "
            "mamba_ssm_cache_dtype=auto mamba_ssu_algorithm=None replayssm_buffer_len=16 "
            "swa_bounded_replay=True use_replayssm=False"
        ),
        CACHE: (
            "prefix_caching_hash_algo=builtin|sha256 prefix_cache_retention_interval=0 "
            "prefix_match_unit=None kv_transfer_config=None kv_offloading_backend=native "
            "kv_offloading_size=None kv_sharing_fast_prefill=False "
            "kv_cache_dtype_skip_layers=None|[] calculate_kv_scales=False "
            "disable_hybrid_kv_cache_manager=False|* use_v2_block_manager=True|*"
        ),
        SCHEDULING: (
            "scheduler_cls=None scheduler_reserve_full_isl=True max_num_active_seqs=None "
            "max_num_scheduled_tokens=None long_prefill_token_threshold=0 "
            "long_prefill_token_threshold_adaptive=False prefill_schedule_interval=1 "
            "max_num_partial_prefills=1 max_long_partial_prefills=1 num_scheduler_steps=1"
        ),
        MEASUREMENTS: (
            "disable_log_stats=True|* disable_log_requests=True|* enable_log_requests=False "
            "log_config_file=None log_level=None logging_config=None kv_events_config=None "
            "collect_detailed_traces=None otlp_traces_endpoint=None aggregate_engine_logging=False "
            "cudagraph_metrics=False custom_histogram_buckets=None "
            "enable_layerwise_nvtx_tracing=False enable_logging_iteration_details=False "
            "enable_mfu_metrics=False kv_cache_metrics=False kv_cache_metrics_sample=0.01 "
            "show_hidden_metrics_for_version=None profiler_config=None|{}"
        ),
        SERVER: (
            "served_model_name=None|* max_num_queued_reqs=None max_num_queued_tokens=None "
            "enable_auto_tool_choice=False|* stream_interval=1"
        ),
        ANSWERS: (
            "chat_template=None structured_outputs_config=None|{} "
            "guided_decoding_backend=auto|guidance reasoning_config=None "
            "reasoning_parser_plugin=None logprobs_mode=raw_logprobs return_sampling_mask=False "
            "aux_output_config=None|{} enable_trace_replay=False|*"
        ),
        CALLBACKS: "logits_processors=None|[]",
        NO_WATERMARK: "watermark_config=None",
        ROUTING: "enable_return_routed_experts=False",
    },
    "SamplingParams": {
        "ask for n choices, or call LLM.beam_search with BeamSearchParams": (
            "best_of=None|1 use_beam_search=None|False length_penalty=None|1.0 "
            "early_stopping=None|False"
        ),
        "structured_outputs is its name": "guided_decoding=None|False",
        CALLBACKS: "logits_processors=None|[]",
        "logprobs and prompt_logprobs return a dict of the most likely tokens at each position": (
            "logprob_token_ids=None|False flat_logprobs=False|None prompt_logprob_start=None|0 "
            "prompt_logprob_token_ids=None|False"
        ),
        "a stream gives an output after every step": "stream_interval=None|1",
        "mie does not compare tokens; use repetition_penalty": "repetition_detection=None|False",
        "parameters are always copied": "skip_clone=False|True",
        NO_WATERMARK: "watermarking=None|False",
        ROUTING: "routed_experts_prompt_start=0|None",
    },
    "BeamSearchParams": {
        "beams are not constrained; use SamplingParams": (
            "structured_outputs=None|False allowed_token_ids=None|False"
        ),
        NO_WATERMARK: "watermarking=None|False",
    },
    "calls": {
        "only methods that generate take adapters": "lora_request=None",
        TEXT_ONLY: "mm_processor_kwargs=None|{}",
        ONE_DEVICE: (
            "data_parallel_rank=None enable_multiprocessing=False start_engine_loop=True "
            "reset_connector=False"
        ),
        MEASUREMENTS: (
            "arrival_time=None trace_headers=None|{} usage_context=None stat_loggers=None|[]"
        ),
        "pass {'prompt_token_ids': ids, 'prompt': text} as the prompt": (
            "prompt_token_ids=None prompt_text=None"
        ),
        "SamplingParams has truncate_prompt_tokens; else pass token ids": (
            "tokenization_kwargs=None|{}"
        ),
        "SamplingParams.structured_outputs is its name": "guided_options_request=None",
        "the prefix cache finds earlier turns by their tokens": "session_id=None kv_hints=None",
        "chat_template_kwargs of LLM.chat and reasoning_parser determine how an answer is read": (
            "reasoning_ended=None reasoning_parser_kwargs=None|{}"
        ),
        "abort the requests first": "reset_running_requests=False",
        "mie uses the caller's request ids": "internal=False",
        "shutdown waits for the current step only": "timeout=None",
    },
}
"""Arguments that are accepted at values without effect, by class; "calls" are of all methods.

``name=value|value`` lists the values, of which the first one is the default. No text is the empty
text, and ``*`` allows all values.
"""

REFUSED: Mapping[str, Mapping[str, str]] = {
    "LLM LLMEngine AsyncLLM": {
        LORA: "pin_lora",
        TEXT_ONLY: (
            "encode embed classify score pooling_task pooling_io_processors reset_mm_cache "
            "reset_encoder_cache"
        ),
        "mie has no worker processes; llm.engine is the engine, with its scheduler and its log": (
            "collective_rpc apply_model model_executor engine_class engine_core scheduler "
            "input_processor input_preprocessor output_processor output_handler renderer "
            "request_counter seq_counter get_kv_event_sources"
        ),
        ONE_DEVICE: (
            "dp_group external_launcher_dp has_unfinished_requests_dp should_execute_dummy_batch "
            "scale_elastic_ep get_external_elastic_ep_status handle_fault "
            "notify_kv_transfer_request_rejected"
        ),
        WEIGHTS: (
            "init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update "
            "start_draft_weight_update update_weights finish_weight_update update_weight_version "
            "get_weight_version set_weight_version compute_weight_checksums"
        ),
        MEMORY: (
            "sleep wake_up is_sleeping release_kv_cache_memory checkpoint_prepare "
            "checkpoint_restore"
        ),
        PROFILE: "start_profile stop_profile profiler",
        MEASUREMENTS: (
            "log_stats logger_manager do_log_stats do_log_stats_with_interval log_requests"
        ),
        ARGUMENTS: (
            "vllm_config model_config cache_config scheduler_config parallel_config device_config "
            "load_config decoding_config lora_config speculative_config observability_config "
            "structured_outputs_config compilation_config kv_transfer_config quant_config "
            "get_vllm_config get_model_config get_parallel_config get_scheduler_config "
            "get_decoding_config get_lora_config"
        ),
        "call from_engine_args(EngineArgs(…))": "from_vllm_config",
        "call get_tokenizer()": "get_tokenizer_group chat_template chat_template_config",
        "call get_default_sampling_params()": "default_sampling_params",
        "call generate(), which adds the request and returns its outputs": "add_request",
        "cancel requests with abort(), or stop adding them": (
            "pause_generation resume_generation is_paused wait_for_requests_to_drain"
        ),
        "call queue(), check_health() or is_running of AsyncLLM": (
            "check_admission admission_stats get_num_queued_tokens get_status "
            "should_keep_api_server_alive"
        ),
    },
    "LoadedModelConfig ModelFacts": {
        "llm.engine_args has the arguments, and an AsyncLLM is made from them": (
            "model model_weights tokenizer tokenizer_mode tokenizer_revision trust_remote_code "
            "seed revision code_revision quantization enforce_eager max_logprobs logprobs_mode "
            "skip_tokenizer_init served_model_name config_format hf_token hf_overrides "
            "generation_config override_generation_config enable_prompt_embeds model_impl "
            "allowed_local_media_path enable_sleep_mode logits_processors"
        ),
        "LLM.model_config has the facts of config.json under mie's names": (
            "hf_config hf_text_config hf_image_processor_config hf_config_path architectures "
            "is_moe get_num_experts is_quantized is_hybrid is_attention_free has_inner_state "
            "hidden_size get_sliding_window disable_sliding_window get_num_layers "
            "get_total_num_hidden_layers get_num_layers_by_block_type get_num_attention_heads "
            "get_num_kv_heads get_total_num_kv_heads get_vocab_size get_hidden_size get_head_size"
        ),
        "call get_default_sampling_params()": ("get_diff_sampling_param try_get_generation_config"),
        "read supported_tasks and runner_type of the LLM": (
            "supported_tasks supported_runner_types task runner_type runner"
        ),
        TEXT_ONLY: (
            "is_encoder_decoder is_cross_encoder is_multimodal_model "
            "is_multimodal_raw_input_only_model multimodal_config uses_mrope get_multimodal_config "
            "verify_with_parallel_config pooler_config attn_type convert"
        ),
    },
    "EngineArgs": {
        "mie reads EngineArgs itself; call LLM.from_engine_args(args)": (
            "create_diffusion_config create_engine_config create_load_config create_logging_config "
            "create_model_config create_observability_config create_speculative_config "
            "create_structured_outputs_config create_watermark_config get_batch_defaults "
            "validate_tensorizer_args"
        )
    },
    "SamplingParams BeamSearchParams StructuredOutputsParams": {
        "call get_tokenizer(), and read eos_token_id": "eos_token_id all_stop_token_ids",
        "parameters are plain values, checked when they are made and when a request is added": (
            "num_logprobs sampling_type output_text_buffer_length for_sampler_warmup verify "
            "update_from_generation_config update_from_tokenizer configure_logprobs "
            "all_constraints_none all_non_structural_tag_constraints_none"
        ),
    },
    "RequestOutput RequestMetrics": {
        "output_kind=CUMULATIVE returns everything so far": "add",
        "the event log of --trace has the cached blocks": "num_cache_creation_tokens",
        "logits that are not numbers end the request with an error": "is_corrupted",
        NO_WATERMARK: "is_watermarked is_watermark_skipped",
    },
    "prompts": {
        TEXT_ONLY: (
            "multi_modal_data media_io_kwargs mm_processor_kwargs multi_modal_uuids token_type_ids "
            "prompt_token_offsets"
        )
    },
    "mie": {
        TEXT_ONLY: (
            "PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput "
            "ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput "
            "PoolingParams MultiModalDataDict"
        ),
        PLAIN_PROMPT: "SingletonPrompt DataPrompt EmbedsPrompt ExplicitEncoderDecoderPrompt",
        FAMILIES: "ModelRegistry",
        "run `mie serve --replicas N --ray-address auto`": "initialize_ray_cluster",
        "StructuredOutputsParams is its name": "GuidedDecodingParams",
    },
    "modules": {
        "import LLM, LLMEngine, AsyncLLM, EngineArgs and SamplingParams from mie": (
            "v1 engine.llm_engine engine.async_llm_engine engine.protocol engine.arg_utils"
        ),
        "import RequestOutput and CompletionOutput from mie": "outputs",
        "import TextPrompt, TokensPrompt and PromptType from mie": "inputs",
        (
            "import SamplingParams, BeamSearchParams, StructuredOutputsParams and "
            "RequestOutputKind from mie"
        ): "sampling_params",
        "import Logprob from mie": "logprobs",
        TEXT_ONLY: "pooling_params multimodal",
        "import LoRARequest from mie": "lora",
        ONE_DEVICE: "distributed worker executor platforms",
        "run `mie serve`, or send requests to AsyncLLM": "entrypoints",
        "mie has no such helpers; use Python's or vLLM's": (
            "utils transformers_utils scalar_type third_party plugins usage"
        ),
        MEASUREMENTS: "logger",
        "the environment variables of mie begin with MIE_ (docs/settings.md)": "envs",
        ARGUMENTS: "config.model config.vllm",
        FAMILIES: "model_executor",
        OPERATORS: "_custom_ops attention compilation kernels",
        "mie inspect --families lists the formats of tool calls and of reasoning": (
            "tool_parsers reasoning"
        ),
        "pass the tokenizer's directory as LLM(tokenizer=...), and call get_tokenizer()": (
            "tokenizers"
        ),
        PROFILE: "profiler tracing",
        "run `mie bench`": "benchmarks",
    },
}
"""Names that are refused, by the classes that lack them, and by module; a remedy for each group.

"prompts" are the keys of a prompt, "mie" the names of the module itself, "modules" its modules.
"""
