"""Write calls of tools as grammars, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from mie.config.params.structured import COMPACT
from mie.errors import RequestError
from mie.text.tools.definitions import INPUT, MOST_CALLS, Tool, ToolChoice, parameters_of
from mie.text.tools.formats import CallFormat, split_tags
from mie.text.tools.quoted import quoted_lark
from mie.text.tools.whole import Format, SpecialId, either, literal_of
from mie.text.tools.written import ArgumentRules, Literals, literals_of, pattern_of

_SLASHED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_ANY_OBJECT = json.dumps(
    {"type": "object", "additionalProperties": True, "x-guidance": {"whitespace_flexible": True}}
)


class Calls:
    """Writes calls as grammars, in llguidance's dialect of Lark."""

    def __init__(self, form: CallFormat, choice: ToolChoice, special_id: SpecialId) -> None:
        self._form, self._choice, self._special_id = form, choice, special_id
        tags = {tag: token_id for tag in form.tags if (token_id := special_id(tag)) is not None}
        self._special = tags
        self._pattern = "(" + "|".join(map(re.escape, tags)) + ")"

    def alone(self, *, holds_all: bool = True) -> Format:
        """Return calls of the tools that may be called, and nothing else.

        With ``holds_all`` the arguments of all functions follow their schemas, strict or not.
        """
        written = literals_of(self._form, is_forced=self._choice.is_forced)
        begin, end = self._terms(written.begin), self._terms(written.end)
        return self._grammar(begin, written, end, holds_all=holds_all)

    def in_text(self) -> Format | None:
        """Return text with calls in it. None if nothing restricts the calls.

        The arguments of functions that are not strict are free. In some formats, a call without a
        tag may begin the answer.
        """
        form = self._form
        if not self._choice.is_held:
            return None
        text = self._tagged() if form.triggers else {"type": "any_text"}
        if not form.is_open_optional:
            return text
        written = literals_of(form)
        calls = self._grammar("", written, self._terms(written.end), before_name=written.begin)
        return either(calls, {**text, "begins_without": self._bare()})

    def _bare(self) -> str:
        """Return the pattern of a text that would be read as a call without a tag."""
        form = self._form
        before = "|".join([r"\s", *map(pattern_of, split_tags(form.begin + form.separator))])
        if form.holds_name:
            return rf"(?:{before})*(?:\{{|\[\s*\{{)"
        names = "|".join(map(pattern_of, sorted(self._choice.names)))
        close = pattern_of(form.name_close.strip()) or r"[\n{]"
        bracket = r"\[\s*" if form.is_list else ""
        return rf"(?:{before})*{bracket}(?:{names})\s*{close}"

    def _tagged(self) -> Format:
        """Return text with calls in it that begin with a tag."""
        form, choice = self._form, self._choice
        written = literals_of(form, is_forced=False)
        begins = [(written.begin, self._terms(written.end))]
        if form.begin.strip() and form.open.strip():  # the model may leave the first tags out
            end = self._terms(written.end)
            begins.append((written.begin.removeprefix(form.begin), f"({end})?" if end else ""))
        tags = []
        for begin, end in begins:
            first, *rest = self._each(begin)
            trigger = literal_of(first, self._special_id)
            if isinstance(trigger, str):
                trigger = next(tag for tag in form.triggers if first.startswith(tag))
                rest = [first.removeprefix(trigger), *rest]
            start = " ".join(filter(None, map(self._term, rest)))
            content = self._grammar(start, written, end)
            tags.append({"type": "tag", "begin": trigger, "content": content, "end": ""})
        texts = [tag["begin"] for tag in tags if isinstance(tag["begin"], str)]
        return {
            "type": "triggered_tags",
            "triggers": texts,
            "tags": tags,
            "excludes": [text for text in form.triggers if text not in texts],
            "stop_after_first": choice.most_calls is not None,
        }

    def _grammar(
        self,
        begin: str,
        written: Literals,
        end: str,
        *,
        holds_all: bool = False,
        before_name: str = "",
    ) -> Format:
        """Return calls after the beginning of the first call.

        With ``holds_all`` the arguments of all functions follow their schemas, strict or not.
        ``before_name`` and a name are one lexeme: a text may begin like ``before_name``.
        """
        form, choice = self._form, self._choice
        rules = None
        if form.parameters is not None:
            rules = ArgumentRules(form.parameters, self._terms)
        rests: list[str] = []
        inputs: dict[str, str] = {}
        texts: list[str] = []
        for place, tool in enumerate(choice.tools):
            if (text := self._input(tool)) is None:
                rest = self._rest(tool, written, rules, holds_all or tool.is_strict)
            else:
                inputs[tool.name] = text
                texts.append(f"input_{place}: %lark {{\n{text}\n}}")
                rest = self._rest_of_text(f"input_{place}", written, rules)
            rests.append(f"rest_{place}: {rest}")

        def calls(before: str) -> str:
            names = [self._name(before, tool, written) for tool in choice.tools]
            return " | ".join(f"{name} rest_{place}" for place, name in enumerate(names))

        most = min(choice.most_calls or MOST_CALLS, MOST_CALLS)
        again = f"({self._terms(written.again)} call){{0,{most - 1}}}" if most > 1 else ""
        start = f"start: {begin} first {again} {end}"
        more = [] if rules is None else rules.rules
        named = [f"first: {calls(before_name)}", f"call: {calls('')}"]
        text = "\n".join([start, *rests, *named, *more, *texts])
        return {
            "type": "grammar",
            "grammar": text,
            "disable_additional_properties": True,
            "places": [
                *(parameters_of(tool.name) for tool in choice.tools),
                *["the names of the tools"] * len(named),
                *([] if rules is None else rules.places),
            ],
            **({"inputs": inputs} if inputs else {}),
        }

    def _input(self, tool: Tool) -> str | None:
        """Return the grammar of the text for a custom tool in Lark, if the tool has a grammar.

        JSON holds to a regular expression by the schema.
        """
        if tool.grammar is None:
            return None
        is_raw = self._form.parameters is not None and self._form.parameters.has_text
        lark = tool.grammar.definition
        if tool.grammar.syntax == "regex":
            if not is_raw:
                return None
            # A slash ends the expression, and so does the end of the line.
            slashed = re.sub(r"(?s:\\.)|/|\n", lambda found: _SLASHED.get(found[0], found[0]), lark)
            lark = f"start: /{slashed}/"
        try:
            return lark if is_raw else quoted_lark(lark)
        except RequestError as error:
            raise RequestError(f"tools has the custom tool {tool.name}, which {error}") from error

    def _rest_of_text(self, text: str, written: Literals, rules: ArgumentRules | None) -> str:
        """Return a call of a custom tool from its argument on."""
        after = self._terms(written.after)
        if rules is not None:
            return f"{rules.of_text(INPUT, text)} {after}"
        begin, end = (json.dumps(each) for each in (f'{{"{INPUT}":"', '"}'))
        return f"{begin} {text} {end} {after}"

    def _name(self, before: str, tool: Tool, written: Literals) -> str:
        """Return a call up to its arguments."""
        if not self._form.has_index:
            return self._terms(before + tool.name + written.middle)
        # The number of a call is free, because one rule writes all calls.
        close = self._terms(self._form.name_close)
        return f"{self._terms(before + tool.name)} /:[0-9]{{1,2}}/ {close}"

    def _rest(
        self, tool: Tool, written: Literals, rules: ArgumentRules | None, is_held: bool
    ) -> str:
        """Return a call from its arguments on."""
        after = self._terms(written.after)
        if rules is not None:
            arguments = rules.of(tool) if is_held else rules.free(written.after)
            return f"{arguments} {after if is_held else ''}"
        schema = json.dumps({**tool.parameters, "x-guidance": COMPACT}) if is_held else _ANY_OBJECT
        return f" %json {schema} {after}"

    def _terms(self, text: str) -> str:
        return " ".join(map(self._term, self._each(text)))

    def _each(self, text: str) -> Iterator[str]:
        """Yield the special tokens in a text, and the text between them."""
        parts = re.split(self._pattern, text) if self._special else [text]
        return filter(None, parts)

    def _term(self, part: str) -> str:
        if part in self._special:
            return f"<[{self._special[part]}]>"
        return json.dumps(part, ensure_ascii=False) if part else ""
