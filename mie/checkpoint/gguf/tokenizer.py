"""Translate the vocabulary of a GGUF file to a Hugging Face tokenizer.

Two kinds are read: byte-level BPE with merges ("gpt2"), and SentencePiece's BPE with scores
("llama"). The result equals the files ``tokenizer.json`` and ``tokenizer_config.json`` of the
original model in all that changes tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mie.checkpoint.gguf.header import GgufArray, GgufHeader
from mie.checkpoint.size_limits import MAX_PIECE_CHARACTERS, MAX_PIECE_LENGTH
from mie.errors import TokenizerError, shown

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_SPECIAL_IDS: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # so spelled in the format
}
_SPACE = "▁"


@dataclass(frozen=True, kw_only=True)
class _Splitter:
    """How a text is split into words before merges: by patterns in turn, or by named steps."""

    patterns: tuple[str, ...] = ()
    splits_digits: bool = False
    normalizer: str = ""
    ignores_merges: bool = False
    """Whether a word that is a token is not merged."""
    adds_bos: bool = False


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = _TEKKEN.replace(f"|{_CASES}+", f"{_ENDING}|{_CASES}+").replace(
    r"|\p{N}|", rf"{_ENDING}|\p{{N}}{{1,3}}|"
)
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_HUNYUAN = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_OF_LLAMA3 = _Splitter(patterns=(_LLAMA3,), ignores_merges=True, adds_bos=True)
_OF_GPT4 = _Splitter(patterns=(_LLAMA3,))
_OF_QWEN2 = _Splitter(patterns=(_QWEN2,), normalizer="NFC")
_OF_TEKKEN = _Splitter(patterns=(_TEKKEN,), ignores_merges=True, adds_bos=True)
_DIGITS = _Splitter(splits_digits=True)
_SPLITTERS: Mapping[str, _Splitter] = {
    "gpt-2": _Splitter(),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,  # Granite 3
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "smaug-bpe": _Splitter(patterns=(_LLAMA3,), ignores_merges=True),  # SmolLM3
    "dbrx": _OF_GPT4,  # Granite 4, OLMo 2 and 3, Phi-4
    "glm4": _OF_GPT4,
    "chatglm-bpe": _OF_GPT4,
    "gpt-4o": _Splitter(patterns=(_GPT4O,)),  # Phi-4-mini
    "seed-coder": _Splitter(patterns=(_SEED,)),
    "hunyuan-dense": _Splitter(patterns=_HUNYUAN),
    "qwen2": _OF_QWEN2,
    "deepseek-r1-qwen": _OF_QWEN2,
    "tekken": _OF_TEKKEN,
    "pixtral": _OF_TEKKEN,
}
"""The splitters by ``tokenizer.ggml.pre``. The patterns are those of the models' own files."""


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """Return the model's ``tokenizer_config.json``: special tokens and chat templates.

    Raises:
        TokenizerError: an id has no token, or a value is of a wrong kind.
    """
    found = _Vocabulary(header)
    tokens = {}
    for name, key in _SPECIAL_IDS.items():
        token_id = header.values.get(_PREFIX + key)
        if token_id is not None:
            tokens[name] = found.token(token_id, key)
    adds_bos = found.model == "llama" or found.splitter.adds_bos
    return {
        **tokens,
        "add_bos_token": header.values.get(_PREFIX + "add_bos_token", adds_bos),
        "add_eos_token": header.values.get(_PREFIX + "add_eos_token", False),
        "chat_template": _chat_templates(header),
    }


def tokenizer_json(header: GgufHeader) -> dict[str, Any]:
    """Return the model's ``tokenizer.json``.

    Raises:
        TokenizerError: the vocabulary is missing or broken, or of a kind that is not read.
    """
    found = _Vocabulary(header)
    parts = _bpe(found) if found.model == "gpt2" else _sentencepiece(found)
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(found.tokens, found.kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}


