"""Compare tokenizers of GGUF files with those of the library and with SentencePiece's rule."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf_files
import pytest
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from tokenizers import decoders as library_decoders

from mie import LLM
from mie.checkpoint.locate import BUNDLED_DIRECTORY
from mie.errors import ChatTemplateError, TokenizerError
from mie.text.chat import TemplateFiles
from mie.text.tokenizer import Tokenizer

TEXTS = [
    *("", " ", "  ", "Hello", " Hello world ", "  two   spaces", "tab\tand\n\nlines\r\n \n x"),
    "wow!\n a_x camelC we's e\u0301t 1234",
    *("I'll don't CAN'T we'Ve it's", "camelCaseWords HTTPServer ÉCOLE école", "quickly a quickly"),
    *("1 12 123 1234 12345 ١٢٣ ½ Ⅷ", "a+b=c; //x /*y*/ {z}\n/path/to !!!\n\n?"),
    *(
        "e\u0301 \u00e9 ﬁ Å",
        "猫が好き 한국어 привет עברית हिन्दी",
        "🦄👩‍👩‍👧 \u200b \ufeff x\u00a0y",
    ),
    *("<|end|>", "a <|end|>b<tool> c <tool>", "<|end|><|end|>  d", "<0x0A> </s> ▁x", "\0\x01\x7f"),
]

# The patterns are those in the published files of the models.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama-bpe": [WORDS],
    "smaug-bpe": [WORDS],
    "dbrx": [WORDS],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "seed-coder": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}|"
        r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "hunyuan-dense": [
        r"\p{N}{1,3}",
        r"[一-龥\x{3040}-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}
PRES = (*PATTERNS, "gpt-2", "smollm")
ADDS_BOS = ("llama-bpe", "tekken")
IGNORES_MERGES = (*ADDS_BOS, "smaug-bpe")
ALIKE = {"llama-bpe", "smaug-bpe"}
"""Pre-tokenizers that differ only in whether they add a token before each text."""


CROSSING = [("!", "Ċ"), ("_", "x"), ("l", "C"), ("e", "'"), ("e", "Ì")]
"""Merges over the borders that some of the patterns draw."""


def corpus() -> list[str]:
    lines = (Path(__file__).parents[1] / "data/tiny_heldout.jsonl").read_text().splitlines()[:30]
    numbers = [f" {number} {number}" for number in range(100, 2000, 3)]
    return [*TEXTS * 3, *numbers, *(json.loads(line)["reference"] for line in lines)]


def library_tokenizer(pre: str) -> Library:
    """Return a tokenizer with the parts of the models that have this pre-tokenizer."""
    tokenizer = Library(models.BPE())
    loose = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in PATTERNS)
    steps: list[Any] = [to_bytes]
    if pre in PATTERNS:
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in PATTERNS[pre]]
        steps = [*splits, to_bytes]
    if pre == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), to_bytes]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    # Merges of digits and of words with other signs, which only some patterns allow.
    wanted, tokenizer.pre_tokenizer = tokenizer.pre_tokenizer, loose
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=sorted(alphabet)
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.pre_tokenizer = wanted
    model = json.loads(tokenizer.to_str())["model"]
    # A token that no merges reach is used only where whole words are looked up.
    words = ["Ġquickly", *map("".join, CROSSING)]
    vocabulary = {**model["vocab"], **{w: len(model["vocab"]) + n for n, w in enumerate(words)}}
    merges = [*map(tuple, model["merges"]), *CROSSING]
    tokenizer.model = models.BPE(vocabulary, merges, ignore_merges=pre in IGNORES_MERGES)
    tokenizer.decoder = library_decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="module", params=PRES)
def bpe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A name of a pre-tokenizer, its tokenizer of the library, and a GGUF file with the same."""
    folder = tmp_path_factory.mktemp("bpe")
    reference = library_tokenizer(request.param)
    reference.save(str(folder / "tokenizer.json"))
    values = gguf_files.bpe_of(folder, request.param, reference.get_vocab_size() + 5)
    begin, end = map(reference.token_to_id, ("<|begin|>", "<|end|>"))
    values |= {"tokenizer.ggml.bos_token_id": begin, "tokenizer.ggml.eos_token_id": end}
    return request.param, reference, write(folder / "model.gguf", values)


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_bytes(gguf_files.gguf_bytes(values, {}))
    return path


