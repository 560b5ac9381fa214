"""Read how llama.cpp's names of pre-tokenizers split a text into words before merges."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT = "default"
"""The splitter of files that name none, as in llama.cpp."""


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """How a text is split into words, and the facts about such models that a file may leave out."""

    patterns: tuple[str, ...] = ()
    """Regular expressions. Each splits the pieces of the expression before."""
    normalizer: str | None = None
    ignores_merges: bool = False
    """Whether a word that is a token is not merged."""
    adds_bos: bool = False


def _read() -> dict[str, Splitter]:
    tables = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    found: dict[str, Splitter] = {}
    for row in tables["splitters"]:
        names, patterns = row.pop("names"), tables["patterns"][row.pop("patterns")]
        found |= dict.fromkeys(names, Splitter(patterns=tuple(patterns), **row))
    return found


SPLITTERS: Mapping[str, Splitter] = _read()
"""The splitters by ``tokenizer.ggml.pre``.

The patterns come from the models' own files. The models of `default` and of DeepSeek have
llama.cpp's patterns (``src/llama-vocab.cpp``).
"""
