"""Encode bad words, which an answer must not contain."""

from collections.abc import Iterable

from mie.errors import RequestError
from mie.text.tokenizer import Tokenizer


def encode_bad_words(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the beginning of a text and after a space, as in vLLM.

    The second spelling is left out if it ends with the first one, because a search for the first
    finds it. vLLM also leaves it out if it has a different number of tokens, and so fails to block
    many words.

    Raises:
        RequestError: a word is not valid Unicode, or the tokenizer has no tokens for it.
    """
    spelled: list[tuple[int, ...]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not plain:
            raise RequestError(f"the tokenizer has no tokens for the bad word {word!r}")
        spelled.append(tuple(plain))
        if spaced[-len(plain) :] != plain:
            spelled.append(tuple(spaced))
    return tuple(spelled)