def test_bpe_equals_the_library_token_for_token(bpe: Any) -> None:
    pre, reference, path = bpe
    tokenizer = Tokenizer.load(path, None)
    for text in TEXTS:
        ids = reference.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == reference.decode(ids)
        begin = [reference.token_to_id("<|begin|>")] if pre in ADDS_BOS else []
        assert tokenizer.encode(text) == begin + ids
    for index in range(reference.get_vocab_size()):
        assert tokenizer.id_to_token(index) == reference.id_to_token(index)
    assert tokenizer.vocab_size == reference.get_vocab_size()  # without unused ids
    assert tokenizer.eos_token_id == reference.token_to_id("<|end|>")
    assert tokenizer.special_ids == {*map(reference.token_to_id, ("<|begin|>", "<|end|>"))}


def test_no_other_pre_tokenizer_gives_the_same_tokens(bpe: Any) -> None:
    """So the texts would notice a wrong one."""
    pre, reference, path = bpe
    values = gguf_files.bpe_of(path.parent, pre, 0) | {"tokenizer.ggml.add_bos_token": False}
    wanted = [reference.encode(text).ids for text in TEXTS]
    for other in set(PRES) - (ALIKE if pre in ALIKE else {pre}):
        values["tokenizer.ggml.pre"] = other
        tokenizer = Tokenizer.load(write(path.parent / "other.gguf", values), None)
        assert [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS] != wanted, other


def test_the_file_can_say_whether_bos_and_eos_are_added(tmp_path: Path) -> None:
    values = gguf_files.bpe_of(BUNDLED_DIRECTORY, "llama-bpe", 0) | {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": True,
    }
    ids = Tokenizer.load(write(tmp_path / "m.gguf", values), None).encode("Hi")
    assert ids[0] != 0
    assert ids[-1] == 1


# SentencePiece

PIECE_TEXTS = [text for text in TEXTS if "</s>" not in text]


