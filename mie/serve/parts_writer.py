"""Answers of one choice that have parts, one after another: the common part of their dialects."""

from collections.abc import Iterable, Iterator
from typing import Any

from mie.frontend.outputs import CompletionOutput
from mie.sched.result import TokenLogprobs
from mie.serve.errors import refuse_unfinished
from mie.serve.parts import PartEvent
from mie.serve.serving import A
from mie.serve.writer import Choice, Writer


class PartsWriter(Writer[A]):
    """Writes an answer of one choice as its parts."""

    def write(self, event: PartEvent, status: str) -> Iterator[str]:
        """Yield the events of a part; ``status`` is the state of the part at its end."""
        raise NotImplementedError

    def finish(self, choice: Choice) -> Iterator[str]:
        """Yield the last events."""
        raise NotImplementedError

    def ended(self, choice: Choice) -> dict[str, Any]:
        """Return the whole answer, when all parts have ended."""
        raise NotImplementedError

    def whole(self, choices: list[Choice]) -> Any:
        [choice] = choices
        refuse_unfinished(choice.new)
        for _ in (*self._add(choice), *choice.parts.end()):
            pass  # nothing is sent before the end
        return self.ended(choice)

    def grow(self, choice: Choice) -> Iterator[str]:
        for event in self._add(choice):
            yield from self.write(event, "completed")
        if choice.new.finish_reason is not None:
            refuse_unfinished(choice.new)
            for event in choice.parts.end():
                yield from self.write(event, status_of(choice.new))
            yield from self.finish(choice)

    def _add(self, choice: Choice) -> Iterator[PartEvent]:
        _, rows = choice.take()
        return choice.parts.add(choice.new, rows)

    def entries(self, rows: Iterable[TokenLogprobs]) -> Iterator[dict[str, Any]]:
        """Yield the log-probabilities of a part, if they are wanted."""
        return iter(()) if self.logprobs is None else self.logprobs.entries(rows)


def status_of(choice: CompletionOutput) -> str:
    """Return whether a choice is whole, in OpenAI's words."""
    return "completed" if choice.finish_reason == "stop" else "incomplete"
