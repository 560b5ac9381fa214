"""Answer requests as a stream: new ones are added while others run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from typing import Any

from mie.errors import ConfigError, RequestError
from mie.frontend.outputs import RequestOutput
from mie.llm import LLM
from mie.params.sampling import RequestOutputKind, SamplingParams

PROMPTS = ("prompt", "messages", "prompt_token_ids")
"""What a request has one of."""


def answers(
    llm: LLM, requests: Iterable[tuple[str, Mapping[str, Any]]]
) -> Iterator[tuple[str, RequestOutput]]:
    """Yield (id, output) of each request as it ends; an output may have an ``error``.

    A request has one of ``prompt``, ``messages`` and ``prompt_token_ids``, and any sampling
    parameters. Its id is unique, and stands in for a seed if it has none, so that its answer
    depends on nothing but the request and the engine's settings. The iterable is read as requests
    end: it may be of any length.
    """
    coming = iter(requests)
    # The engine names the requests, because the ids of an earlier call may still be in its outputs.
    running: dict[str, str] = {}
    num_at_once = 2 * llm.engine.config.max_num_seqs  # so that none waits for the iterable
    try:
        while True:
            added = list(islice(coming, num_at_once - len(running)))
            for key, request in added:
                try:
                    running[llm.add_request(*_prepared(llm, key, request))] = key
                except (ConfigError, RequestError) as error:
                    yield key, _refused(key, str(error))
            if not added and not running:
                return
            for output in llm.step() if running else ():
                if output.request_id in running:  # otherwise an earlier call has left it behind
                    output.request_id = key = running.pop(output.request_id)
                    yield key, output
    finally:
        for request_id in running:  # the caller has left
            llm.abort(request_id)


def _prepared(
    llm: LLM, request_id: str, request: Mapping[str, Any]
) -> tuple[dict[str, Any], SamplingParams]:
    """Return a request's prompt and parameters."""
    values = {name: value for name, value in request.items() if value is not None}
    given = {name: values.pop(name) for name in PROMPTS if name in values}
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise RequestError(f"a request needs one of {', '.join(PROMPTS)}; got {got}")
    salt = values.pop("cache_salt", None)
    prompt = llm.chat_prompt(given["messages"]) if "messages" in given else given
    defaults = {"max_tokens": None} if "messages" in given else {}
    seed = {"seed": seed_of(request_id)}
    params = SamplingParams(**{**seed, **defaults, **llm.generation_config.sampling, **values})
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return {**prompt, "cache_salt": salt}, params


def seed_of(request_id: str) -> int:
    """Return the seed of a request that has none."""
    digest = blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _refused(request_id: str, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=[],
        outputs=[],
        finished=True,
        error=error,
    )
