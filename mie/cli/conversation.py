"""Hold a conversation with a model: its messages, its answers and their times."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mie.base.reprs import count
from mie.cli.answer_writer import AnswerWriter, Look
from mie.errors import RequestError

if TYPE_CHECKING:
    from mie.config.adapters import LoRARequest
    from mie.config.params.sampling import SamplingParams
    from mie.frontend.llm import LLM
    from mie.frontend.outputs import CompletionOutput

_BAR = 30
"""Characters of the meter of the context."""
WHEN_FULL = ("ask", "drop")
"""Treatment of a message that does not fit the context: refuse it, or drop the oldest turns."""
_SHARE_OF_ANSWER = 4
"""Dropped turns leave at least this share of the context for the answer, if so much can be left."""


@dataclass(kw_only=True)
class Stats:
    """The amounts and times of one answer."""

    num_prompt_tokens: int
    began: float
    num_cached_tokens: int = 0
    num_tokens: int = 0
    first_seconds: float = 0.0
    """Seconds until the first token."""
    seconds: float = 0.0

    @property
    def speed(self) -> str:
        """The tokens per second, of the whole answer with its prompt."""
        return f"{self.num_tokens / max(self.seconds, 1e-9):.1f} tokens/s"

    def __str__(self) -> str:
        later = self.seconds - self.first_seconds
        decoding = f"{(self.num_tokens - 1) / later:.1f} tokens/s after it · " if later > 0 else ""
        return (
            f"first token after {self.first_seconds:.2f} s · {decoding}{self.num_tokens} tokens "
            f"in {self.seconds:.1f} s · {self.num_cached_tokens} of {self.num_prompt_tokens} "
            "prompt tokens cached"
        )


class Conversation:
    """A model and the messages so far. Answers are printed as they are generated.

    With ``tells_speed`` each answer is followed by a line with its tokens per second.
    ``when_full`` is one of `WHEN_FULL`. ``chat_template`` replaces the model's. ``lora_request`` is
    the adapter of all answers.

    Raises:
        ChatTemplateError: the model has no chat template, or one without a system message.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        *,
        look: Look | None = None,
        tells_speed: bool = False,
        when_full: str = "ask",
        chat_template: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self.llm, self.params, self.when_full = llm, params, when_full
        self.lora_request = lora_request
        self._options: dict[str, Any] = {}
        if chat_template is not None:
            self._options["chat_template"] = chat_template
        # The turns that were refused, and the message.
        self._refused: tuple[list[dict[str, str]], str] | None = None
        self.look = look or Look(markdown=False)
        self.stats: Stats | None = None
        self.is_stopped = False
        """Whether Ctrl-C ended the last answer."""
        self._tells_speed = tells_speed
        self._turns: list[dict[str, str]] = []
        self.system: str | None = None
        self.set_system(system)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system message, or none, and the turns of both sides."""
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, *self._turns]

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the conversation takes of the context."""
        if not self._turns:
            return 0
        return len(self._prompt(self.messages)["prompt_token_ids"])

    def meter(self) -> str:
        """Return a picture of the context: how much of it the conversation takes."""
        used, limit = self.num_tokens, self.llm.engine.max_model_len
        full = min(_BAR, round(_BAR * used / limit))
        return (
            f"{'█' * full}{'░' * (_BAR - full)} {used:,} of {limit:,} tokens ({used / limit:.0%}) "
            f"in {count(len(self.messages), 'message')}"
        )

    def set_system(self, text: str | None) -> None:
        """Replace the system message. The turns stay.

        Raises:
            ChatTemplateError: the model's chat template has none.
        """
        before, self.system = self.system, text
        try:
            turns = self._turns or [{"role": "user", "content": "Hello"}]
            opening = self.messages[: len(self.messages) - len(self._turns)]
            self.llm.apply_chat_template([*opening, *turns], **self._options)
        except RequestError:
            self.system = before
            raise

    def reset(self) -> None:
        """Drop everything but the system message."""
        self._turns, self._refused = [], None

    def replace(self, messages: Sequence[Any]) -> None:
        """Take the messages of another conversation.

        Raises:
            RequestError: they are not the turns of both sides, or the template rejects them.
        """
        texts: list[Any] = [x.get("content") for x in messages if isinstance(x, dict)]
        roles: list[Any] = [x.get("role") for x in messages if isinstance(x, dict)]
        first = 1 if roles[:1] == ["system"] else 0
        is_pairs = roles[first:] == ["user", "assistant"] * (len(roles[first:]) // 2)
        if len(texts) < len(messages) or not is_pairs or not all(isinstance(x, str) for x in texts):
            raise RequestError(
                'it needs "messages" of text: at most one with the role "system", and pairs of '
                '"user" and "assistant"'
            )
        before = self._turns
        self._turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)][first:]
        try:
            self.set_system(texts[0] if first else None)
        except RequestError:
            self._turns = before
            raise
        self._refused = None

    def undo(self) -> str:
        """Drop the last message and its answer, and return the message.

        Raises:
            RequestError: there is none.
        """
        if not self._turns:
            raise RequestError("there is no message yet")
        text, self._turns = self._turns[-2]["content"], self._turns[:-2]
        self._refused = None
        return text

    def answer_again(self, text: str | None = None) -> None:
        """Answer the last message again, or ``text`` in its place.

        Raises:
            RequestError: there is no message, or ``text`` cannot be answered. Nothing changes.
        """
        if not self._turns:
            raise RequestError("there is no message yet")
        last = self._turns[-2]["content"]
        self._answer_after(self._turns[:-2], last if text is None else text, drops=False)

    def drop(self) -> None:
        """Answer the message that did not fit the context, after dropping the oldest turns.

        Raises:
            RequestError: there is no such message, or it cannot be answered. Nothing changes.
        """
        if self._refused is None:
            raise RequestError("no message waits: /drop sends a message that did not fit")
        turns, text = self._refused
        self._answer_after(turns, text, drops=True)

    def _answer_after(self, turns: list[dict[str, str]], text: str, *, drops: bool) -> None:
        before, self._turns = self._turns, turns
        try:
            self.answer(text, drops=drops)
        finally:
            if self._turns is turns:  # no answer came, so the question is taken back
                self._turns = before

    def answer(self, text: str, *, drops: bool = False) -> None:
        """Print the answer to ``text``, and keep both. Ctrl-C ends the answer early.

        If the context has no room, the oldest turns are dropped, provided that ``drops`` or the
        setting `when_full` says so. The system message stays.

        Raises:
            RequestError: the conversation does not fit the context, or the template rejects it;
                ``text`` is not remembered.
        """
        user = {"role": "user", "content": text}
        prompt, kept = self._fitting(user, drops or self.when_full == "drop")
        stats = Stats(num_prompt_tokens=len(prompt["prompt_token_ids"]), began=perf_counter())
        choice = self._printed(prompt, stats)
        stats.seconds = perf_counter() - stats.began
        notes = ["stopped"] if self.is_stopped else self._why_cut(choice)
        if choice is not None:
            self.stats = stats
            if self._tells_speed:
                notes += [f"{stats.num_tokens} tokens", stats.speed]
        if notes:
            print(f"[{' · '.join(notes)}]", file=sys.stderr)
        if choice is not None and choice.text:
            self._turns = [*kept, user, {"role": "assistant", "content": choice.text}]
            self._refused = None

    def _printed(self, prompt: dict[str, Any], stats: Stats) -> CompletionOutput | None:
        """Print the answer as it is generated, and return it. Ctrl-C stops it."""
        choice: CompletionOutput | None = None
        self.is_stopped = False
        num_thought = 0
        writer = AnswerWriter(sys.stdout, self.look)
        try:
            stream = self.llm.stream(prompt, self.params, lora_request=self.lora_request)
            with closing(stream) as outputs:
                for output in outputs:
                    choice = output.outputs[0]
                    stats.first_seconds = stats.first_seconds or perf_counter() - stats.began
                    stats.num_tokens = len(choice.token_ids)
                    stats.num_cached_tokens = output.num_cached_tokens or 0
                    thought = choice.reasoning or ""
                    writer.add_reasoning(thought[num_thought:])
                    num_thought = len(thought)
                    writer.add(choice.new_text)
        except KeyboardInterrupt:
            self.is_stopped = True
        with suppress(KeyboardInterrupt):  # the second one of a nervous user
            writer.finish()
        return choice

    def _prompt(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return self.llm.chat_prompt(messages, **self._options)

    def _fitting(
        self, user: dict[str, str], drops: bool
    ) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """Return a prompt that fits the context, and the turns in it before the message.

        Raises:
            RequestError: the message does not fit, with the turns or, if it ``drops`` them, alone.
        """
        prompt, limit = self._prompt([*self.messages, user]), self.llm.engine.max_model_len
        num_tokens, num_turns = len(prompt["prompt_token_ids"]), len(self._turns) // 2
        if num_tokens < limit:
            return prompt, self._turns
        opening = self.messages[: len(self.messages) - len(self._turns)]

        def without(num_dropped: int) -> dict[str, Any]:
            return self._prompt([*opening, *self._turns[2 * num_dropped :], user])

        alone = num_tokens if not num_turns else len(without(num_turns)["prompt_token_ids"])
        if alone >= limit:
            raise RequestError(
                f"the message has {alone} tokens with the system message and the template; the"
                f" context holds {limit}, including the answer. The message was not sent: send a"
                " shorter one, or raise --max-model-len"
            )
        if not drops:
            self._refused = self._turns, user["content"]
            raise RequestError(
                f"the conversation has {num_tokens} tokens with this message; the context holds"
                f" {limit}, including the answer. The message was not sent: use /drop to forget the"
                " oldest turns and send it (/set when_full drop always does), use /reset, or send a"
                " shorter one"
            )
        most = limit - min(limit // _SHARE_OF_ANSWER, self.params.max_tokens or limit)
        num_dropped = bisect_left(
            range(num_turns),  # the last resort is to drop all of them
            True,
            1,
            key=lambda number: len(without(number)["prompt_token_ids"]) <= most,
        )
        print(
            f"[the context of {limit} tokens is full: forgot the oldest {num_dropped} of "
            f"{count(num_turns, 'turn')}]",
            file=sys.stderr,
        )
        return without(num_dropped), self._turns[2 * num_dropped :]

    def _why_cut(self, choice: CompletionOutput | None) -> list[str]:
        if choice is None or choice.finish_reason != "length":
            return []
        if len(choice.token_ids) == self.params.max_tokens:
            return [f"cut at max_tokens {self.params.max_tokens}"]
        limit = self.llm.engine.max_model_len
        return [f"the context of {limit} tokens is full: the answer was cut. /reset starts over"]
