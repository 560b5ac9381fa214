"""Compare tokenizers of GGUF files with those of the library and with SentencePiece's rule."""

import json
import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf_files
import pytest
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Signed
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from tokenizers import decoders as library_decoders

from mie import LLM
from mie.checkpoint.families import FAMILIES
from mie.checkpoint.gguf import kept_vocabulary
from mie.checkpoint.gguf import tokenizer as tokenizer_module
from mie.checkpoint.gguf.architectures import ARCHITECTURES
from mie.checkpoint.gguf.header import read_gguf
from mie.checkpoint.gguf.tokenizer import vocabulary
from mie.checkpoint.locate import BUNDLED_DIRECTORY
from mie.errors import ChatTemplateError, RequestError, TokenizerError
from mie.text import partial_tokenizer
from mie.text.template_files import TemplateFiles
from mie.text.tokenizer import Tokenizer

TEXTS = [
    *("", " ", "  ", "Hello", " Hello world ", "  two   spaces", "tab\tand\n\nlines\r\n \n x"),
    "wow!\n a_x camelC we's e\u0301t 1234",
    *("I'll don't CAN'T we'Ve it's", "camelCaseWords HTTPServer ÉCOLE école", "quickly a quickly"),
    *("1 12 123 1234 12345 ١٢٣ ½ Ⅷ", "a+b=c; +; //x /*y*/ {z}\n/path/to !!!\n\n?"),
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
WORDS_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CJK = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
PATTERNS |= {
    "default": [r"[\p{P}$+<=>^~|]+", WORDS_OF_GPT2, r"\p{N}+", "[0-9]{3}"],
    "falcon": [r"[\p{P}$+<=>^~|`]+", WORDS_OF_GPT2, "[0-9]{3}"],
    "deepseek-llm": [
        *(r"\r|\n", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        *(r"\s+$", CJK, r"\p{N}+"),
    ],
    "deepseek-coder": [r"\r|\n", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"],
}
PRES = (*PATTERNS, "gpt-2", "smollm", "olmo")
NORMALISES = ("qwen2", "olmo")
ADDS_BOS = ("llama-bpe", "tekken")
IGNORES_MERGES = (*ADDS_BOS, "smaug-bpe")
ALIKE = {"llama-bpe", "smaug-bpe"}
"""Pre-tokenizers that differ only in whether they add a token before each text."""


CROSSING = [("!", "Ċ"), ("+", ";"), ("_", "x"), ("l", "C"), ("e", "'"), ("e", "Ì")]
"""Merges over the borders that some of the patterns draw."""

ALIASES = {
    "falcon3": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "exaone4": "gpt-2",
    "phi-2": "gpt-2",
    "mpt": "olmo",
    "refact": "smollm",
    "starcoder": "smollm",
    "glm4": "dbrx",
    "chatglm-bpe": "dbrx",
    "deepseek-r1-qwen": "qwen2",
    "pixtral": "tekken",
}
"""Names of pre-tokenizers, and other names of the same ones."""

MODELS_OF_PRES = {
    "llama": [
        *("Llama", "TinyLlama", "Yi", "Mistral", "Mixtral", "ERNIE 4.5", "Phi-3"),
        *("Gemma", "Gemma 2", "Gemma 3"),
    ],
    "llama-bpe": ["Llama"],
    "tekken": ["Mistral", "Ministral 3"],
    "qwen2": ["Qwen2", "Qwen2.5", "Qwen3", "Qwen1.5-MoE"],
    "dbrx": ["OLMo 2", "OLMo 3", "Phi-4"],
    "refact": ["Granite", "Granite 3"],
    "gpt-4o": ["gpt-oss", "Phi-4-mini"],
    "smollm": ["SmolLM"],
    "smaug-bpe": ["SmolLM3"],
    "falcon3": ["Falcon 3"],
    "exaone4": ["EXAONE 4"],
    "olmo": ["OLMoE"],
    "glm4": ["GLM-4-9B", "GLM-4-0414"],
    "chatglm-bpe": ["GLM-4-9B"],
    "hunyuan-dense": ["Hunyuan"],
    "seed-coder": ["Seed-OSS"],
}
"""Models by the pre-tokenizer that llama.cpp's converter finds, or "llama" for SentencePiece."""
QUALIFIERS = ("text", "dense", "sparse", "sparse with a shared expert")


def corpus() -> list[str]:
    lines = (Path(__file__).parents[2] / "data/tiny_heldout.jsonl").read_text().splitlines()[:30]
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
    if pre in NORMALISES:
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


def bundled_bpe(pre: str) -> dict[str, Any]:
    """Return the metadata of the bundled model's tokenizer, without its special tokens."""
    return gguf_files.bpe_of(BUNDLED_DIRECTORY, pre, 0)


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_bytes(gguf_files.gguf_bytes(values, {}))
    return path


def test_bpe_equals_the_library_token_for_token(bpe: Any) -> None:
    pre, reference, path = bpe
    tokenizer = Tokenizer.load(path, None)
    as_text = json.dumps(vocabulary(read_gguf(path)).all_parts())
    assert tokenizer.to_json() == Library.from_str(as_text).to_str()
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


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a file twice. The second time, only the kept vocabulary is read."""
    monkeypatch.setattr(kept_vocabulary, "MIN_PIECES", 0)

    def load(path: Path) -> Tokenizer:
        Tokenizer.load(path, None)
        with monkeypatch.context() as patch:
            patch.delattr(tokenizer_module, "vocabulary")
            return Tokenizer.load(path, None)

    return load


def mixed(texts: list[str], count: int = 20) -> list[str]:
    """Return the texts, and random mixtures of parts of them."""
    rng = random.Random(count)
    parts = [text[rng.randrange(len(text)) :][: rng.randrange(1, 9)] for text in texts * 3 if text]
    return [*texts, *("".join(rng.choices(parts, k=rng.randrange(2, 12))) for _ in range(count))]


def test_a_kept_bpe_gives_the_same_tokens(
    bpe: Any, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pre, reference, path = bpe
    if pre == "default":  # such a file is read with a warning each time
        with pytest.raises(AttributeError, match="vocabulary"):
            kept(path)
        return
    monkeypatch.setattr(partial_tokenizer, "MAX_TEXTS", 1000)
    tokenizer = kept(path)
    monkeypatch.setattr(partial_tokenizer.PartialTokenizer, "whole", None)
    for text in mixed(TEXTS):
        if unicodedata.is_normalized("NFC", text) or pre not in NORMALISES:
            ids = reference.encode(text).ids
            assert tokenizer.encode(text, add_special_tokens=False) == ids, text
            assert tokenizer.decode(ids) == reference.decode(ids)
    size = reference.get_vocab_size()
    for index in range(size):
        token = reference.id_to_token(index)
        assert tokenizer.id_to_token(index) == token
        assert tokenizer.token_to_id(token) == index
    assert tokenizer.id_to_token(size) is None
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.vocab_size == size
    assert tokenizer.eos_token_id == reference.token_to_id("<|end|>")
    assert tokenizer.special_ids == {*map(reference.token_to_id, ("<|begin|>", "<|end|>"))}


def test_a_partial_tokenizer_becomes_whole_where_a_caller_needs_more(
    kept: Any, tmp_path: Path
) -> None:
    reference = library_tokenizer("qwen2")
    reference.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "m.gguf", gguf_files.bpe_of(tmp_path, "qwen2", 0))
    as_text = Library.from_str(json.dumps(vocabulary(read_gguf(path)).all_parts())).to_str()
    text = "e\u0301 is not in NFC, and some " * 100
    assert kept(path).encode(text) == reference.encode(text).ids
    assert kept(path).vocabulary() == reference.get_vocab()
    assert kept(path).to_json() == as_text
    tokenizer = kept(path)
    for _ in range(partial_tokenizer.MAX_TEXTS + 3):
        assert tokenizer.encode("Hello") == reference.encode("Hello").ids
        assert tokenizer.decode([5, 260]) == reference.decode([5, 260])
    tokenizer.complete()
    assert tokenizer.to_json() == as_text
    for wrong in (-1, 1 << 32):
        with pytest.raises(RequestError, match="integers in"):
            kept(path).decode([wrong])


def test_no_other_pre_tokenizer_gives_the_same_tokens(bpe: Any) -> None:
    """So the texts would notice a wrong one."""
    pre, reference, path = bpe
    values = gguf_files.bpe_of(path.parent, pre, 0) | {"tokenizer.ggml.add_bos_token": False}
    wanted = [reference.encode(text).ids for text in TEXTS]
    later = PRES[PRES.index(pre) + 1 :]  # The file of another name tries the earlier ones.
    for other in set(later) - (ALIKE if pre in ALIKE else set()):
        values["tokenizer.ggml.pre"] = other
        tokenizer = Tokenizer.load(write(path.parent / "other.gguf", values), None)
        assert [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS] != wanted, other


@pytest.mark.parametrize("pre", ALIASES)
def test_other_names_of_a_pre_tokenizer_give_the_same_tokens(pre: str, tmp_path: Path) -> None:
    loaded = [
        Tokenizer.load(write(tmp_path / "m.gguf", bundled_bpe(name)), None)
        for name in (pre, ALIASES[pre])
    ]
    assert len({repr([each.encode(text) for text in TEXTS]) for each in loaded}) == 1


def models_of_gguf() -> list[str]:
    """Return the names of the models whose GGUF files mie claims to read."""
    families = {name for row in ARCHITECTURES.values() for name in row.families}
    titles = ", ".join(FAMILIES[name].title for name in sorted(families)).split(", ")
    return sorted(set(titles) - {*QUALIFIERS})


@pytest.mark.parametrize("model", models_of_gguf())
def test_every_model_of_the_families_has_a_known_pre_tokenizer(model: str, tmp_path: Path) -> None:
    pres = [pre for pre, models in MODELS_OF_PRES.items() if model in models]
    assert pres
    for pre in pres:
        values = pieces() if pre == "llama" else bundled_bpe(pre)
        tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", values), None)
        assert "quickly" in tokenizer.decode(tokenizer.encode("quickly a"))


@pytest.mark.parametrize("pre", [..., "", "default"])
def test_a_file_without_a_pre_tokenizer_is_read_with_a_warning(
    pre: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = library_tokenizer("default")
    reference.save(str(tmp_path / "tokenizer.json"))
    values = gguf_files.bpe_of(tmp_path, "", 0) | {"tokenizer.ggml.pre": pre}
    kept = {key: item for key, item in values.items() if item is not ...}
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", kept), None)
    (record,) = caplog.records
    assert str(tmp_path / "m.gguf") in record.getMessage()
    assert "llama.cpp's default" in record.getMessage()
    assert "tokenizer=DIRECTORY" in record.getMessage()
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text).ids


# Special tokens


@pytest.mark.parametrize("value", [-1, 2**32 - 1, 10**6])
@pytest.mark.parametrize("name", ["padding", "seperator", "unknown", "mask", "eot", "fim_pre"])
def test_an_unused_special_token_may_be_absent(name: str, value: int, tmp_path: Path) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    values = bundled_bpe("gpt-2") | {key: Signed(value) if value < 0 else value}
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", values), None)
    assert not tokenizer.special_tokens
    assert tokenizer.encode("Hi")


@pytest.mark.parametrize("value", [Signed(-1), 2**32 - 1])
@pytest.mark.parametrize("name", ["bos", "eos"])
def test_bos_and_eos_may_be_absent_unless_they_are_added(
    name: str, value: int, tmp_path: Path
) -> None:
    values = bundled_bpe("gpt-2") | {f"tokenizer.ggml.{name}_token_id": value}
    assert Tokenizer.load(write(tmp_path / "m.gguf", values), None).encode("Hi")
    values[f"tokenizer.ggml.add_{name}_token"] = True
    with pytest.raises(TokenizerError, match=f"sets add_{name}_token but names no {name}_token"):
        Tokenizer.load(write(tmp_path / "m.gguf", values), None)


@pytest.mark.parametrize(
    ("token", "is_special"),
    [
        *[(token, True) for token in ("<|im_start|>", "<|im_end|>", "<end_of_turn>", "<EOT>")],
        *[(token, False) for token in ("<tool_call>", "</think>", "[INST]")],
    ],
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_added_token_is_one_token_even_if_its_type_is_normal(
    kind: str, token: str, is_special: bool, tmp_path: Path
) -> None:
    values = bundled_bpe("gpt-2") if kind == "gpt2" else pieces()
    index = len(values["tokenizer.ggml.tokens"])
    values["tokenizer.ggml.tokens"].append(token)
    values["tokenizer.ggml.token_type"].append(NORMAL)
    values.setdefault("tokenizer.ggml.scores", [0.0] * index).append(-(10.0**6))
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", values), None)
    assert index in tokenizer.encode(f"quickly{token}a")
    assert (index in tokenizer.special_ids) is is_special


def test_a_special_id_makes_a_normal_token_special_unless_texts_have_it(tmp_path: Path) -> None:
    values = bundled_bpe("gpt-2")
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    tokens.append("~endoftext~")
    kinds.append(NORMAL)
    word = tokens.index("Ġthe")
    for index, is_special in ((len(tokens) - 1, True), (word, False)):
        values["tokenizer.ggml.eos_token_id"] = index
        tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", values), None)
        assert (index in tokenizer.special_ids) is is_special


def test_pieces_in_brackets_that_merges_reach_stay_text(tmp_path: Path) -> None:
    values = bundled_bpe("gpt-2")
    values["tokenizer.ggml.tokens"] += ["<b", "<br", "<br>"]
    values["tokenizer.ggml.token_type"] += [NORMAL] * 3
    values["tokenizer.ggml.merges"] += ["< b", "<b r", "<br >"]
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", values), None)
    assert "<br>" not in tokenizer.added_tokens.values()


@pytest.mark.parametrize(
    ("architecture", "name", "strips"),
    [
        ("phi3", "Phi 3.5 Mini Instruct", True),
        ("phi3", None, True),
        ("llama", "Phi-3 Mini 4K", True),
        ("llama", "phi3", True),
        ("llama", "Phi_3", True),
        ("llama", "Phi 4", False),
        ("llama", None, False),
    ],
)
def test_spaces_after_special_tokens_of_phi_3_are_part_of_them(
    architecture: str, name: str | None, strips: bool, tmp_path: Path
) -> None:
    values = pieces() | {"general.architecture": architecture}
    values |= {} if name is None else {"general.name": name}
    first = len(values["tokenizer.ggml.tokens"])
    for token in ("<|user|>", "<|end|>", "<|assistant|>", "<|endoftext|>"):
        values["tokenizer.ggml.tokens"].append(token)
        values["tokenizer.ggml.token_type"].append(CONTROL)
        values["tokenizer.ggml.scores"].append(0.0)
    user, end, assistant, end_of_text = range(first, first + 4)
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", values), None)
    word, newline = (sentencepiece(text, values) for text in ("quickly", "\n"))
    text = "<|user|>\nquickly<|end|>\n<|assistant|>\n"
    between = [] if strips else newline
    spaced = word if strips else sentencepiece("\nquickly", values)
    expected = [1, user, *spaced, end, *between, assistant, *between]
    assert tokenizer.encode(text) == expected
    # The end of a text keeps the space after it.
    assert tokenizer.encode("<|endoftext|>\n") == [1, end_of_text, *newline]


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(False, True), (0, 1), (True, False), (1, 0)])
def test_the_file_can_say_whether_bos_and_eos_are_added(
    adds_bos: Any, adds_eos: Any, tmp_path: Path
) -> None:
    values = bundled_bpe("llama-bpe") | {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": adds_bos,
        "tokenizer.ggml.add_eos_token": adds_eos,
    }
    ids = Tokenizer.load(write(tmp_path / "m.gguf", values), None).encode("Hi")
    assert (ids[0] == 0) is bool(adds_bos)
    assert (ids[-1] == 1) is bool(adds_eos)


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
    values = bundled_bpe("gpt-2")
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
        ({"pre": "other"}, r"splits texts by 'other' .*; known: .*gpt-2, .*tokenizer=DIRECTORY"),
        ({"pre": 1}, "splits texts by 1"),
        ({"tokens": ...}, "has no tokenizer.ggml.tokens of type str"),
        ({"tokens": [1, 2]}, "has no tokenizer.ggml.tokens of type str"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "has a token twice"),
        ({"token_type": [1]}, "but 1 types of them"),
        ({"merges": ["ab"]}, "the merge 'ab' without a space"),
        ({"merges": ["no such"]}, "the merge 'no such' of texts that are no tokens"),
        ({"merges": ["a b" * 9999]}, "of texts that are no tokens"),
        ({"merges": [1, 2]}, "has no tokenizer.ggml.merges of type str"),
        ({"tokens": ["a" * 16385], "token_type": [1]}, "16385 characters; the limit is 16384"),
        ({"bos_token_id": 10**6}, "bos_token_id 1000000, which is not a token"),
        ({"bos_token_id": "x"}, "bos_token_id 'x', which is not a token"),
        ({"padding_token_id": "x"}, "padding_token_id 'x', which is not a token"),
        ({"add_bos_token": 2}, "add_bos_token 2, which is not a boolean"),
        ({"add_eos_token": "yes"}, "add_eos_token 'yes', which is not a boolean"),
    ],
)
def test_a_broken_vocabulary_is_refused(changes, message, tmp_path) -> None:
    values = bundled_bpe("gpt-2")
    values |= {f"tokenizer.ggml.{key}": item for key, item in changes.items()}
    kept = {key: item for key, item in values.items() if item is not ...}
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(write(tmp_path / "m.gguf", kept), None)
    assert str(tmp_path / "m.gguf") in str(caught.value)


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_a_vocabulary_that_is_not_utf8_is_refused(key: str, tmp_path: Path) -> None:
    values = bundled_bpe("gpt-2") | {f"tokenizer.ggml.{key}": ["no such"]}
    path = write(tmp_path / "m.gguf", values)
    path.write_bytes(path.read_bytes().replace(b"no such", b"no s\xbdch"))
    with pytest.raises(TokenizerError, match=f"not UTF-8 in tokenizer.ggml.{key}"):
        Tokenizer.load(path, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": ...}, "has no tokenizer.ggml.scores of type float"),
        ({"scores": [1.0]}, "but 1 scores"),
        ({"precompiled_charsmap": [1, 2]}, r"precompiled_charsmap, which is not read \(pass"),
        ({"add_space_prefix": 2}, "add_space_prefix 2, which is not a boolean"),
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


@pytest.mark.parametrize("adds_space", [True, False])
def test_kept_pieces_give_the_same_tokens(
    adds_space: bool, kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_tokenizer, "MAX_TEXTS", 1000)
    values = pieces() | {"tokenizer.ggml.add_space_prefix": adds_space}
    path = write(tmp_path / "m.gguf", values)
    whole = Library.from_str(json.dumps(vocabulary(read_gguf(path)).all_parts()))
    tokenizer = kept(path)
    monkeypatch.setattr(partial_tokenizer.PartialTokenizer, "whole", None)
    for text in mixed([*TEXTS, "a<tool>quickly</s> quickly"], 60):
        ids = whole.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == whole.decode(ids)
