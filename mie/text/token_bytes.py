"""Find the exact bytes of single tokens, even of less than a character."""

from mie.text.detokenizer import Detokenizer
from mie.text.tokenizer import Tokenizer


class TokenBytes:
    """The bytes that a token adds to a text, so that the bytes of neighbours join to the text's.

    A token that begins a word has its space, as in the middle of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.byte_table
        self._known: dict[int, bytes] = {}  # if there is no table
        self._inside: Detokenizer | None = None

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token; an unused id has none."""
        if self._table is not None:
            return self._table[token_id]
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes(token_id)
        return known

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._tokenizer.added_tokens:
            return self._tokenizer.added_tokens[token_id].encode()
        stream = self._after_a_word().fork()
        return (stream.add([token_id]) + stream.finish()).encode()

    def _after_a_word(self) -> Detokenizer:
        """Return a stream in the middle of a text, where the next token is spelled in full."""
        if self._inside is None:
            prompt = self._tokenizer.encode("a", add_special_tokens=False)
            self._inside = Detokenizer(self._tokenizer, prompt, skip_special_tokens=False)
        return self._inside
