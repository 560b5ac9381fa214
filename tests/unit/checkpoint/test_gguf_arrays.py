"""Test the arrays of GGUF files, and that a load decodes and finds nothing twice."""

import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from gguf_files import BYTE, NORMAL, UNKNOWN
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from mie import LLM
from mie.base import cache_dir
from mie.checkpoint.gguf import header as header_module
from mie.checkpoint.gguf import kept_vocabulary
from mie.checkpoint.gguf import merges as merges_module
from mie.checkpoint.gguf import tokenizer as tokenizer_module
from mie.checkpoint.gguf.arrays import STRING, GgufArray, places_of_texts
from mie.checkpoint.gguf.header import GgufHeader, opened, read_gguf
from mie.checkpoint.gguf.merges import Merges, Pieces, merges_of_cuts, merges_of_texts
from mie.checkpoint.locate import BUNDLED_DIRECTORY
from mie.text.tokenizer import Tokenizer

PLAIN = st.text("ab▁é\0\x01", max_size=4)
LONG = st.sampled_from(["x" * 255, "x" * 256, "y" * 300, "\0" * 9, "é" * 128])


def array_of(texts: list[str], before: bytes = b"", after: bytes = b"") -> GgufArray | None:
    data = before + b"".join(map(gguf_files.text, texts)) + after
    found = places_of_texts(data, len(before), len(texts), len(data))
    if found is None:
        return None
    places, end = found
    assert data[end:] == after
    return GgufArray(STRING, len(texts), data[len(before) : end], places)


@given(st.lists(PLAIN | LONG, max_size=40), st.binary(max_size=9), st.binary(max_size=9))
def test_texts_of_any_length_and_bytes_are_found(texts, before, after) -> None:
    array = array_of(texts, before, after)
    assert array is not None
    assert array.values == list(array) == texts
    assert [array.text(index) for index in range(len(texts))] == texts
    last = {text: index for index, text in enumerate(texts)}
    for text in (*last, "no such text", "a" * 300):
        assert array.find(text) == last.get(text)


def test_a_text_inside_another_text_is_not_found_there() -> None:
    inner = gguf_files.text("ab")
    array = array_of(["ab", (b"x" + inner + b"y").decode(), (inner + inner).decode()])
    assert array is not None
    assert array.find("ab") == 0
    assert array.find("a") is None


