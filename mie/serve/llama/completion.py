"""``POST /completion`` and ``GET /props``."""

from collections.abc import Iterator
from functools import reduce
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mie.errors import shown
from mie.frontend.outputs import RequestOutput
from mie.serve.body import AtMost, Items, refused
from mie.serve.errors import ApiError, body_of, invalid, refuse_unfinished
from mie.serve.fields import with_fields_of
from mie.serve.llama.options import LlamaOptions, NumPredict, sampling
from mie.serve.openai.formats import Schema, closed_schema
from mie.serve.openai.protocol import MAX_BIASES, Biases, Natural, Prompt, Queued
from mie.serve.serving import Serving
from mie.serve.writer import Choice, Writer, json_response
from mie.serve.written import json_text
from mie.version import __version__

_SETTINGS = (
    *("seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("stop", "ignore_eos"),
)


def _pairs(given: object) -> object:
    """Return llama.cpp's list of [token id, bias] as an object; false bans a token."""
    if not isinstance(given, list):
        return given
    if len(given) > MAX_BIASES:
        raise refused(f"may have at most {MAX_BIASES} entries; got {len(given)}")
    if not all(isinstance(each, list) and len(each) == 2 for each in given):
        raise refused(f"must have pairs of a token id and a bias; got {shown(given)}")
    return {str(token): -100 if bias is False else bias for token, bias in given}


@with_fields_of("llama_completion")
class CompletionBody(LlamaOptions, Queued):
    """The body of ``POST /completion``."""

    model: str | None = None
    prompt: Prompt
    n_predict: NumPredict | None = None
    stream: bool | None = None
    cache_prompt: bool | None = None
    """Whether the prompt is looked up in the prefix cache, which is the default."""
    return_tokens: bool | None = None
    n_probs: Natural | None = None
    """The number of most likely tokens that are told with each token."""
    json_schema: Schema | None = None
    logit_bias: Annotated[Biases | None, BeforeValidator(_pairs)] = None
    ignore_eos: bool | None = None
    response_fields: Annotated[Items[Annotated[str, Field(min_length=1)]], AtMost(64)] | None = None
    """The keys that the answer has, if any are given; "a/b" is a key of an object."""


async def props(request: Request) -> Response:
    """Describe the server as llama.cpp does."""
    serving: Serving = request.app.state.serving
    tokenizer, facts = serving.tokenizer, serving.facts
    params = {name: getattr(serving.default_params, name) for name in _SETTINGS}
    return json_response(
        {
            "default_generation_settings": {
                "n_ctx": facts.max_model_len,
                "params": {**params, "n_predict": serving.defaults.get("max_tokens", -1)},
            },
            "total_slots": facts.max_num_seqs,
            "model_alias": serving.names[0],
            "model_path": facts.model,
            "modalities": {"vision": False, "audio": False},
            "chat_template": serving.template_text,
            "bos_token": (tokenizer and tokenizer.bos_token) or "",
            "eos_token": (tokenizer and tokenizer.eos_token) or "",
            "build_info": f"mie {__version__}",
        }
    )


class CompletionWriter(Writer[CompletionBody]):
    """Complete a prompt, or several, in llama.cpp's shape."""

    id_prefix = "completion-"
    logprobs_name = "n_probs"

    def __init__(self, **asked: Any) -> None:
        super().__init__(**asked)
        self.keeps_tokens = True

    @property
    def spelling(self) -> dict[str, bool]:
        return {"has_ids": True}

    async def run(self) -> ASGIApp:
        body, serving = self.body, self.serving
        serving.required_tokenizer()
        if body.response_fields and body.stream:
            raise invalid(
                "response_fields choose keys of a whole answer; leave out stream", "stream"
            )
        self.set_params(
            "json_schema",
            body.stream,
            n=1,
            **sampling(body),
            limit_name=None,
            max_tokens=body.n_predict,
            logprobs=body.n_probs or None,
            logit_bias=body.logit_bias,
            ignore_eos=body.ignore_eos,
            skip_reading_prefix_cache=True if body.cache_prompt is False else None,
            structured_outputs=body.json_schema and closed_schema(body.json_schema),
        )
        return await self.respond(body.prompt)

    def whole(self, choices: list[Choice]) -> Any:
        answers = []
        for choice in choices:
            self._add(choice)
            answers.append(self._chosen(self._last(choice)))
        return answers[0] if len(answers) == 1 else answers

    def grow(self, choice: Choice) -> Iterator[str]:
        self._add(choice)
        if choice.new.text:
            yield _event({**self._part(choice, choice.new.text), "stop": False})
            choice.take()
        if choice.request.finished:
            yield _event({**self._last(choice), "content": ""})

    def failure(self, error: ApiError) -> str:
        return f"data: {body_of(error, '/completion')}\n\n"

    def _add(self, choice: Choice) -> None:
        refuse_unfinished(choice.new)
        for _ in choice.parts.add(choice.new):
            pass  # the route has one part, the text

    def _part(self, choice: Choice, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {
            "index": choice.index,
            "content": text,
            "tokens": choice.token_ids,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": len(choice.request.prompt_token_ids),
        }
        if self.logprobs is not None:
            part["completion_probabilities"] = self.logprobs.entries(choice.rows)
        return part

    def _last(self, choice: Choice) -> dict[str, Any]:
        output, last = choice.request, choice.new
        text, num_tokens = "".join(part.text for part in choice.parts.all), choice.num_tokens
        num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens or 0
        params, serving = self.params, self.serving
        settings = {name: getattr(params, name) for name in _SETTINGS}
        is_word = isinstance(last.stop_reason, str)
        ends = "limit" if last.finish_reason == "length" else "word" if is_word else "eos"
        prompt = output.prompt
        if prompt is None:
            prompt = serving.required_tokenizer().decode(output.prompt_token_ids)
        has_ids = self.body.return_tokens or self.body.stream
        return {
            **self._part(choice, text),
            "tokens": choice.token_ids if has_ids else [],
            "stop": True,
            "model": self.model,
            "generation_settings": {
                **settings,
                "n_predict": self.body.n_predict or params.max_tokens or -1,
                "repeat_penalty": params.repetition_penalty,
                "n_probs": self.body.n_probs or 0,
                "logit_bias": [
                    {"token": k, "bias": v} for k, v in (params.logit_bias or {}).items()
                ],
                "stream": bool(self.body.stream),
            },
            "prompt": prompt,
            "has_new_line": "\n" in text,
            "truncated": num_prompt + num_tokens >= serving.facts.max_model_len,
            "stop_type": ends,
            "stopping_word": last.stop_reason if is_word else "",
            "tokens_cached": num_cached,
            "timings": _timings(output, num_prompt - num_cached, num_cached, num_tokens),
        }

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of an answer that the request asks for.

        Raises:
            ApiError: the answer has no such key.
        """
        paths = self.body.response_fields
        if not paths:
            return answer
        try:
            return {
                path: reduce(lambda at, key: at[key], path.split("/"), answer) for path in paths
            }
        except (KeyError, TypeError) as error:
            message = f"response_fields: the answer has no {error}; it has {', '.join(answer)}"
            raise invalid(message, "response_fields") from error


def _timings(
    output: RequestOutput, num_prompt: int, num_cached: int, num_new: int
) -> dict[str, Any]:
    times = output.metrics
    assert times is not None, "the engine has measured the request"
    timings: dict[str, Any] = {"cache_n": num_cached}
    for name, number, seconds in (
        ("prompt", num_prompt, times.prefill_time),
        ("predicted", num_new, times.decode_time),
    ):
        seconds = seconds or 0.0
        timings |= {
            f"{name}_n": number,
            f"{name}_ms": 1000 * seconds,
            f"{name}_per_token_ms": 1000 * seconds / max(number, 1),
            f"{name}_per_second": number / seconds if seconds else 0.0,
        }
    return timings


def _event(data: dict[str, Any]) -> str:
    return f"data: {json_text(data)}\n\n"
