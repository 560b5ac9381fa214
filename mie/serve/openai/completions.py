"""``POST /v1/completions``."""

from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp

from mie.frontend.outputs import RequestOutput
from mie.sched.result import TokenLogprobs
from mie.serve.asgi import json_string
from mie.serve.openai.chunks import ChunkWriter, set_params
from mie.serve.openai.protocol import CompletionRequest
from mie.serve.writer import Choice
from mie.serve.written import json_text


class CompletionWriter(ChunkWriter[CompletionRequest]):
    """Complete one prompt or several."""

    id_prefix = "cmpl-"
    logprobs_name = "logprobs"

    def __init__(self, **asked: Any) -> None:
        super().__init__(object="text_completion", **asked)
        self.add_special_tokens = self.body.add_special_tokens is not False
        self._echoes = bool(self.body.echo)
        self.has_new_tokens = self.body.max_tokens != 0

    async def run(self) -> ASGIApp:
        body = self.body
        wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
        counts = [each for each in wanted if each is not None]
        set_params(
            self,
            fills_context=False,
            # The engine generates at least one token, and the answer leaves it out.
            max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=-1 if -1 in counts else max(counts, default=None),
        )
        return await self.respond(body.prompt)

    def first(self, choice: Choice) -> tuple[str, str] | None:
        if not self._echoes:
            return None
        extras = ""
        if self.logprobs is not None:
            output = choice.request
            rows = self.prompt_rows(choice)
            value = self.logprobs_of(choice, output.prompt_token_ids, rows)
            extras = f', "logprobs": {json_text(value)}'
        if self.has_token_ids:
            extras += ', "token_ids": []'
        return f'"text": {json_string(self._prompt_text(choice.request))}', extras

    def deltas(self, choice: Choice) -> list[str]:
        return [f'"text": {json_string(choice.new.text if self.has_new_tokens else "")}']

    def logprobs_of(
        self, choice: Choice, token_ids: list[int], rows: Sequence[TokenLogprobs | None]
    ) -> Any:
        assert self.logprobs is not None
        if choice.offsets is None:
            prompt = self.prepared[choice.index // self.params.n].token_ids
            choice.offsets = self.logprobs.offsets(() if self._echoes else prompt)
        return self.logprobs.completion(token_ids, rows, choice.offsets)

    def choice_of(self, choice: Choice) -> Any:
        request, output = choice.request, choice.new
        text, ids = output.text, output.token_ids
        rows: list[TokenLogprobs | None] = [*choice.rows]
        if not self.has_new_tokens:
            text, ids, rows = "", [], []
        new_ids = ids
        if self._echoes:
            text = self._prompt_text(request) + text
            if self.logprobs is not None:
                ids = [*request.prompt_token_ids, *ids]
                rows = [*self.prompt_rows(choice), *rows]
        written: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self.logprobs and self.logprobs_of(choice, ids, rows),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.sends_prompt_logprobs:
            writer = self.logprobs or self.new_logprobs()
            written["prompt_logprobs"] = writer.prompt(self.prompt_rows(choice))
        if self.has_token_ids:
            written["token_ids"] = new_ids
            written["prompt_token_ids"] = request.prompt_token_ids
        return written

    def _prompt_text(self, output: RequestOutput) -> str:
        tokenizer = self.serving.tokenizer
        if output.prompt is not None or tokenizer is None:
            return output.prompt or ""
        return tokenizer.decode(output.prompt_token_ids, self.params.skip_special_tokens)
