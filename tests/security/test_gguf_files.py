"""Check that hostile GGUF files are refused by name at little cost."""

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf_files
import pytest
import tiny_models
from gguf_files import text
from measured import Measured, Zygote

from mie.checkpoint.locate import BUNDLED_DIRECTORY

HUGE = (2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
MODEL = tiny_models.LLAMA | {"hidden_size": 64, "head_dim": 16}


def head(num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    """Return a file whose only value is an array."""
    return (
        head(num_keys=1)
        + text("tokenizer.ggml.tokens")
        + struct.pack("<IIQ", 9, kind, count)
        + data
    )


def tensors(*each: tuple[str, tuple[int, ...], int, int], **values: object) -> bytes:
    """Return a file with tensors: name, dimensions, type, offset."""
    data = head(len(each), len(values))
    data += b"".join(text(k.replace("__", ".")) + gguf_files.value(v) for k, v in values.items())
    for name, dimensions, kind, offset in each:
        data += text(name) + struct.pack("<I", len(dimensions))
        data += struct.pack(f"<{len(dimensions)}QIQ", *dimensions, kind, offset)
    return data + bytes(4096)


ONE = ("a", (32,), 0, 0)
# Created when needed, because some are large.
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "an empty file": (lambda: b"", "is empty"),
    "four bytes": (lambda: b"GGUF", "its header does not end"),
    "another format": (lambda: b"PK\3\4" + bytes(100), "does not begin with 'GGUF'"),
    "version 1": (lambda: head(version=1) + bytes(50), "of version 1"),
    "big endian": (lambda: head(version=3 << 24) + bytes(50), "is big endian"),
    "2**64 - 1 tensors": (lambda: head(2**64 - 1), "tensors; the limit is"),
    "2**64 - 1 keys": (lambda: head(0, 2**64 - 1), "keys; the limit is"),
    "a key of 2**63 bytes": (
        lambda: head(0, 1) + struct.pack("<Q", 2**63) + bytes(100),
        "does not end",
    ),
    "a key that is not UTF-8": (lambda: head(0, 1) + text(b"\xff\xfe"), "not UTF-8"),
    "a key twice": (
        lambda: head(0, 2) + 2 * (text("a") + gguf_files.value(1)),
        "gives the key 'a' twice",
    ),
    "an unknown type of value": (lambda: head(0, 1) + text("a") + b"\x63\0\0\0", "unknown type 99"),
    "an array of arrays": (lambda: array(9, 1, array(9, 1)), "an array of type 9"),
    "2**64 - 1 numbers": (lambda: array(4, 2**64 - 1), "does not end"),
    "2**40 texts": (lambda: array(8, 2**40), "texts in arrays, which is the limit"),
    "a text of 2**64 - 1 bytes in an array": (
        lambda: array(8, 2, struct.pack("<Q", 2**64 - 1) + bytes(90)),
        "does not end",
    ),
    "40 MB of metadata": (
        lambda: array(0, 40_000_000, bytes(40_000_000)),
        "a header beyond the limit of 33554432 bytes",
    ),
    "no dimension": (lambda: tensors(("a", (), 0, 0)), "0 dimensions"),
    "2**32 - 1 dimensions": (
        lambda: head(1) + text("a") + b"\xff\xff\xff\xff" + bytes(99),
        "4294967295 dimensions",
    ),
    "an empty dimension": (lambda: tensors(("a", (32, 0), 0, 0)), "the shape [0, 32]"),
    "a product of 2**256": (lambda: tensors(("a", (2**63,) * 4, 0, 0)), "1 … 2**40"),
    "a row that ends within a block": (lambda: tensors(("a", (33, 32), 8, 0)), "a multiple of 32"),
    "a type that is not read": (lambda: tensors(("a", (256,), 19, 0)), "type IQ1_S"),
    "a tensor beyond the file": (lambda: tensors(("a", (2**20,), 0, 0)), "of a file of"),
    "an offset of 2**64 - 32": (lambda: tensors(("a", (32,), 0, 2**64 - 32)), "of a file of"),
    "an offset within a block": (lambda: tensors(("a", (32,), 0, 4)), "not a multiple of 32"),
    "tensors that overlap": (lambda: tensors(ONE, ("b", (32,), 0, 96)), "'b' overlaps another"),
    "a tensor twice": (lambda: tensors(ONE, ("a", (32,), 0, 128)), "'a' appears twice"),
    "an alignment of 0": (lambda: tensors(general__alignment=0), "alignment of 0"),
    "an alignment of 48": (lambda: tensors(general__alignment=48), "alignment of 48"),
    "an alignment of 2**31": (lambda: tensors(general__alignment=2**31), "a power of two in 8"),
    "an alignment that is text": (lambda: tensors(general__alignment="a"), "alignment of 'a'"),
    "2**32 - 1 shards": (lambda: tensors(split__count=2**32 - 1), "the limit is 1024"),
    "shards under another name": (lambda: tensors(split__count=2), "must end in -00001-of-00002"),
}
FAST = [
    "a key twice", "a product of 2**256", "a tensor twice", "tensors that overlap",
    "a type that is not read", "an alignment of 0", "an offset of 2**64 - 32", "2**40 texts",
    "2**64 - 1 numbers", "2**64 - 1 tensors", "40 MB of metadata", "big endian",
    "a text of 2**64 - 1 bytes in an array", "an array of arrays",
]  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FILES]
)
def test_a_hostile_file_is_refused(zygote: Zygote, tmp_path: Path, name: str) -> None:
    data, word = FILES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data())
    zygote.run("config", path).check_refused(str(path), word)


