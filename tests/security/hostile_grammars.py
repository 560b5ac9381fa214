"""Make structured outputs whose descriptions are as costly as possible, in children of `zygote`."""

import contextlib
import functools
import gc
import json
import os
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from audit import end_compile_worker, grammars_of
from hostile_requests import llm

from mie import SamplingParams, StructuredOutputsParams
from mie.errors import RequestFailedError

LIMIT = 2**16
"""Maximum number of characters of a description (`RequestLimits.max_grammar_chars`)."""
NUM_TOKENS = 24

Description = dict[str, Any]


@functools.cache
def words(count: int, length: int = 6) -> list[str]:
    """Return random words, always the same ones."""
    rng = random.Random(count)
    return ["".join(rng.choices(string.ascii_lowercase, k=length)) for _ in range(count)]


def nested(depth: int, left: str, right: str, middle: str = "a") -> str:
    """Return a text inside brackets."""
    return left * depth + middle + right * depth


def deep(depth: int, wrap: Callable[[Any], Any], inner: Any) -> Any:
    """Return a schema that is wrapped many times."""
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def in_object(inner: Any) -> Any:
    return {"type": "object", "properties": {"a": inner}, "required": ["a"]}


def optional(count: int) -> Any:
    """Return an object with many optional properties."""
    return {"type": "object", "properties": {word: {"type": "integer"} for word in words(count)}}


REGEXES: dict[str, str] = {
    "repeated repetition": "(a*)*b",
    "optional letters": "a?" * 2000 + "a" * 2000,
    "an exponential automaton": "[ab]*a[ab]{18}",
    "many gaps": ".*a.*b.*c" * 100,
    "a large repetition": "[a-z]{1,100000}",
    "an enormous repetition": "a{4294967296}",
    "three repetitions": "((a{1000}){1000}){1000}",
    "a long repeated group": "(" + "abcdefgh" * 500 + "){1000}",
    "classes": "".join(f"[{a}-z{a}\U0001f600]" for a in string.ascii_lowercase) * 200,
    "ignored case": "(?i)" + "".join(words(9000)),
    "many words": "|".join(words(9000)),
    "deep groups": nested(20_000, "(", ")"),
    "deep stars": nested(10_000, "(", ")*"),
    "a long text": "a" * LIMIT,
    "a long class": "[" + "".join(chr(0x4E00 + i) for i in range(0, 20_000, 2)) + "]{1,50}",
    "an unpaired surrogate": "a\ud800",
}

ALL_DIGITS = "|".join(f'"{i}"' for i in range(10))
GRAMMARS: dict[str, str] = {
    "catastrophic ambiguity": 'start: s\ns: s s | s s s | "a" | ""',
    "hidden left recursion": 'start: a\na: e a "x" | e a | "x"\ne: e e | ""',
    "empty rules that call each other": "start: r0\n"
    + "\n".join(f'r{i}: r{(i + 1) % 200} r{(i + 7) % 200} | ""' for i in range(200)),
    "expressions with all operators": "start: e\ne: e /[-+*\\/]/ e | e e | /[0-9]+/ | "
    '"(" e ")" | "-" e',
    "a large repetition": 'start: r{1,100000}\nr: "a" | "b"',
    "optional rules": "start: " + 'a? b? ' * 2000 + '\na: "x"\nb: "x" "y"',
    "many alternatives of rules": "start: " + " | ".join(f"r{i}" for i in range(250))
    + "\n" + "\n".join(f"r{i}: /[a-z]*{i}[a-z]*/ start | \"{i}\"" for i in range(250)),
    "many lexemes that match alike": "start: (" + " | ".join(f"T{i}" for i in range(200))
    + ")*\n" + "\n".join(f"T{i}: /[a-z]+{word}[a-z]*/" for i, word in enumerate(words(200))),
    "deep groups": f"start: {nested(900, '(', ')', ALL_DIGITS)}",
    "intersections": "start: T\nT: " + " & ".join(f"/.*{word}.*/" for word in words(300, 3)),
    "lazy lexemes": "start: T+\nT[lazy]: /(.|\\n)*a(.|\\n)*b/",
    "a schema inside": "start: (%json " + json.dumps({"type": "object"}) + ")+",
    "quotes without end": 'start: "' + '\\"' * 30_000,
    "a schema with multiples inside": 'start: %json {"multipleOf": 99999989}',
    "a schema with an escaped name": 'start: %json {"\\u006dultipleOf": 99999989}',
    "tokens by number": "start: <[1-999999999]>{1,1000}",
    "options of the library": '%llguidance {"no_forcing": true, "allow_invalid_utf8": true}\n'
    'start: /(.|\\n)*/',
    "a limit of tokens": 'start: t\nt[max_tokens=1000000000]: /.*/',
    "templates": "start: a::0x0\n" + "a::_: " + 'b::incr(_)\nb::_: a::incr(_) | "x" %if true',
}  # fmt: skip


def conditions(depth: int) -> Any:
    """Return conditions of conditions. Each negation is as long as two of the next level."""
    return {"if": conditions(depth - 1), "else": {"minLength": depth}} if depth else {"const": 1}