class _Vocabulary:
    """The checked vocabulary of a file."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.model = header.values.get(_PREFIX + "model")
        if self.model not in ("gpt2", "llama"):
            raise self.error(
                f"has a tokenizer of kind {shown(self.model)}; mie reads 'gpt2' and 'llama'", True
            )
        self.splitter = self._splitter() if self.model == "gpt2" else _Splitter()
        self.tokens = self.array("tokens", str)
        self.kinds = self.array("token_type", int, [_NORMAL] * len(self.tokens))
        if len(self.kinds) != len(self.tokens):
            raise self.error(f"has {len(self.tokens)} tokens, but {len(self.kinds)} types of them")

    @property
    def ids(self) -> dict[str, int]:
        """The id of each token that is in use."""
        used = [
            (token, index)
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind != _UNUSED and token
        ]
        ids = dict(used)
        if len(ids) < len(used):
            raise self.error("has a token twice")
        return ids

    def array(self, key: str, kind: type, default: Sequence[Any] | None = None) -> Sequence[Any]:
        """Return the elements of an array, which are of one kind."""
        array = self._header.values.get(_PREFIX + key)
        if array is None and default is not None:
            return default
        try:
            values = list(array) if isinstance(array, GgufArray) else []
        except UnicodeDecodeError as error:
            raise self.error(f"has a text that is not UTF-8 in {_PREFIX}{key}") from error
        if not values or type(values[0]) is not kind:
            raise self.error(f"has no {_PREFIX}{key} of type {kind.__name__}")
        return values

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean under ``key``."""
        value = self._header.values.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self.error(f"has {_PREFIX}{key} {shown(value)}, which is not a boolean")
        return value

    def token(self, token_id: Any, key: str) -> str:
        """Return the token of an id under ``key``."""
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise self.error(f"has {_PREFIX}{key} {shown(token_id)}, which is not a token")
        return str(self.tokens[token_id])

    def error(self, problem: str, has_remedy: bool = False) -> TokenizerError:
        """Return the error for a problem of the file."""
        remedy = " (pass the original model's tokenizer: tokenizer=DIRECTORY)" if has_remedy else ""
        return TokenizerError(f"{self._header.path} {problem}{remedy}")

    def _splitter(self) -> _Splitter:
        name = self._header.values.get(_PREFIX + "pre")
        if not isinstance(name, str) or name not in _SPLITTERS:
            known = ", ".join(_SPLITTERS)
            raise self.error(f"splits texts by {shown(name)} ({_PREFIX}pre); known: {known}", True)
        return _SPLITTERS[name]

    def refuse(self, key: str) -> None:
        """Raise if the file has a value under ``key``, which would change the text."""
        if self._header.values.get(_PREFIX + key):
            raise self.error(f"has {_PREFIX}{key}, which is not read", True)


def _bpe(found: _Vocabulary) -> dict[str, Any]:
    """Return the parts of a byte-level BPE."""
    merges = []
    for merge in found.array("merges", str):
        place = merge.find(" ", 1)
        if place < 0:
            raise found.error(f"has the merge {shown(merge)} without a space")
        merges.append([merge[:place], merge[place + 1 :]])
    splitter = found.splitter
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    own: list[dict[str, Any]] = [
        {**split, "pattern": {"Regex": pattern}} for pattern in splitter.patterns
    ]
    if splitter.splits_digits:
        own = [{"type": "Digits", "individual_digits": True}]
    to_bytes = _byte_level(use_regex=not splitter.patterns)
    model = {"ignore_merges": splitter.ignores_merges, "byte_fallback": False, "fuse_unk": False}
    return {
        "normalizer": {"type": splitter.normalizer} if splitter.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*own, to_bytes]},
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {"type": "BPE", **model, "vocab": found.ids, "merges": merges},
    }


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    options = {"add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **options}


def _sentencepiece(found: _Vocabulary) -> dict[str, Any]:
    """Return the parts of a BPE whose merges follow from the scores of its pieces."""
    found.refuse("precompiled_charsmap")
    found.refuse("remove_extra_whitespaces")
    ids = found.ids
    unknown = next((t for t, kind in zip(found.tokens, found.kinds, strict=True)
                    if kind == _UNKNOWN), None)  # fmt: skip
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
        "model": {"type": "BPE", **model, "vocab": ids, "merges": _merges(found, ids)},
    }


def _merges(found: _Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs that make up pieces, the best first, in the order of transformers."""
    scores = found.array("scores", float)
    if len(scores) != len(found.tokens):
        raise found.error(f"has {len(found.tokens)} tokens, but {len(scores)} scores")
    lengths = [*map(len, found.tokens)]
    for number, limit, what in (
        (max(lengths), MAX_PIECE_LENGTH, "a token"),
        (sum(lengths), MAX_PIECE_CHARACTERS, "tokens"),
    ):
        if number > limit:
            raise found.error(f"has {what} of {number} characters; the limit is {limit}")
    merges = []
    for piece, kind, score in zip(found.tokens, found.kinds, scores, strict=True):
        if kind == _NORMAL:
            pairs = [(piece[:place], piece[place:]) for place in range(1, len(piece))]
            known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
            known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
            merges += [(score, pair) for pair in known]
    # The sort is stable: among equal scores, the order of the pieces remains.
    merges.sort(key=lambda each: (each[0], len(each[1][0]), len(each[1][1])), reverse=True)
    return [pair for _, pair in merges]


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
