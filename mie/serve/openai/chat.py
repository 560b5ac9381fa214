"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mie.frontend.outputs import CompletionOutput, LogprobRow, RequestOutput
from mie.serve.errors import invalid, unsupported
from mie.serve.openai.params import job_of, read, sampling_params
from mie.serve.openai.protocol import ChatCompletionRequest
from mie.serve.openai.stream import Choice, ChunkWriter, reason, respond
from mie.serve.serving import Generation, Serving, new_id
from mie.serve.sse import json_string


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    serving: Serving = request.app.state.serving
    body, model, headers = await read(request, serving, ChatCompletionRequest)
    max_tokens = _max_tokens(body)
    params = sampling_params(
        body,
        serving,
        max_tokens=max_tokens,
        logprobs=_num_logprobs(body),
    )
    if max_tokens is None and "max_tokens" not in serving.defaults:
        params.max_tokens = None  # the rest of the context
    prompt = await chat_prompt(body, serving)
    is_given = max_tokens is not None
    response_id = new_id("chatcmpl")
    job = job_of(
        body,
        response_id,
        [prompt],
        params,
        is_max_tokens_given=is_given,
        logprobs_name="top_logprobs",
    )
    return await respond(
        request, job, headers, lambda generation: ChatWriter(generation, body, model, serving)
    )


async def chat_prompt(body: Any, serving: Serving) -> dict[str, Any]:
    """Return a conversation as a prompt, as text and in tokens.

    Raises:
        ApiError: the request may not bring a template of its own.
        MieError: a message is malformed, or there is no template that takes it.
    """
    serving.required_tokenizer()
    template = body.chat_template
    if template is None:
        template = serving.chat_template
    elif not serving.config.trust_request_chat_template:
        raise unsupported(
            "chat_template",
            "requests may not bring their own (--trust-request-chat-template lets them)",
        )
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid(
            "add_generation_prompt and continue_final_message exclude each other",
            "continue_final_message",
        )
    adds = body.add_generation_prompt
    return await serving.engine.chat_prompt(
        [message.model_dump(exclude_unset=True) for message in body.messages],
        chat_template=template,
        chat_template_content_format=body.chat_template_content_format or "auto",
        add_generation_prompt=not body.continue_final_message if adds is None else adds,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    """Return the limit under either of its names; the newer one wins."""
    newer = body.max_completion_tokens
    return body.max_tokens if newer is None else newer


def _num_logprobs(body: ChatCompletionRequest) -> int | None:
    """Return how many log-probabilities each token needs."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


class ChatWriter(ChunkWriter):
    """The answers of ``/v1/chat/completions``, whole or in chunks."""

    def __init__(
        self, generation: Generation, body: ChatCompletionRequest, model: str, serving: Serving
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(generation, body, model, serving, object=kind)
        self._sends_prompt_logprobs = body.prompt_logprobs is not None

    # Chunks

    def begin(self, choice: Choice, output: RequestOutput) -> list[str]:
        """Return the chunks that begin a choice."""
        return [
            f'{{"index": {choice.index}, "delta": {{"role": "assistant", "content": ""}}, '
            '"logprobs": null, "finish_reason": null}'
        ]

    def text(self, choice: Choice, text: str, extras: str) -> str:
        """Return a chunk with new text."""
        extras = extras or ', "logprobs": null'
        return (
            f'{{"index": {choice.index}, "delta": {{"content": {json_string(text)}}}{extras}, '
            '"finish_reason": null}'
        )

    def end(self, choice: Choice, text: str, extras: str, output: CompletionOutput) -> list[str]:
        """Return the chunks that end a choice."""
        last = f'{{"index": {choice.index}, "delta": {{}}, "logprobs": null, {reason(output)}}}'
        has_rest = text or choice.has_news
        return [self.text(choice, text, extras), last] if has_rest else [last]

    def logprobs_of(
        self, choice: Choice, token_ids: list[int], rows: list[LogprobRow | None]
    ) -> Any:
        """Return log-probabilities in the shape of this route."""
        assert self.logprobs is not None
        return self.logprobs.chat([row for row in rows if row is not None])

    # A whole answer

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        [output] = outputs
        answer = self.whole(outputs, [self._whole(each) for each in output.outputs])
        if self._sends_prompt_logprobs:
            writer = self.logprobs or self.new_logprobs()
            answer["prompt_logprobs"] = writer.prompt(output.prompt_logprobs or ())
        if self.has_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def _whole(self, each: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": each.index,
            "message": {"role": "assistant", "content": each.text, "refusal": None},
            "logprobs": self.logprobs and self.logprobs.chat(each.logprobs or ()),
            "finish_reason": each.finish_reason,
            "stop_reason": each.stop_reason,
        }
        if self.has_token_ids:
            choice["token_ids"] = each.token_ids
        return choice
