"""The parts of an answer, one after another: reasoning, text, and calls of tools."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from mie.frontend.outputs import CompletionOutput
from mie.sched.result import TokenLogprobs
from mie.text.tools.definitions import ToolCall, input_of

Kind = Literal["reasoning", "text", "call"]


class Part:
    """A part of an answer: reasoning, text, or a call of a tool.

    The text of a call is the JSON of its arguments, or the input of a custom tool.
    """

    def __init__(self, kind: Kind, index: int, call: ToolCall | None) -> None:
        self.kind: Kind = kind
        self.index = index
        """Index of the part in the answer."""
        self._call = call
        self.text = ""
        self.arguments = ""
        """The JSON of a call's arguments."""
        self.logprobs: list[TokenLogprobs] = []

    @property
    def call(self) -> ToolCall:
        """The call, with its id and its name."""
        assert self._call is not None
        return self._call


class PartEvent(NamedTuple):
    """A part begins, grows by a text and its log-probabilities, or ends."""

    what: Literal["begin", "grow", "end"]
    part: Part
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()


class Parts:
    """The parts of one choice. One after another grows."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._waiting: list[TokenLogprobs] = []  # of tokens without their text yet

    @property
    def last_call(self) -> Part | None:
        """The call that began last."""
        return next((part for part in reversed(self.all) if part.kind == "call"), None)

    def add(
        self, choice: CompletionOutput, logprobs: Sequence[TokenLogprobs] = ()
    ) -> Iterator[PartEvent]:
        """Yield the events of a choice's new output, in the order in which the model wrote it."""
        self._waiting += logprobs
        calls = list(choice.tool_calls or ())
        last = self.all[-1] if self.all else None
        if calls and last is not None and last.kind == "call" and calls[0].index == last.call.index:
            yield from self._grow("call", calls[0].arguments, calls.pop(0))
        if choice.reasoning:
            yield from self._grow("reasoning", choice.reasoning)
        is_plain = choice.reasoning is None and choice.tool_calls is None
        if choice.text or (is_plain and self._waiting):
            yield from self._grow("text", choice.text)
        for call in calls:
            yield from self._grow("call", call.arguments, call)

    def end(self) -> Iterator[PartEvent]:
        """Yield the events that end the last part. An empty answer has an empty text."""
        if not self.all:
            yield from self._begin("text", None)
        yield PartEvent("end", self.all[-1])

    def _grow(self, kind: Kind, text: str, call: ToolCall | None = None) -> Iterator[PartEvent]:
        last = self.all[-1] if self.all else None
        is_same = last is not None and last.kind == kind
        if is_same and call is not None:
            is_same = call.index == self.all[-1].call.index
        if not is_same:
            if last is not None:
                yield PartEvent("end", last)
            yield from self._begin(kind, call)
        logprobs: list[TokenLogprobs] = []
        if kind == "text":
            logprobs, self._waiting = self._waiting, []
        part = self.all[-1]
        if kind == "call":
            part.arguments += text
            if part.call.is_custom:
                text = input_of(part.arguments)[len(part.text) :]
        if text or logprobs:
            part.text += text
            part.logprobs += logprobs
            yield PartEvent("grow", part, text, logprobs)

    def _begin(self, kind: Kind, call: ToolCall | None) -> Iterator[PartEvent]:
        part = Part(kind, len(self.all), call)
        self.all.append(part)
        yield PartEvent("begin", part)
