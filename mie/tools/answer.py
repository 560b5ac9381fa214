"""What an answer is made of, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass

from mie.params.structured import StructuredOutputsParams
from mie.tools.response_template import CallFormat, Tags


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How the text of an answer divides into reasoning, text and calls."""

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
        of_calls = self.calls
        tags = [] if of_calls is None else [of_calls.open, of_calls.close, of_calls.name_close]
        if self.reasoning is not None:
            tags += [self.reasoning.open, self.reasoning.close]
        return tuple(tag for tag in tags if tag)
