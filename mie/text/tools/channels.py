"""Read answers in harmony, the format of gpt-oss. How they were cut into pieces changes nothing.

An answer is messages. Each has a header with its channel and perhaps its recipient. The prompt ends
with ``<|start|>assistant``, the beginning of the first header.

    <|channel|>analysis<|message|>It is sunny.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mie.text.tools.formats import ENDS, MESSAGE, REPLY
from mie.text.tools.held import LONGEST_HEAD
from mie.text.tools.parser import BorderedText, Divider, new_call
from mie.text.tools.values import json_text, json_value

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")  # after the role or after the channel
_END = re.compile("|".join(map(re.escape, ENDS)))
_BEGINNINGS = ("<|start|>", "<|channel|>", MESSAGE, "to=")
_FUNCTIONS = "functions."


def unfinished_header(prompt: str) -> str:
    """Return the header of the message that a prompt ends in, or nothing if it has none yet."""
    header, message, content = prompt.rpartition(REPLY)[2].partition(MESSAGE)
    return "" if not message or _END.search(content) else header + message


class ChannelParser(Divider):
    """Divides harmony's messages into reasoning, text and calls.

    The channel "analysis" is reasoning, and other channels are text. A message to one of the tools
    is a call if it is an object of arguments, and is held back until it is whole. A message to
    anything else, such as a built-in tool, is reasoning in the channel "analysis"; elsewhere it
    stays text with its header, and is counted. Analysis stays text, too, if the format has no
    reasoning. The header of a message that was cut there is left out.
    """

    _message: _Message
    """The message that is read, once its header has been."""

    @property
    def is_reasoning(self) -> bool:
        return self._state == self._body and self._message.part is self._reasoning

    def _begin(self, is_last: bool) -> bool:
        """Look for a header. A message without one is text."""
        found = self._buffer.lstrip()
        if found.startswith(_BEGINNINGS):
            self._state = self._header
            return True
        if not is_last and any(tag.startswith(found) for tag in _BEGINNINGS):
            return False
        if self._buffer:
            self._open(_Message(part=self._content))
        return bool(self._buffer)

    def _header(self, is_last: bool) -> bool:
        header, tag, _ = self._buffer.partition(MESSAGE)
        # The beginning of a header that is certain.
        length = len(header) if tag else len(header) - len(MESSAGE) + 1
        if length > LONGEST_HEAD:
            self._open(_Message(part=self._content))
        elif tag:
            self._buffer = self._buffer[len(header + tag) :]
            self._open(self._message_of(header + tag))
        elif is_last and self._buffer.lstrip().startswith("<|"):
            self._buffer = ""
            return False
        elif is_last:
            self._open(_Message(part=self._content))
        else:
            return False
        return True

    def _message_of(self, header: str) -> _Message:
        channel = ["", *_CHANNEL.findall(header)][-1]
        recipient = ["assistant", *_RECIPIENT.findall(header)][-1]
        name = recipient.removeprefix(_FUNCTIONS)
        if recipient != name and name in self._form.names:
            return _Message(header=header, tool=name)
        is_analysis = channel == "analysis"
        if is_analysis and self._form.reasoning is not None:
            return _Message(part=self._reasoning)
        is_sent = recipient != "assistant"
        self.num_unparsed += is_sent
        return _Message(header=header if is_sent or is_analysis else "", part=self._content)

    def _open(self, message: _Message) -> None:
        self._message, self._state = message, self._body
        if message.part is not None:
            if message.part.text:
                message.part.border()
            message.part.add(message.header)

    def _body(self, is_last: bool) -> bool:
        end, message = _END.search(self._buffer), self._message
        length = self._released(is_last) if end is None else end.start()
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if message.part is None:
            message.held.append(text)
        else:
            message.part.add(text)
        if end is None and not is_last:
            return False
        self._buffer = self._buffer.removeprefix(tag := end.group() if end else "")
        self._close(tag)
        self._state = self._begin
        return True

    def _released(self, is_last: bool) -> int:
        """Return the length of the buffer without an end that may begin a tag."""
        place = self._buffer.rfind("<")
        is_held = place >= 0 and any(tag.startswith(self._buffer[place:]) for tag in ENDS)
        return place if is_held and not is_last else len(self._buffer)

    def _close(self, tag: str) -> None:
        """End the message at ``tag``."""
        message = self._message
        if message.part is None:
            text = "".join(message.held)
            arguments = json_value(text)
            most = self._form.most_calls
            if isinstance(arguments, dict) and (most is None or len(self.calls) < most):
                self.calls.append(new_call(self._form, self._key, len(self.calls), message.tool))
                self.calls[-1].arguments = json_text(arguments)
                return
            self.num_unparsed += 1
            message.part = self._content
            self._open(message)
            self._content.add(text)
        if message.header:
            message.part.add(tag)


@dataclass(kw_only=True)
class _Message:
    """A message while it is read: a part of the answer, or a call if it has none."""

    part: BorderedText | None = None
    header: str = ""
    """The header of a call, or of a message that keeps it in the text."""
    tool: str = ""
    held: list[str] = field(default_factory=list)
    """The arguments of a call."""
