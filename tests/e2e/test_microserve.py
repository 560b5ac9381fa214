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


VOCAB = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]


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
    assert max(map(len, text.splitlines())) <= 100
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"numpy"}
    named = set(re.findall(r"\b(?:mie|tests)/[\w/]+(?:\.py)?", text)) - {"mie/assets/tiny"}
    assert len(named) >= 12
    assert [name for name in named if not (FILE.parent / name).exists()] == []


def test_twenty_answers_are_those_of_mie(microserve: ModuleType) -> None:
    """The pool is too small for all of them, so sequences are preempted and prefixes shared."""
    llm = LLM("bundled", backend="numpy")
    params = SamplingParams(temperature=0, max_tokens=16)
    expected = llm.generate(TEXTS, params, use_tqdm=False)
    engine = microserve.Engine(microserve.Model(TINY), num_blocks=24, block_size=4, budget=32)
    seqs = [microserve.Sequence(text, microserve.encode(text, VOCAB), 16) for text in TEXTS]
    for seq in seqs:
        engine.add(seq)
    num_preempted, num_holders = 0, 0
    while engine.queue:
        running = [seq for seq in engine.queue if seq.table]
        assert sum(count for _, count in engine.step()) <= 32
        num_preempted += sum(not seq.table for seq in running if seq in engine.queue)
        num_holders = max(num_holders, *engine.pool.ref_counts)
    for text, seq, output in zip(TEXTS, seqs, expected, strict=True):
        assert seq.prompt == list(output.prompt_token_ids), text
        assert seq.tokens[len(seq.prompt) :] == list(output.outputs[0].token_ids), text
    assert num_preempted > 0
    assert num_holders > 1
    assert sorted(engine.pool.free) == list(range(24))
    assert not any(engine.pool.ref_counts)


def test_its_story_is_the_one_that_mie_writes(microserve: ModuleType) -> None:
    text = FILE.read_text(encoding="utf-8")
    match = re.search(r'story = encode\("(.*?) named (.*?)"', text)
    assert match is not None
    params = SamplingParams(temperature=0, max_tokens=8)
    output = LLM("bundled", backend="numpy").generate([match[1]], params, use_tqdm=False)[0]
    assert output.outputs[0].text == f" named {match[2]}"


def test_its_tokens_are_those_of_the_library(microserve: ModuleType) -> None:
    library = LLM("bundled", backend="numpy").get_tokenizer()
    rng = random.Random(0)
    pieces = ["It's", " we'll", "\n\n", "  ", " fox", "X1_2", "'sad'", "_", " 42", "the", "?!"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        ids = microserve.encode(text, VOCAB)
        assert ids == list(library.encode(text)), text
        assert microserve.decode(ids[1:], VOCAB) == text
    with pytest.raises(AssertionError, match="café"):
        microserve.encode("café", VOCAB)


def test_a_prompt_that_can_never_fit_is_refused(microserve: ModuleType) -> None:
    engine = microserve.Engine(microserve.Model(TINY), num_blocks=2, block_size=4)
    engine.add(microserve.Sequence("A", [0, 5], 6))
    with pytest.raises(AssertionError, match="can never fit"):
        engine.add(microserve.Sequence("B", [0, 5], 7))


def test_it_reads_bfloat16_and_refuses_other_types(microserve: ModuleType, tmp_path: Path) -> None:
    numbers = np.array([[1.5, -2.0, 0.25]], np.float32)
    raw = (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    entry = {"dtype": "BF16", "shape": [1, 3], "data_offsets": [0, len(raw)]}
    for other in ("F16", "BF16"):
        header = json.dumps({"__metadata__": {}, "x": {**entry, "dtype": other}}).encode()
        header += b" " * (-len(header) % 8)
        (tmp_path / other).write_bytes(len(header).to_bytes(8, "little") + header + raw)
    assert np.array_equal(microserve.read_safetensors(tmp_path / "BF16")["x"], numbers)
    with pytest.raises(AssertionError, match="F16"):
        microserve.read_safetensors(tmp_path / "F16")


def test_the_command_checks_its_answers(tmp_path: Path) -> None:
    # Two threads of OpenBLAS wait for each other in each small product while other tests run.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, FILE], cwd=tmp_path, env=environment, capture_output=True, timeout=300
    )
    assert process.returncode == 0, process.stderr.decode()
    lines = process.stdout.decode().splitlines()
    pools = [line.split()[1] for line in lines if re.match(r" +\d", line)]
    assert {*"".join(pools)} == {*"ABCE*-."}  # D ends in the step that admits it
    assert [line[0] for line in lines[-6:-1]] == [*"ABCDE"]
    assert lines[-1] == "All tokens equal the oracle's."


PAGE = (FILE.parent / "docs/microserve.md").read_text(encoding="utf-8")
EXPERIMENTS = re.findall(r"```diff\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def output_of(text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run the text of the file, and return the lines that it prints, and the error."""
    try:
        exec(compile(text, FILE, "exec"), {"__name__": "__main__", "__file__": str(FILE)})
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return capsys.readouterr().out.splitlines()


def test_the_page_has_an_experiment_for_each_part() -> None:
    assert len(EXPERIMENTS) == PAGE.count("```diff") == 8


@pytest.mark.slow
@pytest.mark.parametrize(("diff", "printed"), [("", PAGE.split("```")[1][5:]), *EXPERIMENTS])
def test_the_experiments_of_the_page_print_its_lines(
    diff: str, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["microserve.py"])
    text = FILE.read_text(encoding="utf-8")
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, re.MULTILINE):
        before = re.sub(r"^-", "", old, flags=re.MULTILINE)
        assert text.count(before) == 1, before
        text = text.replace(before, re.sub(r"^\+", "", new, flags=re.MULTILINE))
    found = output_of(text, capsys)
    assert [line for line in printed.splitlines() if line not in found] == []
