"""``POST /v1/completions``."""

import json
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp

from mie.frontend.outputs import LogprobRow, RequestOutput
from mie.serve.asgi import json_string
from mie.serve.openai.chunks import ChunkWriter, set_params
from mie.serve.openai.protocol import CompletionRequest
from mie.serve.serving import Asked
from mie.serve.writer import Choice


async def completions(asked: Asked[CompletionRequest]) -> ASGIApp:
    """Complete one prompt or several."""
    body = asked.body
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    counts = [each for each in wanted if each is not None]
    set_params(
        asked,
        fills_context=False,
        # The engine generates at least one token. The answer leaves it out where none is wanted.
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=-1 if -1 in counts else max(counts, default=None),
    )
    return await CompletionWriter(asked).respond(body.prompt)


class CompletionWriter(ChunkWriter):
    """Writes the answers of ``/v1/completions``."""

    id_prefix = "cmpl-"
    logprobs_name = "logprobs"

    def __init__(self, asked: Asked[CompletionRequest]) -> None:
        super().__init__(asked, "text_completion")
        self.add_special_tokens = self.body.add_special_tokens is not False
        self._echoes = bool(self.body.echo)
        self.has_new_tokens = self.body.max_tokens != 0

    def first(self, choice: Choice) -> tuple[str, str] | None:
        if not self._echoes:
            return None
        extras = ""
        if self.logprobs is not None:
            output = choice.request
            value = self.logprobs_of(choice, output.prompt_token_ids, output.prompt_logprobs or ())
            extras = f', "logprobs": {json.dumps(value)}'
        if self.has_token_ids:
            extras += ', "token_ids": []'
        return f'"text": {json_string(self._prompt_text(choice.request))}', extras

    def deltas(self, choice: Choice) -> list[str]:
        return [f'"text": {json_string(choice.new.text if self.has_new_tokens else "")}']

    def logprobs_of(
        self, choice: Choice, token_ids: list[int], rows: Sequence[LogprobRow | None]
    ) -> Any:
        assert self.logprobs is not None
        if choice.offsets is None:
            prompt = self.prepared[choice.index // self.asked.params.n].token_ids
            choice.offsets = self.logprobs.offsets(() if self._echoes else prompt)
        return self.logprobs.completion(token_ids, rows, choice.offsets)

    def choice_of(self, choice: Choice) -> Any:
        request, output = choice.request, choice.new
        text, ids = output.text, output.token_ids
        rows: list[LogprobRow | None] = [*(output.logprobs or ())]
        if not self.has_new_tokens:
            text, ids, rows = "", [], []
        new_ids = ids
        if self._echoes:
            text = self._prompt_text(request) + text
            if self.logprobs is not None:
                ids = [*request.prompt_token_ids, *ids]
                rows = [*(request.prompt_logprobs or ()), *rows]
        written: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self.logprobs and self.logprobs_of(choice, ids, rows),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.sends_prompt_logprobs:
            writer = self.logprobs or self.new_logprobs()
            written["prompt_logprobs"] = writer.prompt(request.prompt_logprobs or ())
        if self.has_token_ids:
            written["token_ids"] = new_ids
            written["prompt_token_ids"] = request.prompt_token_ids
        return written

    def _prompt_text(self, output: RequestOutput) -> str:
        tokenizer = self.asked.serving.tokenizer
        if output.prompt is not None or tokenizer is None:
            return output.prompt or ""
        return tokenizer.decode(output.prompt_token_ids, self.skips_special)
