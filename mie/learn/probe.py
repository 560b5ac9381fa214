"""Observe an engine of the tutorial with a model that shows the keys that each query has read.

The probe's values are one-hot vectors, one for each computed token, and all scores are equal. So
an output of attention is the list of the tokens that were read, each with its share. The tokens
are numbers that identify a request and a position: token 105 of request A is at position 5.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

SIZE = 160
"""Maximum number of tokens that a probe computes."""
VOCABULARY = 1000
UNSET = 1e7
"""A number that attend can never return."""
HEIGHT = 1 / 3
"""A value of the probe. No binary number has this size, so rounding changes it."""
LAYERS = 2


class Broken(Exception):
    """A rule that the code of a learner breaks."""

    def __init__(self, rule: str, seen: str) -> None:
        super().__init__(f"{rule}: {seen}")
        self.rule, self.seen = rule, seen
        """The name of a rule of rules.json, and a sentence about the observation."""


@dataclass
class Entry:
    """A token that the probe has computed once."""

    token: int
    text: tuple[int, ...] = ()
    """The tokens that its query has read, itself included."""


def ordinal(number: int) -> str:
    """Return a place in words: "1st" for 1, "2nd" for 2."""
    last = 0 if number // 10 % 10 == 1 else number % 10
    return str(number) + {1: "st", 2: "nd", 3: "rd"}.get(last, "th")


def numpy_with_marks() -> ModuleType:
    """Return NumPy with an ``empty`` and an ``empty_like`` that fill the array with `UNSET`."""

    def marked(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (array := make(*args, **kwargs), array.fill(UNSET))[0]

    module = ModuleType("numpy")
    vars(module).update(vars(np), empty=marked(np.empty), empty_like=marked(np.empty_like))
    return module


def called(rule: str, case: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return a function's result. An error in a situation that a rule is about breaks the rule."""
    try:
        return function(*args)
    except (Broken, NotImplementedError):
        raise
    except Exception as error:
        raise Broken(rule, f"{case} raised {type(error).__name__}: {error}.") from error


def text_of(name: str, length: int, prefix: Sequence[int] = ()) -> list[int]:
    """Return the tokens of request ``name``: a prefix, then own tokens up to ``length``."""
    base = 100 * (ord(name) - ord("A") + 1)
    return [*prefix, *(base + i for i in range(len(prefix), length))]


def wrong_row(name: str, token: int, at: int, texts: Mapping[str, list[int]]) -> Broken:
    """Return the broken rule of a wrong token that was appended at a position of a text."""
    for other, text in texts.items():
        if token in text and text.index(token):
            row = text.index(token) - 1
            if other != name:
                seen = f"Request {name} got the token that follows position {row} of request "
                return Broken("row of another sequence", f"{seen}{other}.")
            seen = f"At position {at}, request {name} got the token that follows position {row}, "
            return Broken("row of logits", f"{seen}and not position {at - 1}.")
    seen = f"At position {at}, request {name} got a token that the model did not choose."
    return Broken("wrong token", seen)


