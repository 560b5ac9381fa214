"""``POST /v1/completions``."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mie.frontend.outputs import CompletionOutput, LogprobRow, RequestOutput
from mie.serve.body import read
from mie.serve.openai.params import sampling_params
from mie.serve.openai.protocol import CompletionRequest
from mie.serve.openai.stream import Choice, ChunkWriter, reason, respond
from mie.serve.openai.structure import structure_of
from mie.serve.serving import Generation, Job, Serving, new_id
from mie.serve.sse import json_string


async def completions(request: Request) -> Response:
    """Complete one prompt or several."""
    serving: Serving = request.app.state.serving
    body, model, headers = await read(request, CompletionRequest)
    structure, structure_name = structure_of(body)
    params = sampling_params(
        body,
        serving,
        structure_name,
        # The engine generates at least one token. The answer leaves it out where none is wanted.
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        structured_outputs=structure,
    )
    job = Job(
        response_id=new_id("cmpl"),
        prompts=body.prompt,
        params=params,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        is_max_tokens_given=bool(body.max_tokens),
        adds_special_tokens=body.add_special_tokens is not False,
        structure_name=structure_name,
    )
    return await respond(
        request, job, headers, lambda generation: CompletionWriter(generation, body, model, serving)
    )


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return how many log-probabilities of the prompt the answer needs."""
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    counts = [each for each in asked if each is not None]
    return -1 if -1 in counts else max(counts, default=None)


class CompletionWriter(ChunkWriter):
    """The answers of ``/v1/completions``, whole or in chunks."""

    def __init__(
        self, generation: Generation, body: CompletionRequest, model: str, serving: Serving
    ) -> None:
        super().__init__(generation, body, model, serving, object="text_completion")
        self._echoes = bool(body.echo)
        self.has_new_tokens = body.max_tokens != 0
        self._sends_prompt_logprobs = body.prompt_logprobs is not None
        self._tokenizer = serving.tokenizer

    # Chunks

    def begin(self, choice: Choice, output: RequestOutput) -> list[str]:
        """Return the chunks that begin a choice."""
        if not self._echoes:
            return []
        ids = output.prompt_token_ids
        extras = ""
        if self.logprobs is not None:
            value = self.logprobs_of(choice, ids, list(output.prompt_logprobs or ()))
            extras = f', "logprobs": {json.dumps(value)}'
        if self.has_token_ids:
            extras += ', "token_ids": []'
        return [self._text(choice, self._prompt_text(output), extras)]

    def news(self, choice: Choice, output: CompletionOutput, extras: str) -> list[str]:
        """Return the chunk with new text."""
        return [self._text(choice, output.text, extras)]

    def _text(self, choice: Choice, text: str, extras: str) -> str:
        extras = extras or ', "logprobs": null'
        return (
            f'{{"index": {choice.index}, "text": {json_string(text)}{extras}, '
            '"finish_reason": null}'
        )

    def end(self, choice: Choice, output: CompletionOutput, extras: str) -> list[str]:
        """Return the chunks that end a choice."""
        text = output.text
        if not self.has_new_tokens:
            text, extras = "", ""
        extras = extras or ', "logprobs": null'
        ending = reason(output, output.finish_reason)
        return [f'{{"index": {choice.index}, "text": {json_string(text)}{extras}, {ending}}}']

    def logprobs_of(
        self, choice: Choice, token_ids: list[int], rows: list[LogprobRow | None]
    ) -> Any:
        """Return log-probabilities in the shape of this route."""
        assert self.logprobs is not None
        if choice.offsets is None:
            prompt = self.generation.prepared[choice.index // self.n].token_ids
            choice.offsets = self.logprobs.offsets(() if self._echoes else prompt)
        return self.logprobs.completion(token_ids, rows, choice.offsets)

    # A whole answer

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [
            self._whole(place * self.n, output, each)
            for place, output in enumerate(outputs)
            for each in output.outputs
        ]
        return self.whole(outputs, choices)

    def _whole(self, first: int, output: RequestOutput, each: CompletionOutput) -> dict[str, Any]:
        text, ids = each.text, each.token_ids
        rows: list[LogprobRow | None] = [*(each.logprobs or ())]
        if not self.has_new_tokens:
            text, ids, rows = "", [], []
        num_new = len(ids)
        if self._echoes:
            text = self._prompt_text(output) + text
            if self.logprobs is not None:
                ids = [*output.prompt_token_ids, *ids]
                rows = [*(output.prompt_logprobs or ()), *rows]
        index = first + each.index
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None
            if self.logprobs is None
            else self.logprobs_of(Choice(index), ids, rows),
            "finish_reason": each.finish_reason,
            "stop_reason": each.stop_reason,
        }
        if self._sends_prompt_logprobs:
            writer = self.logprobs or self.new_logprobs()
            choice["prompt_logprobs"] = writer.prompt(output.prompt_logprobs or ())
        if self.has_token_ids:
            choice["token_ids"] = ids[len(ids) - num_new :]
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids, self.skips_special)
