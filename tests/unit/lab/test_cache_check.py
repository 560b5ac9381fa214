"""Test how a folder of blocks is listed, verified and removed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit import tier_of
from command_line import mie
from engines import run_to_end

from mie import SamplingParams
from mie.config.engine_args import EngineArgs
from mie.disk.folder import Shelf, shelves
from mie.disk.segment import SUFFIX, Block, read_block, write_segment
from mie.errors import ConfigError
from mie.lab.cache_check import check
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

GOLDEN = Path(__file__).parents[2] / "golden" / "models"
PROMPTS = ([*range(5, 25)], [*range(5, 17), *range(40, 48)], [*range(30, 61)])


def args_of(model: str, **settings: Any) -> EngineArgs:
    own = {"num_blocks": 60, "block_size": 4, "max_model_len": 32, **settings}
    return EngineArgs(model=str(GOLDEN / model), backend="numpy", batch_invariant=True, **own)


def fill(model: str, folder: Path) -> Shelf:
    """Return the blocks of some prompts."""
    args = args_of(model, prefix_cache_dir=str(folder))
    engine = load_engine(GOLDEN / model, LoadSettings.of(args), use_tqdm=False)
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        engine.add_request(prompt, params, cache_salt=["a", None][number % 2])
    run_to_end(engine)
    tier_of(engine).close()
    (shelf,) = shelves(folder)
    return shelf


def rewrite(shelf: Shelf, key: bytes, data: bytes) -> None:
    """Replace the bytes of a content, with the right checksum."""
    (segment,) = shelf.path.glob(f"*{SUFFIX}")
    blocks = [
        Block(
            each.key,
            each.part,
            each.parent,
            each.position,
            each.token_ids,
            data if each.key == key else read_block(each),
        )
        for each in shelf.entries.values()
    ]
    write_segment(segment, blocks)


@pytest.mark.parametrize("model", ["qwen3_tied", "gemma3_two_ropes", "qwen35_delta"])
def test_all_contents_are_equal(model: str, tmp_path: Path):
    shelf = fill(model, tmp_path)
    verdict = check(shelf, args_of(model))
    assert (verdict.differences, verdict.num_damaged) == ([], 0)
    assert verdict.num_equal + verdict.num_left == len(shelf.entries)
    assert verdict.num_equal >= len(shelf.blocks)


@pytest.mark.parametrize("byte", [0, -1])
def test_a_block_that_differs_is_named_by_position_and_layer(byte: int, tmp_path: Path):
    shelf = fill("qwen3_tied", tmp_path)
    entry = next(each for each in shelf.blocks if each.position == 8)
    data = bytearray(read_block(entry))
    data[byte] ^= 1
    rewrite(shelf, entry.key, bytes(data))
    (shelf,) = shelves(tmp_path)
    (found,) = check(shelf, args_of("qwen3_tied")).differences
    assert (found.part, found.position, found.num_bytes) == ("block", 8, 1)
    assert found.layer == (0 if byte == 0 else shelf.facts["num_layers"] - 1)
    assert found.byte == (0 if byte == 0 else len(data) - 1)


def test_a_state_that_differs_is_noticed(tmp_path: Path):
    shelf = fill("qwen35_delta", tmp_path)
    entry = next(each for each in shelf.entries.values() if each.part == "state")
    data = bytearray(read_block(entry))
    data[5] ^= 1
    rewrite(shelf, entry.key, bytes(data))
    (shelf,) = shelves(tmp_path)
    (found,) = check(shelf, args_of("qwen35_delta")).differences
    assert (found.part, found.position, found.layer) == ("state", entry.position, None)


def test_a_damaged_block_is_counted_apart(tmp_path: Path):
    shelf = fill("qwen3_tied", tmp_path)
    entry = shelf.blocks[0]
    data = bytearray(entry.segment.read_bytes())
    data[entry.offset] ^= 1
    entry.segment.write_bytes(data)
    verdict = check(shelf, args_of("qwen3_tied"))
    assert (len(verdict.differences), verdict.num_damaged) == (0, 1)
    assert verdict.num_equal == len(shelf.entries) - 1


def test_blocks_are_compared_without_the_facts_of_their_folder(tmp_path: Path):
    shelf = fill("qwen3_tied", tmp_path)
    rewrite(shelf, shelf.blocks[0].key, bytes(shelf.blocks[0].size))
    (shelf,) = shelves(tmp_path)
    (found,) = check(replace(shelf, facts={}), args_of("qwen3_tied")).differences
    assert found.layer is None
    with pytest.raises(ConfigError, match="block_size is None, not 8"):
        check(replace(shelf, facts={}), args_of("qwen3_tied", block_size=8))


def test_a_fraction_is_a_part_of_the_paths(tmp_path: Path):
    shelf = fill("qwen3_tied", tmp_path)
    assert len(shelf.paths) == 3
    verdict = check(shelf, args_of("qwen3_tied"), fraction=0.4)
    assert 0 < verdict.num_equal < len(shelf.entries)


def test_other_settings_are_refused_by_name(tmp_path: Path):
    shelf = fill("qwen3_tied", tmp_path)
    with pytest.raises(ConfigError, match="cache_dtype is auto, not int8"):
        check(shelf, replace(args_of("qwen3_tied"), kv_cache_dtype="int8"))


def test_a_folder_is_listed_measured_verified_and_removed(tmp_path: Path):
    shelf = fill("qwen3_tied", tmp_path)
    name = shelf.path.name
    (row,) = json.loads(mie("cache", "list", tmp_path, "--json").stdout)
    assert (row["name"], row["salts"], row["bytes"]) == (name, 2, shelf.num_bytes)
    assert row["tokens"] == 4 * len(shelf.blocks)
    text = mie("cache", "list", tmp_path).stdout.decode()
    assert text.startswith(f"{name[:8]}  ")
    assert "5 6 7 8 9" in text
    assert "in all" in mie("cache", "du", tmp_path).stdout.decode()
    options = ["--backend", "numpy", "--batch-invariant", "--num-blocks", "60"]
    done = mie("cache", "verify", tmp_path, "--max-model-len", "32", *options)
    assert done.returncode == 0
    equal = f"{len(shelf.entries)} contents are equal, 0 differ, 0 are damaged"
    assert equal in done.stdout.decode()
    entry = shelf.blocks[0]
    rewrite(shelf, entry.key, bytes(entry.size))
    done = mie("cache", "verify", tmp_path, "--max-model-len", "32", *options)
    assert done.returncode == 1
    assert f"block at position {entry.position}, layer 0" in done.stdout.decode()
    assert mie("cache", "rm", tmp_path).returncode == 2
    assert name[:8] in mie("cache", "rm", tmp_path, "--all").stdout.decode()
    assert [*shelves(tmp_path)] == []
