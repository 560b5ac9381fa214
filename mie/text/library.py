"""Make the tokenizers library's tokenizer from a ``tokenizer.json``, and convert its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.base.threads import is_of_the_request
from mie.errors import MieError, TokenizerError, printable
from mie.text.tokenizer_checks import check_model, checked_tokenizer

if TYPE_CHECKING:
    import tokenizers

_PROBE = "A 1 é\u0301 猫 ▁🦄\n"  # a component that panics does so with any text


def parsed(text: str, path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of the text of a ``tokenizer.json``. It is untrusted input.

    Raises:
        TokenizerError: it exceeds a limit, or is not a tokenizer.
    """
    from tokenizers import Tokenizer

    text = checked_tokenizer(text, str(path))
    with library_errors(TokenizerError, f"{path} is not a tokenizer"):
        backend = Tokenizer.from_str(text)
        check_model(backend.model, str(path))
        _try(backend)
    return backend


def built(parts: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of the contents of a ``tokenizer.json`` with a BPE.

    The result equals `parsed`. A large vocabulary is not written as text and parsed again, which
    would take three times as long. Every added token is also in the vocabulary.

    Raises:
        TokenizerError: it exceeds a limit, or is not a tokenizer.
    """
    from tokenizers import AddedToken, models

    model = {key: value for key, value in parts["model"].items() if value is not None}
    kind, vocab, merges = (model.pop(key) for key in ("type", "vocab", "merges"))
    assert kind == "BPE", kind
    empty = {"type": kind, "vocab": {}, "merges": []}
    backend = parsed(json.dumps({**parts, "added_tokens": [], "model": empty}), path)
    with library_errors(TokenizerError, f"{path} is not a tokenizer"):
        backend.model = models.BPE(vocab, merges, **model)
        for is_special, same in groupby(parts["added_tokens"], lambda each: each["special"]):
            tokens = [
                AddedToken(**{key: value for key, value in each.items() if key != "id"})
                for each in same
            ]
            (backend.add_special_tokens if is_special else backend.add_tokens)(tokens)
        _try(backend)
    return backend


def _try(backend: tokenizers.Tokenizer) -> None:
    with suppress(Exception):  # the vocabulary has no token for unknown text
        backend.encode(_PROBE)


@contextmanager
def library_errors(kind: type[MieError], what: str) -> Iterator[None]:
    """Convert any exception of the tokenizers library to ``kind``."""
    try:
        yield
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise kind(f"{what}: {printable(str(error))}") from error


def is_library_error(error: BaseException) -> bool:
    """Return whether the tokenizers library raised ``error``, rather than the user or mie."""
    is_panic = type(error).__name__ == "PanicException"
    is_ours = isinstance(error, MieError) or not isinstance(error, Exception)
    return is_panic or (not is_ours and is_of_the_request(error))
