"""How the words that an answer must not contain are spelled in tokens."""

from collections.abc import Iterable

from mie.errors import RequestError
from mie.text.tokenizer import Tokenizer


def encode_bad_words(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the lists of token ids that spell ``words``: each at the beginning of a text and after
    a space, as vLLM encodes them.

    The second spelling is left out where it ends with the first one, which is found inside it.
    vLLM also leaves it out where it has another number of tokens, and so lets many a word through.

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
        if spaced[-len(plain) :] != plain:
            spelled.append(tuple(spaced))
    return tuple(spelled)
