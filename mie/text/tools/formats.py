"""Define how answers, calls of tools and reasoning are written. The rows are in `table`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mie.config.params.structured import StructuredOutputsParams
from mie.text.tools.whole import AnswerParts

_BARS = re.compile(r"｜\w+｜")  # a special token inside of DeepSeek's tags
_TAG = re.compile(r"(<[^<>\s]*>|\[\w+\])|\s+")


def split_tags(text: str) -> list[str]:
    """Return the tags in a text and the words between them."""
    return [part for part in _TAG.split(text) if part]


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The tags before and after a part of an answer."""

    open: str
    close: str
    text_open: str = ""
    """The tag before the text that follows the part; nothing if the text has no tags."""
    text_close: str = ""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How a call writes one argument after another, where the arguments are not a JSON object."""

    open: str = ""
    """Text before a name."""
    middle: str
    """Text between a name and a value."""
    text_middle: str = ""
    """Text between a name and a value that is text, where this differs."""
    close: str = ""
    """Text after a value, such as a tag."""
    text_close: str = ""
    """Text after a value that is text, where this differs."""
    separator: str = ""
    """Text between two arguments."""
    quotes: tuple[str, ...] = ()
    """Quotes of text in values that are literals. Without any, a value ends at the tag `close`."""

    @property
    def has_text(self) -> bool:
        """Whether text is written directly, and not as JSON."""
        return not self.quotes or bool(self.text_middle)

    def before(self, *, is_text: bool) -> str:
        """Return the text between a name and a value."""
        return self.text_middle or self.middle if is_text else self.middle

    def after(self, *, is_text: bool) -> str:
        """Return the text after a value."""
        return self.text_close or self.close if is_text else self.close


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a model writes calls of tools. Whitespace at the ends of a text may differ in answers.

    A call is ``begin open NAME name_close ARGUMENTS close end``, where other calls stand before
    ``end``. If `name_close` is empty, the name stands in a JSON object beside the arguments.
    """

    begin: str = ""
    """The tags before all calls. A model may leave them out, and may repeat them."""
    open: str = ""
    """The tag before a call, or before a list of calls."""
    name_close: str = ""
    """The text between a name and arguments that stand outside of an object."""
    close: str = ""
    """The tag after a call, or after a list; nothing if the JSON ends a call."""
    separator: str = ""
    """The text between two calls."""
    end: str = ""
    """The tags after all calls."""
    name: str = "name"
    """The key of the tool's name. If it is empty, the name itself is the key of the arguments."""
    arguments: str = "arguments"
    """The key of the arguments."""
    parameters: Parameters | None = None
    """How arguments are written; as a JSON object if this is None."""
    is_list: bool = False
    """Whether the calls are a list in brackets. Such a list is read whole."""
    is_open_optional: bool = False
    """Whether a call may begin an answer without tags, as it does where it is forced."""
    id_length: int = 0
    """Characters that the id of a call must have; 0 sets no length."""
    id_tag: str = ""
    """The tag of an id that may stand behind a name."""
    has_index: bool = False
    """Whether a name is written, and is the id, as ``functions.NAME:INDEX``."""

    @property
    def holds_name(self) -> bool:
        """Whether the name stands in a JSON object beside the arguments."""
        return not self.name_close and self.parameters is None

    @property
    def is_streamed(self) -> bool:
        """Whether the arguments of a forced call are passed on while they come."""
        return self.parameters is None and not self.has_index

    @property
    def triggers(self) -> tuple[str, ...]:
        """The tags that begin a call anywhere in the text."""
        return tuple({text.split()[0]: 0 for text in (self.begin, self.open) if text.strip()})

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that may be special tokens, the longest first."""
        texts = [self.begin, self.open, self.name_close, self.close, self.separator, self.end]
        if self.parameters is not None:
            each = self.parameters
            texts += [each.open, each.middle, each.close, each.text_middle, each.text_close]
        parts = " ".join([*texts, self.id_tag]).split()
        found = {
            *parts,
            *(tag for part in parts for tag in [*split_tags(part), *_BARS.findall(part)]),
        }
        return tuple(sorted(found, key=len, reverse=True))


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """The reasoning, the calls and the grammar that an answer may have."""

    reasoning: Tags | None = None
    begins_with: str = ""
    """Tags at the end of the prompt: the answer continues the part that they open."""
    may_lack_open: bool = False
    """Whether text before a closing tag is reasoning, where the model left out the opening tag."""
    calls: CallFormat | None = None
    names: frozenset[str] = frozenset()
    """The names of the tools that may be called."""
    customs: frozenset[str] = frozenset()
    """The names of the custom tools among them."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The schemas of their arguments, by which text becomes a number or an object."""
    most_calls: int | None = None
    """Maximum number of calls; None if there is no limit."""
    structured_outputs: StructuredOutputsParams | None = None
    """The grammar that the tools make for the answer."""
    structure: StructuredOutputsParams | None = None
    """The structure that the caller gave and that is a part of the answer's grammar."""
    structure_place: str = ""
    """The place of the structure in the grammar, for messages."""
    parts: AnswerParts = field(default_factory=AnswerParts)
    """The parts of which `mie.frontend.whole_answer` makes a grammar."""
    is_written: bool = False
    """Whether a grammar writes the answer: reasoning, and then calls or a text."""
    before_structure: str = ""
    """The tags that the prompt must end with if a grammar of the request writes the answer."""

    @property
    def has_channels(self) -> bool:
        """Whether the answer is harmony's messages."""
        return self.calls == HARMONY or self.reasoning == ANALYSIS

    @property
    def has_budget(self) -> bool:
        """Whether the number of reasoning tokens can be limited."""
        return self.reasoning is not None and bool(not self.has_channels or self.parts.reasoning)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that the text must keep, even where they are special tokens."""
        if self.has_channels:
            return HARMONY_TAGS
        own = () if self.calls is None else self.calls.tags
        if self.reasoning is None:
            return own
        tags = self.reasoning
        texts = (tags.open, tags.close, tags.text_open, tags.text_close)
        return (*own, *(tag for text in texts for tag in split_tags(text)))


MESSAGE, END = "<|message|>", "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, *ENDS)
REPLY = "<|start|>assistant"
FINAL = f"<|channel|>final{MESSAGE}"
COMMENTARY = f"<|channel|>commentary{MESSAGE}"
ANALYSIS = Tags(open=f"<|channel|>analysis{MESSAGE}", close=END)
HARMONY = CallFormat(
    open="<|channel|>commentary to=functions.",
    name_close=f" <|constrain|>json{MESSAGE}",
    separator=END + REPLY,
)
"""The calls that a grammar writes; `mie.text.tools.channels` reads all of harmony."""
HARMONY_TO = replace(
    HARMONY, open=" to=functions.", name_close=f"<|channel|>commentary json{MESSAGE}"
)
"""The calls with the recipient after the role, as the chat template of gpt-oss writes them."""
