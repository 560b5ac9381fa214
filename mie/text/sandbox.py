"""A jinja2 sandbox in which every template ends, soon and in little memory.

A chat template is a program that comes with a model. jinja2's sandbox keeps it from Python's
insides, but not from running for hours or filling the memory. Here everything it does is *work*,
each piece is charged before it is done, and a template that has spent its allowance is stopped:

* a turn of a loop, a filter and a test cost ``STEP``, a call some more, plus the size of what goes
  in; operators, comparisons, slices, lists and everything written cost their size;
* what can make much out of little pays for its result in advance: ``'a' * 10**10``, padding,
  ``replace``, ``join``, ``format``; integers end at 4,096 bits; filters and methods of that kind
  that no chat template needs are missing.

So the allowance bounds time and memory together. It counts work, not seconds: the same template
does the same on every machine and on every thread, and nothing depends on signals.
"""

from __future__ import annotations

import functools
import re
import string
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

STEP = 100  # the work of one turn of a loop; a character is 1
_CALL = 5 * STEP
_ELEMENT = 40  # of one element of a container
_FILTER_FACTOR = 4  # filters are Python, slower per character than an operator
_LARGEST_INTEGER = 4096  # bits; the time of a product grows faster than its digits


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALLOWED_FILTERS = _words(
    "abs attr capitalize count d default dictsort e escape first float format groupby indent int"
    " items join last length list lower map max min reject rejectattr replace reverse safe select"
    " selectattr sort string title trim truncate unique upper urlencode wordcount"
)
_STRING_METHODS = _words(
    "capitalize casefold center count endswith find format format_map index isalnum isalpha isascii"
    " isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip partition"
    " removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split"
    " splitlines startswith strip swapcase title upper zfill"
)
_DICT_METHODS = _words("get items keys values")
_LIST_METHODS = _words("count index")


class TooMuchWork(Exception):
    """The template spent its allowance."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Hugging Face's template settings, with an allowance of work (see the module).

    Call ``allow`` before each rendering; each thread has its own allowance.
    """

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationTag],
            finalize=_charge_output,
        )
        self._thread = threading.local()
        self.globals = {"dict": dict, "namespace": _Namespace, "range": self.globals["range"]}
        filters: Mapping[str, Any] = self.filters
        self.filters = {name: self._guarded(name, filters[name]) for name in _ALLOWED_FILTERS}
        self.filters |= {_Metering.STEPS: self.steps, _Metering.CHARGED: self.charged}
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: self._guarded(name, test) for name, test in tests.items()}

    def add_filter(self, name: str, filter_: Callable[..., Any]) -> None:
        """Make ``filter_`` known to templates, and charge for it."""
        self.filters[name] = self._guarded(name, filter_)

    def compile_metered(self, source: str) -> Any:
        """The template of ``source``, with every loop and operator under the meter."""
        return self.from_string(_Metering().visit(self.parse(source)))

    def allow(self, work: int) -> None:
        """Let this thread's templates do ``work`` from now on, and no more."""
        self._thread.left = work

    def charge(self, work: int) -> None:
        """Spend ``work``.

        Raises:
            TooMuchWork: less than that is left.
        """
        self._thread.left = self._left() - work
        if self._thread.left < 0:
            raise TooMuchWork

    def steps(self, values: Iterable[Any]) -> Iterator[Any]:
        """``values``, each for the price of one step."""
        for value in values:
            self.charge(STEP)
            yield value

    def charged(self, value: Any) -> Any:
        """``value``, for the price of its size."""
        self.charge(self._size(value))
        return value

    def concat(self, pieces: Collection[str]) -> str:  # type: ignore[override]  # a hook of jinja2's
        """The joined ``pieces`` of a macro, a block, or a ``{% set %}`` with a body."""
        self.charge(sum(map(len, pieces)))
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``left operator right``, for the price of its operands and of a large result."""
        self.charge(self._size(left) + self._size(right))
        self.charge(_operator_work(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """``obj(*args, **kwargs)``, for the price of a call and of its arguments."""
        text = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        self.charge(_CALL + self._size(text) + self._size(args) + self._size(kwargs))
        if isinstance(text, str):
            self.charge(_method_work(obj.__name__, text, *args, **kwargs))
        return super().call(context, obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may see ``obj.attr``: of Python's own types, a short list."""
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        if isinstance(obj, dict):
            return attr in _DICT_METHODS
        if isinstance(obj, list | tuple):
            return attr in _LIST_METHODS
        if isinstance(obj, int | float | complex | bytes | range | set | frozenset | type):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def _left(self) -> int:
        return getattr(self._thread, "left", 0)

    def _size(self, value: Any) -> int:
        return size_of(value, self._left())

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.charge(STEP + _FILTER_FACTOR * (self._size(args) + self._size(kwargs)))
            values = args[1:] if hasattr(function, "jinja_pass_arg") else args
            self.charge(_filter_work(name, *values, **kwargs))
            return function(*args, **kwargs)

        return guarded


