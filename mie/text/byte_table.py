"""Find the bytes of each token, where a text is nothing but the bytes of its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")


class ByteTable(dict[int, bytes]):
    """The bytes that each token adds to a text, by id. An id is looked up when it is needed first.

    Two kinds of decoders have a table:

        ByteLevel                                 Ġ is a space, and â is the byte 0xE2
        Replace, ByteFallback, Fuse, and Strip    ▁ is a space, and <0xE2> is the byte 0xE2

    The text of valid UTF-8 equals the text of the tokenizers library. In other bytes, each broken
    character becomes one U+FFFD. The library's ``ByteFallback`` replaces all bytes of a run of byte
    tokens instead, even complete characters before a character that is cut.
    """

    def __init__(
        self,
        spell: Callable[[int], str | None],
        *,
        replaced: Sequence[tuple[str, str]] = (),
        is_byte_level: bool,
        stripped: bytes = b"",
        num_stripped: int = 0,
    ) -> None:
        super().__init__()
        self._spell = spell
        self._replaced = replaced
        self._is_byte_level = is_byte_level
        self.stripped = stripped
        """A byte that is removed from the beginning of a text."""
        self.num_stripped = num_stripped
        """How many of these bytes are removed at most."""

    @classmethod
    def of(
        cls, steps: Sequence[dict[str, Any]], spell: Callable[[int], str | None]
    ) -> ByteTable | None:
        """Return the table of a decoder, or None if the decoder is of another kind."""
        kinds = [step["type"] for step in steps]
        place = next((n for n, kind in enumerate(kinds) if kind != "Replace"), len(kinds))
        replaced = [(step["pattern"].get("String"), step["content"]) for step in steps[:place]]
        after = kinds[place:]
        strips = steps[-1:] if after[-1:] == ["Strip"] else []
        is_known = after[: len(after) - len(strips)] in (
            ["ByteLevel"],
            ["ByteLevel", "Fuse"],
            ["ByteFallback", "Fuse"],
            *([] if strips else [["ByteFallback"]]),
        )
        is_plain = all(step["stop"] == 0 and step["content"].isascii() for step in strips)
        if not is_known or not is_plain or not all(old for old, _ in replaced):
            return None
        return cls(
            spell,
            replaced=replaced,
            is_byte_level="ByteLevel" in after,
            stripped=strips[0]["content"].encode() if strips else b"",
            num_stripped=strips[0]["start"] if strips else 0,
        )

    def __missing__(self, token_id: int) -> bytes:
        """Return the bytes of an id that was not needed before. An id without a token has none."""
        token = self._spell(token_id)
        if token is None:
            return b""
        for old, new in self._replaced:
            token = token.replace(old, new)
        self[token_id] = data = self._bytes(token)
        return data

    def strip(self, data: bytes, num_left: int) -> tuple[bytes, int]:
        """Return the first ``data`` of a text without the bytes that are removed.

        At most ``num_left`` bytes are removed. The second result is the number for later data.
        """
        while num_left and data.startswith(self.stripped):
            data, num_left = data[1:], num_left - 1
        return data, 0 if data else num_left

    def text(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens."""
        data = b"".join([self[token_id] for token_id in token_ids])
        return self.strip(data, self.num_stripped)[0].decode("utf-8", "replace")

    def _bytes(self, token: str) -> bytes:
        if self._is_byte_level:
            return _letters_to_bytes(token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.encode()


def _letters_to_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token. Plain text in an added token is encoded directly."""
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode("utf-8")


def _letter_table() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _letter_table()