def test_many_texts_are_found_over_the_border_of_a_window() -> None:
    texts = [f"token {number}" * (1 + number % 9 // 8) for number in range(100_000)]
    texts[70_000] = "long" * 100
    array = array_of(texts)
    assert array is not None
    assert array.values == texts


@given(st.lists(PLAIN, min_size=1, max_size=8), st.integers(1, 8))
def test_a_length_past_the_end_is_noticed(texts: list[str], num_lost: int) -> None:
    data = b"".join(map(gguf_files.text, texts)) + gguf_files.text("")[:-num_lost]
    assert places_of_texts(data, 0, len(texts) + 1, len(data)) is None


@pytest.mark.parametrize("length", [2**62, 2**64 - 1])
def test_a_text_that_ends_far_outside_is_not_followed(length: int) -> None:
    data = gguf_files.text("a") + struct.pack("<Q", length) + b"bc"
    found = places_of_texts(data, 0, 2, len(data))
    assert found is not None
    assert found[1] > len(data)
    assert places_of_texts(data, 0, 3, len(data)) is None


def test_two_halves_of_a_character_in_two_texts_are_no_text() -> None:
    data = b"".join(map(gguf_files.text, (b"a\xc3", b"\xa9b")))
    found = places_of_texts(data, 0, 2, len(data))
    assert found is not None
    with pytest.raises(UnicodeDecodeError):
        _ = GgufArray(STRING, 2, data, found[0]).values


# A load


def test_a_load_reads_the_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_files.convert(BUNDLED_DIRECTORY, tmp_path / "m.gguf", "F32", "gpt-2")
    read: list[Path] = []

    def counted(path: Path) -> GgufHeader:
        read.append(path)
        return read_gguf(path)

    monkeypatch.setattr(header_module, "read_gguf", counted)
    llm = LLM(model=str(path), backend="numpy", num_blocks=16)
    assert read == [path]
    assert llm.get_tokenizer().chat_templates.choose(None).source


def test_a_header_is_passed_on_and_a_directory_too(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_files.gguf_bytes(pieces(), {}))
    header = opened(path)
    assert isinstance(header, GgufHeader)
    assert opened(header) is header
    assert opened(tmp_path) == tmp_path
    assert Tokenizer.load(header, None).encode("ab") == Tokenizer.load(path, None).encode("ab")


# Merges

PIECE = st.text("ab▁é猫", min_size=1, max_size=4)


def cut_in_two(piece: str) -> list[tuple[str, str]]:
    return [(piece[:place], piece[place:]) for place in range(1, len(piece))]


@given(st.lists(st.tuples(PIECE, st.booleans(), st.integers(0, 2)), unique_by=lambda own: own[0]))
def test_merges_are_those_of_transformers(vocabulary: list[tuple[str, bool, int]]) -> None:
    scores = {piece: score for piece, _, score in vocabulary}
    found = []
    for piece, is_normal, score in vocabulary:
        own = [(one, two) for one, two in cut_in_two(piece) if one in scores and two in scores]
        found += [(score, len(one), len(two), (one, two)) for one, two in own if is_normal]
    # transformers' generate_merges sorts by these and reverses, which keeps the order of equals.
    wanted = [each[-1] for each in sorted(found, key=lambda each: each[:3], reverse=True)]
    texts = [piece for piece, _, _ in vocabulary]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merges_module, "BATCH_BYTES", 7)
        pieces = Pieces.of(texts)
        is_normal = np.array([own[1] for own in vocabulary], bool)
        merges = merges_of_cuts(pieces, is_normal, np.array([own[2] for own in vocabulary], float))
        as_texts = array_of([f"{one} {two}" for one, two in wanted])
        assert as_texts is not None
        listed = merges_of_texts(pieces, as_texts)
    assert not isinstance(listed, int)
    for each in (merges, listed):
        pairs = [(texts[one], texts[two]) for one, two in each.pairs.tolist()]
        assert pairs == wanted
        assert [texts[number] for number in each.results] == [one + two for one, two in wanted]


WRONG = ["ab", "a ", " b", "", "b a", "x a", "a x", "a  b", "a b" * 9]


@pytest.mark.parametrize("merge", ["a b", "  a", *WRONG])
def test_the_number_of_a_wrong_merge_is_found(merge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges_module, "BATCH_BYTES", 20)
    array = array_of(["a b"] * 3 + [merge] + ["a b"])
    assert array is not None
    found = merges_of_texts(Pieces.of(["a", "b", "ab", " ", " a"]), array)
    assert (found == 3) if merge in WRONG else isinstance(found, Merges)


def test_pieces_with_one_checksum_are_named() -> None:
    assert Pieces.of(["a", "b", "ab"]).same is None
    assert Pieces.of(["a", "b", "a"]).same == ("a", "a")
    assert Pieces.of([]).find_texts(["a"]) == []


def pieces(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a vocabulary in which two merges make "abc"."""
    tokens = ["<unk>", "<0x0A>", "a", "b", "c", "ab", "bc", "abc", "▁", "▁a"]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -9.0, -4.0],
        "token_type": [UNKNOWN, BYTE] + [NORMAL] * 8,
        "add_space_prefix": False,
    }
    return {f"tokenizer.ggml.{key}": item for key, item in {**values, **changes}.items()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_vocabulary, "MIN_PIECES", 0)
    return tmp_path / "cache" / "mie" / "tokenizers"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose vocabularies were read."""
    read: list[Path] = []
    vocabulary = tokenizer_module.vocabulary

    def counted(header: GgufHeader) -> Any:
        read.append(header.path)
        return vocabulary(header)

    monkeypatch.setattr(tokenizer_module, "vocabulary", counted)
    return read


def loaded(folder: Path, **changes: Any) -> str:
    path = folder / "m.gguf"
    path.write_bytes(gguf_files.gguf_bytes(pieces(**changes), {}))
    return Tokenizer.load(path, None).to_json()


def merges_of(text: str) -> list[list[str]]:
    merges: list[list[str]] = json.loads(text)["model"]["merges"]
    return merges


def test_a_vocabulary_is_read_once(tmp_path: Path, cache: Path, found: list[Path]) -> None:
    first = loaded(tmp_path)
    path = tmp_path / "m.gguf"
    assert found == [path]
    parts = tokenizer_module.vocabulary(read_gguf(path)).all_parts()
    assert Library.from_str(json.dumps(parts)).to_str() == first
    found.clear()
    assert merges_of(first) == [["b", "c"], ["a", "b"], ["ab", "c"], ["a", "bc"], ["▁", "a"]]
    assert loaded(tmp_path) == first
    assert found == []
    (kept,) = cache.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def resident_bytes(file: Path) -> int:
    """Return the memory that the mapping of a file takes."""
    of_file = Path("/proc/self/smaps").read_text().partition(str(file))[2]
    return int(of_file.partition("Rss:")[2].split()[0]) << 10


def test_a_kept_vocabulary_takes_no_memory_after_a_text(tmp_path: Path, cache: Path) -> None:
    """The file of Gemma 3 has 17 MiB. Its pages and lists of its texts do not stay."""
    loaded(tmp_path)
    tokenizer = Tokenizer.load(tmp_path / "m.gguf", None)
    [file] = cache.iterdir()
    assert tokenizer.encode("abc") == [7]
    assert resident_bytes(file) == 0
    assert tokenizer.id_to_token(7) == "abc"
    assert resident_bytes(file) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": [0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -9.0, -4.0]},
        {"tokens": ["<unk>", "<0x0A>", "b", "a", "c", "ab", "bc", "abc", "▁", "▁a"]},
        {"token_type": [UNKNOWN, BYTE] + [NORMAL] * 3 + [5] + [NORMAL] * 4},
    ],
    ids=["scores", "tokens", "kinds"],
)
def test_another_vocabulary_never_gets_the_merges_of_the_first(
    changes: dict[str, Any], tmp_path: Path, cache: Path, found: list[Path]
) -> None:
    first = merges_of(loaded(tmp_path))
    assert merges_of(loaded(tmp_path, **changes)) != first or "tokens" in changes
    assert len(found) == 2
    assert len([*cache.iterdir()]) == 2


