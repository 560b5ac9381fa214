"""Render chat templates, and search for regexes, in a separate process with limits.

`mie.text.renderer` starts it.

Requests and replies are JSON objects. The kernel kills the process when a request exceeds its CPU
time. It exits with `OUT_OF_MEMORY` when it reaches the memory limit.
"""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from mie.base import worker_side

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2 import nodes
    from jinja2.parser import Parser

OUT_OF_MEMORY = 77
_CACHED_TEMPLATES = 4
_LONGEST_MESSAGE = 2000  # most characters of an error
_LONGEST_TEXT = 1 << 23  # Characters of a rendered prompt.
_SPARE_MEMORY = 1 << 25  # Bytes that a worker may keep after a request.
_LONGEST_LINE = 1024  # characters of a line that a regex is searched in


def main(cpu_seconds: str, memory_bytes: str) -> None:
    """Answer requests until the socket closes."""
    renderer = Renderer()
    idle = worker_side.address_space()
    worker_side.limit_address_space(idle + int(memory_bytes))
    while (request := worker_side.read_message()) is not None:
        worker_side.limit_cpu_seconds(float(cpu_seconds))
        try:
            reply = renderer.answer(request)
            reply["is_last"] = worker_side.address_space() > idle + _SPARE_MEMORY
            data = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        worker_side.limit_cpu_seconds(0)
        worker_side.write_message(data)


class Renderer:
    """Compiles and renders templates in jinja2's sandbox, with Hugging Face's settings."""

    def __init__(self) -> None:
        from jinja2 import TemplateError, TemplateSyntaxError, nodes
        from jinja2.ext import Extension, LoopControlExtension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class GenerationTag(Extension):
            """A tag that marks an assistant's words for training. It renders its body."""

            tags = {"generation"}  # noqa: RUF012  # as in jinja2

            def parse(self, parser: Parser) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body, lineno=line)

        def raise_exception(message: object) -> None:
            raise TemplateError(str(message))

        self._template_error = TemplateError
        self._syntax_error = TemplateSyntaxError
        self._sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationTag]
        )
        self._sandbox.filters["tojson"] = _to_json
        self._sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": _now}
        self._templates: dict[str, Any] = {}

    def answer(self, request: bytes) -> dict[str, Any]:
        """Return the reply to a request.

        It is a ``text``, a content ``format``, ``texts`` without the lines in which a ``pattern``
        is found, or an ``error``.
        """
        values = json.loads(request.decode("utf-8", "surrogatepass"))
        if "pattern" in values:
            search = re.compile(values["pattern"]).search
            return {"texts": [_without_lines(text, search) for text in values["texts"]]}
        source = values["source"]
        try:
            if "variables" not in values:
                return {"format": self._content_format(source)}
            template = self._compiled(source)
        except MemoryError:
            raise
        except self._syntax_error as error:
            return _failure("syntax", error.message or "", line=error.lineno)
        except Exception as error:  # a template can raise any exception
            return _failure("compile", f"{type(error).__name__}: {error}")
        try:
            text = template.render(values["variables"])
        except MemoryError:
            raise
        except Exception as error:
            if type(error) is self._template_error:
                return _failure("refused", str(error))
            return _failure("failed", f"{type(error).__name__}: {error}")
        if len(text) > _LONGEST_TEXT:
            return _failure("long", f"{len(text):,} characters; the limit is {_LONGEST_TEXT:,}")
        return {"text": text}

    def _compiled(self, source: str) -> Any:
        template = self._templates.pop(source, None) or self._sandbox.from_string(source)
        self._templates[source] = template
        if len(self._templates) > _CACHED_TEMPLATES:
            del self._templates[next(iter(self._templates))]
        return template

    def _content_format(self, source: str) -> str:
        """Return the content format that the template expects: "openai" or "string"."""
        tree = self._sandbox.parse(source)
        messages = _loop_targets(tree, _names_for(tree, "messages", ""))
        for message in messages:
            if _loop_targets(tree, _names_for(tree, message, "content")):
                return "openai"
        return "string"


def _without_lines(text: str, search: Callable[[str], object]) -> str | None:
    """Return a text without the lines in which something is found, or None if no line is left."""
    lines = text.split("\n")
    kept = [line for line in lines if len(line) > _LONGEST_LINE or not search(line)]
    return "\n".join(kept) if kept else None


def _names_for(tree: nodes.Template, name: str, key: str) -> list[tuple[str, str]]:
    """Return the name (or ``name.key``) and the variables that it is assigned to."""
    from jinja2.nodes import Assign, Name

    found = [(name, key)]
    for each in found:
        for assignment in tree.find_all(Assign):
            target = assignment.target
            if isinstance(target, Name) and _is_access(assignment.node, each):
                found += [(target.name, "")] if (target.name, "") not in found else []
    return found


def _loop_targets(tree: nodes.Template, names: list[tuple[str, str]]) -> list[str]:
    """Return the loop variables of the loops over any of ``names``."""
    from jinja2.nodes import For, Name

    return [
        loop.target.name
        for loop in tree.find_all(For)
        if isinstance(loop.target, Name) and any(_is_access(loop.iter, name) for name in names)
    ]


def _is_access(node: nodes.Node, name: tuple[str, str]) -> bool:
    """Return whether ``node`` accesses the variable or its key, possibly filtered, tested or
    sliced."""
    from jinja2.nodes import Const, Filter, Getattr, Getitem, Name, Slice, Test

    variable, key = name
    while isinstance(node, Filter | Test) or (
        isinstance(node, Getitem) and isinstance(node.arg, Slice)
    ):
        if node.node is None:
            return False
        node = node.node
    if key and isinstance(node, Getattr):
        is_key = node.attr == key
        node = node.node
    elif key and isinstance(node, Getitem):
        is_key = isinstance(node.arg, Const) and node.arg.value == key
        node = node.node
    else:
        is_key = not key
    return is_key and isinstance(node, Name) and node.name == variable


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as in Hugging Face's templates, without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _failure(kind: str, message: str, **more: Any) -> dict[str, Any]:
    return {"error": kind, "message": message[:_LONGEST_MESSAGE], **more}
