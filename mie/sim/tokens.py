"""Generate token ids that stand for text. Only their equality matters.

Each source of text (a stretch of a prompt, an answer) has a key of 64 bits, and its tokens depend
only on the key and their position. So equal texts are equal, and others share no block.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def text_key(*numbers: int) -> int:
    """Return a key for the source of text with these numbers (SplitMix64's finaliser, in turn)."""
    key = 0
    for number in numbers:
        key = (key ^ number) + 0x9E3779B97F4A7C15 & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key


def text_tokens(key: int, length: int, vocab_size: int) -> list[int]:
    """Return the first ``length`` tokens of a text."""
    return [text_token(key, position, vocab_size) for position in range(length)]


def text_token(key: int, position: int, vocab_size: int) -> int:
    """Return the token at a position."""
    return (key * (position + 1) >> 20) % vocab_size
