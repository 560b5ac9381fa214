"""Describe an answer: the calls that callers get, and how its text divides into parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mie.params.structured import StructuredOutputsParams
from mie.tools.formats import CallFormat, Tags


@dataclass(kw_only=True, slots=True)
class ToolCall:
    """A call of a tool that a model wrote."""

    index: int
    """Place among the calls of its choice, from 0."""
    id: str
    """Name of this call, under which its result is sent back."""
    name: str
    """Name of the tool."""
    arguments: str = ""
    """The arguments as JSON, or only the new part of it if ``output_kind`` is DELTA."""

    def as_message(self) -> dict[str, Any]:
        """Return the call as an entry of ``tool_calls`` in an assistant's message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """The reasoning, the calls and the grammar that an answer may have."""

    reasoning: Tags | None = None
    begins_in_reasoning: bool = False
    """Whether the prompt ends with the tag that opens the reasoning."""
    calls: CallFormat | None = None
    names: frozenset[str] = frozenset()
    """The names of the tools that may be called."""
    may_repeat: bool = True
    """Whether there may be several calls."""
    structured_outputs: StructuredOutputsParams | None = None
    """The grammar of an answer that must be calls, and nothing else."""

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that the text must keep, even where they are special tokens."""
        calls, reasoning = self.calls, self.reasoning
        tags = [] if calls is None else [calls.open, calls.close, calls.name_close]
        tags += [] if reasoning is None else [reasoning.open, reasoning.close]
        return tuple(tag for tag in tags if tag)