class Probe:
    """A model with logits that choose the next token of known texts. It checks each pass."""

    def __init__(self, texts: dict[str, list[int]]) -> None:
        """``texts`` has the right tokens of each request."""
        self.config = {
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": 1,
            "num_attention_heads": 2,
            "head_dim": LAYERS * SIZE,
        }
        self.texts = texts
        self.drafts = False
        """Whether tokens outside of the texts are drafts. Otherwise they are a mistake."""
        self.before: Callable[[list[int]], None] | None = None
        """Gets the tokens of each pass before it is computed."""
        self.after: Callable[[int, int], None] | None = None
        """Gets the layer and the number of tokens after each ``attend``."""
        self.most_passes: int | None = None
        """Maximum number of passes, if a text ends after so many."""
        self.num_passes = self.num_ended = 0
        """Passes that have begun, and passes that have returned logits."""
        self.entries: list[Entry] = []

    def forward(self, tokens: Any, positions: Any, attend: Any) -> Any:
        """Return logits [T, V] of tokens and positions, as a model of step 1 does.

        Raises:
            Broken: a token, a position, or the keys that a query has read are wrong.
        """
        tokens, positions = [int(t) for t in tokens], [int(p) for p in positions]
        self.num_passes += 1
        if self.most_passes is not None and self.num_passes > self.most_passes:
            seen = f"The {self._pass} begins, and {self.most_passes} passes are enough."
            raise Broken("number of passes", seen)
        if not tokens:
            raise Broken("empty pass", f"The {self._pass} computes no token.")
        if len(tokens) != len(positions):
            seen = f"The {self._pass} has {len(tokens)} tokens and {len(positions)} positions."
            raise Broken("positions count", seen)
        if self.before:
            self.before(tokens)
        rows = [self._row(tokens[:i], t, positions[i]) for i, t in enumerate(tokens)]
        num_checked = len(rows)  # nothing follows from the rows behind a wrong draft
        if self.drafts:
            wrong = [t != self.texts[n][p] for t, (n, p) in zip(tokens, rows, strict=True)]
            num_checked = wrong.index(True) if True in wrong else len(rows)
        first = len(self.entries)
        if first + len(tokens) > SIZE:
            seen = f"The model was called {self.num_passes} times, and the text is not done."
            raise Broken("no end", seen)
        self.entries += [Entry(token) for token in tokens]
        for layer in range(LAYERS):
            v = np.zeros((len(tokens), 1, LAYERS * SIZE))
            v[range(len(tokens)), 0, layer * SIZE + first + np.arange(len(tokens))] = HEIGHT
            q = np.zeros((len(tokens), 2, LAYERS * SIZE))
            out = attend(layer, q, -v, v.copy())
            if np.shape(out) != (len(tokens), 2, LAYERS * SIZE):
                seen = f"attend returned an array of shape {np.shape(out)} for q of shape "
                seen += f"{(len(tokens), 2, LAYERS * SIZE)}."
                raise Broken("shape of attend", seen)
            if self.after:
                self.after(layer, len(tokens))
            for row, (name, position) in enumerate(rows[:num_checked]):
                shares = np.asarray(out, np.float64)[row, 0] / HEIGHT
                self._check(layer, first + row, name, position, shares, first)
        logits = np.zeros((len(tokens), VOCABULARY))
        for row, (name, position) in enumerate(rows):
            text = self.texts[name]
            logits[row, text[position + 1] if position + 1 < len(text) else VOCABULARY - 1] = 1
        self.num_ended += 1
        return logits

    @property
    def _pass(self) -> str:
        return f"{ordinal(self.num_passes)} pass"

    def _row(self, before: Sequence[int], token: int, position: int) -> tuple[str, int]:
        """Return the request and the position of a token, with the tokens before it in the line."""
        homes = [name for name, text in self.texts.items() if token in text]
        if not homes:
            if self.drafts:
                (name,) = self.texts
                return name, position
            seen = f"The {self._pass} computes a token that is in no text: the model did not "
            raise Broken("wrong token", f"{seen}choose it.")
        name = homes[0]
        right = self.texts[name].index(token)
        stored = [entry.token for entry in self.entries]
        ends = [text.index(t) for text in [self.texts[name]] for t in stored if t in text]
        if right != position and (token in before or (token in stored and position > max(ends))):
            raise wrong_row(name, token, position, self.texts)
        if right != position:
            seen = f"Token {right} of request {name} was computed at position {position}"
            rule = "position restarted" if position < right else "position"
            rule = "position off by one" if abs(right - position) == 1 else rule
            raise Broken(rule, f"{seen} in the {self._pass}.")
        return name, position

    def _check(
        self, layer: int, own: int, name: str, position: int, shares: Any, first: int
    ) -> None:
        """Compare the tokens that a query has read with the tokens before it."""
        who = f"In the {self._pass}, the query at position {position} of request {name}"
        if np.isclose(shares, UNSET / HEIGHT).any():
            raise Broken("row not written", f"{who} got no result: attend left its row as it was.")
        if not np.isfinite(shares).all():
            raise Broken("nothing to read", f"{who} got NaN: it could read no key at all.")
        if shares.min() < -1e-9:
            raise Broken("keys as values", f"{who} read keys where values belong.")
        places = np.flatnonzero(shares > 1e-9)
        if not len(places):
            raise Broken("nothing to read", f"{who} got zeros: it read no value.")
        if any(place // SIZE != layer for place in places):
            raise Broken("layers mixed", f"{who} read values of another layer in layer {layer}.")
        ids = [int(place) % SIZE for place in places]
        read = [self.entries[i] for i in ids]
        text = self.texts[name]
        in_order = sorted(read, key=lambda e: text.index(e.token) if e.token in text else len(text))
        self.entries[own].text = tuple(entry.token for entry in in_order)
        self._compare(who, name, position, read, own, first, ids)
        if abs(shares.sum() - 1) > 1e-6:
            if abs(shares.sum() - 1) < 2e-3:
                raise Broken("rounded", f"{who} read values times {shares.sum():.6f}.")
            raise Broken("empty slots", f"{who} also read slots that hold no key.")
        if len(read) > 1 and shares.max() > 1.5 * shares[places].min():
            raise Broken("read twice", f"{who} read a key more than once.")

    def _compare(
        self,
        who: str,
        name: str,
        position: int,
        read: Sequence[Entry],
        own: int,
        first: int,
        ids: Sequence[int],
    ) -> None:
        text = self.texts[name]
        right = text[: position + 1]
        tokens = Counter(entry.token for entry in read)
        future = [text.index(t) for t in tokens if t in text[position + 1 :]]
        foreign = [t for t in tokens if t not in text]
        missing = [i for i, t in enumerate(right) if t not in tokens]
        if future:
            raise Broken("mask shows the future", f"{who} read the key at position {future[0]}.")
        if foreign:
            if self.drafts:
                raise Broken("dropped draft read", f"{who} read the key of a draft that was wrong.")
            other = next(n for n, t in self.texts.items() if foreign[0] in t)
            at = self.texts[other].index(foreign[0])
            raise Broken("foreign key", f"{who} read the key at position {at} of request {other}.")
        if missing == [position]:
            raise Broken("own key missing", f"{who} did not read its own key.")
        if missing and min(ids) >= first and self.num_passes > 1:
            seen = f"{who} read only keys of this pass, and not the {ordinal(missing[0] + 1)} "
            raise Broken("only the new keys", f"{seen}token.")
        if missing:
            where = ", ".join(str(i) for i in missing[:4])
            keys = "key at position" if len(missing) == 1 else "keys at positions"
            raise Broken("keys missing", f"{who} did not read the {keys} {where}.")
        if max(tokens.values()) > 1:
            raise Broken("read twice", f"{who} read a key more than once.")
        for entry in read:
            at = text.index(entry.token)
            is_other = entry.text and entry.text != tuple(text[: at + 1])
            if is_other and entry is not self.entries[own]:
                seen = f"{who} read a key at position {at} that was computed after other tokens."
                raise Broken("key of another beginning", seen)


def counted(pool_class: Any) -> Any:
    """Return a class of pools that counts the blocks that `take` and `drop` hand out."""

    class CountedPool(pool_class):  # type: ignore[misc]  # the class of a file
        num_out = 0

        def take(self) -> Any:
            block = super().take()
            self.num_out += 1
            return block

        def drop(self, block: int) -> None:
            super().drop(block)
            self.num_out -= 1

    return CountedPool


def audit(pool: Any, seqs: Sequence[Any], is_shared: bool = False) -> None:
    """Compare the free list of a pool with the tables of all sequences.

    Raises:
        Broken: a block has two owners, none, or is free and in use.
    """
    holders: dict[int, list[str]] = {}
    for seq in seqs:
        for block in seq.table:
            holders.setdefault(block, []).append(seq.name)
    for block, count in Counter(pool.free).items():
        if count > 1:
            raise Broken("block freed twice", f"Block {block} is {count} times in the free list.")
        if block in holders:
            seen = f"Block {block} is in the free list, and still in the table of "
            seen += f"{' and '.join(holders[block])}."
            raise Broken("block freed too early", seen)
    for block, names in holders.items():
        if len({*names}) < len(names):
            seen = f"Block {block} is twice in the table of {names[0]}."
            raise Broken("block twice in a table", seen)
        if len(names) > 1 and not is_shared:
            seen = f"Block {block} is in the tables of {' and '.join(names)}."
            raise Broken("block in two tables", seen)
        if is_shared and pool.holders[block] != len(names):
            few = pool.holders[block] < len(names)
            seen = f"Block {block} is in the table of {' and '.join(names)}, and its count of "
            seen += f"holders is {pool.holders[block]}."
            raise Broken("holder not counted" if few else "holder counted twice", seen)
    lost = sorted({*range(pool.num_blocks)} - {*pool.free} - {*holders})
    if lost:
        raise Broken("block lost", f"Block {lost[0]} is in no table, and not in the free list.")
    num_used = pool.num_blocks - len(pool.free)
    if getattr(pool, "num_out", num_used) != num_used:
        seen = f"{num_used} blocks are in use, and take and drop have counted {pool.num_out}."
        raise Broken("take and drop", seen)
    for seq in seqs:
        if seq.num_computed and len(seq.table) * pool.block_size < seq.num_computed:
            seen = f"{seq.name} counts {seq.num_computed} computed tokens, and its table has room "
            seen += f"for {len(seq.table) * pool.block_size}."
            raise Broken("computed without blocks", seen)
