"""Keep the answer to a request, and how much of the answer its caller has taken.

The tokens, log-probabilities and endings belong to the request's sequences. The text and all else
is derived from them, so that anything an exception leaves half-done is derived again. While a
sequence runs, its text is derived when the caller takes it, unless the text may end the sequence.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from mie.base.threads import is_of_the_request
from mie.config.params.sampling import RequestOutputKind
from mie.errors import RequestError
from mie.frontend.collector import Collector, CollectorRef
from mie.frontend.outputs import CompletionOutput, Logprob, LogprobRow, RequestOutput, ranked
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
        self.num_ready = 0  # tokens that the caller may take
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
        """Begin the answer to ``request``. The engine made it from ``prepared``."""
        self.request = request
        self.request_id = request.request_id
        self.collector = collector
        self.is_answered = False
        """Whether all text of the answer is there. A stop string ends it before its sequences."""
        params = request.params
        self.reads_steps = bool(params.stop_strings) or prepared.form is not None
        """Whether each token is processed in its step, for a stop string or a parser."""
        self._prepared = prepared
        self._is_final = prepared.output_kind is RequestOutputKind.FINAL_ONLY
        self._is_delta = prepared.output_kind is RequestOutputKind.DELTA
        self._has_rows = params.logprobs is not None and prepared.has_rows
        self._tokenizer = tokenizer if params.detokenize else None
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

    def advance(self) -> bool:
        """Process the sequences' new tokens, or leave them to `take` until a sequence ends.

        Tokens cost less together, and a caller may take many of them at once. Return whether there
        may be something to `file`, or a sequence to end.

        Raises:
            Exception: any error of the tokenizer or of a parser, for which the request is to blame.
        """
        with self._lock:
            if self._fault is not None:
                raise self._fault
            has_ended = True
            for choice in self._choices:
                sequence = choice.sequence
                if self.reads_steps or sequence.finish_reason is not None:
                    self._advance(choice, sequence.num_final, sequence.finish_reason)
                    has_ended = has_ended and choice.finish_reason is not None
                else:
                    choice.num_ready, has_ended = sequence.num_final, False
            if has_ended and not self.is_answered:
                self._count_calls()
                self.is_answered = True
        return self.is_answered or self.reads_steps or not self._is_final

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
            for choice in () if self._is_final else self._choices:
                is_new |= choice.num_ready > choice.num_taken
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
        for choice in self._choices:
            if not choice.is_broken:
                with suppress(Exception):
                    self._advance(choice, choice.num_ready, None)  # the caller may lack this text
        self._tokenizer = self._fault = None
        for choice in self._choices:
            choice.stream = choice.answer = None
            if choice.is_broken or choice.finish_reason is None:
                choice.is_broken, choice.finish_reason = False, None
                sequence = choice.sequence
                self._advance(choice, sequence.num_final, sequence.finish_reason)
                choice.finish_reason, choice.stop_reason = "error", None
        self.is_answered = True

    def take(self) -> RequestOutput | None:
        """Return the next output for the caller, or None if there is none (any more).

        Under CUMULATIVE it has everything so far, otherwise only the new part. If making the output
        raises, the request fails: at once if it has ended, and otherwise in the engine's thread.
        """
        with self._lock:
            if self._is_over:
                return None
            was_interrupted = not self.is_answered
            for choice in self._choices:
                was_interrupted = was_interrupted and choice.finish_reason is not None
            if was_interrupted:
                self._is_filed = False  # the next turn files it again
                return None
            try:
                for choice in self._choices:
                    self._advance(choice, choice.num_ready, None)
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
            num_tokens = 0
            for choice in self._choices:
                num_tokens += choice.num_tokens
                choice.num_taken = choice.num_tokens
                choice.num_characters_taken = len(choice.text)
                choice.is_over = choice.finish_reason is not None
                if choice.answer is not None:
                    choice.answer.take()
            self.request.metrics.num_generation_tokens = num_tokens
            self._is_filed = False
            self._is_over = output.finished
        return output

    def _output(self) -> RequestOutput:
        request, metrics = self.request, self.request.metrics
        error, adapter = request.error, self._prepared.adapter
        outputs = []
        for choice in self._choices:
            if not self._is_delta or self._is_news(choice):
                outputs.append(self._completion(choice))
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=request.token_ids,
            outputs=outputs,
            finished=self.is_answered,
            num_cached_tokens=metrics.num_cached_tokens,
            metrics=metrics,
            lora_request=None if adapter is None else adapter.request,
        )
        if request.params.prompt_logprobs is not None and self._prepared.has_rows:
            output.prompt_logprobs = self._take_prompt_logprobs()
        if error is not None:
            output.error = f"{type(error).__name__}: {error}"
            output.is_invalid = isinstance(error, RequestError)
        return output

    def _is_news(self, choice: _Choice) -> bool:
        """Return whether the caller lacks tokens of a choice, or its end."""
        is_new = choice.num_tokens > choice.num_taken or choice.finish_reason is not None
        return is_new and not choice.is_over

    def _completion(self, choice: _Choice) -> CompletionOutput:
        sequence, num_prompt, is_delta = choice.sequence, self.request.num_prompt, self._is_delta
        start = choice.num_taken if is_delta else 0
        new_text = choice.text[choice.num_characters_taken :]
        output = CompletionOutput(
            index=sequence.index,
            text=new_text if is_delta else choice.text,
            new_text=new_text,
            token_ids=sequence.token_ids[num_prompt + start : num_prompt + choice.num_tokens],
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if self._has_rows:
            output.cumulative_logprob = choice.cumulative_logprob
            output.logprobs = choice.logprobs[start:]
        if choice.answer is not None:
            output.reasoning = choice.answer.reasoning(is_delta=is_delta)
            output.tool_calls = choice.answer.calls(is_delta=is_delta)
        return output

    def _take_prompt_logprobs(self) -> list[LogprobRow | None]:
        rows = self._prompt_rows
        rows.extend(map(self._logprob_row, self.request.prompt_logprobs[len(rows) - 1 :]))
        start = self._num_prompt_taken if self._is_delta else 0
        self._num_prompt_taken = len(rows)
        return rows[start:]

    def _advance(self, choice: _Choice, num_tokens: int, reason: FinishReason | None) -> None:
        """Process the first ``num_tokens`` tokens. They are the last ones if there is a reason."""
        if choice.is_broken:
            choice.begin(self._new_stream())
            choice.is_broken = False
        if choice.finish_reason is not None:
            return
        if num_tokens <= choice.num_tokens and reason is None:
            return
        token_ids, num_prompt = choice.sequence.token_ids, self.request.num_prompt
        new = token_ids[num_prompt + choice.num_tokens : num_prompt + num_tokens]
        ends = reason == "stop" and num_prompt + num_tokens == len(token_ids)
        has_end = ends and not self.request.params.include_stop_str_in_output
        choice.is_broken = True
        if self.reads_steps:
            self._read(choice, new, has_end=has_end)
        else:
            choice.num_tokens = num_tokens
            if choice.stream is not None:
                choice.text += choice.stream.detokenizer.add(new[:-1] if has_end else new)
        if self._has_rows:
            for row in choice.sequence.logprobs[len(choice.logprobs) : choice.num_tokens]:
                choice.logprobs.append(self._logprob_row(row))
                choice.cumulative_logprob += row.logprobs[0]
        if reason is not None and choice.finish_reason is None:
            self._end(choice, reason)
        choice.num_ready = choice.num_tokens
        choice.is_broken = False

    def _read(self, choice: _Choice, token_ids: list[int], *, has_end: bool) -> None:
        """Process tokens one after another, up to a stop string.

        With ``has_end`` the last one is EOS or a stop token, which is not part of the text.
        """
        min_tokens = self.request.params.min_tokens
        for place, token_id in enumerate(token_ids, start=1):
            choice.num_tokens += 1
            if choice.stream is not None:
                spelled = [] if has_end and place == len(token_ids) else [token_id]
                text, stop = choice.stream.add(spelled, choice.num_tokens > min_tokens)
                choice.write(text, stop, None)
                if stop is not None:
                    break

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
            for token_id, (logprob, rank) in ranked(row).items()
        }
