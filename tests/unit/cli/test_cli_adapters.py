"""`mie generate`, `mie chat` and `mie run` answer with an adapter of ``--lora-modules``."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import random_adapter, write_peft

from mie import LLM, LoRARequest, SamplingParams
from mie.cli import main

SHAPES = {
    f"model.layers.{layer}.self_attn.{name}.weight": np.zeros((rows, 256), np.float32)
    for layer in range(4)
    for name, rows in (("q_proj", 256), ("v_proj", 128))
}
PROMPTS = ["Once upon a time", "One day"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("poet", "clerk")):
        write_peft(tmp_path / name, random_adapter(SHAPES, number, size=2.0), lora_alpha=16)
    return tmp_path


def test_the_first_adapter_answers_unless_lora_names_another(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = [f"{name}={folder}/{name}" for name in ("poet", "clerk")]
    options = ["--backend", "numpy", "--num-blocks", "64", "--temperature", "0"]
    options += ["--max-tokens", "6", "--enable-lora", "--lora-modules", *modules]

    def printed(*words: str) -> str:
        assert main([*words, *options]) == 0
        return capsys.readouterr().out

    llm = LLM("bundled", enable_lora=True, max_loras=2, backend="numpy", num_blocks=64)
    poet, clerk = (LoRARequest(n, i, f"{folder}/{n}") for i, n in ((1, "poet"), (2, "clerk")))
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    params = SamplingParams(**greedy)
    first, other, plain = (
        [each.outputs[0].text for each in llm.generate(PROMPTS, params, False, lora_request=own)]
        for own in (poet, clerk, None)
    )
    assert first != other != plain != first
    assert printed("generate", PROMPTS[0]) == first[0] + "\n"
    lines = printed("generate", *PROMPTS, "--json", "--lora", "clerk").splitlines()
    assert [json.loads(line)["text"] for line in lines] == other
    params = SamplingParams(**{**llm.generation_config.conversation, **greedy})
    message = [{"role": "user", "content": "Hello"}]
    answers = [
        llm.chat(message, params, False, lora_request=own)[0].outputs[0].text.strip()
        for own in (poet, clerk)
    ]
    assert answers[0] != answers[1]
    assert printed("chat", "--prompt", "Hello").strip() == answers[0]
    assert printed("run", "bundled", "Hello", "--lora", "clerk").strip() == answers[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "Once", "--enable-lora"], "--enable-lora and --lora need an adapter here"),
        (["chat", "--lora", "a"], "--enable-lora and --lora need an adapter here"),
        (
            ["run", "bundled", "--lora", "b", "--enable-lora", "--lora-modules", "a=p", "c=p"],
            "--lora is 'b'; --lora-modules has a, c",
        ),
        (["generate", "Once", "--lora-modules", "a=p"], "lora_modules needs enable_lora=True"),
        (["generate", "Once", "--lora-modules", "a"], "an adapter is name=path"),
        (["bench", "latency", "--enable-lora"], "prompts of this command name no adapter"),
        (
            ["batch", "in", "out", "--lora-modules", "a=p"],
            "prompts of this command name no adapter",
        ),
    ],
)
def test_an_adapter_that_is_missing_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
