"""Keep the answer to a request, and how much of the answer its caller has taken.

The tokens, log-probabilities and endings belong to the request's sequences. The text and all else
is derived from them, so that anything an exception leaves half-done is derived again.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from mie.base.threads import is_of_the_request
from mie.config.params.sampling import RequestOutputKind
from mie.errors import RequestError
from mie.frontend.collector import Collector, CollectorRef
from mie.frontend.outputs import CompletionOutput, Logprob, LogprobRow, RequestOutput
from mie.frontend.prepare import PreparedRequest
from mie.sched.result import TokenLogprobs
from mie.sched.sequence import FinishReason, Request, Sequence
from mie.text.stream import TextStream
from mie.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mie.frontend.conversation import AnswerState

logger = logging.getLogger(__name__)


class _Choice:
    """The text of a choice's processed tokens, and the amount that its caller has."""

    def __init__(self, sequence: Sequence, answer: AnswerState | None) -> None:
        self.sequence = sequence
        self.answer = answer
        self.num_taken = 0  # tokens that were handed out
        self.num_characters_taken = 0
        self.is_over = False  # The end was handed out.
        self.is_broken = False  # an exception may have left it half-processed
        self.begin(None)

    def begin(self, stream: TextStream | None) -> None:
        """Process the tokens from the first one on."""
        self.stream = stream
        self.num_tokens = 0
        self.text = ""
        if self.answer is not None:
            self.answer.begin()
        self.logprobs: list[LogprobRow] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def write(self, text: str, stop: str | None, reason: FinishReason | None) -> None:
        """Add text to the answer. It ends if a stop string or a reason is given."""
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif reason is not None:
            self.finish_reason, self.stop_reason = reason, self.sequence.stop_reason
        if self.answer is None:
            self.text += text
        else:
            is_last, num_taken = self.finish_reason is not None, self.num_characters_taken
            self.text, self.num_characters_taken = self.answer.add(text, num_taken, is_last=is_last)


