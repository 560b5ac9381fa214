"""Rewrite grammars so that their texts are JSON strings, without the quotes around them.

A custom tool has a grammar of its input. Most models write the input as a string in a JSON object,
where quotes, backslashes and control characters are escaped. Each text of the rewritten grammar is
a text of the grammar as `json.dumps` writes it, and the other way round.

Each escape is a lexeme of its own. llguidance reads a lexeme as long as possible, so a longer one
would swallow the backslash of a text that follows it. A terminal with an escape becomes a rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from mie.errors import RequestError, shown

_SPECIAL = [*map(chr, range(32)), '"', "\\"]
_PLAIN = r'[^"\\\x00-\x1f]'
_LARK = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<define>(?m:^)[ \t]*[?!]?(?P<defined>[A-Za-z_]\w*)(?=\s*:))
    |%import\s+common\.(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?
    |%ignore\s+(?P<ignored>"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/[a-z]*|\w+)(?=\s*$)
    |(?P<range>"(?:\\.|[^"\\\n])+"\s*\.\.\s*"(?:\\.|[^"\\\n])+")
    |(?P<text>"(?:\\.|[^"\\\n])*")(?P<case>i?)
    |/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)
    |(?P<name>\b[A-Za-z_]\w*\b(?!\s*\[))
    |(?P<refused>%\w*|<[^>\s]*>|@\w*|\b[A-Za-z_]\w*\s*\[|[&~](?!\d))""",
    re.VERBOSE | re.MULTILINE,
)
_ATOM = re.compile(
    r"""(?P<code>\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[xuU]\{[0-9A-Fa-f]{1,8}\}))
    |(?P<set>\\[dDwWsS]|\.|\[\^?\]?(?:\\.|[^\]\\])*\])
    |(?P<refused>\\[pPbBAzZ0-9<>]|[\^$\[]|[*+?}]\?|\(\?(?![is:-]))
    |(?P<escape>\\.)
    |(?P<group>\((?:\?(?P<flags>[is-]*)(?P<end>[:)]))?)
    |(?P<close>\))
    |(?P<bar>\|)
    |(?P<repeat>[*+?]|\{\d*,?\d*\})
    |(?P<letter>.)""",
    re.VERBOSE | re.DOTALL,
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_CODE = re.compile(r"\\[xuU]\{?([0-9A-Fa-f]+)\}?")
_COMMON = {
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
}
"""The terminals of Lark's library that have special characters."""
_PLAIN_COMMON = frozenset(
    {
        *("DIGIT", "HEXDIGIT", "INT", "SIGNED_INT", "DECIMAL", "FLOAT", "SIGNED_FLOAT", "NUMBER"),
        *("SIGNED_NUMBER", "LCASE_LETTER", "UCASE_LETTER", "LETTER", "WORD", "CNAME"),
    }
)


def quoted_lark(grammar: str) -> str:
    """Return a grammar in llguidance's dialect of Lark for JSON strings.

    Raises:
        RequestError: the grammar has something that cannot be rewritten. The message continues the
            name of the tool.
    """
    return _Quoter(grammar).written()


class _Quoter:
    """Rewrites one grammar."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._parts = [*_LARK.finditer(grammar)]
        self._bodies: dict[str, list[re.Match[str]]] = {}
        name = ""
        for part in self._parts:
            name = part["defined"] or (part["alias"] or part["common"]) or name
            self._bodies.setdefault(name, []).append(part)
        self._rules = self._with_escapes()

    def _with_escapes(self) -> dict[str, str]:
        """Return the terminals that have escapes, and the rules that they become."""
        terminals = {name for name in self._bodies if name.upper() == name and name.strip("_")}
        found: dict[str, str] = {}
        while True:
            new = {
                name
                for name in terminals - found.keys()
                if any(part["name"] in found or _has_escape(part) for part in self._bodies[name])
            }
            if not new:
                return found
            for name in new:
                rule = f"json_{name.lower().strip('_')}"
                while rule in self._grammar or rule in found.values():
                    rule += "_"
                found[name] = rule

    def written(self) -> str:
        """Return the rewritten grammar."""
        written, place, defined = [], 0, ""
        for part in self._parts:
            written += [self._grammar[place : part.start()], self._rewritten(part, defined)]
            defined = part["defined"] or defined
            place = part.end()
        return "".join([*written, self._grammar[place:]])

    def _rewritten(self, part: re.Match[str], defined: str) -> str:
        if part["comment"] is not None:
            return ""
        if name := part["defined"] or part["name"]:
            return part.group().replace(name, self._rules.get(name, name))
        if name := part["common"]:
            rule = self._rules.get(part["alias"] or name)
            return part.group() if rule is None else f"{rule}: {_expression(_COMMON[name], '')}"
        if part["ignored"] is not None:
            return self._ignored(part)
        if part["refused"] is not None:
            if part["refused"] in "&~" and defined not in self._rules:
                return part.group()
            raise _unsupported(part["refused"])
        if not _has_escape(part):
            return part.group()
        return _expression(*_regex_of(part))

    def _ignored(self, part: re.Match[str]) -> str:
        """Return the parts left out between lexemes. A character of several is one such lexeme."""
        given = part["ignored"]
        body = self._bodies.get(given, [])
        if given in self._rules:
            found = [each for each in body if not each["defined"]]
        else:
            found = [*_LARK.finditer(given)]
        if len(found) != 1:
            raise _unsupported(part.group())
        if given not in self._rules and not _has_escape(found[0]):
            return part.group()
        pattern, flags = _regex_of(found[0])
        atoms = [*_atoms(pattern, flags)]
        is_class = len(atoms) == 1 or (len(atoms) == 2 and atoms[1] in ("*", "+"))
        if not is_class or not isinstance(atoms[0], _Set):
            raise _unsupported(part.group())
        return "\n".join(f"%ignore {each}" for each in atoms[0].lexemes())


def _has_escape(part: re.Match[str]) -> bool:
    if name := part["common"]:
        if name not in _PLAIN_COMMON and name not in _COMMON:
            raise _unsupported(f"common.{name}")
        return name in _COMMON
    if part["regex"] is None and part["text"] is None and part["range"] is None:
        return False
    return any(isinstance(each, _Set) and each.special for each in _atoms(*_regex_of(part)))


def _regex_of(part: re.Match[str]) -> tuple[str, str]:
    """Return a regular expression and its flags, also of a text."""
    if part["common"] is not None:
        return _COMMON[part["common"]], ""
    if part["regex"] is not None:
        return part["regex"], part["flags"]
    if part["range"] is not None:
        ends = [_CODE_OF.format(ord(_text(each))) for each in part["range"].split("..", 1)]
        return f"[{'-'.join(ends)}]", ""
    return "".join(_CODE_OF.format(ord(each)) for each in _text(part["text"])), part["case"]


_CODE_OF = r"\x{{{:x}}}"


def _text(quoted: str) -> str:
    try:
        text = json.loads(quoted.strip())
    except ValueError:
        raise _unsupported(quoted.strip()) from None
    return str(text)


class _Set:
    """A character of a class, or one character."""

    def __init__(self, text: str, *, ignores_case: bool, letter: str | None = None) -> None:
        """``text`` is the class, in brackets."""
        self._text = text
        self._flag = "i" if ignores_case else ""
        if letter is not None:
            self.special = [letter] if letter in _SPECIAL else []
            self._is_plain = not self.special
        else:
            self.special = [each for each in _SPECIAL if _has(text, each)]
            self._is_plain = True

    def lexemes(self, repeat: str = "") -> Iterator[str]:
        """Yield the lexemes of the class. ``repeat`` repeats the characters without escapes."""
        if self._is_plain:
            text = f"[{self._text}&&{_PLAIN}]" if self.special else self._text
            yield f"/{text}{repeat}/{self._flag}"
        if self.special:
            yield "/" + "|".join(re.escape(json.dumps(each)[1:-1]) for each in self.special) + "/"


def _expression(pattern: str, flags: str) -> str:
    """Return the rule of a regular expression, with a lexeme for each character."""
    atoms = [*_atoms(pattern, flags)]
    written = ['(""']
    for place, atom in enumerate(atoms):
        if not isinstance(atom, _Set):
            written.append({"(": '(""', "|": '| ""'}.get(atom, atom))
            continue
        # At the end, a run of characters is one lexeme, as long as possible.
        is_run = atoms[place + 1 : place + 2] in (["*"], ["+"]) and set(atoms[place + 2 :]) <= {")"}
        written.append(f"({' | '.join(atom.lexemes('+' if is_run else ''))})")
    return " ".join([*written, ")"])


def _atoms(pattern: str, flags: str) -> Iterator[_Set | str]:
    """Yield the characters, the parentheses, the bars and the repetitions of an expression."""
    if flags.strip("is"):
        raise _unsupported(f"/…/{flags}")
    dots_all, ignores_case = "s" in flags, "i" in flags
    left = []
    for found in _ATOM.finditer(pattern):
        text = found.group()
        if found["refused"] is not None:
            raise _unsupported(text)
        if found["group"] is not None:
            if found["end"] != ")":
                left.append((dots_all, ignores_case))
                yield "("
            on, _, off = (found["flags"] or "").partition("-")
            dots_all = ("s" in on or dots_all) and "s" not in off
            ignores_case = ("i" in on or ignores_case) and "i" not in off
        elif found["close"] is not None:
            dots_all, ignores_case = left.pop() if left else (dots_all, ignores_case)
            yield text
        elif found["repeat"] is not None or found["bar"] is not None:
            yield text
        elif found["set"] is not None:
            if text == ".":
                text = r"[\x00-\x{10ffff}]" if dots_all else r"[^\n]"
            text = text if text.startswith("[") else f"[{text}]"
            if re.search(r"(?<!\\)(?:\[:|&&|--|~~)|\\[pPbB]|(?<!^)(?<!\\)\[", text):
                raise _unsupported(text)
            yield _Set(text, ignores_case=ignores_case)
        else:
            letter = text
            if found["code"] is not None:
                letter = chr(min(int(_CODE.sub(r"\1", text), 16), 0x10FFFF))
            elif found["escape"] is not None:
                letter = _CONTROLS.get(text[1:], text[1:])
            code = f"[{_CODE_OF.format(ord(letter))}]"
            yield _Set(code, ignores_case=ignores_case, letter=letter)


def _has(text: str, letter: str) -> bool:
    """Return whether a class has a special character. Rust and Python agree on these."""
    plain = _CODE.sub(lambda found: rf"\U{min(int(found[1], 16), 0x10FFFF):08x}", text)
    try:
        return re.fullmatch(plain, letter, re.ASCII) is not None
    except (re.error, OverflowError):
        raise _unsupported(text) from None


def _unsupported(what: str) -> RequestError:
    return RequestError(
        f"has {shown(what)} in its grammar, which is not supported where a model writes the input "
        "as a JSON string (write texts, classes of characters and repetitions)"
    )
