"""Make small tokenizers of every kind that the text room must support."""

import json
import random
import string
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from mie.text.tokenizer import Tokenizer, TokenizerConfig

SENTENCES = [
    "Once upon a time there was a small dragon who lived near the sea, far from the town.",
    "The dragon's friends weren't afraid; they don't run! Do they? No, they sing: la, la, la.",
    "Ein schöner Tag für Züge, naïve cafés und Straßen. Été à Zürich, mañana en España.",
    "今天天气很好。小猫在花园里玩。東京の空は青い。안녕하세요 세계",
    "Emoji: 😀 🎉 👩‍👩‍👧 🇨🇭 and combining: e\u0301 a\u0308 n\u0303 ❤️",
    "def main():\n    return [1, 2, 3]\n\n\nprint('done')\t# tabs",
]


def byte_level() -> Tokenizer:
    """Return a tokenizer like those of GPT-2, Llama-3 and Qwen, with bytes spelled as letters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|bos|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens([AddedToken("dear reader", special=False), AddedToken("猫 é")])
    return wrap(backend, bos_token="<|bos|>", eos_token="<|end|>")


def many_words(count: int) -> Tokenizer:
    """Return a tokenizer with a large vocabulary: all bytes, and random words of two letters each.

    Its words have letters, digits and punctuation, with and without a space in front.
    """
    rng = random.Random(count)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|bos|>", "<|end|>", *alphabet])}
    merges = []
    known = [*string.ascii_letters, *"0123456789._-@/\u0120"]
    while len(vocabulary) < count:
        left, right = rng.choice(known), rng.choice(known)
        if left + right not in vocabulary and len(left + right) <= 12:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
            known.append(left + right)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|end|>"])
    return wrap(backend, bos_token="<|bos|>", eos_token="<|end|>")


def llama2() -> Tokenizer:
    """Return a tokenizer like those of Llama-2, TinyLlama and Mistral.

    It has ``▁`` for spaces, ``<0xE2>`` for unknown bytes, and BOS in front.
    """
    backend = _with_byte_tokens(normalizers.Prepend("▁"))
    backend.decoder = DECODERS["llama2"]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return wrap(backend, bos_token="<s>", eos_token="</s>")


def phi3() -> Tokenizer:
    """Return a tokenizer like Phi-3's: special tokens swallow the space after them."""
    backend = _with_byte_tokens(normalizers.Prepend("▁"))
    backend.add_special_tokens([AddedToken(f"<|{name}|>", rstrip=True) for name in ("user", "end")])
    backend.decoder = DECODERS["llama2"]
    return wrap(backend, bos_token="<s>", eos_token="<|end|>")


def gemma() -> Tokenizer:
    """Return a tokenizer like Gemma's: no space in front, and some emoji in one piece."""
    backend = _with_byte_tokens(pieces=["😀", "🎉"])
    backend.decoder = DECODERS["gemma"]
    return wrap(backend, bos_token="<s>", eos_token="</s>")


def _with_byte_tokens(*prefix: normalizers.Normalizer, pieces: Sequence[str] = ()) -> Backend:
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    words = SENTENCES[:2]
    backend.train_from_iterator(words, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    spec = json.loads(backend.to_str())
    trained = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    spec["model"] |= {
        "vocab": {token: i for i, token in enumerate([*known, *trained, *pieces])},
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
    }
    backend = Backend.from_str(json.dumps(spec))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace() -> Tokenizer:
    """Return a SentencePiece model converted with the Metaspace decoder."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return wrap(backend)


def wordpiece() -> Tokenizer:
    """Return a tokenizer with BERT's pieces, where ``##`` continues a word."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        SENTENCES,
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False),
    )
    return wrap(backend)


def end_of_word() -> Tokenizer:
    """Return a tokenizer with GPT-1's and CLIP's ``</w>``, which is a space before another word."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    backend.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
        ),
    )
    return wrap(backend)


def no_decoder() -> Tokenizer:
    """Return a tokenizer.json without a decoder: the library joins tokens with spaces."""
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "cat": 2, "▁": 3}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrap(backend)


KINDS = {
    maker.__name__: cache(maker)
    for maker in (byte_level, llama2, metaspace, wordpiece, end_of_word, no_decoder)
}

BYTE_KINDS = {
    **{maker.__name__: cache(maker) for maker in (gemma, phi3)},
    **{name: KINDS[name] for name in ("byte_level", "llama2")},
}
"""The kinds of tokenizers with texts that are the bytes of their tokens."""

ODD_TOKENS = [
    *(f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0x41, 0x80, 0xA9, 0xC3, 0xE2, 0x82, 0xAC, 0xF0)),
    *("<0x9F>", "<0x98>", "<0x+A>", "<0xGG>", "<0x4>", "<0x041>"),
    *(" ", "▁", "▁▁", "▁a", "  b", "c ", "", "é", "😀", "Ċ", "Ġ", "Ã", "©", "ðŁ", "ĺ", "Ģ"),
    *("##a", "a##", " .", "n't", " do not", "x</w>", "</w>", "|", "xx"),
]

DECODERS = {
    "byte_level": decoders.ByteLevel(),
    "byte_fallback": decoders.ByteFallback(),
    "metaspace": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
    "wordpiece": decoders.WordPiece(),
    "wordpiece_plain": decoders.WordPiece("##", False),
    "bpe": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "replace": decoders.Replace("▁", " "),
    "replace_pair": decoders.Replace("xx", "y"),
    "replace_regex": decoders.Replace(Regex("[ab]"), "y"),
    "strip": decoders.Strip(" ", 1, 0),
    "llama2": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "gemma": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "fallback_then_metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace_then_strip": decoders.Sequence([decoders.Metaspace(), decoders.Strip(" ", 1, 0)]),
    "byte_level_then_strip": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    "fused_strip_two": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "fused_replace": decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", "__")]),
    "fused_replace_pair": decoders.Sequence([decoders.Fuse(), decoders.Replace("xx", "y")]),
    "fused_metaspace": decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
    "nested": decoders.Sequence(
        [decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), decoders.Strip("A", 3, 0)]
    ),
}


def with_decoder(name: str) -> Tokenizer:
    """Return a vocabulary of awkward tokens, decoded by ``DECODERS[name]``."""
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(ODD_TOKENS)}, "xx"))
    backend.decoder = DECODERS[name]
    backend.add_special_tokens(["<special>"])
    return wrap(backend)


def wrap(backend: Backend, **config: Any) -> Tokenizer:
    """Return ``backend`` as mie's tokenizer, with ``config`` as in tokenizer_config.json."""
    flags = {name: config.pop(name) for name in [*config] if name.startswith("add_")}
    return Tokenizer(backend, TokenizerConfig(special_tokens=config, **flags))
