"""Refuse a ``tokenizer.json`` with a cost that is not proportional to the length of a prompt.

A tokenizer is a small program. A normalizer may double a text 32 times, and patterns may backtrack
for hours. The library runs it in this process without limits, and runs it on the text of added
tokens when it loads the file. The parts that can grow a text or take long are checked first.
"""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

from mie.errors import TokenizerError, printable

LARGEST_PART = 2 << 20  # characters in a part of the file other than the model and added tokens
MOST_STEPS = 64  # most steps of a normalizer or another part
MOST_GROWTH = 64  # All steps together; the largest in use is about 36.
MOST_ADDED = 1024  # characters or tokens that are added to a text once
MOST_WORD_CHARACTERS = 1000  # In a WordPiece word; the cost grows with the cube.

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def checked_tokenizer(text: str, path: str) -> str:
    """Return the ``tokenizer.json`` in ``text`` with only parts that are safe to load.

    Raises:
        TokenizerError: it exceeds a limit or is not JSON. The library refuses anything else that
            is not a tokenizer.
    """
    try:
        parts = _parts(text)
        for name, part in parts.items():
            _check(len(part) <= LARGEST_PART, f"{name} has {len(part)} characters",
                   LARGEST_PART, path)  # fmt: skip
        steps = {name: [*_steps(json.loads(part))] for name, part in parts.items()}
        for name, found in steps.items():
            _check(len(found) <= MOST_STEPS, f"{name} has {len(found)} steps", MOST_STEPS, path)
        _check_growth(steps["normalizer"] + steps["pre_tokenizer"], path)
        _check_growth(steps["decoder"], path)
        for step in steps["normalizer"] + steps["pre_tokenizer"] + steps["decoder"]:
            _check_pattern(step, path)
        _check_templates(steps["post_processor"], path)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise TokenizerError(f"{path} is not a tokenizer: {printable(str(error))}") from error
    # The last of two parts with the same name counts, so another spelling of a name hides nothing.
    checked = ", ".join(f'"{name}": {part}' for name, part in parts.items())
    return f"{text.rstrip()[:-1]}, {checked}}}"


def check_model(model: Any, path: str) -> None:
    """Raise `TokenizerError` if the library's ``model`` may take too long on a long word."""
    most = getattr(model, "max_input_chars_per_word", 0)
    _check(most <= MOST_WORD_CHARACTERS, f"max_input_chars_per_word is {most}",
           MOST_WORD_CHARACTERS, path)  # fmt: skip


def _check(is_fine: bool, what: str, limit: int, path: str) -> None:
    if not is_fine:
        raise TokenizerError(f"{path}: {what}; the limit is {limit}")


# Read only the small parts of a large file.


_TO_BRACKET = re.compile(
    r'[^"{}\[\]]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"{}\[\]]*){0,1000}([{}\[\]])?', re.DOTALL
)
_PART_VALUE = re.compile(r"[ \t\r\n]*:[ \t\r\n]*[^ \t\r\n\d-]")
_MOST_BRACKETS = 2_000_000
_SPACE = re.compile(r"[ \t\r\n]*")


def _parts(text: str) -> dict[str, str]:
    """Return the JSON text of each part, or "null" for missing parts.

    The model has many megabytes, so the text after it is parsed only if it may contain a part.
    """
    parts = {}
    for key, start, end in _members(text):
        if key in parts:
            raise ValueError(f"{key!r} appears twice")
        if key in _PARTS:
            parts[key] = text[start:end]
    return {name: parts.get(name, "null") for name in _PARTS}


def _parts_follow(text: str, start: int) -> bool:
    """Return whether something after ``start`` looks like one of the parts."""
    for name in _PARTS:
        place = text.find(f'"{name}"', start)
        while place >= 0:  # Tokens may have these names, but their values are numbers.
            if _PART_VALUE.match(text, place + len(name) + 2):
                return True
            place = text.find(f'"{name}"', place + 1)
    return False


