"""Describe a call of a tool, as callers get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
