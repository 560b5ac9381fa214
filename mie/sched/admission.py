"""What is refused at the door: settings under which a request might never run, and a request that
could not."""

from mie.config import EngineConfig
from mie.errors import ConfigError, RequestError
from mie.memory.manager import KVCacheManager
from mie.sched.sequence import Request


def check_budget(config: EngineConfig, max_model_len: int) -> None:
    """Raise `ConfigError` if a whole context may be too long for the step that must take it."""
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}; without chunked"
            f" prefill a step must take a whole context of {max_model_len} tokens (raise it to"
            " that, lower max_model_len, or allow enable_chunked_prefill)"
        )


def check_fits(
    request: Request, config: EngineConfig, manager: KVCacheManager, max_model_len: int
) -> None:
    """Raise `RequestError` if even an idle engine could not serve the request."""
    num_prompt = request.num_prompt
    if num_prompt >= max_model_len:
        raise RequestError(
            f"prompt has {num_prompt} tokens; the context holds {max_model_len}, the answer "
            "included (shorten the prompt, or raise max_model_len to at least "
            f"{num_prompt + 1} if the model allows it)"
        )
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