class Answer:
    """The answer to a request. The engine's thread derives it, and the caller's thread takes it."""

    def __init__(
        self,
        request: Request,
        prepared: PreparedRequest,
        tokenizer: Tokenizer | None,
        collector: CollectorRef,
    ) -> None:
        """Begin the answer to ``request``, into which the engine turned ``prepared``."""
        self.request = request
        self.request_id = request.request_id
        self.collector = collector
        self.is_answered = False
        """Whether all text of the answer is there. A stop string ends it before its sequences."""
        self._prepared = prepared
        self._tokenizer = tokenizer if request.params.detokenize else None
        self._lock = threading.Lock()  # the engine's thread adds, the caller's takes
        self._is_filed = False  # it is in its collector's news
        self._is_over = False  # the final output was handed out
        self._fault: Exception | None = None  # raised by `take`, for `advance` to raise again
        self._prompt_rows: list[LogprobRow | None] = [None]
        self._num_prompt_taken = 0
        key = "" if prepared.form is None else os.urandom(16).hex()
        self._choices = [_Choice(each, self._new_answer(each, key)) for each in request.sequences]
        stream = self._new_stream()
        for number, choice in enumerate(self._choices):
            choice.begin(stream and stream.fork() if number else stream)

    def advance(self) -> None:
        """Process the sequences' new tokens.

        Raises:
            Exception: any error of the tokenizer or of a parser, for which the request is to blame.
        """
        with self._lock:
            if self._fault is not None:
                raise self._fault
            for choice in self._choices:
                self._advance(choice)
            if self._has_ended and not self.is_answered:
                self._count_calls()
                self.is_answered = True

    @property
    def _has_ended(self) -> bool:
        return all(choice.finish_reason for choice in self._choices)

    def _count_calls(self) -> None:
        answers = [choice.answer for choice in self._choices if choice.answer is not None]
        metrics = self.request.metrics
        metrics.num_reasoning_tokens = sum(answer.num_reasoning_tokens for answer in answers)
        metrics.num_tool_calls = sum(len(answer.parser.calls) for answer in answers)
        metrics.num_unparsed_calls = sum(answer.parser.num_unparsed for answer in answers)

    def file(self, collector: Collector) -> bool:
        """Add the request to its caller's news if it has any; return whether it was added."""
        if self._is_filed:  # the caller will take everything that is there by then
            return False
        with self._lock:
            is_new = self.is_answered and not self._is_over
            if self._prepared.output_kind is not RequestOutputKind.FINAL_ONLY:
                is_new |= any(each.num_tokens > each.num_taken for each in self._choices)
            if not is_new:
                return False
            collector.file(self)
            self._is_filed = True
            return True

    def stopped(self) -> list[_Choice]:
        """Return the choices that have met a stop string while their sequences still run."""
        return [c for c in self._choices if c.finish_reason and not c.sequence.finish_reason]

    def fail(self, error: Exception) -> None:
        """End the answer with this error. Its tokens are kept, and no more text is decoded.

        The sequences may have ended without an error, because the text of the last token comes
        after the last step.
        """
        with self._lock:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.request.error = self.request.error or error
        self._tokenizer = self._fault = None
        for choice in self._choices:
            choice.stream = choice.answer = None
            if choice.is_broken or choice.finish_reason is None:
                choice.is_broken, choice.finish_reason = False, None
                self._advance(choice)
                choice.finish_reason, choice.stop_reason = "error", None
        self.is_answered = True

    def take(self) -> RequestOutput | None:
        """Return the next output for the caller, or None if there is none (any more).

        Under CUMULATIVE it has everything so far, otherwise only the news. If making the output
        raises, the request fails: at once if it has ended, and otherwise in the engine's thread.
        """
        with self._lock:
            if self._is_over:
                return None
            is_broken = any(choice.is_broken for choice in self._choices)
            if is_broken or (self._has_ended and not self.is_answered):
                self._is_filed = False  # the next turn files it again
                return None
            try:
                output = self._output()
            except Exception as error:
                if not is_of_the_request(error):
                    raise
                logger.exception("the output of request %s cannot be made", self.request_id)
                if not self.is_answered:
                    self._is_filed, self._fault = False, error
                    return None
                for choice in self._choices:
                    choice.is_broken |= not choice.is_over
                self._fail(error)
                output = self._output()
            for choice in self._choices:
                choice.num_taken = choice.num_tokens
                choice.num_characters_taken = len(choice.text)
                choice.is_over = choice.finish_reason is not None
                if choice.answer is not None:
                    choice.answer.take()
            self._is_filed = False
            self._is_over = output.finished
        return output

    def _output(self) -> RequestOutput:
        error = self.request.error
        self.request.metrics.num_generation_tokens = sum(each.num_tokens for each in self._choices)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=self.request.token_ids,
            prompt_logprobs=self._take_prompt_logprobs(),
            outputs=[self._completion(each) for each in self._choices if self._is_due(each)],
            finished=self.is_answered,
            num_cached_tokens=self.request.metrics.num_cached_tokens,
            metrics=self.request.metrics,
            error=None if error is None else f"{type(error).__name__}: {error}",
            is_invalid=isinstance(error, RequestError),
        )

    def _is_due(self, choice: _Choice) -> bool:
        """Return whether the next output has this choice. Under DELTA it must have news."""
        is_new = choice.num_tokens > choice.num_taken or choice.finish_reason is not None
        return not self._is_delta or (is_new and not choice.is_over)

    @property
    def _is_delta(self) -> bool:
        return self._prepared.output_kind is RequestOutputKind.DELTA

    def _completion(self, choice: _Choice) -> CompletionOutput:
        is_delta = self._is_delta
        has_logprobs = self.request.params.logprobs is not None and self._prepared.has_rows
        start = choice.num_taken if is_delta else 0
        num_prompt = len(self.request.token_ids)
        new_text, answer = choice.text[choice.num_characters_taken :], choice.answer
        return CompletionOutput(
            index=choice.sequence.index,
            text=new_text if is_delta else choice.text,
            new_text=new_text,
            token_ids=choice.sequence.token_ids[
                num_prompt + start : num_prompt + choice.num_tokens
            ],
            cumulative_logprob=choice.cumulative_logprob if has_logprobs else None,
            logprobs=choice.logprobs[start:] if has_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            reasoning=None if answer is None else answer.reasoning(is_delta=is_delta),
            tool_calls=None if answer is None else answer.calls(is_delta=is_delta),
        )

    def _take_prompt_logprobs(self) -> list[LogprobRow | None] | None:
        if self.request.params.prompt_logprobs is None or not self._prepared.has_rows:
            return None
        rows = self._prompt_rows
        rows.extend(map(self._logprob_row, self.request.prompt_logprobs[len(rows) - 1 :]))
        start = self._num_prompt_taken if self._is_delta else 0
        self._num_prompt_taken = len(rows)
        return rows[start:]

    def _advance(self, choice: _Choice) -> None:
        sequence = choice.sequence
        if choice.is_broken:
            choice.begin(self._new_stream())
            choice.is_broken = False
        if choice.finish_reason is not None:
            return
        reason = sequence.finish_reason
        num_prompt = len(self.request.token_ids)
        first = num_prompt + choice.num_tokens
        new = sequence.token_ids[first : num_prompt + sequence.num_final]
        if not new and reason is None:
            return
        choice.is_broken = True
        for position, token_id in enumerate(new, start=first + 1):
            is_last = position == len(sequence.token_ids)
            if self._add_token(choice, token_id, reason if is_last else None):
                break
        else:
            if reason is not None:
                self._end(choice, reason)
        choice.is_broken = False

    def _add_token(self, choice: _Choice, token_id: int, reason: FinishReason | None) -> bool:
        """Process a token and return whether it completes a stop string.

        ``reason`` is the reason if the sequence ends with this token.
        """
        params = self.request.params
        if params.logprobs is not None and self._prepared.has_rows:
            row: TokenLogprobs = choice.sequence.logprobs[choice.num_tokens]
            choice.logprobs.append(self._logprob_row(row))
            choice.cumulative_logprob += row.logprobs[0]
        choice.num_tokens += 1
        if choice.stream is None:
            return False
        # EOS and stop tokens are not part of the text.
        is_spelled = reason != "stop" or params.include_stop_str_in_output
        is_armed = choice.num_tokens > params.min_tokens
        text, stop = choice.stream.add([token_id] if is_spelled else [], is_armed)
        choice.write(text, stop, None)
        return stop is not None

    def _end(self, choice: _Choice, reason: FinishReason) -> None:
        """Flush the stream of a sequence that has ended. The rest may complete a stop string."""
        text, stop = "", None
        if choice.stream is not None:
            text, stop = choice.stream.finish(choice.num_tokens > self.request.params.min_tokens)
        choice.write(text, stop, reason)

    def _new_answer(self, sequence: Sequence, key: str) -> AnswerState | None:
        if self._prepared.form is None:
            return None
        # It needs mie.text.tools, and few requests use that.
        from mie.frontend.conversation import AnswerState

        return AnswerState(self._prepared.form, f"{key}/{sequence.index}")

    def _new_stream(self) -> TextStream | None:
        if self._tokenizer is None:
            return None
        params, form = self.request.params, self._prepared.form
        return TextStream(
            self._tokenizer,
            self.request.token_ids,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            kept_tokens=() if form is None else form.tags,
        )

    def _logprob_row(self, row: TokenLogprobs) -> LogprobRow:
        """Return a row with the chosen token's rank. The others are ordered by rank."""
        tokenizer = self._tokenizer
        return {
            token_id: Logprob(
                logprob=logprob,
                rank=rank,
                decoded_token=tokenizer.token_str(token_id) if tokenizer else None,
            )
            for token_id, (logprob, rank) in row.ranked().items()
        }
