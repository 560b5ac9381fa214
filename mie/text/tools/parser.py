"""Read an answer that arrives in pieces. How it was cut into pieces changes nothing."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable

from mie.text.tools.definitions import ToolCall
from mie.text.tools.formats import AnswerFormat, Tags
from mie.text.tools.held import HeldCalls
from mie.text.tools.values import json_text, length_that_begins


class Divider(ABC):
    """Divides an answer into reasoning, text and calls, from state to state."""

    def __init__(self, form: AnswerFormat, key: str) -> None:
        """The ids of calls derive from ``key``."""
        self.calls: list[ToolCall] = []
        self.num_unparsed = 0
        """Opening tags, or messages to a recipient, that were no calls."""
        self.moved: str | None = None
        """Text that turned out to be reasoning."""
        self._form = form
        self._key = key
        self._content = BorderedText()
        self._reasoning = BorderedText()
        self._buffer = ""
        self._state: Callable[[bool], bool] = self._begin
        self.add(form.begins_with)

    @property
    def content(self) -> str:
        """The text so far, without reasoning and calls."""
        return self._content.text

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return self._reasoning.text

    @property
    @abstractmethod
    def is_reasoning(self) -> bool:
        """Whether the next piece belongs to the reasoning."""

    def add(self, text: str) -> None:
        """Read the next piece of the answer."""
        self._buffer += text
        while self._state(False):
            pass

    def finish(self) -> None:
        """Read the held-back text, because the answer has ended."""
        while self._state(True):
            pass
        self._content.end()

    @abstractmethod
    def _begin(self, is_last: bool) -> bool:
        """Read from the buffer, as each state does. Return whether the next may read on."""


class AnswerParser(Divider):
    """Divides an answer by its tags.

    Text that may be the beginning of a tag is held back, and so is a call until it is whole. An
    opening tag without a call stays text, and is counted.
    """

    _held: HeldCalls | None = None
    _is_first = True  # no text has come yet
    _is_between = False  # the text is between tags of its own
    _has_reasoned = False

    @property
    def is_reasoning(self) -> bool:
        return self._state in (self._think, self._opened)

    def _begin(self, is_last: bool) -> bool:
        """Look for reasoning at the beginning of an answer. It is nowhere else."""
        tags, found = self._form.reasoning, self._buffer.lstrip()
        if tags is not None and found.startswith(tags.open):
            self._buffer = found[len(tags.open) :]
            self._enter_reasoning()
            return True
        if tags is not None and tags.open.startswith(found) and not is_last:
            return False
        self._state = self._text
        return True

    def _enter_reasoning(self) -> None:
        self._reasoning.border()
        self._state, self._has_reasoned = self._opened, True

    def _opened(self, is_last: bool) -> bool:
        """Skip an opening tag that a model writes again, as after a prompt that ends with one."""
        assert self._form.reasoning is not None
        tag, found = self._form.reasoning.open, self._buffer.lstrip()
        if found.startswith(tag):
            self._buffer = found[len(tag) :]
            return True
        if tag.startswith(found) and not is_last:
            return False
        self._state = self._think
        return True

    def _think(self, is_last: bool) -> bool:
        assert self._form.reasoning is not None
        close = self._form.reasoning.close
        if close in self._buffer:
            thought, _, self._buffer = self._buffer.partition(close)
            self._reasoning.add(thought)
            self._content.border()
            self._state = self._begin  # some models think again at once
            return True
        self._reasoning.add(self._released(is_last, close))
        return False

    def _text(self, is_last: bool) -> bool:
        calls, tags = self._form.calls, self._lacking_tags()
        if calls is not None and calls.is_open_optional and self._is_first and self._buffer.strip():
            return self._enter_call(0)
        if self._skip_tag_of_text():
            return True
        triggers = () if calls is None else calls.triggers
        places = [place for tag in triggers if (place := self._buffer.find(tag)) >= 0]
        place = -1 if tags is None else self._buffer.find(tags.close)
        if tags is not None and place >= 0:
            before = self._content.text + self._buffer[:place]
            if tags.open not in before and not (places and min(places) < place):
                self._content.add(self._taken(place))
                self._taken(len(tags.close))
                self._move_to_reasoning()
                return True
        if places:
            return self._enter_call(min(places))
        others = () if tags is None else (tags.close,)
        text = self._released(is_last, *triggers, *others, *self._tag_of_text())
        self._is_first = self._is_first and not text.strip()
        self._content.add(text)
        return False

    def _tag_of_text(self) -> tuple[str, ...]:
        """Return the tag around the text of an answer that may come next, if there is one."""
        tags = self._form.reasoning
        if tags is None or not tags.text_open or not (self._is_first or self._is_between):
            return ()
        return (tags.text_close if self._is_between else tags.text_open,)

    def _skip_tag_of_text(self) -> bool:
        """Leave out the tag around the text if it comes before any call."""
        calls = self._form.calls
        for tag in self._tag_of_text():
            before, found, _ = self._buffer.partition(tag)
            has_call = calls is not None and any(each in before for each in calls.triggers)
            if found and not has_call and (self._is_between or not before.strip()):
                self._content.add(self._taken(len(before)))
                self._taken(len(tag))
                self._content.border()
                self._is_between, self._is_first = not self._is_between, False
                return True
        return False

    def _enter_call(self, place: int) -> bool:
        self._content.add(self._taken(place))
        most = self._form.most_calls and self._form.most_calls - len(self.calls)
        self._held, self._state = HeldCalls(self._form, most), self._call
        return True

    def _call(self, is_last: bool) -> bool:
        """Read calls. Each leaves as soon as it is whole."""
        assert self._held is not None
        assert self._form.calls is not None
        is_done = self._held.read(self._buffer, is_last)
        for name, arguments in self._held.take():
            self.calls.append(new_call(self._form, self._key, len(self.calls), name))
            self.calls[-1].arguments = json_text(arguments)
        if not is_done:
            return False
        if self._held.end:
            self._content.border()
            self._taken(self._held.end)
        else:
            tags = [tag for tag in self._form.calls.triggers if self._buffer.startswith(tag)]
            self._content.add(self._taken(max(1, self._held.place, *map(len, tags))))
            self.num_unparsed += bool(tags)
        self._is_first, self._state = False, self._text
        return True

    def _lacking_tags(self) -> Tags | None:
        """Return the tags of reasoning that may have begun without the opening one."""
        if not self._form.may_lack_open or self._has_reasoned or self.calls:
            return None
        return self._form.reasoning

    def _move_to_reasoning(self) -> None:
        self.moved = self._content.text
        self._content, self._has_reasoned, self._is_first = BorderedText(), True, True
        self._reasoning.add(self.moved.lstrip())
        self._content.border()
        self._state = self._begin

    def _released(self, is_last: bool, *tags: str) -> str:
        """Take the buffer, except for an end that may begin a tag."""
        kept = 0 if is_last else length_that_begins(self._buffer, tags)
        return self._taken(len(self._buffer) - kept)

    def _taken(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text


def new_call(form: AnswerFormat, key: str, index: int, name: str) -> ToolCall:
    """Return a call without arguments. A key and an index always give the same id."""
    assert form.calls is not None
    digest = hashlib.sha256(f"{key}\0{index}".encode()).hexdigest()
    length = form.calls.id_length
    id = digest[:length] if length else f"call_{digest[:24]}"
    if form.calls.has_index:
        id = f"functions.{name}:{index}"
    return ToolCall(index=index, id=id, name=name, is_custom=name in form.customs)


class BorderedText:
    """Gathers a text in pieces. Space before a tag and after it belongs to the format."""

    def __init__(self) -> None:
        self.text = ""
        self._space = ""
        self._is_at_border = False

    def add(self, text: str) -> None:
        """Add a piece. Space at its end waits for the next piece."""
        kept = text.rstrip()
        if kept:
            if self._is_at_border:  # text on both sides of a part stays apart
                self.text += ("\n" if self.text else "") + kept.lstrip()
            else:
                self.text += self._space + kept
            self._is_at_border = False
            self._space = text[len(kept) :]
        else:
            self._space += text

    def border(self) -> None:
        """Mark the place of a tag."""
        self._space = ""
        self._is_at_border = True

    def end(self) -> None:
        """Add the space that waits, because no tag follows it."""
        if not self._is_at_border:
            self.text += self._space
        self._space = ""
