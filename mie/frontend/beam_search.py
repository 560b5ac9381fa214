"""Search for the most likely continuations of prompts with beams, as in vLLM.

A step computes one token of every beam and keeps the best continuations. Each beam is a request for
one token. It continues a beam of the last step, so it finds that beam's full blocks in the prefix
cache and computes the few tokens after them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mie.base.arithmetic import exp, log, power
from mie.config.params.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
from mie.config.params.values import integer
from mie.errors import RequestFailedError
from mie.frontend.collector import Collector
from mie.frontend.loop import EngineLoop
from mie.frontend.outputs import Logprob, LogprobRow, RequestOutput
from mie.frontend.prepare import PreparedRequest
from mie.frontend.progress import steps
from mie.sched.sequence import FinishReason
from mie.text.tokenizer import Tokenizer


@dataclass(kw_only=True)
class BeamSearchSequence:
    """A beam: a prompt and one continuation of it."""

    tokens: list[int]
    """Token ids of the prompt and the continuation, including a final EOS token."""
    logprobs: list[LogprobRow]
    """Candidates for each generated token."""
    cum_logprob: float = 0.0
    """Sum of the generated tokens' log-probabilities."""
    text: str | None = None
    """The text of ``tokens``; None without a tokenizer."""
    finish_reason: FinishReason | None = None
    """The reason of the end: "stop" after an EOS token, else "length"."""
    stop_reason: int | str | None = None
    """The EOS token that ended the beam, or None."""


@dataclass(kw_only=True)
class BeamSearchOutput:
    """The beams of one prompt."""

    sequences: list[BeamSearchSequence]
    """The ``beam_width`` best beams, best first."""


@dataclass(kw_only=True)
class _Search:
    """The search over one prompt."""

    prepared: PreparedRequest
    max_tokens: int
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)


