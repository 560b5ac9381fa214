"""Check a request on its own, independent of the engine's settings."""

import re
from collections.abc import Sequence
from numbers import Integral

from mie.config.engine import DEFAULT_LIMITS, RequestLimits
from mie.config.params.sampling import SamplingParams
from mie.errors import PromptTooLongError, RequestError, shown

_AUTOMATIC_ID = re.compile(r"auto-\d+")


def automatic_id(number: int) -> str:
    """Return the id of a request that was added without one."""
    return f"auto-{number}"


def check_request_id(request_id: object, limits: RequestLimits = DEFAULT_LIMITS) -> None:
    """Raise `RequestError` unless it is text that may be the id of a request."""
    _check_text("request_id", request_id, limits.max_request_id_chars)


def check_token_ids(token_ids: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` unless all token ids of the prompt and the parameters are in range."""
    if not token_ids:
        raise RequestError("prompt is empty; it needs at least one token")
    last = vocab_size - 1
    for what, ids in (("prompt", token_ids), *params.named_token_ids.items()):
        if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= last):
            continue
        for token_id in ids:
            if not _is_integer(token_id) or not 0 <= token_id <= last:
                raise RequestError(
                    f"{what} has token id {shown(token_id)}; the vocabulary has ids 0 … {last}"
                )


def check_length(num_prompt: int, max_model_len: int) -> None:
    """Raise `PromptTooLongError` if a prompt of that many tokens leaves no room for an answer."""
    if num_prompt >= max_model_len:
        raise PromptTooLongError(
            f"prompt has {num_prompt} tokens; the context holds {max_model_len}, the answer "
            "included (shorten the prompt, or raise max_model_len to at least "
            f"{num_prompt + 1} if the model allows it)",
            num_prompt,
            max_model_len,
        )


def check_something_allowed(
    params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int
) -> None:
    """Raise `RequestError` if all tokens could be banned at once, leaving none to sample.

    ``min_tokens`` bans the tokens that end the output, and each bad word bans its last token.
    """
    if params.bad_words:
        raise RequestError(
            "bad_words needs a tokenizer, and the engine has none (give bad_words_token_ids)"
        )
    allowed = params.allowed_token_ids or range(vocab_size)
    banned = set(params.end_token_ids(eos_token_ids)) if params.min_tokens else set()
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


def check_labels(
    request_id: object,
    priority: object,
    cache_salt: object,
    client: object = None,
    limits: RequestLimits = DEFAULT_LIMITS,
) -> None:
    """Raise `RequestError` unless a caller may choose these. An id of None chooses no id."""
    if request_id is not None:
        check_request_id(request_id, limits)
        if _AUTOMATIC_ID.fullmatch(str(request_id)):
            raise RequestError(
                f"request id {request_id!r} has the form of an automatic id; choose another"
            )
    if not _is_integer(priority):
        raise RequestError(f"priority must be an integer; got {shown(priority)}")
    if not -(2**63) <= priority < 2**63:  # type: ignore[operator]  # it is an integer
        raise RequestError(f"priority must be in -2**63 … 2**63 - 1; got {shown(priority)}")
    if cache_salt is not None:
        _check_text("cache_salt", cache_salt, limits.max_cache_salt_chars)
    if client is not None:
        _check_text("client", client, limits.max_request_id_chars)


def _check_text(name: str, value: object, max_chars: int) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a non-empty string; got {shown(value)}")
    if len(value) > max_chars:
        raise RequestError(f"{name} may have at most {max_chars} characters; got {len(value)}")


def check_logprobs(params: SamplingParams, limit: int) -> None:
    """Raise `RequestError` if more than ``limit`` log-probabilities are wanted; -1 is no limit."""
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if limit != -1 and count is not None and not 0 <= count <= limit:
            asked = "all" if count == -1 else count
            raise RequestError(f"{name} asks for {asked}; max_logprobs is {limit} (raise it)")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
