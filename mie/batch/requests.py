"""Answer requests as a stream: new ones are added while others run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from mie.config.params.sampling import RequestOutputKind, SamplingParams
from mie.errors import ConfigError, RequestError
from mie.frontend.outputs import RequestOutput
from mie.llm import LLM

PROMPTS = ("prompt", "messages", "prompt_token_ids")
"""The names of a request's prompt, of which it has exactly one."""
_LABELS = ("cache_salt", "priority")

Key = TypeVar("Key")
Request: TypeAlias = Mapping[str, Any]
"""A request: one of `PROMPTS`, any sampling parameters, ``cache_salt`` and ``priority``."""


def answers(
    llm: LLM, requests: Iterable[tuple[str, Request]]
) -> Iterator[tuple[str, RequestOutput]]:
    """Yield (id, output) of each request as it ends; an output may have an ``error``.

    The id of a request is unique, and stands in for a seed if it has none, so that its answer
    depends on nothing but the request and the engine's settings. The iterable is read as requests
    end: it may be of any length.
    """

    def params_of(key: str, request: Request) -> SamplingParams:
        no_limit = {"max_tokens": None} if "messages" in request else {}
        defaults = {"seed": seed_of(key), **no_limit, **llm.generation_config.sampling}
        return SamplingParams(**{**defaults, **sampling_of(request)})

    given = (
        (key, {name: value for name, value in request.items() if value is not None})
        for key, request in requests
    )
    num_at_once = 2 * llm.engine.config.max_num_seqs  # so that none waits for the iterable
    with closing(run(llm, given, params_of, num_at_once=num_at_once)) as outputs:
        for key, output in outputs:
            output.request_id = key
            yield key, output


def run(
    llm: LLM,
    requests: Iterable[tuple[Key, Request]],
    params_of: Callable[[Key, Request], SamplingParams],
    *,
    num_at_once: int | None = None,
    is_strict: bool = False,
) -> Generator[tuple[Key, RequestOutput], None, None]:
    """Yield (key, output) of each request as it ends, at most ``num_at_once`` in the engine.

    A request that is refused has an output with an ``error``. With ``is_strict`` it is raised.
    """
    coming = iter(requests)
    # The engine names the requests, because the ids of an earlier call may still be in its outputs.
    running: dict[str, Key] = {}
    try:
        while True:
            num_read = 0
            for key, request in islice(coming, num_at_once and num_at_once - len(running)):
                num_read += 1
                try:
                    params = params_of(key, request)
                    params.output_kind = RequestOutputKind.FINAL_ONLY
                    prompt, priority = prompt_of(llm, request), request.get("priority", 0)
                    running[llm.add_request(prompt, params, priority=priority)] = key
                except (ConfigError, RequestError) as error:
                    if is_strict:
                        raise
                    yield key, _refused(str(error))
            if not num_read and not running:
                return
            for output in llm.step() if running else ():
                if output.request_id in running:  # otherwise an earlier call has left it behind
                    yield running.pop(output.request_id), output
    finally:
        for request_id in running:  # the caller has left
            llm.abort(request_id)


def prompt_of(llm: LLM, request: Request) -> dict[str, Any]:
    """Return the prompt of a request as `LLM.add_request` takes it.

    Raises:
        RequestError: the request has none, or several.
    """
    given = {name: request[name] for name in PROMPTS if name in request}
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise RequestError(f"a request needs one of {', '.join(PROMPTS)}; got {got}")
    prompt = llm.chat_prompt(given["messages"]) if "messages" in given else given
    return {**prompt, "cache_salt": request.get("cache_salt")}


def sampling_of(request: Request) -> dict[str, Any]:
    """Return the sampling parameters of a request."""
    others = {*PROMPTS, *_LABELS}
    return {name: value for name, value in request.items() if name not in others}


def seed_of(request_id: str) -> int:
    """Return the seed of a request that has none."""
    digest = blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _refused(error: str) -> RequestOutput:
    return RequestOutput(
        request_id="", prompt=None, prompt_token_ids=[], outputs=[], finished=True, error=error
    )
