"""The items of a response's output, and the events of each while it grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mie.frontend.outputs import CompletionOutput
from mie.tools.calls import ToolCall

Event = tuple[str, dict[str, Any]]
"""The name of an event and its fields."""


class OutputItem:
    """An item that grows by pieces of text. A kind says what it is."""

    kind: str
    prefix: str

    def __init__(self, index: int, response_id: str) -> None:
        """``index`` is its place in the output."""
        place = f"_{index}" if index else ""
        self.id = f"{self.prefix}_{response_id.removeprefix('resp_')}{place}"
        self.index = index
        self.text = ""

    def continues(self, call: ToolCall | None) -> bool:
        """Whether the next piece of this kind is of this item."""
        return True

    def as_dict(self, status: str) -> dict[str, Any]:
        """Return the item as JSON."""
        return {"id": self.id, "type": self.kind, "status": status, **self._fields(status)}

    def begin(self) -> Iterator[Event]:
        """Yield the events that begin the item."""
        added = {"output_index": self.index, "item": self.as_dict("in_progress")}
        yield "response.output_item.added", added

    def grow(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Yield the event of a piece of text."""
        raise NotImplementedError

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events that end the item."""
        done = {"output_index": self.index, "item": self.as_dict(status)}
        yield "response.output_item.done", done

    def _fields(self, status: str) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def _item(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}

    @property
    def _place(self) -> dict[str, Any]:
        return {**self._item, "content_index": 0}


class MessageItem(OutputItem):
    """The text of the answer."""

    kind = "message"
    prefix = "msg"

    def __init__(self, index: int, response_id: str) -> None:
        super().__init__(index, response_id)
        self.logprobs: list[dict[str, Any]] = []

    def begin(self) -> Iterator[Event]:
        """Yield the events that begin the item and its only part."""
        yield from super().begin()
        yield "response.content_part.added", {**self._place, "part": self._part()}

    def grow(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Yield the event of a piece of text."""
        self.text += text
        self.logprobs += logprobs
        fields = {**self._place, "delta": text, "logprobs": logprobs}
        yield "response.output_text.delta", fields

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events that end the item and its only part."""
        done = {**self._place, "text": self.text, "logprobs": self.logprobs}
        yield "response.output_text.done", done
        yield "response.content_part.done", {**self._place, "part": self._part()}
        yield from super().end(status)

    def _fields(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        return {"role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self.logprobs,
        }


class ReasoningItem(OutputItem):
    """What the model wrote before its answer."""

    kind = "reasoning"
    prefix = "rs"

    def grow(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Yield the event of a piece of text."""
        self.text += text
        yield "response.reasoning_text.delta", {**self._place, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events that end the item."""
        yield "response.reasoning_text.done", {**self._place, "text": self.text}
        yield from super().end(status)

    def _fields(self, status: str) -> dict[str, Any]:
        part = {"type": "reasoning_text", "text": self.text}
        return {"summary": [], "content": [] if status == "in_progress" else [part]}


class CallItem(OutputItem):
    """A call of a tool; its text is the arguments."""

    kind = "function_call"
    prefix = "fc"

    def __init__(self, index: int, response_id: str, call: ToolCall) -> None:
        super().__init__(index, response_id)
        self._call = call

    def continues(self, call: ToolCall | None) -> bool:
        """Whether the next piece is of the same call."""
        return call is not None and call.index == self._call.index

    def grow(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Yield the event of a piece of the arguments."""
        self.text += text
        yield "response.function_call_arguments.delta", {**self._item, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events that end the item."""
        done = {**self._item, "name": self._call.name, "arguments": self.text}
        yield "response.function_call_arguments.done", done
        yield from super().end(status)

    def _fields(self, status: str) -> dict[str, Any]:
        return {"call_id": self._call.id, "name": self._call.name, "arguments": self.text}


class OutputItems:
    """All items of a response. One after another grows."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self._items: list[OutputItem] = []
        self._logprobs: list[dict[str, Any]] = []  # those of tokens whose text is still to come

    def add(self, choice: CompletionOutput, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Yield the events of what is new."""
        self._logprobs += logprobs
        if choice.reasoning:
            yield from self._grow(ReasoningItem, choice.reasoning)
        is_plain = choice.reasoning is None and choice.tool_calls is None
        if choice.text or (is_plain and self._logprobs):
            yield from self._grow(MessageItem, choice.text)
        for call in choice.tool_calls or ():
            yield from self._grow(CallItem, call.arguments, call)

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events that end the last item. An empty output has an empty message."""
        if not self._items:
            yield from self._begin(MessageItem, None)
        yield from self._items[-1].end(status)

    def as_list(self, status: str) -> list[dict[str, Any]]:
        """Return the items as JSON. All but the last one are complete."""
        last = self._items[-1]
        return [each.as_dict(status if each is last else "completed") for each in self._items]

    def _grow(
        self, kind: type[OutputItem], text: str, call: ToolCall | None = None
    ) -> Iterator[Event]:
        last = self._items[-1] if self._items else None
        if last is None or not (isinstance(last, kind) and last.continues(call)):
            if last is not None:
                yield from last.end("completed")
            yield from self._begin(kind, call)
        logprobs: list[dict[str, Any]] = []
        if kind is MessageItem:
            logprobs, self._logprobs = self._logprobs, []
        if text or logprobs:
            yield from self._items[-1].grow(text, logprobs)

    def _begin(self, kind: type[OutputItem], call: ToolCall | None) -> Iterator[Event]:
        index = len(self._items)
        if call is None:
            self._items.append(kind(index, self._response_id))
        else:
            self._items.append(CallItem(index, self._response_id, call))
        yield from self._items[-1].begin()
