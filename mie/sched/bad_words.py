"""Which tokens would complete a bad word."""

from collections.abc import Sequence


class BadWords:
    """The spellings of bad words by the number of tokens before the last one, and by these tokens:
    a position costs one look for each number, however many words there are."""

    def __init__(self, spellings: Sequence[Sequence[int]]) -> None:
        self._last_ids: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in spellings:
            words = self._last_ids.setdefault(len(before), {})
            words.setdefault(tuple(before), []).append(last)

    @property
    def read_tokens(self) -> bool:
        """Whether the tokens before a position decide what is banned there."""
        return any(self._last_ids)

    def completing(self, token_ids: Sequence[int], num_generated: int) -> list[int]:
        """The tokens that would complete a word, as the next one after ``token_ids``, the last
        ``num_generated`` of which are the output: words are looked for in it alone."""
        banned: list[int] = []
        for length, words in self._last_ids.items():
            if length <= num_generated:
                before = tuple(token_ids[len(token_ids) - length :])
                banned += words.get(before, ())
        return banned
