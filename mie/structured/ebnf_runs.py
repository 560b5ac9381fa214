"""Write an EBNF grammar with long lexemes, where the next character always determines the rule.

llguidance reads a lexeme as long as possible. In a grammar that is LL(1) this changes no text: only
one lexeme can begin with the next character, and the text after a run does not begin with a
character of the run (A. Aho et al., Compilers, section 4.4). A part that is not LL(1) may be a
lexeme of its own, if it has no rules and none of its characters can follow it. A mask then takes
microseconds, where lexemes of one character take milliseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

Ranges: TypeAlias = Sequence[tuple[int, int]]
_MAX_DEPTH = 60
_MAX_NODES = 3000
_MAX_WORK = 200_000
"""Parts of rules that the analysis may look at, about 0.2 s."""


class _TooMuchError(Exception):
    """The analysis takes too much work."""


@dataclass(frozen=True, eq=False)
class Letters:
    """A character of a class."""

    ranges: Ranges
    is_negated: bool
    pattern: str
    """The class in a regular expression, in brackets."""


@dataclass(frozen=True, eq=False)
class Reference:
    """A text of another rule."""

    name: str


@dataclass(frozen=True, eq=False)
class Choice:
    """One of several sequences."""

    sequences: Sequence[Sequence[Node]]


@dataclass(frozen=True, eq=False)
class Repeated:
    """Something several times."""

    item: Node
    least: int
    most: int | None


Node: TypeAlias = "Letters | Reference | Choice | Repeated"


def lark_with_runs(rules: Mapping[str, Choice], names: Mapping[str, str]) -> str | None:
    """Return a grammar in Lark with long lexemes, or None if it is not LL(1).

    ``names`` has the names of the rules in Lark.
    """
    if _size(rules) > _MAX_NODES:
        return None
    factored = {name: _factored(rule, 0) for name, rule in rules.items()}
    analysis = _Analysis(factored)
    if not analysis.is_ll1():
        return None
    writer = _Writer(names, analysis.lexemes)
    return "\n".join(
        f"{names[name]}: {writer.choice(rule, name)}" for name, rule in factored.items()
    )


def _size(rules: Mapping[str, Choice]) -> int:
    """Return the number of nodes, or more than any limit if they nest too deep."""
    left: list[tuple[Node, int]] = [(rule, 0) for rule in rules.values()]
    num_nodes = 0
    while left and num_nodes <= _MAX_NODES:
        node, depth = left.pop()
        num_nodes += 1 if depth < _MAX_DEPTH else _MAX_NODES
        if isinstance(node, Choice):
            left += [(each, depth + 1) for sequence in node.sequences for each in sequence]
        elif isinstance(node, Repeated):
            left.append((node.item, depth + 1))
    return num_nodes


def _factored(choice: Choice, depth: int) -> Choice:
    """Return a choice in which sequences that begin with the same class share the beginning."""
    groups: dict[object, list[list[Node]]] = {}
    for sequence in choice.sequences:
        inner = [part for each in sequence for part in _inside(each, depth)]
        first = inner[0] if inner else None
        key = first.pattern if isinstance(first, Letters) and depth < _MAX_DEPTH else object()
        groups.setdefault(key, []).append(inner)
    sequences: list[Sequence[Node]] = []
    for group in groups.values():
        if len(group) == 1:
            sequences.append(group[0])
        else:
            rest = _factored(Choice([sequence[1:] for sequence in group]), depth + 1)
            sequences.append([group[0][0], *_unwrapped(rest)])
    return Choice(sequences)


def _inside(node: Node, depth: int) -> Sequence[Node]:
    """Return a node with its choices factored. A choice of one sequence is that sequence."""
    if isinstance(node, Repeated):
        item = _inside(node.item, depth)
        only = item[0] if len(item) == 1 else Choice([item])
        return [Repeated(only, node.least, node.most)]
    if not isinstance(node, Choice):
        return [node]
    return _unwrapped(_factored(node, depth + 1))


def _unwrapped(choice: Choice) -> Sequence[Node]:
    return choice.sequences[0] if len(choice.sequences) == 1 else [choice]


class _Analysis:
    """Computes the characters with which each part begins and goes on. Sets are bits."""

    def __init__(self, rules: Mapping[str, Choice]) -> None:
        self._rules = rules
        ends = {end for each in _letters_in(rules) for a, b in each.ranges for end in (a, b + 1)}
        self._ends = sorted({0, *ends})
        self._all = (1 << len(self._ends)) - 1
        self._first = dict.fromkeys(rules, 0)
        self._may_be_empty = dict.fromkeys(rules, False)
        self._follow = dict.fromkeys(rules, 0)
        self._num_left = _MAX_WORK
        self.lexemes: set[Node] = set()
        """Parts that are not LL(1) and can be one lexeme."""

    def is_ll1(self) -> bool:
        """Return whether the next character always determines how a text goes on.

        It is false too if the answer takes too much work.
        """
        with suppress(_TooMuchError):
            return self._is_ll1()
        return False

    def _is_ll1(self) -> bool:
        while True:
            before = dict(self._first), dict(self._may_be_empty)
            for name, rule in self._rules.items():
                self._first[name], self._may_be_empty[name] = self._begins(rule)
            if before == (self._first, self._may_be_empty):
                break
        while True:
            follow = dict(self._follow)
            is_clear = True
            self.lexemes.clear()
            for name, rule in self._rules.items():
                is_clear = self._visit(rule, self._follow[name]) and is_clear
            if follow == self._follow:
                return is_clear

    def _begins(self, node: Node) -> tuple[int, bool]:
        """Return the characters that a node begins with, and whether it may be empty."""
        self._num_left -= 1
        if self._num_left < 0:
            raise _TooMuchError
        if isinstance(node, Letters):
            return self._bits(node), False
        if isinstance(node, Reference):
            return self._first[node.name], self._may_be_empty[node.name]
        if isinstance(node, Repeated):
            first, is_empty = self._begins(node.item)
            return first, is_empty or node.least == 0
        found = [self._begins_in(sequence) for sequence in node.sequences]
        bits = 0
        for first, _ in found:
            bits |= first
        return bits, any(is_empty for _, is_empty in found)

    def _begins_in(self, sequence: Sequence[Node]) -> tuple[int, bool]:
        bits = 0
        for node in sequence:
            first, is_empty = self._begins(node)
            bits |= first
            if not is_empty:
                return bits, False
        return bits, True

    def _bits(self, node: Letters) -> int:
        bits = 0
        for low, high in node.ranges:
            begin, end = (bisect_right(self._ends, each) - 1 for each in (low, high))
            bits |= (1 << end + 1) - (1 << begin)
        return self._all & ~bits if node.is_negated else bits

    def _visit(self, node: Node, follow: int) -> bool:
        """Note what follows the rules in a node, and return whether the node is LL(1)."""
        if isinstance(node, Letters):
            return True
        if isinstance(node, Reference):
            self._follow[node.name] |= follow
            return True
        if isinstance(node, Repeated):
            first, is_empty = self._begins(node.item)
            is_clear = self._visit(node.item, follow if node.most == 1 else follow | first)
            if is_clear and not is_empty and (node.least == node.most or not first & follow):
                return True
            return self._is_lexeme(node, follow)
        is_clear, taken, num_empty = True, 0, 0
        for sequence in node.sequences:
            first, is_empty = self._begins_in(sequence)
            num_empty += is_empty
            first |= follow if is_empty else 0
            is_clear = is_clear and not first & taken
            taken |= first
            behind = follow
            for each in reversed(sequence):
                is_clear = self._visit(each, behind) and is_clear
                first, is_empty = self._begins(each)
                behind = first | (behind if is_empty else 0)
        return (is_clear and num_empty <= 1) or self._is_lexeme(node, follow)

    def _is_lexeme(self, node: Node, follow: int) -> bool:
        """Return whether a part without rules ends where another character comes, and note it."""
        left = [node]
        for each in left:
            self._num_left -= 1
            if isinstance(each, Choice):
                left += [part for sequence in each.sequences for part in sequence]
            elif isinstance(each, Repeated):
                left.append(each.item)
            elif isinstance(each, Reference) or self._bits(each) & follow:
                return False
        if self._begins(node)[1]:
            return False
        self.lexemes.add(node)
        return True


def _letters_in(rules: Mapping[str, Choice]) -> list[Letters]:
    left: list[Node] = [*rules.values()]
    for node in left:
        if isinstance(node, Choice):
            left += [each for sequence in node.sequences for each in sequence]
        elif isinstance(node, Repeated):
            left.append(node.item)
    return [node for node in left if isinstance(node, Letters)]


class _Writer:
    """Writes rules in Lark."""

    def __init__(self, names: Mapping[str, str], lexemes: set[Node]) -> None:
        self._names, self._lexemes = names, lexemes

    def choice(self, choice: Choice, rule: str = "", *, is_repeated: bool = False) -> str:
        """Return a choice. ``rule`` is the rule of which it is all, or nothing."""
        if choice in self._lexemes:
            return f'"" /{_pattern(choice)}/'
        return " | ".join(
            self._sequence(sequence, rule, is_repeated=is_repeated) for sequence in choice.sequences
        )

    def _sequence(self, sequence: Sequence[Node], rule: str, *, is_repeated: bool) -> str:
        """Return a sequence. Characters that follow each other are one lexeme."""
        first, last = (sequence[0], sequence[-1]) if sequence else (None, None)
        is_recursive = isinstance(last, Reference) and last.name == rule and len(sequence) == 2
        if isinstance(first, Letters) and (is_recursive or (is_repeated and len(sequence) == 1)):
            return f'"" /{first.pattern}+/' + (f" {self._names[rule]}" if is_recursive else "")
        parts, letters = ['""'], ""
        for node in [*sequence, None]:
            if isinstance(node, Letters):
                letters += node.pattern
                continue
            if letters:
                parts.append(f"/{letters}/")
                letters = ""
            if node is not None:
                parts.append(self._node(node))
        return " ".join(parts)

    def _node(self, node: Node) -> str:
        if isinstance(node, Reference):
            return self._names[node.name]
        if isinstance(node, Choice):
            return f"({self.choice(node)})"
        if node in self._lexemes or isinstance(node, Letters):
            return f"/{_pattern(node)}/"
        most = "" if node.most is None else node.most
        if isinstance(node.item, Letters):
            run = f"/{node.item.pattern}{{{max(1, node.least)},{most}}}/"
            return '""' if node.most == 0 else f"({run})?" if node.least == 0 else run
        inner = (
            self.choice(node.item, is_repeated=node.most is None)
            if isinstance(node.item, Choice)
            else self._node(node.item)
        )
        return f"({inner}){{{node.least},{most}}}"


def _pattern(node: Node) -> str:
    """Return the regular expression of a part without rules."""
    if isinstance(node, Letters):
        return node.pattern
    if isinstance(node, Repeated):
        return f"(?:{_pattern(node.item)}){{{node.least},{'' if node.most is None else node.most}}}"
    assert isinstance(node, Choice)
    return f"(?:{'|'.join(''.join(map(_pattern, each)) for each in node.sequences)})"
