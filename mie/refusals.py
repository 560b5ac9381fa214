"""List the names of vLLM that mie does not have, each with the remedy, and refuse them.

`REFUSED` maps a class, or a module of vLLM, to its names. docs/vllm.md shows the whole table.
"""

from collections.abc import Mapping
from typing import NoReturn, TypeVar

from mie.errors import UnsupportedImportError, UnsupportedNameError

T = TypeVar("T")


def _each(remedy: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), remedy)


_POOLING = "mie runs generative models only; run an embedding model or classifier with vLLM"
_TEXT_ONLY = "mie runs text models only"
_LORA = "mie has no LoRA adapters; merge the adapter into the checkpoint"
_PLAIN_PROMPT = "pass a text, a list of token ids, a TextPrompt or a TokensPrompt"
_WORKERS = "mie has no worker processes; llm.engine is the engine in this process"
_WEIGHTS = "weights are read once; load a new LLM from the new checkpoint"
_MEMORY = "an engine keeps its memory; delete the LLM and load another"
_PROFILE = "use a profiler of Python, or LLM(trace=file) and `mie trace` for the time of each step"
_CONFIGS = "llm.engine_args has the arguments and llm.model_config the model"
_STATS = "call get_metrics()"
_INSIDE = "read llm.engine, whose scheduler and log are public"
_ONE_DEVICE = "mie computes on one device"
_CLOSED = "cancel requests with abort(), or stop adding them"

_ENGINE = {
    **_each(_LORA, "add_lora list_loras pin_lora remove_lora"),
    **_each(_WORKERS, "collective_rpc"),
    **_each(_WEIGHTS, "get_weight_version"),
    **_each(_MEMORY, "sleep wake_up is_sleeping release_kv_cache_memory"),
    **_each(_PROFILE, "start_profile stop_profile"),
    **_each(_TEXT_ONLY, "reset_mm_cache reset_encoder_cache"),
    **_each(_CONFIGS, "vllm_config observability_config"),
    **_each(_STATS, "log_stats logger_manager do_log_stats"),
    **_each(_INSIDE, "engine_core output_processor input_processor renderer"),
    **_each("call from_engine_args(EngineArgs(…))", "from_vllm_config"),
}

_UPDATES = _each(
    _WEIGHTS,
    "init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update "
    "start_draft_weight_update update_weights finish_weight_update update_weight_version",
)

_POOLING_OUTPUTS = _each(
    _POOLING,
    "PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput "
    "ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput",
)

_PROMPT = _each(
    _TEXT_ONLY, "multi_modal_data media_io_kwargs mm_processor_kwargs multi_modal_uuids"
)

