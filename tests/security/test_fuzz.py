"""Fuzz every file that is read with thousands of structured mutations of valid JSON.

Each case is either accepted or refused by an error of mie, within a second of CPU time and 200 MB.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
from hostile_files import VIEWS, model_directory, safetensors, story, write_shards
from measured import Measured, Zygote
from mutations import mutated, nudged, text_of

import mie.cli
from mie.checkpoint.locate import BUNDLED_DIRECTORY

ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CONFIG = {
    **tiny_models.LLAMA,
    "rope_scaling": ROPE,
    "sliding_window": None,
    "bos_token_id": 1,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def simulated_run(path: Path) -> list[str]:
    """Return the lines of a log with many steps and a preemption."""
    load = ["--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "24"]
    load += ["--num-blocks", "8"]
    device = ["--device", "a10g", "--model-shape", "TinyLlama-1.1B"]
    assert mie.cli.main(["bench", "throughput", *device, *load, "--trace", str(path)]) == 0
    return path.read_text().splitlines()


class Files:
    """Directories whose files are mutated."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = model_directory(root / "model", rope_scaling=ROPE)
        self.header = model_directory(root / "header")
        self.weights = (self.header / "model.safetensors").read_bytes()
        self.shards = model_directory(root / "shards")
        self.weight_map = write_shards(self.shards)
        self.tokenizer = root / "tokenizer"
        shutil.copytree(BUNDLED_DIRECTORY, self.tokenizer)
        name = self.tokenizer / "tokenizer_config.json"
        self.tokenizer_config = json.loads(name.read_text())
        self.logs = [story(root), simulated_run(root / "run.jsonl")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("fuzz"))


Case = Callable[[Zygote, Files, random.Random], Measured]


def load(zygote: Zygote, directory: Path, draw: random.Random) -> Measured:
    """Load or inspect the file."""
    if draw.random() < 0.7:
        return zygote.run("generate", directory)
    check = ["--check"] if draw.random() < 0.5 else []
    return zygote.run("cli", "inspect", *check, directory)


def config(zygote: Zygote, files: Files, draw: random.Random) -> Measured:
    (files.model / "generation_config.json").unlink(missing_ok=True)
    (files.model / "config.json").write_text(text_of(mutated(CONFIG, draw), draw))
    return load(zygote, files.model, draw)


def generation_config(zygote: Zygote, files: Files, draw: random.Random) -> Measured:
    values = {"eos_token_id": [2, 3], "bos_token_id": 1, "temperature": 0.6, "top_k": 20}
    (files.model / "config.json").write_text(json.dumps(CONFIG))
    text = text_of(mutated(values, draw), draw)
    (files.model / "generation_config.json").write_text(text)
    return load(zygote, files.model, draw)


def header(zygote: Zygote, files: Files, draw: random.Random) -> Measured:
    (size,) = struct.unpack("<Q", files.weights[:8])
    values = json.loads(files.weights[8 : 8 + size])
    names, data = list(values), files.weights[8 + size :]
    draw.shuffle(names)  # which has no effect
    values = {name: values[name] for name in names}
    text = text_of(mutated(values, draw) if draw.random() < 0.9 else values, draw)
    if draw.random() < 0.1:
        data = data[: draw.randrange(len(data))]
    (files.header / "model.safetensors").write_bytes(safetensors(text, data))
    return load(zygote, files.header, draw)


def index(zygote: Zygote, files: Files, draw: random.Random) -> Measured:
    values = {"metadata": {"total_size": 0}, "weight_map": files.weight_map}
    text = text_of(mutated(values, draw), draw)
    (files.shards / "model.safetensors.index.json").write_text(text)
    return load(zygote, files.shards, draw)


def tokenizer_config(zygote: Zygote, files: Files, draw: random.Random) -> Measured:
    text = text_of(mutated(files.tokenizer_config, draw), draw)
    (files.tokenizer / "tokenizer_config.json").write_text(text)
    return zygote.run("tokenizer", files.tokenizer)


def trace(zygote: Zygote, files: Files, draw: random.Random) -> Measured:
    lines = list(draw.choice(files.logs))
    for _ in range(draw.choice([1, 1, 2])):
        at = draw.randrange(len(lines)) if draw.random() < 0.8 else 0
        is_plain = draw.random() < 0.6  # so that the content is wrong, and not the form
        keep = ("step", "version")
        fields = json.loads(lines[at])
        changed = nudged(fields, draw, keep) if is_plain else mutated(fields, draw)
        lines[at] = text_of(changed, draw)
    if draw.random() < 0.2:
        at = draw.randrange(1, len(lines) - 1)
        lines[at : at + 2] = draw.choice([[], lines[at : at + 1] * 2, lines[at : at + 2][::-1]])
    path = files.root / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    out = str(files.root / "out.json")
    command = [out if word == "OUT" else word for word in draw.choice(VIEWS)]
    return zygote.run("cli", *command, path)


CASES: list[Case] = [
    *(config, config, header, header, trace, trace),
    *(generation_config, index, tokenizer_config),
]


def fuzz(zygote: Zygote, files: Files, seed: int, count: int) -> None:
    """Run some cases. A failure names the seed that reproduces it alone."""
    for number in range(seed * count, (seed + 1) * count):
        draw = random.Random(number)
        case = CASES[number % len(CASES)]
        result = case(zygote, files, draw)
        try:
            result.check_cost()
            assert "\x1b" not in result.stdout + result.stderr
            assert len(result.message) + len(result.stderr) < 4000
        except AssertionError as error:
            raise AssertionError(f"case {number}, {case.__name__}: {error}") from error


def test_one_hundred_mutations(zygote: Zygote, files: Files) -> None:
    fuzz(zygote, files, 0, 100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_five_thousand_mutations(zygote: Zygote, files: Files, seed: int) -> None:
    fuzz(zygote, files, seed, 200)


@pytest.mark.parametrize("case", dict.fromkeys(CASES), ids=lambda case: case.__name__)
def test_mutations_are_both_accepted_and_refused(zygote: Zygote, files: Files, case: Case) -> None:
    """A fuzz run that accepts or refuses everything tests nothing."""
    verdicts = set()
    for number in range(60):
        result = case(zygote, files, random.Random(number))
        verdicts.add(bool(result.error or result.code))
        if len(verdicts) == 2:
            return
    raise AssertionError(f"refused: {verdicts}")
