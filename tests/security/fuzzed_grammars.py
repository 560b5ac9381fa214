"""Make random descriptions of outputs, and follow each for some tokens, in children of `zygote`."""

import functools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from audit import compile_worker

from mie import StructuredOutputsParams
from mie.checkpoint.locate import BUNDLED_DIRECTORY
from mie.errors import ConfigError, RequestError
from mie.structured.grammars import Grammars
from mie.structured.limits import CPU_SECONDS, FIRST_SECONDS
from mie.structured.matcher import Matcher
from mie.text.tokenizer import Tokenizer

VOCAB_SIZE, EOS = 2048, 0
NUM_TOKENS = 24
MOST_SECONDS = CPU_SECONDS + FIRST_SECONDS + 1.5
"""CPU time of this process for a case: the limits of its compilation and its masks, and a step."""

Json = Any


# Random regular expressions.


def regex(draw: random.Random, depth: int = 4) -> str:
    """Return an expression, which may be enormous or wrong."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(
            ["a", "b", ".", "[a-z]", "[^ab]", r"\d", r"\w", r"\s", r"\p{L}", "é", ""]
        )
    inner = functools.partial(regex, draw, depth - 1)
    kinds: list[Callable[[], str]] = [
        lambda: inner() + inner(),
        lambda: f"({inner()}|{inner()})",
        lambda: f"({inner()}){draw.choice(['*', '+', '?'])}",
        lambda: f"({inner()}){{{number(draw)}}}",
        lambda: f"({inner()}){{{draw.randrange(9)},{number(draw)}}}",
        lambda: f".*{inner()}.{{{draw.randrange(40)}}}",
        lambda: f"^{inner()}$",
        lambda: f"(?i){inner()}",
        lambda: draw.choice(["(?=a)", r"\1", "(", "[", "a{,3}", "(?<n>a)", r"[^\s\S]", r"\b"]),
    ]
    weights = [6, 4, 4, 2, 2, 2, 0.2, 0.2, 0.1]
    return draw.choices(kinds, weights)[0]()


def number(draw: random.Random) -> int:
    return draw.choices([1, 2, 3, 9, 30, 100, 1000, 10**5, 2**31, 10**30], [9] * 8 + [1] * 2)[0]


# Random grammars in Lark.


def lark(draw: random.Random) -> str:
    """Return a grammar of some rules and terminals, which may refer to each other in any way."""
    rules = [f"r{i}" for i in range(draw.choice([1, 2, 3, 6, 20]))]
    terminals = [f"T{i}" for i in range(draw.randrange(4))]

    def atom(names: list[str]) -> str:
        kinds: list[Callable[[], str]] = [
            lambda: json.dumps(draw.choice(["a", "b", "ab", " ", ",", "é", ""])),
            lambda: f"/{regex(draw, 2).replace('/', '')}/",
            lambda: draw.choice(names),
            lambda: f"({alternatives(names, 1)})",
            lambda: draw.choice(["%json " + json.dumps(schema(draw, 2)), "@other", "<[1-99]>"]),
        ]
        return draw.choices(kinds, [6, 3, 6, 2, 1])[0]()

    def sequence(names: list[str]) -> str:
        count = draw.choice([1, 1, 2, 2, 3, 5])
        ends = [
            "",
            "",
            "",
            "*",
            "+",
            "?",
            f"{{{draw.randrange(5)},{draw.choice([5, 300, 10**6])}}}",
        ]
        return " ".join(atom(names) + draw.choice(ends) for _ in range(count))

    def alternatives(names: list[str], most: int = 4) -> str:
        return " | ".join(sequence(names) for _ in range(draw.randint(1, most)))

    lines = [f"start: {alternatives(rules + terminals)}"]
    lines += [f"{name}: {alternatives(rules + terminals)}" for name in rules]
    for name in terminals:
        operator = draw.choice([" ", " | ", " & "])
        texts = [f"/{regex(draw, 3).replace('/', '')}/" for _ in range(draw.randint(1, 8))]
        lines.append(f"{name}: {'~' if draw.random() < 0.1 else ''}{operator.join(texts)}")
    if draw.random() < 0.1:
        lines.append('p::_: p::incr(_) | "x" %if true')
    return "\n".join(lines)


# Random JSON schemas.

TYPES = ["object", "array", "string", "integer", "number", "boolean", "null"]
FORMATS = ["date", "date-time", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "time", "nope"]
WORDS = ["a", "b", "name", "$ref", "é", ""]


def schema(draw: random.Random, depth: int = 4) -> Json:
    """Return a schema of any keywords, which may contradict themselves."""
    if depth == 0:
        leaves = [{}, True, {"type": "string"}, {"$ref": "#"}, {"$ref": "#/$defs/a"}, value(draw)]
        return draw.choices(leaves, [3, 1, 4, 2, 2, 1])[0]
    found: dict[str, Json] = {}
    if draw.random() < 0.7:
        found["type"] = draw.choice(TYPES) if draw.random() < 0.9 else draw.sample(TYPES, 2)
    known = UNSUPPORTED if draw.random() < 0.03 else KEYWORDS.keys() - UNSUPPORTED
    names = draw.sample(sorted(known), draw.choice([0, 1, 1, 2, 3, 6]))
    for name in names:
        found[name] = KEYWORDS[name](draw, depth - 1)
    if depth == 4:
        found["$defs"] = {name: schema(draw, 2) for name in "ab"}
    return found


def value(draw: random.Random, depth: int = 2) -> Json:
    if depth and draw.random() < 0.2:
        return [value(draw, depth - 1) for _ in range(draw.randrange(3))]
    if depth and draw.random() < 0.2:
        return {draw.choice(WORDS): value(draw, depth - 1)}
    if draw.random() < 0.005:
        return draw.choice([2**64, 10**40])
    return draw.choice([None, True, 0, 1, -1, 1.5, 1e300, 2**53, 2**63, "a", "\x00"])


def bound(draw: random.Random, depth: int) -> Json:
    return draw.choice([0, 1, 5, 100, -3, 0.5, 1e-9, 1e300, 2**63, 10**6, 97, 7919, 99_999_989])


def count(draw: random.Random, depth: int) -> Json:
    return draw.choice([0, 1, 2, 5, 40, 1000, 10**6, 10**18, -1, 1.5])


def one(draw: random.Random, depth: int) -> Json:
    return schema(draw, depth)


def some(draw: random.Random, depth: int) -> Json:
    return [schema(draw, depth) for _ in range(draw.choice([0, 1, 2, 3, 12]))]


def named(draw: random.Random, depth: int) -> Json:
    size = draw.choice([0, 1, 2, 3, 60])
    return {
        f"{draw.choice(WORDS)}{i}": schema(draw, min(depth, 1 + (size < 9))) for i in range(size)
    }


def by_pattern(draw: random.Random, depth: int) -> Json:
    if draw.random() < 0.3:
        return {f"^[a-z]*{i}[a-z]*$": {} for i in range(draw.choice([10, 60, 300]))}
    return {regex(draw, 2): schema(draw, depth) for _ in range(draw.randint(1, 4))}


def patterns(draw: random.Random, depth: int) -> Json:
    size = draw.choice([2, 3, 8, 40])
    return [{"type": "string", "pattern": f".*{chr(97 + i % 26)}.{{{draw.randrange(12)}}}"}
            for i in range(size)]  # fmt: skip


KEYWORDS: dict[str, Callable[[random.Random, int], Json]] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bound),
    "multipleOf": bound,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), count),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), count),
    "pattern": lambda draw, depth: regex(draw, 3),
    "format": lambda draw, depth: draw.choice(FORMATS),
    "const": lambda draw, depth: value(draw),
    "enum": lambda draw, depth: [value(draw) for _ in range(draw.choice([0, 1, 3, 500]))],
    **dict.fromkeys(("properties", "$defs", "definitions", "dependentSchemas"), named),
    "patternProperties": by_pattern,
    **dict.fromkeys(("items", "additionalProperties", "not", "if", "then", "else"), one),
    **dict.fromkeys(("contains", "propertyNames", "unevaluatedProperties"), one),
    **dict.fromkeys(("anyOf", "oneOf", "prefixItems"), some),
    "allOf": lambda draw, depth: (some if draw.random() < 0.6 else patterns)(draw, depth),
    "required": lambda draw, depth: draw.sample(WORDS, 2),
    "dependentRequired": lambda draw, depth: {"a": ["b"]},
    "uniqueItems": lambda draw, depth: draw.random() < 0.5,
    "$ref": lambda draw, depth: draw.choice(["#", "#/$defs/a", "#/$defs/b", "#/nope", "http://x"]),
    "$anchor": lambda draw, depth: "a",
    "x-guidance": lambda draw, depth: {"lenient": True, "whitespace_pattern": regex(draw, 2)},
    "title": lambda draw, depth: value(draw),
}


UNSUPPORTED = {
    *("minProperties", "maxProperties", "minContains", "maxContains", "contains", "uniqueItems"),
    *("dependentSchemas", "not", "if", "then", "else", "propertyNames", "unevaluatedProperties"),
    *("dependentRequired", "x-guidance", "$anchor"),
}
"""Keywords that the library refuses, most of which would hide the effects of the others."""


def description(draw: random.Random) -> dict[str, Any]:
    """Return the fields of a description."""
    kind = draw.choices(["json", "regex", "grammar", "choice", "whitespace"], [6, 3, 4, 1, 1])[0]
    if kind == "regex":
        return {"regex": regex(draw, draw.choice([2, 4, 6]))}
    if kind == "grammar":
        return {"grammar": lark(draw)}
    if kind == "choice":
        size = draw.choice([1, 9, 3000])
        return {
            "choice": ["".join(draw.choices("ab é\n", k=draw.randint(1, 20))) for _ in range(size)]
        }
    if kind == "whitespace":
        return {"json": {"items": {}}, "whitespace_pattern": regex(draw, 3)}
    close = {"disable_additional_properties": draw.random() < 0.3}
    return {"json": schema(draw), "disable_any_whitespace": draw.random() < 0.7, **close}


# Running them.


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_DIRECTORY, None)


def warm_up() -> None:
    """Load the common parts of the cases, before the children are forked."""
    Grammars(tokenizer(), VOCAB_SIZE, [EOS]).index()


def run(first: int, end: int) -> str:
    """Run the cases of some seeds, and return the findings as JSON."""
    grammars = Grammars(tokenizer(), VOCAB_SIZE, [EOS])
    grammars.start(StructuredOutputsParams(regex="a"))
    seen = {"followed": 0, "refused": 0, "ended": 0, "slowest": 0.0, "slowest_compilation": 0.0}
    for number in range(first, end):
        draw = random.Random(number)
        began, began_worker = time.process_time(), worker_seconds(grammars)
        try:
            seen[verdict(grammars, draw)] += 1
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error
        seconds = time.process_time() - began
        compilation = worker_seconds(grammars) - began_worker
        assert seconds < MOST_SECONDS, f"case {number} took {seconds:.1f} s"
        assert compilation < CPU_SECONDS + 0.5, f"case {number} took {compilation:.1f} s to compile"
        seen["slowest"] = max(seen["slowest"], seconds)
        seen["slowest_compilation"] = max(seen["slowest_compilation"], compilation)
    return json.dumps(seen)


def verdict(grammars: Grammars, draw: random.Random) -> str:
    """Compile a description and follow it, and return its fate."""
    try:
        params = StructuredOutputsParams(**description(draw))
        matcher = grammars.start(params)
    except (ConfigError, RequestError) as refusal:
        check_message(str(refusal))
        return "refused"
    try:
        follow(matcher, draw)
    except RequestError as end:
        check_message(str(end))
        return "ended"
    return "followed"


def follow(matcher: Matcher, draw: random.Random) -> None:
    for _ in range(NUM_TOKENS):
        token_id = matcher.determined()
        if token_id is None:
            mask = int.from_bytes(matcher.mask(), "little")
            allowed = [i for i in range(VOCAB_SIZE) if mask >> i & 1]
            assert allowed, "the mask is empty"
            token_id = draw.choice(allowed)
        if token_id == EOS:
            return
        matcher.accept(token_id)


def check_message(message: str) -> None:
    assert message.startswith(("structured_outputs", "json", "choice", "each of choice")), message
    assert len(message) < 1000, message
    assert message.isprintable(), message


def worker_seconds(grammars: Grammars) -> float:
    """Return the CPU time of everything that the worker has compiled."""
    worker = compile_worker(grammars)
    assert worker is not None
    fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
