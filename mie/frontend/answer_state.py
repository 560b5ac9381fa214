"""Split a model's text into an answer's parts, and count the parts that its caller received."""

from __future__ import annotations

from dataclasses import replace

from mie.structured.tools.calls import ToolCall
from mie.structured.tools.forced import new_parser
from mie.structured.tools.formats import AnswerFormat


class AnswerState:
    """Reads the text of one choice as its format says."""

    def __init__(self, form: AnswerFormat, key: str) -> None:
        """The ids of calls derive from ``key``."""
        self._form = form
        self._key = key
        self._num_reasoning_taken = 0
        self._num_arguments_taken: list[int] = []  # characters, of each call
        self.begin()

    def begin(self) -> None:
        """Read the text from the first character on."""
        self._parser = new_parser(self._form, self._key)
        self.num_reasoning_tokens = 0

    def add(self, text: str, *, is_last: bool) -> str:
        """Read the text of a token, and return the answer so far, without its other parts."""
        self.num_reasoning_tokens += self._parser.is_reasoning
        self._parser.add(text)
        if is_last:
            self._parser.finish()
        return self._parser.content

    @property
    def num_calls(self) -> int:
        """The number of calls."""
        return len(self._parser.calls)

    @property
    def num_unparsed(self) -> int:
        """The number of opening tags that no call followed."""
        return self._parser.num_unparsed

    def reasoning(self, *, is_delta: bool) -> str | None:
        """Return the reasoning, or only its new part; None if the format has none."""
        if self._form.reasoning is None:
            return None
        return self._parser.reasoning[self._num_reasoning_taken if is_delta else 0 :]

    def calls(self, *, is_delta: bool) -> list[ToolCall] | None:
        """Return the calls, or only their new parts; None if there are no tools."""
        if self._form.calls is None:
            return None
        if not is_delta:
            return [replace(call) for call in self._parser.calls]
        taken = self._num_arguments_taken
        return [
            replace(call, arguments=call.arguments[taken[call.index] :])
            if call.index < len(taken)
            else replace(call)
            for call in self._parser.calls
            if call.index >= len(taken) or len(call.arguments) > taken[call.index]
        ]

    def take(self) -> None:
        """Note that the caller has everything so far."""
        self._num_reasoning_taken = len(self._parser.reasoning)
        self._num_arguments_taken = [len(call.arguments) for call in self._parser.calls]