def pieces() -> dict[str, Any]:
    """Return the metadata of a vocabulary with 256 bytes, and pieces with falling scores."""
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=500, show_progress=False)
    )
    vocabulary = tokenizer.get_vocab()
    merged = sorted((p for p in vocabulary if len(p) > 1), key=lambda p: vocabulary[p])
    single = sorted(p for p in vocabulary if len(p) == 1 and p != "猫")
    own = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*own, *merged, *single, "<tool>"]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    kinds += [NORMAL] * (len(merged) + len(single)) + [USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259
        + [-float(n) for n in range(len(merged) + len(single))]
        + [0.0],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentencepiece(text: str, values: dict[str, Any], prefix: str = "▁") -> list[int]:
    """Merge the pair with the best score, the leftmost first, until no merge is a piece."""
    tokens, scores = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"]
    kinds = values["tokenizer.ggml.token_type"]
    ids = {token: n for n, token in enumerate(tokens) if kinds[n] == NORMAL}
    symbols = list(prefix + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (-scores[ids[one + two]], place)
            for place, (one, two) in enumerate(pairwise(symbols))
            if one + two in ids
        ]
        if not pairs:
            break
        place = min(pairs)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    found = []
    for symbol in symbols:
        known = [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
        found += known
    return found


def test_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    values = pieces()
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", values), None)
    for text in PIECE_TEXTS + corpus()[-5:]:
        if "<tool>" not in text:
            ids = sentencepiece(text, values)
            assert tokenizer.encode(text) == [1, *ids], text
            assert tokenizer.decode(ids) == text.replace("▁", " ")
    assert 3 + "猫".encode()[0] in tokenizer.encode("猫")


def test_a_text_after_a_special_token_begins_with_a_space(tmp_path: Path) -> None:
    """As in the Hugging Face tokenizers of Llama 2, and in llama.cpp."""
    values = pieces()
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", values), None)
    tool = len(values["tokenizer.ggml.tokens"]) - 1
    first, second = (sentencepiece(text, values) for text in ("Hello", "world"))
    assert tokenizer.encode("Hello</s>world") == [1, *first, 2, *second]
    assert tokenizer.encode("Hello<tool>world") == [1, *first, tool, *second]
    assert tokenizer.special_ids == {0, 1, 2}


def test_the_space_before_a_text_can_be_off(tmp_path: Path) -> None:
    values = pieces() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", values), None)
    ids = sentencepiece("Hello world", values, prefix="")
    assert tokenizer.encode("Hello world") == [1, *ids]
    assert tokenizer.decode(sentencepiece(" x", values, prefix="")) == " x"


# Templates, and files that are refused


def test_templates_are_in_the_metadata(tmp_path: Path) -> None:
    values = gguf_files.bpe_of(BUNDLED_DIRECTORY, "gpt-2", 0)
    path = write(tmp_path / "m.gguf", values)
    with pytest.raises(ChatTemplateError, match=r"no chat template in the metadata of .*m\.gguf"):
        TemplateFiles(path).read()
    write(path, values | {"tokenizer.chat_template": "one"})
    assert TemplateFiles(path).read()[0] == "one"
    named = {"tokenizer.chat_template.tool_use": "two", "tokenizer.chat_templates": ["tool_use"]}
    write(path, values | {"tokenizer.chat_template": "one"} | named)
    assert TemplateFiles(path).names == ("default", "tool_use")
    assert TemplateFiles(path).read("tool_use")[0] == "two"


def test_a_tokenizer_that_is_given_takes_precedence(tmp_path: Path) -> None:
    path = gguf_files.convert(BUNDLED_DIRECTORY, tmp_path / "model.gguf")  # without a tokenizer
    with pytest.raises(TokenizerError, match=r"kind None.*tokenizer=DIRECTORY"):
        LLM(path, backend="numpy")
    llm = LLM(path, tokenizer=str(BUNDLED_DIRECTORY), backend="numpy", num_blocks=16)
    own = LLM(str(BUNDLED_DIRECTORY), backend="numpy", num_blocks=16)
    assert llm.get_tokenizer().encode("Hi") == own.get_tokenizer().encode("Hi")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"kind 'bert'; mie reads 'gpt2' and 'llama' \(pass"),
        ({"pre": "default"}, r"splits texts by 'default' .*; known: gpt-2, .*tokenizer=DIRECTORY"),
        ({"pre": ...}, "splits texts by None"),
        ({"tokens": ...}, "has no tokenizer.ggml.tokens of type str"),
        ({"tokens": [1, 2]}, "has no tokenizer.ggml.tokens of type str"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "has a token twice"),
        ({"token_type": [1]}, "but 1 types of them"),
        ({"merges": ["ab"]}, "the merge 'ab' without a space"),
        ({"merges": ["no such"]}, "is not a tokenizer"),
        ({"bos_token_id": 10**6}, "bos_token_id 1000000, which is not a token"),
        ({"bos_token_id": "x"}, "bos_token_id 'x', which is not a token"),
    ],
)
def test_a_broken_vocabulary_is_refused(changes, message, tmp_path) -> None:
    values = gguf_files.bpe_of(BUNDLED_DIRECTORY, "gpt-2", 0)
    values |= {f"tokenizer.ggml.{key}": item for key, item in changes.items()}
    kept = {key: item for key, item in values.items() if item is not ...}
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(write(tmp_path / "m.gguf", kept), None)
    assert str(tmp_path / "m.gguf") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": ...}, "has no tokenizer.ggml.scores of type float"),
        ({"scores": [1.0]}, "but 1 scores"),
        ({"precompiled_charsmap": [1, 2]}, r"precompiled_charsmap, which is not read \(pass"),
        ({"add_space_prefix": 1}, "add_space_prefix 1, which is not a boolean"),
        ({"tokens": ["x" * 257], "token_type": [1], "scores": [0.0]}, "257 characters; the limit"),
    ],
)
def test_broken_pieces_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = pieces() | {f"tokenizer.ggml.{key}": item for key, item in changes.items()}
    for name in ("bos", "eos", "unknown"):
        values.pop(f"tokenizer.ggml.{name}_token_id")
    kept = {key: item for key, item in values.items() if item is not ...}
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(write(tmp_path / "m.gguf", kept), None)
