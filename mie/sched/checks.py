"""Check a request on its own, independent of the engine's settings."""

import re
from collections.abc import Container, Sequence
from numbers import Integral

from mie.errors import RequestError
from mie.sched.params import SamplingParams

_AUTOMATIC_ID = re.compile(r"auto-\d+")


def automatic_id(number: int) -> str:
    """Return the id of a request that was added without one."""
    return f"auto-{number}"


def check_request_id(request_id: object, in_use: Container[object]) -> None:
    """Raise `RequestError` unless this id is valid for a caller to choose. None chooses no id."""
    if request_id is None:
        return
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(f"request_id must be a non-empty string; got {request_id!r}")
    if _AUTOMATIC_ID.fullmatch(request_id):
        raise RequestError(
            f"request id {request_id!r} has the form of an automatic id; choose another"
        )
    if request_id in in_use:
        raise RequestError(f"request id {request_id!r} is in use; choose another")


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
                    f"{what} has token id {token_id!r}; the vocabulary has ids 0 … {last}"
                )


def check_labels(priority: object, cache_salt: object) -> None:
    """Raise `RequestError` unless both have the right type."""
    if not _is_integer(priority):
        raise RequestError(f"priority must be an integer; got {priority!r}")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError(f"cache_salt must be a non-empty string; got {cache_salt!r}")


def check_logprobs(params: SamplingParams, limit: int) -> None:
    """Raise `RequestError` if more than ``limit`` log-probabilities are wanted; -1 is no limit."""
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if limit != -1 and count is not None and not 0 <= count <= limit:
            asked = "all" if count == -1 else count
            raise RequestError(f"{name} asks for {asked}; max_logprobs is {limit} (raise it)")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