class BeamSearcher:
    """Searches over several prompts at once with one engine."""

    def __init__(
        self, loop: EngineLoop, tokenizer: Tokenizer | None, params: BeamSearchParams
    ) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._params = params
        # A temperature needs all log-probabilities, because they must be normalized again.
        self._has_temperature = params.temperature not in (0.0, 1.0)
        self._step_params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=-1 if self._has_temperature else 2 * params.beam_width,
            detokenize=False,
        )
        self._eos_token_ids = frozenset(loop.engine.eos_token_ids)
        self._longest = loop.engine.scheduler.longest

    def run_all(
        self,
        prompts: Sequence[PreparedRequest],
        use_tqdm: bool | Callable[..., Any],
        concurrency_limit: int | None,
    ) -> list[BeamSearchOutput]:
        """Search over at most ``concurrency_limit`` prompts at a time; see `run`."""
        size = max(1, len(prompts))
        if concurrency_limit is not None:
            size = integer("concurrency_limit", concurrency_limit, 1)
        outputs = []
        for start in range(0, len(prompts), size):
            counted = steps(self._params.max_tokens, use_tqdm)
            outputs += self.run(prompts[start : start + size], counted)
        return outputs

    def run(
        self, prompts: Sequence[PreparedRequest], counted: Iterable[int]
    ) -> list[BeamSearchOutput]:
        """Return the best beams of each prompt. ``counted`` counts the steps.

        Raises:
            RequestError: a prompt could never be served; nothing was computed.
            RequestFailedError: a beam failed.
        """
        searches = [
            _Search(
                prepared=each,
                # At least 1, so that the engine refuses too long a prompt with its own message.
                max_tokens=max(
                    1, min(self._params.max_tokens, self._longest - len(each.token_ids))
                ),
                beams=[BeamSearchSequence(tokens=each.token_ids, logprobs=[])],
            )
            for each in prompts
        ]
        collector = self._loop.new_collector()
        try:
            for step in counted:
                active = [s for s in searches if s.beams and step < s.max_tokens]
                if not active:
                    break
                self._extend(active, collector)
        finally:
            collector.close()
        return [self._output(search) for search in searches]

    def _extend(self, searches: Sequence[_Search], collector: Collector) -> None:
        """Find the best beams that are one token longer."""
        requests = [
            self._request(search.prepared, beam) for search in searches for beam in search.beams
        ]
        outputs = iter(self._answers(requests, collector))
        for search in searches:
            candidates = [
                self._continued(beam, row, token_id)
                for beam in search.beams
                for row in self._rows(next(outputs))
                for token_id in row
            ]
            search.completed += [beam for beam in candidates if beam.stop_reason is not None]
            unfinished = [beam for beam in candidates if beam.stop_reason is None]
            unfinished.sort(key=self._score, reverse=True)
            search.beams = unfinished[: self._params.beam_width]

    def _request(self, prepared: PreparedRequest, beam: BeamSearchSequence) -> PreparedRequest:
        return replace(
            prepared,
            token_ids=beam.tokens,
            params=self._step_params,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _answers(
        self, requests: list[PreparedRequest], collector: Collector
    ) -> list[RequestOutput]:
        """Run the requests, and return their outputs in the same order."""
        request_ids = self._loop.add(requests, collector)
        answers: dict[str, RequestOutput] = {}
        while len(answers) < len(requests):
            answers.update({output.request_id: output for output in self._loop.wait(collector)})
        outputs = [answers[request_id] for request_id in request_ids]
        for output in outputs:
            if output.outputs[0].logprobs is None or not output.outputs[0].logprobs:
                reason = output.error or "it was aborted"
                raise RequestFailedError(f"a beam failed: {reason}", outputs)
        return outputs

    def _rows(self, output: RequestOutput) -> Iterator[LogprobRow]:
        """Yield the candidates for the next token, most likely first."""
        rows = output.outputs[0].logprobs
        assert rows is not None
        for row in rows:
            logprobs = [entry.logprob for entry in row.values()]
            if self._has_temperature:
                scaled = [logprob / self._params.temperature for logprob in logprobs]
                total = scaled[0] + log(math.fsum(exp(each - scaled[0]) for each in scaled))
                logprobs = [each - total for each in scaled]
            entries = zip(row.items(), logprobs, strict=True)
            yield {
                token_id: Logprob(
                    logprob=logprob, rank=entry.rank, decoded_token=self._token_str(token_id)
                )
                for (token_id, entry), logprob in [*entries][: 2 * self._params.beam_width]
            }

    def _token_str(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_str(token_id)

    def _continued(
        self, beam: BeamSearchSequence, row: LogprobRow, token_id: int
    ) -> BeamSearchSequence:
        is_end = token_id in self._eos_token_ids and not self._params.ignore_eos
        return BeamSearchSequence(
            tokens=[*beam.tokens, token_id],
            logprobs=[*beam.logprobs, row],
            cum_logprob=beam.cum_logprob + row[token_id].logprob,
            finish_reason="stop" if is_end else None,
            stop_reason=token_id if is_end else None,
        )

    def _score(self, beam: BeamSearchSequence) -> float:
        """Return the log-probability divided by the length.

        The length includes the prompt but not a final EOS token.
        """
        length = len(beam.tokens) - (beam.tokens[-1] in self._eos_token_ids)
        return beam.cum_logprob / power(max(length, 1), self._params.length_penalty)

    def _output(self, search: _Search) -> BeamSearchOutput:
        beams = [*search.completed, *search.beams]
        best = sorted(beams, key=self._score, reverse=True)[: self._params.beam_width]
        for beam in best:
            beam.finish_reason = beam.finish_reason or "length"
            beam.text = self._text(beam)
        return BeamSearchOutput(sequences=best)

    def _text(self, beam: BeamSearchSequence) -> str | None:
        if self._tokenizer is None:
            return None
        is_cut = beam.stop_reason is not None and not self._params.include_stop_str_in_output
        token_ids = beam.tokens[:-1] if is_cut else beam.tokens
        skips = self._params.skip_special_tokens
        return self._tokenizer.decode(token_ids, skip_special_tokens=skips)
