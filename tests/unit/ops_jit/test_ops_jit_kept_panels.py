"""Check the cache of panels: what it keeps, and what happens where it is damaged or closed."""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from deadlines import PATIENCE
from engines import run_to_end
from numpy.typing import NDArray
from quantised_rows import quantised

pytest.importorskip("numba")

from mie import SamplingParams
from mie.base.cache_dir import private_folder
from mie.config.engine import EngineConfig
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops.weights.quantised import Form, Rows
from mie.ops_jit import kept_panels
from mie.ops_jit.kept_panels import KeptPanels, make_room
from mie.ops_jit.memory import HugePages, segments_of

INT4 = Form(codes="int4", group=32, has_offsets=True)
UNITS = Form(codes="int8", group=32, has_offsets=False, scale_bits=8)
GOLDEN = Path(__file__).parents[2] / "golden" / "models" / "qwen3_tied"
FLOATS = np.linspace(-1, 1, 70 * 24, dtype=np.float32).reshape(70, 24)
MATRICES: Sequence[Sequence[tuple[Rows, Form | None]]] = [
    [(quantised(INT4, 80, 64), INT4)],
    [(FLOATS, None)],
    [(FLOATS.astype(ml_dtypes.bfloat16), None)],
    [(quantised(UNITS, 48, 256), UNITS), (quantised(INT4, 32, 256), INT4)],
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where panels are kept. The compiled kernels stay where they are."""
    path = tmp_path / "panels"
    monkeypatch.setattr(kept_panels, "open_cache", lambda name: private_folder(path))
    return path


def load(name: str = "model", max_bytes: int = 1 << 30) -> tuple[list[NDArray[np.uint8]], int]:
    """Load all matrices, keep them, and return the bytes of the panels and how many were packed."""
    kept, pages, found = KeptPanels(name, min_bytes=0, max_bytes=max_bytes), HugePages(), []
    for parts in MATRICES:
        blocks = iter([rows for rows, _ in parts])
        sizes = [(len(rows), form) for rows, form in parts]
        columns = parts[0][0].shape[1]
        found += segments_of(sizes, blocks, columns, pages, None, kept=kept)
    thread = kept.write()
    if thread is not None:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return [each.memory.reshape(-1).view(np.uint8).copy() for each in found], kept.num_packed


def same(one: Sequence[NDArray[np.uint8]], two: Sequence[NDArray[np.uint8]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_second_load_maps_the_panels_of_the_first_and_reads_no_block(folder: Path) -> None:
    packed, number = load()
    assert number == len(MATRICES)
    [file] = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    mapped, number = load()
    assert number == 0
    assert same(packed, mapped)
    assert load("another model")[1] == len(MATRICES)


def flip(place: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return change


def swap_a_digit(path: Path) -> None:
    data = path.read_bytes()
    assert b'["float32", ' in data
    path.write_bytes(data.replace(b'["float32", ', b'["float32",9'))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the data": flip(-1000),
    "a bit of the description": swap_a_digit,
    "a bit of the digest": flip(0),
    "a length beyond the file": flip(38),
    "half of it": lambda path: os.truncate(path, path.stat().st_size // 2),
    "nothing in it": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_reported_once_and_written_again(
    folder: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    packed, _ = load()
    [file] = folder.iterdir()
    damage(file)
    with caplog.at_level(logging.WARNING):
        again, number = load()
    assert number == len(MATRICES)
    assert same(packed, again)
    assert [record.message.split(" (")[0] for record in caplog.records] == [f"{file} is damaged"]
    assert load()[1] == 0


def test_a_file_of_other_users_is_not_read(folder: Path) -> None:
    load()
    [file] = folder.iterdir()
    file.chmod(0o666)
    assert load()[1] == len(MATRICES)


def test_a_folder_that_cannot_be_used_is_no_error(folder: Path) -> None:
    folder.write_text("a file")
    assert load()[1] == len(MATRICES)
    assert folder.read_text() == "a file"


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_panels.os, "replace", refuse)
    assert load()[1] == len(MATRICES)
    assert [*folder.iterdir()] == []


def test_small_models_are_not_kept(folder: Path) -> None:
    kept = KeptPanels("small", min_bytes=1 << 20)
    segments_of([(70, None)], iter([FLOATS]), 24, HugePages(), None, kept=kept)
    thread = kept.write()
    assert thread is not None
    thread.join(PATIENCE)
    assert [*folder.iterdir()] == []


def test_the_files_unused_for_the_longest_time_make_room(folder: Path) -> None:
    load("first")
    size = (folder / "first").stat().st_size
    load("second")
    for number, name in enumerate(("first", "second")):
        os.utime(folder / name, (number, number))
    assert load("first")[1] == 0  # and is used last
    load("third", max_bytes=size * 5 // 2)
    assert sorted(path.name for path in folder.iterdir()) == ["first", "third"]
    assert not make_room(folder, size, max_bytes=size - 1)
    assert not make_room(folder, 1 << 62, max_bytes=1 << 63)
    assert len([*folder.iterdir()]) == 2


def tokens(model: Path, **settings: Any) -> list[int]:
    """Return the answer of a new engine."""
    config = EngineConfig(num_blocks=16, block_size=4, max_model_len=32, **settings)
    engine = load_engine(model, LoadSettings(engine=config, backend="jit"), use_tqdm=False)
    request = engine.add_request([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    run_to_end(engine)
    return [*request.sequences[0].output_ids]


def test_an_engine_with_kept_panels_gives_the_same_tokens_and_other_files_have_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_panels, "MIN_BYTES", 0)
    packed: list[int] = []

    def joined(self: KeptPanels, write: Any = KeptPanels.write) -> None:
        packed.append(self.num_packed)
        if (thread := write(self)) is not None:
            thread.join(PATIENCE)

    monkeypatch.setattr(KeptPanels, "write", joined)
    model = Path(shutil.copytree(GOLDEN, tmp_path / "model"))
    assert tokens(model) == tokens(model)
    tokens(model, weight_dtype="float32")
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # in place, with the same size
    weights.write_bytes(data)
    tokens(model)
    every = packed[0]
    assert packed == [every, 0, every, every]
    assert every > 0
    assert len([*folder.iterdir()]) == 3
