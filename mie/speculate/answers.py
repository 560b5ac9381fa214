"""Keep the tokens of finished answers, so that later answers can be guessed from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mie.speculate.history import BREAK, History


class _OfSalt:
    """The answers of a salt in two generations. When the younger is full, the older is dropped."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.old, self.young = History(width), History(width)
        self.num_young = 0

    def rotate(self) -> None:
        self.old, self.young, self.num_young = self.young, History(self._width), 0

    @property
    def size(self) -> int:
        return len(self.old.token_ids) + len(self.young.token_ids)


class Answers:
    """The latest finished answers of each salt.

    A request never uses answers of another salt, so not even the speed reveals them. At most
    ``most_answers`` answers of a salt and ``most_tokens`` tokens of all salts are kept. The salt
    that was used least recently goes first.
    """

    def __init__(self, width: int, most_answers: int, most_tokens: int) -> None:
        self._width, self._most_answers, self._most_tokens = width, most_answers, most_tokens
        self._of_salts: OrderedDict[str | None, _OfSalt] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are kept, with one more for each answer."""
        return sum(each.size for each in self._of_salts.values())

    def add(self, token_ids: Sequence[int], salt: str | None) -> None:
        """Keep an answer, and drop others if there are too many."""
        size = len(token_ids) + 1
        if self._most_answers < 2 or size > self._most_tokens // 2:
            return
        own = self._of_salts.setdefault(salt, _OfSalt(self._width))
        self._of_salts.move_to_end(salt)
        is_full = len(own.young.token_ids) + size > self._most_tokens // 2
        if is_full or own.num_young >= self._most_answers // 2:
            own.rotate()
        own.young.extend([*token_ids, BREAK])
        own.num_young += 1
        while self.num_tokens > self._most_tokens:
            self._of_salts.popitem(last=False)

    def of(self, salt: str | None) -> list[History]:
        """Return the answers of a salt, the latest ones first."""
        own = self._of_salts.get(salt)
        return [own.young, own.old] if own else []

    def clear(self) -> None:
        """Drop all answers."""
        self._of_salts.clear()
