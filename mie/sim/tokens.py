"""Token ids that stand for text: which ones does not matter, only which are equal.

Each source of text (a stretch of a prompt, an answer) has a key of 64 bits, and its tokens depend
on the key and their position alone. So equal texts are equal, and others share no block.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def text_key(*numbers: int) -> int:
    """A key for a source of text that ``numbers`` name (the finaliser of SplitMix64, in turn)."""
    key = 0
    for number in numbers:
        key = (key ^ number) + 0x9E3779B97F4A7C15 & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key


def text_tokens(key: int, length: int, vocab_size: int) -> list[int]:
    """The first ``length`` tokens of a text."""
    return [text_token(key, position, vocab_size) for position in range(length)]


def text_token(key: int, position: int, vocab_size: int) -> int:
    """The token at a position."""
    return (key * (position + 1) >> 20) % vocab_size
