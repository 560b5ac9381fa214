"""llama.cpp's own tests of tokenizers: GGUF vocabularies, texts, and the expected token ids."""

from collections.abc import Iterator
from functools import partial

from mie.text.tokenizer import Tokenizer

from ..case import Case, Row, Run, Suite
from ._published_tokenizers import archive, gguf_tokenizer, unpack

MARK = "\n__ggml_vocab_test__\n"  # after each text
SOURCE = "https://github.com/ikawrakow/ik_llama.cpp/tree/main/models"
FILES = (
    "bert-bge", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-spm", "mpt", "phi-3",
    "refact", "starcoder",
)  # fmt: skip
PUBLISHED = {"llama-bpe": ("llama3_2", 128_256), "qwen2": ("qwen3", 151_936)}
"""Vocabularies that stand in npm packages: the package, and the model's number of tokens."""


def measure(name: str, run: Run) -> Iterator[Row]:
    """Compare the ids of each text with the expected ones."""
    stem = f"vocab/ggml-vocab-{name}.gguf"
    texts = run.path(f"{stem}.inp").read_bytes().decode()
    lines = run.path(f"{stem}.out").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    expected = [[int(each) for each in line.split()] for line in lines]
    if name in PUBLISHED:
        package, num_tokens = PUBLISHED[name]
        tokenizer = gguf_tokenizer(unpack(run, package), name, num_tokens)
    else:
        tokenizer = Tokenizer.load(run.path(stem), None)
    cases = list(zip(texts.removesuffix(MARK).split(MARK), expected, strict=True))
    wrong = [text for text, ids in cases if tokenizer.encode(text, False) != ids]
    yield Row.compared(
        name,
        f"{len(cases) - len(wrong)} of {len(cases)} texts",
        "all",
        not wrong,
        source=SOURCE,
        reason=f"differs for {wrong[0]!r}" if wrong else "",
    )


def case(name: str) -> Case:
    """Return the case of a vocabulary."""
    stem = f"vocab/ggml-vocab-{name}.gguf"
    vocabulary = archive(PUBLISHED[name][0]) if name in PUBLISHED else stem
    packages = ("gguf",) if name in PUBLISHED else ()
    inputs = (vocabulary, f"{stem}.inp", f"{stem}.out")
    return Case(name, partial(measure, name), inputs=inputs, packages=packages)


SUITE = Suite(
    title="llama.cpp's vocabulary tests",
    text="The token ids of the texts that llama.cpp tests its tokenizers with, for each GGUF "
    "vocabulary in its repository that has expected ids. The vocabularies llama-bpe and qwen2 are "
    "Llama 3.2's and Qwen3's tokenizer.json, converted by the gguf package. mie runs decoders, so "
    "it refuses the WordPiece vocabulary of the encoder BERT.",
    cases=[case(name) for name in sorted((*FILES, *PUBLISHED))],
)
