"""`mie serve --models-dir`: its options, the models of a folder, and the times of `keep_alive`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from deadlines import PATIENCE
from models_folder import NAMES, PROMPT, SETTINGS, new_folder

from mie import LLM
from mie.cli import main
from mie.load.directory import ModelsDirectory
from mie.serve.ollama.protocol import seconds_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_folder(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        (90, 90),
        (1.5, 1.5),
        ("0", 0),
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        (-1, float("inf")),
        ("-1", float("inf")),
        ("-5m", float("inf")),
    ],
)
def test_the_times_of_keep_alive(given, seconds):
    assert seconds_of(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "m", "5 m", "5m!", "five", True, [], {}, "١"])
def test_what_is_no_time_is_refused(given):
    with pytest.raises(Exception, match="keep_alive must be seconds"):
        seconds_of(given)


def test_the_models_of_a_folder(tmp_path):
    for path in ("a.gguf", "mmproj-a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (tmp_path / path).touch()
    for path in ("c/c-Q4_K_M.gguf", "c/mmproj-F16.gguf", "d/x-Q4.gguf", "d/x-Q8.gguf"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    for name in ("a", "hf", ".hidden", "empty"):
        (tmp_path / name).mkdir()
    for name in ("a", "hf", ".hidden"):
        (tmp_path / name / "config.json").touch()
    found = ModelsDirectory(tmp_path, SETTINGS, 1).find()
    assert {name: path.relative_to(tmp_path).as_posix() for name, path in found.items()} == {
        "a": "a",
        "a.gguf": "a.gguf",
        "b": "b-00001-of-00002.gguf",
        "c": "c/c-Q4_K_M.gguf",
        "d/x-Q4": "d/x-Q4.gguf",
        "d/x-Q8": "d/x-Q8.gguf",
        "hf": "hf",
    }


def test_the_plan_is_the_memory_that_is_taken(folder):
    directory = ModelsDirectory(folder, {**SETTINGS, "num_blocks": None}, 8 << 20)
    for name in NAMES:
        planned = directory.plan(folder / name)
        engine = LLM(**planned.settings).engine
        sizes = engine.metrics.sizes
        assert sizes["mie:kv_bytes"] == planned.settings["kv_cache_memory_bytes"]
        assert sizes["mie:weights_bytes"] + sizes["mie:kv_bytes"] < planned.num_bytes <= 8 << 20


@pytest.fixture
def words(folder: Path) -> list[str]:
    return ["serve", "--models-dir", str(folder)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["./x"], "MODEL is for one model, and --models-dir for several"),
        (["--model", "x"], "--model is for one model"),
        (["--served-model-name", "x"], "--served-model-name is for one model"),
        (["--tokenizer", "x"], "--tokenizer is for one model"),
        (["--chat-template", "x"], "--chat-template is for one model"),
        (["--trace", "x.jsonl"], "--trace is for one model"),
        (["--replicas", "2"], "--replicas is for one model"),
        (["--models-max", "0"], "models_max must be"),
        (["--backend", "cupy"], "needs kv_cache_memory_bytes or num_blocks"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(capsys, words, more, message):
    assert main([*words, *more]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_and_options_without_one(capsys, tmp_path):
    assert main(["serve", "--models-dir", str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["serve", "--models-memory", "1GiB"]) == 2
    assert "models_memory needs models_dir" in capsys.readouterr().err


def test_the_command_serves_a_folder_until_sigterm(folder):
    """The whole program: options, the first lines, a model on demand, and the exit code."""
    options = ["--skip-tokenizer-init", "--backend", "numpy", "--num-blocks", "32"]
    command = [sys.executable, "-m", "mie", "serve", "--models-dir", str(folder), "--port", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        first = [process.stderr.readline() for _ in range(3)]
        assert first[0].startswith("[5 models in ")
        url = first[2].rstrip("]\n").rpartition(" ")[2]
        body = {"model": NAMES[3], "prompt": PROMPT, "max_tokens": 2}
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.stderr.close()
        process.wait(PATIENCE)
