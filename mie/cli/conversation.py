"""Hold a conversation with a model: its messages, its answers and their times."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mie.base.reprs import count
from mie.cli.answer_writer import AnswerWriter, Look
from mie.errors import RequestError

if TYPE_CHECKING:
    from mie.config.params.sampling import SamplingParams
    from mie.frontend.outputs import CompletionOutput
    from mie.llm import LLM

_BAR = 30
"""Characters of the meter of the context."""


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
    ) -> None:
        self.llm, self.params = llm, params
        self.look = look or Look(markdown=False)
        self.stats: Stats | None = None
        self._tells_speed = tells_speed
        self._turns: list[dict[str, str]] = []
        self.system: str | None = None
        self.set_system(system)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system message, if there is one, and the turns of both sides."""
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, *self._turns]

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the conversation takes of the context."""
        if not self._turns:
            return 0
        return len(self.llm.chat_prompt(self.messages)["prompt_token_ids"])

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
            self.llm.apply_chat_template([*opening, *turns])
        except RequestError:
            self.system = before
            raise

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._turns = []

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

    def undo(self) -> str:
        """Forget the last message and its answer, and return the message.

        Raises:
            RequestError: there is none.
        """
        if not self._turns:
            raise RequestError("there is no message yet")
        text, self._turns = self._turns[-2]["content"], self._turns[:-2]
        return text

    def answer_again(self, text: str | None = None) -> None:
        """Answer the last message again, or ``text`` in its place.

        Raises:
            RequestError: there is no message, or ``text`` cannot be answered. Nothing changes.
        """
        before = self._turns
        last = self.undo()
        try:
            self.answer(last if text is None else text)
        finally:
            if len(self._turns) < len(before):  # no answer came
                self._turns = before

    def answer(self, text: str) -> None:
        """Print the answer to ``text``, and remember both. Ctrl-C ends the answer early.

        Raises:
            RequestError: the conversation does not fit the context, or the template rejects it;
                ``text`` is not remembered.
        """
        user = {"role": "user", "content": text}
        prompt = self.llm.chat_prompt([*self.messages, user])
        self._check_fits(len(prompt["prompt_token_ids"]))
        stats = Stats(num_prompt_tokens=len(prompt["prompt_token_ids"]), began=perf_counter())
        choice, is_stopped = self._printed(prompt, stats)
        stats.seconds = perf_counter() - stats.began
        notes = ["stopped"] if is_stopped else self._why_cut(choice)
        if choice is not None:
            self.stats = stats
            if self._tells_speed:
                notes += [f"{stats.num_tokens} tokens", stats.speed]
        if notes:
            print(f"[{' · '.join(notes)}]", file=sys.stderr)
        if choice is not None and choice.text:
            self._turns = [*self._turns, user, {"role": "assistant", "content": choice.text}]

    def _printed(
        self, prompt: dict[str, Any], stats: Stats
    ) -> tuple[CompletionOutput | None, bool]:
        """Print the answer as it is generated, and return it and whether Ctrl-C stopped it."""
        choice: CompletionOutput | None = None
        is_stopped = False
        num_thought = 0
        writer = AnswerWriter(sys.stdout, self.look)
        try:
            with closing(self.llm.stream(prompt, self.params)) as outputs:
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
            is_stopped = True
        with suppress(KeyboardInterrupt):  # the second one of a nervous user
            writer.finish()
        return choice, is_stopped

    def _check_fits(self, num_tokens: int) -> None:
        limit = self.llm.engine.max_model_len
        if num_tokens >= limit:
            raise RequestError(
                f"the conversation has {num_tokens} tokens with this message; the context holds"
                f" {limit}, including the answer. The message was not sent: use /reset, or send a"
                " shorter one"
            )

    def _why_cut(self, choice: CompletionOutput | None) -> list[str]:
        if choice is None or choice.finish_reason != "length":
            return []
        if len(choice.token_ids) == self.params.max_tokens:
            return [f"cut at max_tokens {self.params.max_tokens}"]
        limit = self.llm.engine.max_model_len
        return [f"the context of {limit} tokens is full: the answer was cut. /reset starts over"]
