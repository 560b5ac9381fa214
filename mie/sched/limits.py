"""Compute the limits of a step, and refuse settings and requests that could never run."""

import math

from mie.config.engine import EngineConfig
from mie.config.params.checks import check_length
from mie.errors import ConfigError, RequestError, shown
from mie.memory.manager import KVCacheManager
from mie.sched.sequence import Request


def check_budget(config: EngineConfig, max_model_len: int) -> None:
    """Raise `ConfigError` if a whole context can be too long for the step that must take it."""
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}; without chunked"
            f" prefill a step must hold a whole context of {max_model_len} tokens (raise it to"
            " that, lower max_model_len, or allow enable_chunked_prefill)"
        )


def max_chunk(config: EngineConfig) -> int:
    """Return the maximum number of tokens of a chunk."""
    return config.max_prefill_chunk or config.max_num_batched_tokens


def chunk_size(config: EngineConfig, num_missing: int, most: int) -> int:
    """Return how many of a prompt's missing tokens a step takes, of at most ``most``."""
    if not config.enable_chunked_prefill:
        return num_missing if num_missing <= most else 0
    return min(num_missing, most, max_chunk(config))


def watermark_blocks(config: EngineConfig, manager: KVCacheManager) -> int:
    """Return the number of blocks that admission leaves free while others run."""
    return math.ceil(config.watermark * manager.num_blocks)


def check_fits(
    request: Request, config: EngineConfig, manager: KVCacheManager, max_model_len: int
) -> None:
    """Raise `RequestError` if even an idle engine could not serve the request."""
    num_prompt, policy = request.num_prompt, config.scheduling_policy
    check_length(num_prompt, max_model_len)
    if num_prompt > manager.capacity:
        raise RequestError(
            f"prompt has {num_prompt} tokens; the KV cache holds {manager.capacity} "
            f"(raise num_blocks to at least {manager.blocks_needed(num_prompt + 1)})"
        )
    for name, value, needed in (
        ("priority", request.priority or None, "priority"),
        ("client", request.client, "fair"),
    ):
        if value is not None and policy != needed:
            raise RequestError(
                f"{name} is {shown(value)}; the engine schedules by {policy} "
                f"(set scheduling_policy={needed!r})"
            )