def size_of(value: Any, enough: int) -> int:
    """Characters and elements of ``value``, inner ones too; counting ends at ``enough``.

    A list of lists that all are the same list counts as often as it would be written out.
    """
    size = 0
    found = [value]
    while found and size <= enough:
        item = found.pop()
        size += 1
        if isinstance(item, Context):  # jinja2's own; every template has it
            continue
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() // 8
        elif isinstance(item, Mapping):
            size += 2 * _ELEMENT * len(item)
            found += [*item.keys(), *item.values()] if size <= enough else []
        elif isinstance(item, Collection):
            size += _ELEMENT * len(item)
            found += item if size <= enough and not isinstance(item, range) else []
    return size


def _operator_work(operator: str, left: Any, right: Any) -> int:
    """What an operator's result costs beyond its operands."""
    if operator == "*" and isinstance(left, int) and isinstance(right, Collection):
        return left * _content(right)
    if operator == "*" and isinstance(right, int) and isinstance(left, Collection):
        return right * _content(left)
    if isinstance(left, int) and isinstance(right, int):
        return _integer_work(operator, left, right)
    if operator == "%" and isinstance(left, str):
        return _percent_work(left, right)
    return 0


def _integer_work(operator: str, left: int, right: int) -> int:
    bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}
    if bits.get(operator, 0) > _LARGEST_INTEGER:
        raise TooMuchWork
    return 0


def _content(value: Collection[Any]) -> int:
    """The size of ``value``, which was charged for already and so is not too large to count."""
    return max(0, size_of(value, 10**9))


def _method_work(name: str, text: str, *args: Any, **kwargs: Any) -> int:
    """What a string method's result costs beyond its arguments."""
    if name in ("center", "ljust", "rjust", "zfill"):
        return sum(arg for arg in args if isinstance(arg, int))
    if name == "replace":
        return _replace_work(text, *args, **kwargs)
    if name == "join" and args:
        return _join_work(args[0], text)
    if name in ("format", "format_map"):
        return _braces_work(text, (args, kwargs))
    return 0


def _filter_work(name: str, *args: Any, **kwargs: Any) -> int:
    """What a filter's result costs beyond its arguments."""
    if name == "replace":
        return _replace_work(str(args[0]), *args[1:], **kwargs)
    if name == "join":
        return _join_work(args[0], *args[1:2], **kwargs)
    if name == "format":
        return _percent_work(str(args[0]), args[1:] or kwargs)
    if name == "indent":
        return _indent_work(str(args[0]), *args[1:], **kwargs)
    return 0


def _replace_work(text: str, old: object = "", new: object = "", *_: Any, **__: Any) -> int:
    return text.count(str(old)) * len(str(new))


def _join_work(values: Any, separator: object = "", *_: Any, **options: Any) -> int:
    separator = str(options.get("d", separator))
    if isinstance(values, Collection):
        return len(separator) * len(values)
    # A generator's length is not known: leave only short separators to it.
    return STEP * len(separator) ** 2


def _indent_work(text: str, width: object = 4, *_: Any, **__: Any) -> int:
    return (text.count("\n") + 1) * (width if isinstance(width, int) else len(str(width)))


_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")


def _percent_work(template: str, values: Any) -> int:
    """What ``template % values`` costs: every field may hold all values, and its padding."""
    size = _content((values,))
    fields = _PERCENT_FIELD.findall(template)
    return sum(size + _width(width) + _width(precision) for width, precision in fields)


def _braces_work(template: str, values: Any) -> int:
    """What ``template.format(values)`` costs, in the same way."""
    size = _content((values,))
    specs = [
        spec or "" for _, name, spec, _ in string.Formatter().parse(template) if name is not None
    ]
    return sum(size + sum(map(_width, re.findall(r"\d+|\{", spec))) for spec in specs)


def _width(digits: str) -> int:
    """A width in a format; one that is itself an argument may be anything, so it is too much."""
    if digits in ("*", "{"):
        raise TooMuchWork
    return int(digits or 0)


class _Metering(NodeTransformer):
    """Puts a parsed template's loops and operators under the meter.

    The filters it inserts have a space in their names: no template can write them.
    """

    STEPS = "each step"
    CHARGED = "pay for"

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, self.STEPS)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, self.CHARGED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes[:] = [_filtered(operand, self.CHARGED) for operand in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, self.CHARGED) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, self.CHARGED) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, self.CHARGED)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, self.CHARGED)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context  # which also keeps jinja2 from calling it while compiling
def _charge_output(context: Context, value: Any) -> Any:
    sandbox = context.environment
    assert isinstance(sandbox, Sandbox)
    return sandbox.charged(value)


class _GenerationTag(Extension):
    """``{% generation %}``, with which training code marks the assistant's words: just its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """jinja2's ``namespace``; written out, it hides its values, whose size nobody counted."""

    def __repr__(self) -> str:
        return "<namespace>"
