"""Find the tokens that would complete a bad word."""

from collections.abc import Sequence


class BadWords:
    """Bad words as token sequences, indexed by length and by the tokens before the last one.

    A position costs one lookup for each length, however many words there are.
    """

    def __init__(self, spellings: Sequence[Sequence[int]]) -> None:
        self._last_ids: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in spellings:
            words = self._last_ids.setdefault(len(before), {})
            words.setdefault(tuple(before), []).append(last)

    @property
    def read_tokens(self) -> bool:
        """Whether a position's bans depend on the tokens before it."""
        return any(self._last_ids)

    def completing(self, token_ids: Sequence[int], num_generated: int) -> list[int]:
        """Return the tokens that would complete a bad word if they came next after ``token_ids``.

        Only the last ``num_generated`` tokens (the output) are searched.
        """
        banned: list[int] = []
        for length, words in self._last_ids.items():
            if length <= num_generated:
                before = tuple(token_ids[len(token_ids) - length :])
                banned += words.get(before, ())
        return banned
