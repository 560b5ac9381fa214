"""Translate the vocabulary of a GGUF file to a Hugging Face tokenizer.

Two kinds are read: byte-level BPE with merges ("gpt2"), and SentencePiece's BPE with scores
("llama"). The result equals the files ``tokenizer.json`` and ``tokenizer_config.json`` of the
original model in all that changes tokens.

NumPy is imported where it is used: ``mie --help`` imports this module.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.checkpoint.gguf.arrays import STRING, GgufArray
from mie.checkpoint.gguf.header import NO_TOKEN, GgufHeader
from mie.checkpoint.gguf.splitters import DEFAULT, SPLITTERS, Splitter
from mie.checkpoint.size_limits import MAX_PIECE_CHARACTERS, MAX_PIECE_LENGTH, MAX_TOKEN_LENGTH
from mie.errors import TokenizerError, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mie.checkpoint.gguf.kept_vocabulary import KeptVocabulary
    from mie.checkpoint.gguf.merges import Merges, Pieces

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_SPECIAL_IDS: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # so spelled in the format
}
_USED = ("bos_token", "eos_token")
_SPACE = "▁"

END_TOKENS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_turn>", "<EOT>", "<|return|>", "<|call|>",
}  # fmt: skip
"""Tokens that end a text in every model that has them, as in llama.cpp."""

_SOURCES = (
    *("arrays.py", "kept_vocabulary.py", "merges.py", "splitters.json", "splitters.py"),
    "tokenizer.py",
)
_BRACKETED = re.compile(r"<.+>|\[.+\]")
_KEEP_SPACES_OF_PHI_3 = ("<unk>", "<s>", "<|endoftext|>")

logger = logging.getLogger(__name__)


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """Return the model's ``tokenizer_config.json``: special tokens and chat templates.

    Raises:
        TokenizerError: the id of BOS or EOS has no token, or a value is of a wrong kind.
    """
    found = _Vocabulary(header)
    tokens = {name: found.token(key, is_used=name in _USED) for name, key in _SPECIAL_IDS.items()}
    adds_bos = found.model == "llama" or found.splitter.adds_bos
    has_bos = tokens["bos_token"] is not None
    return {
        **{name: token for name, token in tokens.items() if token is not None},
        "add_bos_token": found.flag("add_bos_token", adds_bos and has_bos),
        "add_eos_token": found.flag("add_eos_token", False),
        "chat_template": _chat_templates(header),
    }


def vocabulary(header: GgufHeader) -> KeptVocabulary:
    """Return the contents of the model's ``tokenizer.json``.

    Raises:
        TokenizerError: the vocabulary is missing or broken, or of a kind that is not read.
    """
    import numpy as np  # which `mie --help` does not need

    from mie.checkpoint.gguf.kept_vocabulary import KeptVocabulary

    found = _Vocabulary(header)
    ids = found.ids
    pieces = _pieces(found)
    if found.model == "gpt2":
        parts, merges = _bpe(found), _merges_of_texts(found, pieces)
    else:
        parts, merges = _sentencepiece(found), _merges_of_scores(found, pieces)
    is_merged = np.zeros(len(found.tokens), bool)
    is_merged[ids[merges.results]] = True
    kinds = found.mended_kinds(is_merged)
    tokens, strips = found.tokens, found.is_phi_3
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and tokens[index] not in _KEEP_SPACES_OF_PHI_3,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, kind in enumerate(kinds.tolist())
        if kind in _ADDED
    ]
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return KeptVocabulary.of({**head, **parts}, pieces, ids, merges)


def vocabulary_digest(header: GgufHeader) -> str | None:
    """Return a digest of all that decides `tokenizer_json`: the metadata, and the sources.

    None: it logs a warning about the file, which a kept result would not.
    """
    pre = header.values.get(_PREFIX + "pre") or DEFAULT
    is_bpe = header.values.get(_PREFIX + "model") == "gpt2"
    if is_bpe and isinstance(pre, str) and SPLITTERS.get(pre) is SPLITTERS[DEFAULT]:
        return None
    digest = hashlib.sha256()
    for source in _SOURCES:
        digest.update(Path(__file__).with_name(source).read_bytes())
    for key, value in header.values.items():
        if isinstance(value, GgufArray) and key.startswith(_PREFIX):
            digest.update(f"{key} {value.kind} {value.count} {len(value.data)}:".encode())
            digest.update(value.data)
        elif key.startswith((_PREFIX, "general.")):
            digest.update(f"{key}={value!r}\n".encode())
    return digest.hexdigest()[:40]


class _Vocabulary:
    """The checked vocabulary of a file."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.model = header.values.get(_PREFIX + "model")
        if self.model not in ("gpt2", "llama"):
            raise self.error(
                f"has a tokenizer of kind {shown(self.model)}; mie reads 'gpt2' and 'llama'", True
            )
        self.splitter = self._splitter() if self.model == "gpt2" else Splitter()
        self._tokens = self.texts("tokens")

    @cached_property
    def tokens(self) -> Sequence[str]:
        """All tokens. A single one is found faster by `token`."""
        return self.array("tokens", str)

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """The kind of each token."""
        import numpy as np

        kinds = np.array(self.array("token_type", int, [_NORMAL] * len(self.tokens)))
        if len(kinds) != len(self.tokens):
            raise self.error(f"has {len(self.tokens)} tokens, but {len(kinds)} types of them")
        return kinds

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The ids of the tokens that are in use."""
        import numpy as np

        lengths = np.array([*map(len, self.tokens)])
        return np.flatnonzero((self.kinds != _UNUSED) & (lengths > 0))

    @property
    def is_phi_3(self) -> bool:
        """Whether the model is a Phi-3: its special tokens swallow the space after them.

        No key of the file has this property of tokens. Phi-4 has the same architecture and another
        kind of vocabulary.
        """
        name = str(self._header.values.get("general.name", "")).lower()
        architecture = self._header.values.get("general.architecture")
        is_named = "phi3" in re.sub(r"[-_ ]", "", name)
        return self.model == "llama" and (architecture == "phi3" or is_named)

    def mended_kinds(self, is_merged: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the kinds of the tokens. Some files call added tokens normal tokens.

        A text never becomes such a token, because no merge makes it. ``is_merged``: for each token,
        whether a merge makes it.
        """
        special = {
            value
            for key, value in self._header.values.items()
            if key.startswith(_PREFIX) and key.endswith("_token_id")
        }
        kinds: NDArray[np.int64] = self.kinds.copy()
        for index, token in enumerate(self.tokens):
            if token[:1] not in ("<", "[") and index not in special:
                continue
            is_suspect = index in special or _BRACKETED.fullmatch(token)
            if kinds[index] != _NORMAL or len(token) < 2 or not is_suspect:
                continue
            if token in END_TOKENS:
                kinds[index] = _CONTROL
            elif not is_merged[index]:
                is_control = index in special or token.startswith("<|")
                kinds[index] = _CONTROL if is_control else _USER_DEFINED
        return kinds

    def array(self, key: str, kind: type, default: Sequence[Any] | None = None) -> Sequence[Any]:
        """Return the elements of an array of one kind."""
        array = self._header.values.get(_PREFIX + key)
        if array is None and default is not None:
            return default
        try:
            values = array.values if isinstance(array, GgufArray) else []
        except UnicodeDecodeError as error:
            raise self.error(f"has a text that is not UTF-8 in {_PREFIX}{key}") from error
        if not values or type(values[0]) is not kind:
            raise self.error(f"has no {_PREFIX}{key} of type {kind.__name__}")
        return values

    def texts(self, key: str) -> GgufArray:
        """Return an array of texts that are not decoded."""
        array = self._header.values.get(_PREFIX + key)
        if not isinstance(array, GgufArray) or array.kind != STRING or not array.count:
            raise self.error(f"has no {_PREFIX}{key} of type str")
        return array

    def text(self, key: str, index: int) -> str:
        """Return one text of an array."""
        try:
            return self.texts(key).text(index)
        except UnicodeDecodeError as error:
            raise self.error(f"has a text that is not UTF-8 in {_PREFIX}{key}") from error

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean under ``key``. Some files write it as 0 or 1."""
        value = self._header.values.get(_PREFIX + key, default)
        if value not in (0, 1):
            raise self.error(f"has {_PREFIX}{key} {shown(value)}, which is not a boolean")
        return bool(value)

    def token(self, key: str, *, is_used: bool = False) -> str | None:
        """Return the token of the id under ``key``, or None if the model has no such token.

        Raises:
            TokenizerError: the value is no integer. Or ``is_used`` is set, and the id is not in the
                vocabulary.
        """
        token_id = self._header.values.get(_PREFIX + key)
        if token_id is None or token_id in NO_TOKEN:
            return None
        is_id = isinstance(token_id, int)
        if is_id and 0 <= token_id < self._tokens.count:
            return self.text("tokens", token_id)
        if is_used or not is_id:
            raise self.error(f"has {_PREFIX}{key} {shown(token_id)}, which is not a token")
        return None

    def error(self, problem: str, has_remedy: bool = False) -> TokenizerError:
        """Return the error for a problem of the file."""
        remedy = " (pass the original model's tokenizer: tokenizer=DIRECTORY)" if has_remedy else ""
        return TokenizerError(f"{self._header.path} {problem}{remedy}")

    def _splitter(self) -> Splitter:
        name = self._header.values.get(_PREFIX + "pre") or DEFAULT
        if not isinstance(name, str) or name not in SPLITTERS:
            known = ", ".join(SPLITTERS)
            raise self.error(f"splits texts by {shown(name)} ({_PREFIX}pre); known: {known}", True)
        return SPLITTERS[name]

    def refuse(self, key: str) -> None:
        """Raise if the file has a value under ``key``, because it would change the text."""
        if self._header.values.get(_PREFIX + key):
            raise self.error(f"has {_PREFIX}{key}, which is not read", True)


def _bpe(found: _Vocabulary) -> dict[str, Any]:
    """Return the parts of a byte-level BPE, without pieces and merges."""
    splitter = found.splitter
    if splitter is SPLITTERS[DEFAULT]:
        logger.warning(
            "%s",
            found.error(
                f"does not name its pre-tokenizer ({_PREFIX}pre), so texts are split by "
                "llama.cpp's default and may have other tokens than in the model's "
                "training",
                True,
            ),
        )
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [{**split, "pattern": {"Regex": pattern}} for pattern in splitter.patterns]
    model = {"ignore_merges": splitter.ignores_merges, "byte_fallback": False, "fuse_unk": False}
    return {
        "normalizer": {"type": splitter.normalizer} if splitter.normalizer else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, _byte_level(use_regex=False)],
        },
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {"type": "BPE", **model, "vocab": {}, "merges": []},
    }


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    options = {"add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **options}


def _sentencepiece(found: _Vocabulary) -> dict[str, Any]:
    """Return the parts of a BPE with bytes for unknown characters, without pieces and merges."""
    found.refuse("precompiled_charsmap")
    found.refuse("remove_extra_whitespaces")
    unknown = found.token("unknown_token_id") or next(
        (found.tokens[index] for index in (found.kinds == _UNKNOWN).nonzero()[0].tolist()), None
    )
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = (
        [{"type": "Prepend", "prepend": _SPACE}] if found.flag("add_space_prefix", True) else []
    )
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    model = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, to_marks]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", **model, "vocab": {}, "merges": []},
    }


def _pieces(found: _Vocabulary) -> Pieces:
    """Return the tokens that are in use.

    No token is longer than the limit, because a text's checksum takes 30 times its memory.
    """
    from mie.checkpoint.gguf.merges import Pieces

    limit = MAX_PIECE_LENGTH if found.model == "llama" else MAX_TOKEN_LENGTH
    longest = max(map(len, found.tokens))
    if longest > limit:
        raise found.error(f"has a token of {longest} characters; the limit is {limit}")
    tokens, ids = found.tokens, found.ids
    in_use = tokens if len(ids) == len(tokens) else [tokens[index] for index in ids.tolist()]
    pieces = Pieces.of(in_use)
    if pieces.same is not None:
        one, two = pieces.same
        if one == two:
            raise found.error("has a token twice")
        raise found.error(f"has two tokens with one checksum: {shown(one)} and {shown(two)}")
    return pieces


def _merges_of_texts(found: _Vocabulary, pieces: Pieces) -> Merges:
    """Return the merges that the file lists."""
    from mie.checkpoint.gguf.merges import merges_of_texts

    merges = merges_of_texts(pieces, found.texts("merges"))
    if not isinstance(merges, int):
        return merges
    merge = found.text("merges", merges)
    lacks = "of texts that are no tokens" if " " in merge[1:] else "without a space"
    raise found.error(f"has the merge {shown(merge)} {lacks}")


def _merges_of_scores(found: _Vocabulary, pieces: Pieces) -> Merges:
    """Return the pairs that make up pieces, the best first."""
    import numpy as np

    from mie.checkpoint.gguf.merges import merges_of_cuts

    scores = np.array(found.array("scores", float))
    if len(scores) != len(found.tokens):
        raise found.error(f"has {len(found.tokens)} tokens, but {len(scores)} scores")
    total = int(pieces.lengths.sum())
    if total > MAX_PIECE_CHARACTERS:
        limit = MAX_PIECE_CHARACTERS
        raise found.error(f"has tokens of {total} characters; the limit is {limit}")
    return merges_of_cuts(pieces, found.kinds[found.ids] == _NORMAL, scores[found.ids])


def _chat_templates(header: GgufHeader) -> Any:
    """Return the model's template, or a list of named ones, or None."""
    main = "tokenizer.chat_template"
    named = {
        key.removeprefix(f"{main}."): text
        for key, text in header.values.items()
        if key.startswith(f"{main}.")
    }
    default = header.values.get(main)
    if not named:
        return default
    own = {} if default is None else {"default": default}
    return [{"name": name, "template": text} for name, text in {**own, **named}.items()]
