"""Write a tokenizer with as many tokens as a published one, made of random pieces of words."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<unk>", "<s>", "</s>")
LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
MARKS = '",:{}[]. -_\n0123456789'
MAX_LENGTH = 12
MAX_SHORT = 200
"""Number of pieces of each kind that others end with."""


def write_tokenizer(folder: Path, vocab_size: int, seed: int = 0) -> Path:
    """Write a byte-level ``tokenizer.json`` with ``vocab_size`` tokens, and return its folder.

    Each token above the 256 bytes joins two earlier ones. Most are words with or without a space
    before, some are numbers and punctuation, as in the vocabularies of published models.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*SPECIAL, *alphabet])
    pools = {"word": list(LETTERS), "mark": [_spelled(mark) for mark in MARKS]}
    pools["spaced"] = [_spelled(" ")]
    merges = []
    rng = random.Random(seed)
    while len(tokens) < vocab_size:
        kind = rng.choices(["word", "spaced", "mark"], [6, 4, 1])[0]
        short = pools["word" if kind == "spaced" else kind][:MAX_SHORT]
        joined = (left := rng.choice(pools[kind])) + (right := rng.choice(short))
        if len(joined) <= MAX_LENGTH and joined not in tokens:
            tokens[joined] = None
            merges.append((left, right))
            pools[kind].append(joined)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _spelled(text: str) -> str:
    """Return a text as byte-level tokenizers spell it."""
    [(piece, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return piece
