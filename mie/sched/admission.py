"""Refuse settings under which a request might never run, and requests that cannot run."""

from mie.config.engine import EngineConfig
from mie.errors import ConfigError, RequestError, shown
from mie.memory.manager import KVCacheManager
from mie.params.checks import check_length
from mie.sched.sequence import Request


def check_budget(config: EngineConfig, max_model_len: int) -> None:
    """Raise `ConfigError` if a whole context can be too long for the step that must take it."""
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}; without chunked"
            f" prefill a step must hold a whole context of {max_model_len} tokens (raise it to"
            " that, lower max_model_len, or allow enable_chunked_prefill)"
        )


def check_fits(
    request: Request, config: EngineConfig, manager: KVCacheManager, max_model_len: int
) -> None:
    """Raise `RequestError` if even an idle engine could not serve the request."""
    num_prompt = request.num_prompt
    check_length(num_prompt, max_model_len)
    if manager.blocks_for(num_prompt) > manager.num_blocks:
        raise RequestError(
            f"prompt has {num_prompt} tokens; the KV cache holds "
            f"{manager.num_blocks * manager.block_size} "
            f"(raise num_blocks to at least {manager.blocks_for(num_prompt + 1)})"
        )
    if request.priority and config.scheduling_policy != "priority":
        raise RequestError(
            f"priority is {request.priority}; the engine schedules by {config.scheduling_policy} "
            "(set scheduling_policy='priority')"
        )
    if request.client is not None and config.scheduling_policy != "fair":
        raise RequestError(
            f"client is {shown(request.client)}; the engine schedules by "
            f"{config.scheduling_policy} (set scheduling_policy='fair')"
        )
