"""Find the exact bytes of single tokens, which may be less than a character."""

from mie.text.detokenizer import BYTE_TOKEN, Detokenizer, letters_to_bytes
from mie.text.tokenizer import Tokenizer


class TokenBytes:
    """The bytes that a token adds to a text, so that those of neighbours join to the text's.

    A token that begins a word has its space, as in the middle of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = {step["type"] for step in tokenizer.decoder_steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_bytes = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}
        self._inside: Detokenizer | None = None

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token; an id that stands for nothing has none."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes(token_id)
        return known

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._tokenizer.added_tokens:
            return self._tokenizer.added_tokens[token_id].encode()
        if self._is_byte_level:
            return letters_to_bytes(token)
        byte = BYTE_TOKEN.fullmatch(token) if self._has_bytes else None
        if byte is not None:
            return bytes([int(byte.group(1), 16)])
        stream = self._after_a_word().fork()
        return (stream.add([token_id]) + stream.finish()).encode()

    def _after_a_word(self) -> Detokenizer:
        """Return a stream in the middle of a text, where the next token is spelled in full."""
        if self._inside is None:
            prompt = self._tokenizer.encode("a", add_special_tokens=False)
            self._inside = Detokenizer(self._tokenizer, prompt, skip_special_tokens=False)
        return self._inside