def test_a_million_tokens_cost_little(zygote: Zygote, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(array(8, 1 << 20, text("ab") * (1 << 20)))
    zygote.run("config", path).check_refused("does not name its architecture")
    zygote.run("tokenizer", path).check_refused("a tokenizer of kind None")


def test_a_pipe_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "model.gguf")
    zygote.run("generate", tmp_path / "model.gguf").check_refused("model.gguf")


# Mutations


class Files:
    """A small model with a tokenizer, as a GGUF file, and the places of its integers."""

    def __init__(self, root: Path) -> None:
        config = MODEL | {"vocab_size": 2048}
        tiny_models.write_model(root / "model", config, tiny_models.random_weights(config))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (root / "model" / name).write_bytes((BUNDLED_DIRECTORY / name).read_bytes())
        self.path = gguf_files.convert(root / "model", root / "model.gguf", "Q8_0", "gpt-2")
        self.data = self.path.read_bytes()
        self.integers = list(integers(self.data))


def integers(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the place and the size of every integer of the header but those within arrays."""
    at = 8

    def take(size: int) -> tuple[tuple[int, int], int]:
        nonlocal at
        place, at = at, at + size
        return (place, size), int.from_bytes(data[place:at], "little")

    def skip_text() -> Iterator[tuple[int, int]]:
        nonlocal at
        place, length = take(8)
        at += length
        yield place

    yield 4, 4
    place, num_tensors = take(8)
    yield place
    place, num_keys = take(8)
    yield place
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    for _ in range(num_keys):
        yield from skip_text()
        place, kind = take(4)
        yield place
        if kind == 8:
            yield from skip_text()
        elif kind == 9:
            (place, kind), (second, count) = take(4), take(8)
            yield from (place, second)
            for _ in range(count if kind == 8 else 0):
                *_, _last = skip_text()
            at += 0 if kind == 8 else count * sizes[kind]
        else:
            yield take(sizes[kind])[0]
    for _ in range(num_tensors):
        yield from skip_text()
        place, dimensions = take(4)
        yield place
        for size in (*[8] * dimensions, 4, 8):
            yield take(size)[0]


def mutated(files: Files, draw: random.Random) -> bytes:
    """Return the file with one to three changes of its header."""
    data = bytearray(files.data)
    end = max(place + size for place, size in files.integers)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        place, size = draw.choice(files.integers)
        now = int.from_bytes(data[place : place + size], "little")
        hostile = [
            now + 1,
            now - 1,
            now ^ 1 << draw.randrange(8 * size),
            2 * now,
            *range(32),
            *HUGE,
        ]
        kind = draw.random()
        if kind < 0.75:
            data[place : place + size] = (draw.choice(hostile) % 256**size).to_bytes(size, "little")
        elif kind < 0.85:
            start = draw.randrange(end)
            data[start : start + 1] = bytes([draw.randrange(256)])
        elif kind < 0.95:
            start = draw.randrange(end)
            data[start : start + draw.choice([1, 4, 8, 32])] = b""
        else:
            del data[draw.choice([draw.randrange(end), draw.randrange(len(data))]) :]
    return bytes(data)


def run(zygote: Zygote, files: Files, number: int) -> Measured:
    draw = random.Random(number)
    files.path.write_bytes(mutated(files, draw))
    action = draw.choice(["generate", "tokenizer", "weights", "cli"])
    arguments = ["inspect"] if action == "cli" else []
    result = zygote.run(action, *arguments, files.path)
    try:
        result.check_cost()
        assert "\x1b" not in result.stdout + result.stderr
        assert len(result.message) + len(result.stderr) < 4000
    except AssertionError as error:
        raise AssertionError(f"case {number}, {action}: {error}") from error
    return result


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("gguf"))


def test_some_mutations_are_both_accepted_and_refused(zygote: Zygote, files: Files) -> None:
    verdicts = set()
    for number in range(100):
        result = run(zygote, files, number)
        verdicts.add(bool(result.error or result.code))
        if number >= 20 and len(verdicts) == 2:
            return
    raise AssertionError(f"refused: {verdicts}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_thousand_mutations(zygote: Zygote, files: Files, seed: int) -> None:
    for number in range(200 * seed, 200 * (seed + 1)):
        run(zygote, files, number)