def _members(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the keys of the object in ``text`` with the start and end of their values."""
    decoder = json.JSONDecoder()
    place = _expect(text, 0, "{")
    if text[place] == "}":
        return
    while True:
        if text[place] != '"':
            raise ValueError(f"expected a name at character {place}")
        key, place = decoder.raw_decode(text, place)
        place = _expect(text, place, ":")
        if key == "model" and not _parts_follow(text, place):
            return
        end = _end_of_value(text, place)
        yield key, place, end
        place = _SPACE.match(text, end).end()  # type: ignore[union-attr]  # it matches everywhere
        if text[place] == "}":
            return
        place = _expect(text, place, ",")


def _expect(text: str, place: int, character: str) -> int:
    """Return the position after ``character`` and the space around it."""
    place = _SPACE.match(text, place).end()  # type: ignore[union-attr]  # it matches everywhere
    if text[place] != character:
        raise ValueError(f"expected {character!r} at character {place}")
    return _SPACE.match(text, place + 1).end()  # type: ignore[union-attr]


def _end_of_value(text: str, start: int) -> int:
    if text[start] not in "{[":
        return json.JSONDecoder().raw_decode(text, start)[1]
    depth, place = 0, start
    for _ in range(_MOST_BRACKETS):
        found = _TO_BRACKET.match(text, place)
        if found is None or found.end() == place:
            raise ValueError("a bracket is not closed")
        place = found.end()
        if found[1]:
            depth += 1 if found[1] in "{[" else -1
            if depth == 0:
                return place
    raise ValueError(f"more than {_MOST_BRACKETS} brackets")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part, including the steps of nested sequences."""
    if not isinstance(part, dict):
        return
    if part.get("type") != "Sequence":
        yield part
        return
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        for inner in part.get(name) or []:
            yield from _steps(inner)


# Growth


def _check_growth(steps: list[dict[str, Any]], path: str) -> None:
    growth = 1.0
    added = 0
    for step in steps:
        growth *= _growth(step)
        added += len(step.get("prepend") or "")
        what = f"{step.get('type')} and the steps before it may make a text {growth:.0f} times"
        _check(growth <= MOST_GROWTH, f"{what} as long", MOST_GROWTH, path)
    _check(added <= MOST_ADDED, f"Prepend adds {added} characters", MOST_ADDED, path)


def _growth(step: dict[str, Any]) -> float:
    """Return the factor by which a step may lengthen a text.

    Unicode's normal forms are not counted: they are idempotent and grow a text 18 times at most.
    """
    kind = step.get("type")
    if kind == "Replace":
        old = step["pattern"].get("String")
        new = len(step["content"])
        return max(1, new / len(old)) if old else new + 1
    if kind == "ByteLevel":
        return 4
    if kind == "BertNormalizer":
        return 3
    if kind == "Precompiled":
        return _charsmap_growth(step.get("precompiled_charsmap") or "")
    return 1


def _charsmap_growth(charsmap: str) -> int:
    """Return the length of the longest replacement in a SentencePiece table.

    The table is the size of its trie in four bytes, the trie, and null-terminated texts.
    """
    data = base64.b64decode(charsmap)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")), 1)


def _check_templates(steps: list[dict[str, Any]], path: str) -> None:
    """Raise `TokenizerError` if a template repeats the text or adds many special tokens."""
    for step in steps:
        if step.get("type") != "TemplateProcessing":
            continue
        pieces = step["single"]
        tokens = step["special_tokens"]
        copies = sum("Sequence" in piece for piece in pieces)
        _check(copies <= 1, f"post_processor repeats the text {copies} times", 1, path)
        names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
        added = sum(len(tokens[name]["ids"]) for name in names)
        _check(added <= MOST_ADDED, f"post_processor adds {added} tokens", MOST_ADDED, path)


# Patterns


_PATTERN_TOKEN = re.compile(
    r"(?P<skip>\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\])"
    r"|(?P<open>\((?:\?(?:>|[=!:]|<[=!]|<\w+>|[a-z]*-?[a-z]*:|[a-z-]+\)|\#))?)"
    r"|(?P<close>\))"
    r"|(?P<many>[+*]|\{\d*,\})(?P<how>[+?]?)",
    re.DOTALL,
)


def _check_pattern(step: dict[str, Any], path: str) -> None:
    pattern = step.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if isinstance(regex, str) and _repeats_a_repetition(regex):
        raise TokenizerError(
            f"{path}: {step.get('type')} repeats a group that contains a repetition, which may"
            f" never end: {printable(regex)[:200]}"
        )


def _repeats_a_repetition(regex: str) -> bool:
    """Return whether the pattern contains a nested repetition like ``(a+)+``.

    Matches of such a pattern can be divided in exponentially many ways.
    """
    inside = [False]  # for each open group, whether it contains a repetition
    closed = False  # Whether the group that was just closed has one.
    end = -1
    for found in _PATTERN_TOKEN.finditer(regex):
        if found["open"]:
            if not found["open"].endswith(")"):  # (?i) is not a group
                inside.append(False)
        elif found["close"]:
            has_one = inside.pop() if len(inside) > 1 else False
            closed, end = has_one, found.end()
            inside[-1] = inside[-1] or has_one
        elif found["many"]:
            if closed and found.start() == end and found["how"] != "+":
                return True
            inside[-1] = True
    return False