SCHEMAS: dict[str, Any] = {
    "deep objects": deep(60, in_object, {"type": "integer"}),
    "deep alternatives": deep(100, lambda inner: {"anyOf": [inner, {"type": "null"}]}, {}),
    "an exponential conjunction": {
        "allOf": [{"anyOf": [{"type": "string"}, {"minLength": i}]} for i in range(24)]
    },
    "doubled references": {
        "$defs": {
            f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
            for i in range(60)
        }
        | {"d60": {"type": "integer"}},
        "$ref": "#/$defs/d0",
    },
    "a reference to itself": {"$ref": "#"},
    "a conjunction with itself": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    "a tree": {"type": "array", "items": {"$ref": "#"}, "minItems": 2},
    "a huge enumeration": {"enum": words(7000)},
    "enumerations in conjunction": {"allOf": [{"enum": words(2000)}, {"enum": words(2000)[::-1]}]},
    "a giant text": {"const": "a" * (LIMIT - 100)},
    "a giant name": {"type": "object", "properties": {"a" * (LIMIT - 100): {}}},
    "a long text": {"type": "string", "minLength": 10**6},
    "a long array": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
    "arrays of arrays": deep(
        5, lambda inner: {"type": "array", "items": inner, "maxItems": 1000}, {"type": "null"}
    ),
    "many items": {"type": "array", "prefixItems": [{"type": "integer"}] * 3000},
    "an enormous bound": {"type": "integer", "minimum": 10**300, "maximum": 10**301},
    "a bound too large for a float": {"type": "integer", "maximum": 10**400},
    "a tiny interval": {"type": "number", "minimum": 1e-300, "maximum": 2e-300},
    "multiples": {"type": "integer", "multipleOf": 7919, "minimum": 1},
    "large multiples": {"type": "integer", "multipleOf": 99_999_989},
    "several multiples": {"allOf": [{"type": "integer", "multipleOf": p} for p in (97, 101, 103)]},
    "a hard pattern": {"type": "string", "pattern": "^(a|b)*a(a|b){18}$"},
    "a pattern of a length": {"type": "string", "pattern": "a.*b", "minLength": 5000},
    "patterns in conjunction": {
        "allOf": [{"type": "string", "pattern": word} for word in words(60, 3)]
    },
    "formats in conjunction": {
        "allOf": [{"type": "string", "format": name} for name in ("email", "uri", "hostname")]
    },
    "400 optional properties": optional(400),
    "patterns of properties": {
        "patternProperties": {f"^[a-z]*{word}[a-z]*$": {} for word in words(100, 2)}
    },
    "a conjunction of 40 patterns": {
        "allOf": [{"pattern": f".*{a}.{{9}}"} for a in string.ascii_letters[:40]]
    },
    "patterns of properties that overlap": {
        "patternProperties": {f"{a}.*{b}": {"minimum": i} for i, (a, b) in
                              enumerate(zip(words(60, 1), words(61, 1), strict=False))}
    },
    "many required names": {"type": "object", "required": words(3000)},
    "conditions within conditions": conditions(7),
    "exclusive alternatives": {
        "oneOf": [{"anyOf": [{"required": [a]}, {"required": [b]}]}
                  for a, b in zip(words(8, 2), words(8, 3), strict=True)],
    },
    "options of the library": {
        "type": "object", "not": {"required": ["a"]}, "x-guidance": {"lenient": True},
    },
}  # fmt: skip

CASES: dict[str, Description] = {
    **{f"regex, {name}": {"regex": regex} for name, regex in REGEXES.items()},
    **{f"grammar, {name}": {"grammar": text} for name, text in GRAMMARS.items()},
    **{f"schema, {name}": {"json": schema} for name, schema in SCHEMAS.items()},
    "choice, many": {"choice": words(9000)},
    "choice, one that is long": {"choice": ["a" * LIMIT]},
    "choice, many that begin alike": {"choice": ["a" * i + "b" for i in range(350)]},
    "json_object": {"json_object": True},
    "whitespace, exponential": {"json": {}, "whitespace_pattern": "([ \\n]*)*\\t[ \\n\\t]{18}"},
    "whitespace that is a letter": {"json": {}, "whitespace_pattern": '[a-z0-9"{}:,]*'},
}


@functools.cache
def alone() -> str:
    """Return the text that a request gets without a neighbour."""
    own = SamplingParams(max_tokens=8, temperature=0.0)
    return llm().generate("Once", own, use_tqdm=False)[0].outputs[0].text


def warm_up() -> None:
    """Load the common parts of the cases, before the children are forked."""
    alone()
    first = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), max_tokens=1)
    llm().generate("Once", first, use_tqdm=False)


def run(name: str) -> str:
    """Generate a few tokens of a costly output beside another request, which must not change.

    Return the first tokens, or raise mie's error about it.
    """
    own = SamplingParams(max_tokens=8, temperature=0.0)
    costly = SamplingParams(
        structured_outputs=StructuredOutputsParams(**CASES[name]),
        max_tokens=NUM_TOKENS,
        temperature=1000.0,
        seed=1,
    )
    failed: RequestFailedError | None = None
    try:
        outputs = llm().generate(["Once", "Once"], [own, costly], use_tqdm=False)
    except RequestFailedError as error:
        failed, outputs = error, error.outputs
    finally:
        end_worker()  # so that its cost counts
        assert not llm().engine.has_work
        assert llm().engine.scheduler.manager.num_used == 0
    assert outputs[0].outputs[0].text == alone()
    if failed is not None:
        raise failed
    return f"{outputs[1].outputs[0].text!r:.60}"


def end_worker() -> None:
    """End the process that compiles descriptions, and wait for it."""
    end_compile_worker(grammars_of(llm()))


def kept_bytes(number: int = 12) -> int:
    """Compile the largest descriptions, and return how many bytes they take afterwards."""
    before = _resident_bytes()
    for seed in range(number):
        structured = StructuredOutputsParams(choice=[f"{seed}" + "a" * (LIMIT - 2)])
        with contextlib.suppress(RequestFailedError):
            llm().generate("Once", SamplingParams(structured_outputs=structured), use_tqdm=False)
    gc.collect()
    return _resident_bytes() - before


def _resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")
