"""llama.cpp's own tests of tokenizers: GGUF vocabularies, texts, and the expected token ids."""

from collections.abc import Iterator
from functools import partial

from mie.text.tokenizer import Tokenizer

from ..case import Case, Row, Run, Suite

SOURCE = "https://github.com/ikawrakow/ik_llama.cpp/tree/main/models"
NAMES = (
    "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-spm", "mpt", "phi-3", "refact",
    "starcoder",
)  # fmt: skip


def measure(name: str, run: Run) -> Iterator[Row]:
    """Compare the ids of each text with the expected ones."""
    stem = f"vocab/ggml-vocab-{name}.gguf"
    texts = run.path(f"{stem}.inp").read_bytes().decode()
    lines = run.path(f"{stem}.out").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    expected = [[int(each) for each in line.split()] for line in lines]
    tokenizer = Tokenizer.load(run.path(stem), None)
    cases = list(zip(texts.split("\n__ggml_vocab_test__\n"), expected, strict=True))
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
    return Case(name, partial(measure, name), inputs=(stem, f"{stem}.inp", f"{stem}.out"))


SUITE = Suite(
    title="llama.cpp's vocabulary tests",
    text="The token ids of the texts that llama.cpp tests its tokenizers with, for each GGUF "
    "vocabulary that its repository has.",
    cases=[case(name) for name in NAMES],
)
