"""How the words that an answer must not contain are spelled in tokens."""

from collections.abc import Iterable

from mie.errors import RequestError
from mie.text.tokenizer import Tokenizer


def encode_bad_words(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The lists of token ids that spell ``words``, as vLLM encodes them.

    Each word is encoded as the beginning of a text and after a space. The second spelling counts
    if it has as many tokens and begins with another one: then the space is part of the first token,
    and otherwise the first spelling occurs inside it.

    Raises:
        RequestError: a word is no valid Unicode, or the tokenizer has no tokens for it.
    """
    spelled: list[tuple[int, ...]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not plain:
            raise RequestError(f"the tokenizer has no tokens for the bad word {word!r}")
        spelled.append(tuple(plain))
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            spelled.append(tuple(spaced))
    return tuple(spelled)