def test_another_source_makes_its_own_tokenizer(
    tmp_path: Path, cache: Path, found: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(tmp_path)
    folder = Path(tokenizer_module.__file__).parent
    sources = [path for path in folder.iterdir() if path.is_file()]
    for source in sources:
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(tokenizer_module, "__file__", str(tmp_path / "tokenizer.py"))
    loaded(tmp_path)
    assert len(found) == 1
    for name in ("arrays.py", "merges.py", "kept_vocabulary.py", "splitters.json", "tokenizer.py"):
        with (tmp_path / name).open("a") as file:
            file.write("#")
        loaded(tmp_path)
    assert len(found) == 6


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def linked(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(8)),
    "empty": lambda path: path.write_bytes(b""),
    "a bit of the arrays": lambda path: flipped(path, -4),
    "a bit of the digest": lambda path: flipped(path, 3),
    "a link": linked,
    "others may write": lambda path: path.chmod(0o622),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_gives_the_same_tokenizer(damage, tmp_path, cache, found) -> None:
    first = loaded(tmp_path)
    (path,) = cache.iterdir()
    damage(path)
    assert loaded(tmp_path) == first
    assert len(found) == 2
    assert loaded(tmp_path) == first
    assert len(found) == 2


def no_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.parent.write_text("")


def full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_dir.os, "replace", refuse)


@pytest.mark.parametrize("lack", [no_folder, full_disk])
def test_without_a_cache_a_vocabulary_is_read_at_every_load(
    lack, tmp_path, cache, found, monkeypatch
) -> None:
    lack(cache, monkeypatch)
    assert loaded(tmp_path) == loaded(tmp_path)
    assert len(found) == 2
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_only_the_newest_vocabularies_stay(
    tmp_path: Path, cache: Path, found: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_vocabulary, "MAX_FILES", 2)
    for number in range(4):
        loaded(tmp_path, scores=[float(number)] * 10)
        newest = max(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, ns=(number + 1, number + 1))
    assert len([*cache.iterdir()]) == 2
    loaded(tmp_path, scores=[3.0] * 10)
    assert len(found) == 4
