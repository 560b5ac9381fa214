"""Answer requests as a stream: new ones are added while others run."""

import json
import os
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from mie.config.adapters import LoRARequest
from mie.config.params.sampling import RequestOutputKind, SamplingParams
from mie.errors import ConfigError, RequestError
from mie.frontend.llm import LLM
from mie.frontend.outputs import RequestOutput

PROMPTS = ("prompt", "messages", "prompt_token_ids")
"""The names of a request's prompt. A request has exactly one of them."""
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
    chat_template: str | None = None,
    lora_request: LoRARequest | None = None,
) -> Generator[tuple[Key, RequestOutput], None, None]:
    """Yield (key, output) of each request as it ends, at most ``num_at_once`` in the engine.

    A request that is refused has an output with an ``error``. With ``is_strict`` it is raised.
    ``lora_request`` is the adapter of all requests.
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
                    prompt = prompt_of(llm, request, chat_template)
                    labels = {"priority": request.get("priority", 0), "lora_request": lora_request}
                    running[llm.add_request(prompt, params, **labels)] = key
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


def prompt_of(llm: LLM, request: Request, chat_template: str | None = None) -> dict[str, Any]:
    """Return the prompt of a request as `LLM.add_request` takes it.

    ``chat_template`` replaces the model's where the request has messages.

    Raises:
        RequestError: the request has none, an empty one, or several.
    """
    given = {name: request[name] for name in PROMPTS if name in request}
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise RequestError(f"a request needs one of {', '.join(PROMPTS)}; got {got}")
    for name, value in given.items():
        if isinstance(value, (str, list)) and not value:
            raise RequestError(f"{name} is empty")
    prompt = given
    if "messages" in given:
        prompt = llm.chat_prompt(given["messages"], chat_template=chat_template)
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


RESULTS = ("generated_text", "finish_reason", "error", "output")
"""The names of the columns that an answer adds to its row."""


class RowEngine:
    """An engine that answers batches of rows, as `mie.ray.generate` describes them."""

    def __init__(
        self, settings: Mapping[str, Any], checkpoint: str | os.PathLike[str] | None = None
    ) -> None:
        """Load an engine, and read the answered rows of the directory ``checkpoint``."""
        self._llm = LLM(**settings)
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._done = {} if self._checkpoint is None else _kept(self._checkpoint)

    def answers(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, str | None]]:
        """Return the `RESULTS` of each row: kept, new, or why there is no answer."""
        ids: list[Any] = [row.get("id") for row in rows]
        requests: dict[str, dict[str, Any]] = {}
        refused: dict[int, Mapping[str, str | None]] = {}
        for place, (row, key) in enumerate(zip(rows, ids, strict=True)):
            try:
                if not isinstance(key, str) or key in ids[:place]:
                    raise ValueError(f"a row needs an id of its own, which is text; got {key!r}")
                if key not in self._done:
                    requests[key] = _request(row)
            except ValueError as error:  # JSON that cannot be read is one, too
                refused[place] = dict.fromkeys(RESULTS) | {"error": str(error)}
        new = {key: _result(output) for key, output in answers(self._llm, requests.items())}
        if self._checkpoint is not None and new:
            _keep(self._checkpoint, new)
        known = {**self._done, **new}
        return [refused.get(place) or known[key] for place, key in enumerate(ids)]


def _request(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as a request. Arrow has filled the fields that other rows have with None."""
    params = row.get("sampling_params") or {}
    params = json.loads(params) if isinstance(params, str) else params
    if not isinstance(params, Mapping):
        raise ValueError(f"sampling_params must be a struct or a JSON object; got {params!r}")
    request = dict(params)
    request |= {name: row[name] for name in (*PROMPTS, "cache_salt") if row.get(name) is not None}
    if isinstance(request.get("messages"), list):
        request["messages"] = [_without_none(message) for message in request["messages"]]
    return request


def _without_none(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message  # the engine refuses it
    return {name: value for name, value in message.items() if value is not None}


def _result(output: RequestOutput) -> dict[str, str | None]:
    first = output.outputs[0] if output.outputs else None
    return {
        "generated_text": None if first is None else first.text,
        "finish_reason": None if first is None else first.finish_reason,
        "error": output.error,
        # Times and cache hits depend on other requests, and an answer does not.
        "output": json.dumps({**output.as_dict(), "metrics": None, "num_cached_tokens": None}),
    }


def _keep(directory: Path, results: Mapping[str, Mapping[str, str | None]]) -> None:
    """Write the answers of a batch to a file that appears at once, complete."""
    directory.mkdir(parents=True, exist_ok=True)
    name = uuid.uuid4().hex
    part = directory / f"{name}.part"
    part.write_text("".join(json.dumps([key, each]) + "\n" for key, each in results.items()))
    part.rename(directory / f"{name}.jsonl")


def _kept(directory: Path) -> dict[str, Mapping[str, str | None]]:
    files = sorted(directory.glob("*.jsonl"))
    return dict(json.loads(line) for file in files for line in file.read_text().splitlines())
