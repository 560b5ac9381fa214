"""Make the records that ``mie generate --json`` prints, one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mie.cli.openai_batch import refusal

if TYPE_CHECKING:
    from mie.cli.requests import Origin, RefusedRequest
    from mie.frontend.outputs import CompletionOutput, LogprobRow, RequestOutput


def records_of(origin: Origin, output: RequestOutput, model: str) -> Iterator[dict[str, Any]]:
    """Yield a record for each choice, or one record for a request in OpenAI's batch form."""
    if origin.batch is not None:
        yield {**origin.batch.answer(output, model), **origin.ids}
        return
    line = {} if origin.line is None else {"line": origin.line}
    for choice in output.outputs:
        yield {**origin.ids, **line, **_as_json(output, choice)}


def record_of_refused(refused: RefusedRequest) -> dict[str, Any]:
    """Return the record of a line that could not be served."""
    origin = refused.origin
    if origin.batch is not None:
        return {**origin.ids, **refusal(refused.error)}
    return {**origin.ids, "line": origin.line, "error": refused.error}


def _as_json(output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
    """Return one choice as a JSON object with vLLM's names."""
    return {
        "request_id": output.request_id,
        "index": choice.index,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": choice.text,
        **({} if choice.reasoning is None else {"reasoning": choice.reasoning}),
        "token_ids": choice.token_ids,
        "cumulative_logprob": choice.cumulative_logprob,
        "logprobs": choice.logprobs and [_row_as_json(row) for row in choice.logprobs],
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "metrics": output.metrics and output.metrics.as_dict(),
    }


def _row_as_json(row: LogprobRow) -> list[dict[str, Any]]:
    return [{"token_id": token_id, **asdict(entry)} for token_id, entry in row.items()]