REFUSED: Mapping[str, Mapping[str, str]] = {
    # Modules.
    "vllm": {
        **_POOLING_OUTPUTS,
        "PoolingParams": _POOLING,
        "ModelRegistry": "a family is flags in mie.checkpoint.config (docs/howto/model-family.md)",
        "initialize_ray_cluster": "run `mie serve --replicas N --ray-address auto`",
    },
    "vllm.inputs": {
        **_each(_PLAIN_PROMPT, "DataPrompt EmbedsPrompt ExplicitEncoderDecoderPrompt"),
        **_each(
            _TEXT_ONLY,
            "ModalityData MultiModalDataBuiltins MultiModalDataDict MultiModalEncDecInput "
            "MultiModalHashes MultiModalInput MultiModalPlaceholders MultiModalUUIDDict mm_input",
        ),
        **_each(
            _PLAIN_PROMPT,
            "DecoderOnlyEngineInput EmbedsInput EncoderDecoderInput EngineInput SingletonInput "
            "TokensInput build_enc_dec_input embeds_input mm_enc_dec_input split_enc_dec_input "
            "tokens_input",
        ),
    },
    "vllm.sampling_params": {
        "SamplingType": "temperature=0 takes the most likely token, seed fixes the others",
        "RepetitionDetectionParams": "loops are not detected; use repetition_penalty",
        "GuidedDecodingParams": "StructuredOutputsParams is its name",
    },
    "vllm.pooling_params": _each(
        _POOLING, "PoolingParams LateChunkingParams LateInteractionParams"
    ),
    "vllm.outputs": {
        **_POOLING_OUTPUTS,
        **_each(_POOLING, "LateChunk LateChunkingMetadata"),
        "RequestError": "catch mie.errors.RequestError, or read RequestOutput.error",
        "SamplingMask": "logprobs=-1 returns the log-probabilities of the whole vocabulary",
        "WeightVersionSpan": _WEIGHTS,
    },
    "vllm.logprobs": {"FlatLogprobs": "logprobs are a dict for each position"},
    "vllm.lora.request": {"LoRARequest": _LORA},
    # Classes.
    "LLM": {
        **_each(_POOLING, "encode embed classify score pooling_task pooling_io_processors"),
        **_each(_WORKERS, "collective_rpc apply_model"),
        **_UPDATES,
        "get_weight_version": "call weights_digest()",
        **_each(_MEMORY, "sleep wake_up release_kv_cache_memory"),
        **_each(_PROFILE, "start_profile stop_profile"),
        "reset_mm_cache": _TEXT_ONLY,
        **_each(_INSIDE, "engine_class input_processor renderer request_counter"),
        "chat_template": "call get_tokenizer().chat_template",
        "chat_template_config": "call get_tokenizer().chat_template",
        "default_sampling_params": "call get_default_sampling_params()",
    },
    "LLMEngine": {
        **_ENGINE,
        "apply_model": _WORKERS,
        "set_weight_version": _WEIGHTS,
        "model_executor": _WORKERS,
        "do_log_stats_with_interval": _STATS,
        **_each(
            _ONE_DEVICE,
            "dp_group external_launcher_dp has_unfinished_requests_dp should_execute_dummy_batch",
        ),
    },
    "AsyncLLM": {
        **_ENGINE,
        **_UPDATES,
        "get_weight_version": "call weights_digest()",
        "encode": _POOLING,
        "add_request": "call generate(), which adds the request and yields its outputs",
        **_each(_INSIDE, "output_handler get_kv_event_sources"),
        **_each("call get_model_config()", "model_config scheduler_config"),
        **_each(_PROFILE, "profiler"),
        "log_requests": "mie does not log requests",
        **_each(_CLOSED, "pause_generation resume_generation is_paused wait_for_requests_to_drain"),
        **_each("call queue()", "check_admission admission_stats get_num_queued_tokens"),
        **_each(_MEMORY, "checkpoint_prepare checkpoint_restore"),
        "compute_weight_checksums": "call weights_digest()",
        **_each(_ONE_DEVICE, "scale_elastic_ep get_external_elastic_ep_status handle_fault"),
        "get_status": "call check_health()",
        "should_keep_api_server_alive": "read is_running",
        "notify_kv_transfer_request_rejected": "engines do not exchange KV blocks",
    },
    "EngineArgs": _each(
        "mie reads EngineArgs itself; call LLM.from_engine_args(args)",
        "create_diffusion_config create_engine_config create_load_config create_logging_config "
        "create_model_config create_observability_config create_speculative_config "
        "create_structured_outputs_config create_watermark_config get_batch_defaults "
        "validate_tensorizer_args",
    ),
    "SamplingParams": {
        **_each("read get_tokenizer().eos_token_id", "eos_token_id all_stop_token_ids"),
        "num_logprobs": "read logprobs",
        "sampling_type": "temperature == 0 takes the most likely token",
        "output_text_buffer_length": "stop strings determine how much text is kept back",
        "for_sampler_warmup": "samplers need no warm-up",
        "update_from_generation_config": "get_default_sampling_params() has the model's values",
        "update_from_tokenizer": "bad words are encoded when the request is added",
        "verify": "parameters are checked when they are made and when they are used",
    },
    "BeamSearchParams": {"configure_logprobs": "a beam search asks for what it needs"},
    "StructuredOutputsParams": _each(
        "exactly one of json, regex, choice, grammar and json_object is given",
        "all_constraints_none all_non_structural_tag_constraints_none",
    ),
    "RequestOutput": {
        "add": "output_kind=CUMULATIVE returns everything so far",
        "num_cache_creation_tokens": "the event log of --trace tells which blocks are cached",
    },
    "RequestMetrics": {
        "is_corrupted": "logits that are not numbers end the request with an error",
        **_each("tokens are not watermarked", "is_watermarked is_watermark_skipped"),
    },
    # Keys of prompts.
    "TextPrompt": _PROMPT,
    "TokensPrompt": {
        **_PROMPT,
        "token_type_ids": _POOLING,
        "prompt_token_offsets": "offsets of tokens are not used",
    },
}


def missing(module: str, name: str) -> Exception:
    """Return the error for a name that a module does not have, for its ``__getattr__``.

    For a name of vLLM it is an `UnsupportedImportError` with the remedy.
    """
    ours = module.replace("vllm", "mie", 1)
    remedy = REFUSED[module].get(name)
    if remedy is None:
        return AttributeError(f"module {ours!r} has no attribute {name!r}")
    return UnsupportedImportError(f"{ours} has no {name}: {remedy}")


def refuses_names(cls: type[T]) -> type[T]:
    """Decorate a class so that each of vLLM's names that it lacks is refused with the remedy.

    Reading one raises `UnsupportedNameError`, an ``AttributeError``, so that ``hasattr`` is False.
    """
    for name, remedy in REFUSED[cls.__name__].items():
        setattr(cls, name, _Refusal(f"{cls.__name__} has no {name}: {remedy}"))
    return cls


class _Refusal:
    """A class attribute that cannot be read."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise UnsupportedNameError(self._message)
