"""Refuse settings under which a request might never run, and requests that cannot run."""

from collections.abc import Set

from mie.config.engine import EngineConfig
from mie.errors import ConfigError, RequestError
from mie.memory.manager import KVCacheManager
from mie.params.sampling import SamplingParams
from mie.sched.sequence import Request


def check_budget(config: EngineConfig, max_model_len: int) -> None:
    """Raise `ConfigError` if a whole context can be too long for the step that must take it."""
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}; without chunked"
            f" prefill a step must hold a whole context of {max_model_len} tokens (raise it to"
            " that, lower max_model_len, or allow enable_chunked_prefill)"
        )


def check_length(num_prompt: int, max_model_len: int) -> None:
    """Raise `RequestError` if a prompt of that many tokens leaves no room for an answer."""
    if num_prompt >= max_model_len:
        raise RequestError(
            f"prompt has {num_prompt} tokens; the context holds {max_model_len}, the answer "
            "included (shorten the prompt, or raise max_model_len to at least "
            f"{num_prompt + 1} if the model allows it)"
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


def check_something_allowed(
    params: SamplingParams, end_token_ids: Set[int], vocab_size: int
) -> None:
    """Raise `RequestError` if all tokens could be banned at once, leaving none to sample.

    ``min_tokens`` bans ``end_token_ids``, and each bad word bans its last token.
    """
    if params.bad_words:
        raise RequestError(
            "bad_words needs a tokenizer, and the engine has none (give bad_words_token_ids)"
        )
    allowed = params.allowed_token_ids or range(vocab_size)
    banned = set(end_token_ids) if params.min_tokens else set()
    if params.allowed_token_ids and banned.issuperset(allowed):
        raise RequestError(
            f"allowed_token_ids {list(allowed)} all end the sequence, but "
            f"min_tokens={params.min_tokens} forbids it; allow another, or set min_tokens to 0"
        )
    banned.update(ids[-1] for ids in params.bad_words_token_ids or ())
    if banned and banned.issuperset(allowed):
        raise RequestError(
            "bad words may ban every allowed token, so that none can be sampled; allow "
            "another token, or leave out a word"
        )
