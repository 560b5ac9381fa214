"""Check the engine in one file against `mie`, and against the oracle at its end."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mie import LLM, SamplingParams

FILE = Path(__file__).parents[2] / "microserve.py"
TINY = FILE.parent / "mie/assets/tiny"
PLACES, ANIMALS = ("lake", "mill", "forest", "library"), ("fox", "owl", "bear", "hare", "otter")
TEXTS = [f"Once upon a time there was a small {x} by the {y}." for x in ANIMALS for y in PLACES]


@pytest.fixture(scope="module")
def microserve() -> ModuleType:
    spec = importlib.util.spec_from_file_location("microserve", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short_needs_only_numpy_and_names_files_that_exist() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 250
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported == {"itertools", "json", "numpy", "pathlib", "re", "sys"}
    named = set(re.findall(r"\b(?:mie|tests)/[\w/]+(?:\.py)?", text)) - {"mie/assets/tiny"}
    assert len(named) >= 8
    assert [name for name in named if not (FILE.parent / name).exists()] == []


def test_twenty_answers_are_those_of_mie(microserve: ModuleType) -> None:
    """The pool is too small for all of them, so sequences are preempted and prefixes shared."""
    llm = LLM("bundled", backend="numpy")
    params = SamplingParams(temperature=0, max_tokens=16)
    expected = llm.generate(TEXTS, params, use_tqdm=False)
    model, tokenizer = microserve.Model(TINY), microserve.Tokenizer(TINY / "tokenizer.json")
    engine = microserve.Engine(model, num_blocks=24, block_size=4)
    seqs = [engine.add([0, *tokenizer.encode(text)], 16) for text in TEXTS]
    while engine.waiting or engine.running:
        engine.step()
    for text, seq, output in zip(TEXTS, seqs, expected, strict=True):
        assert seq.prompt == list(output.prompt_token_ids), text
        assert seq.tokens[len(seq.prompt) :] == list(output.outputs[0].token_ids), text
    assert engine.num_preempted > 0
    assert sum(seq.num_cached for seq in seqs) > 0
    assert sorted(engine.pool.free) == list(range(24))
    assert not any(engine.pool.holders)


def test_its_tokenizer_equals_the_library(microserve: ModuleType) -> None:
    tokenizer = microserve.Tokenizer(TINY / "tokenizer.json")
    library = LLM("bundled", backend="numpy").get_tokenizer()
    rng = random.Random(0)
    pieces = ["It's", " we'll", "\n\n", "  ", " fox", "X1_2", "é", "…", " 42", "\t", "?!", "日本"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        ids = tokenizer.encode(text)
        assert ids == list(library.encode(text, add_special_tokens=False)), text
        assert tokenizer.decode(ids) == text


def test_a_prompt_that_can_never_fit_is_refused(microserve: ModuleType) -> None:
    engine = microserve.Engine(microserve.Model(TINY), num_blocks=2, block_size=4)
    with pytest.raises(ValueError, match="do not fit into room for 8"):
        engine.add([0, 5], 7)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_it_reads_each_type_of_float(microserve: ModuleType, dtype: str, tmp_path: Path) -> None:
    numbers = np.array([[1.5, -2.0, 0.25]], np.float32)
    raw = {
        "F32": numbers.tobytes(),
        "F16": numbers.astype(np.float16).tobytes(),
        "BF16": (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
    }[dtype]
    entry = {"dtype": dtype, "shape": [1, 3], "data_offsets": [0, len(raw)]}
    header = json.dumps({"__metadata__": {}, "x": entry}).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + raw)
    assert np.array_equal(microserve.read_safetensors(tmp_path / "x")["x"], numbers)


def test_the_command_checks_its_answers(tmp_path: Path) -> None:
    # Two threads of OpenBLAS wait for each other in each small product while other tests run.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, FILE], cwd=tmp_path, env=environment, capture_output=True, timeout=300
    )
    assert process.returncode == 0, process.stderr.decode()
    last = process.stdout.decode().splitlines()[-1]
    assert re.fullmatch(r"All tokens equal the oracle's\. Number of preemptions: [1-9]\d*\.", last)
