"""Render chat templates with jinja2 and the settings of transformers 5, without code of mie."""

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

REASONING = ("reasoning_content", "thinking", "reasoning")
MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class Generation(jinja2.ext.Extension):
    """The tag around an assistant's words. It renders its body."""

    tags = {"generation"}  # noqa: RUF012  # as in jinja2

    def parse(self, parser: Any) -> Any:
        """Return the body in a call block, as transformers' tag does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


@functools.cache
def compiled(source: str) -> jinja2.Template:
    """Return a template of `environment`."""
    return environment().from_string(source)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return jinja2's sandbox with transformers' filters and functions."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return made


def render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """Return the text that transformers returns."""
    given = [_with_reasoning(message) for message in messages]
    if variables.pop("continue_final_message", False):
        given[-1]["content"] += MARK
        text = compiled(source).render(messages=given, **variables)
        if MARK.strip() not in text:
            raise ValueError("the template does not write the last message")
        before, found, _ = text.rpartition(MARK)
        return before if found else text.rpartition(MARK.strip())[0].rstrip()
    return compiled(source).render(messages=given, **variables)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning has the names that templates read."""
    found = [message[key] for key in REASONING if message.get(key) is not None]
    return {"thinking": found[0], **message, "reasoning_content": found[0]} if found else message
