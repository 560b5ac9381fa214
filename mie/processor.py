"""From the engine's token ids to a user's text: detokenise, stop at stop strings, collect."""

from dataclasses import dataclass

from mie.engine import Engine, SequenceOutput, StepOutput
from mie.errors import RequestError
from mie.interrupts import interrupts_deferred
from mie.outputs import CompletionOutput, Logprob, LogprobRow, RequestOutput
from mie.sched.params import SamplingParams
from mie.sched.result import TokenLogprobs
from mie.text.stream import TextStream
from mie.text.tokenizer import Tokenizer


@dataclass(eq=False)
class _Live:
    """A request that runs, and what it has given so far."""

    params: SamplingParams
    output: RequestOutput
    streams: list[TextStream | None]


class OutputProcessor:
    """Keeps the `RequestOutput` of every running request up to date."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._live: dict[str, _Live] = {}

    @property
    def request_ids(self) -> list[str]:
        """The requests that run."""
        return list(self._live)

    def add_request(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a prompt in the engine, and follow it: its request id."""
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer; load the model with its tokenizer")
        added: str | None = None
        try:
            with interrupts_deferred():
                added = self._engine.add_request(
                    token_ids, params, request_id, priority=priority, cache_salt=cache_salt
                )
                self._live[added] = self._new_live(added, prompt, token_ids, params)
            return added
        except BaseException:  # Ctrl-C: the caller never learns the id
            if added is not None:
                self.abort(added)
            raise

    def _new_live(
        self, request_id: str, prompt: str | None, token_ids: list[int], params: SamplingParams
    ) -> _Live:
        asked = params.logprobs is not None
        output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(token_ids),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            outputs=[
                CompletionOutput(
                    index=index,
                    logprobs=[] if asked else None,
                    cumulative_logprob=0.0 if asked else None,
                )
                for index in range(params.n)
            ],
        )
        streams = [self._new_stream(token_ids, params) for _ in range(params.n)]
        return _Live(params=params, output=output, streams=streams)

    def _new_stream(self, token_ids: list[int], params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None or not params.detokenize:
            return None
        return TextStream(
            self._tokenizer,
            token_ids,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    def abort(self, request_id: str) -> None:
        """End a request and give its blocks back; unknown ids are ignored."""
        with interrupts_deferred():
            self._engine.abort(request_id)
            live = self._live.pop(request_id, None)
        if live is not None:
            for choice in live.output.outputs:
                choice.finish_reason = choice.finish_reason or "abort"
            live.output.finished = True

    def process(self, step: StepOutput) -> list[RequestOutput]:
        """Take in a step: the outputs that it changed, each the request's own, grown."""
        changed: dict[str, RequestOutput] = {}
        for request_id, rows in step.prompt_logprobs.items():
            live = self._live[request_id]
            assert live.output.prompt_logprobs is not None
            live.output.prompt_logprobs.extend(self._logprob_row(row) for row in rows)
        for output in step.outputs:
            live = self._live[output.request_id]
            if output.request_id not in changed:
                changed[output.request_id] = live.output
                for choice in live.output.outputs:
                    choice.new_text = ""
            self._advance(live, output)
        for output_of_request in changed.values():
            if output_of_request.finished:
                del self._live[output_of_request.request_id]
        return list(changed.values())

    def _advance(self, live: _Live, new: SequenceOutput) -> None:
        choice, stream = live.output.outputs[new.index], live.streams[new.index]
        choice.token_ids.extend(new.token_ids)
        choice.finish_reason, choice.stop_reason = new.finish_reason, new.stop_reason
        if choice.logprobs is not None and choice.cumulative_logprob is not None:
            choice.logprobs.extend(self._logprob_row(row) for row in new.logprobs)
            choice.cumulative_logprob += sum(row.logprobs[0] for row in new.logprobs)
        live.output.num_cached_tokens = new.metrics.num_cached_tokens
        live.output.metrics = new.metrics
        if stream is not None:
            self._add_text(live, choice, stream, list(new.token_ids))
        live.output.finished = all(c.finish_reason for c in live.output.outputs)

    def _add_text(
        self, live: _Live, choice: CompletionOutput, stream: TextStream, token_ids: list[int]
    ) -> None:
        params = live.params
        if choice.finish_reason == "stop" and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # EOS and stop tokens are no part of the text
        is_armed = len(choice.token_ids) > params.min_tokens
        choice.new_text, stop = stream.add(token_ids, is_armed)
        if choice.finish_reason and stop is None:
            rest, stop = stream.finish(is_armed)
            choice.new_text += rest
        choice.text += choice.new_text
        if stop is not None:
            self._engine.finish(live.output.request_id, choice.index, "stop", stop)
            choice.finish_reason, choice.stop_reason = "stop", stop

    def _logprob_row(self, row: TokenLogprobs) -> LogprobRow:
        """The chosen token with its rank; the others are in order of theirs."""
        entries = {}
        others = 0
        for token_id, logprob in zip(row.token_ids, row.logprobs, strict=True):
            if token_id == row.token_ids[0]:
                rank = row.rank
            else:
                others += 1
                rank = others + (row.rank <= others)
            text = self._tokenizer.token_str(token_id) if self._tokenizer else None
            entries[token_id] = Logprob(logprob=logprob, rank=rank, decoded_token=text)
        return entries
