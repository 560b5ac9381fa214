"""Test the parts of the command line that need no process."""

import argparse
import json
import re
from types import SimpleNamespace

import pytest

import mie.llm
from mie.batch.lines import Line
from mie.cli import main
from mie.cli.generate import _Printer, _title
from mie.cli.options import add_engine_options, add_sampling_options, load_llm, sampling_params
from mie.config.params.sampling import SamplingParams
from mie.errors import ConfigError
from mie.frontend.outputs import CompletionOutput


def parsed(*arguments: str, max_tokens: int | None = 256) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=max_tokens)
    return parser.parse_args(arguments)


def test_every_sampling_flag_arrives() -> None:
    flags = (
        "--max-tokens 9 --min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --n 3"
        " --seed 7 --stop a --stop b --stop-token-ids 4 --stop-token-ids 5 --ignore-eos"
        " --include-stop-str-in-output --repetition-penalty 1.1 --presence-penalty 0.2"
        " --frequency-penalty 0.3 --no-skip-special-tokens --logprobs 5"
    )
    assert sampling_params(parsed(*flags.split())) == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        n=3,
        seed=7,
        stop=["a", "b"],
        stop_token_ids=[4, 5],
        ignore_eos=True,
        include_stop_str_in_output=True,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        skip_special_tokens=False,
        logprobs=5,
    )


def test_a_requests_own_parameters_take_precedence() -> None:
    params = sampling_params(parsed("--temperature", "0.5"), {"temperature": 0, "max_tokens": 3})
    assert params == SamplingParams(temperature=0, max_tokens=3)
    with pytest.raises(ConfigError, match="did you mean 'max_tokens'"):
        sampling_params(parsed(), {"max_token": 3})


def test_every_engine_flag_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mie.llm, "LLM", lambda model, trace, **settings: (model, settings))
    flags = (
        "--model m --backend numpy --dtype float64 --max-model-len 128 --max-num-seqs 4"
        " --max-num-batched-tokens 64 --block-size 8 --num-gpu-blocks-override 32"
        " --kv-cache-memory-bytes 2MiB --no-enable-prefix-caching --no-partial-block-sharing"
        " --max-cached-blocks 9 --scheduling-policy sjf --batching static --max-prefill-chunk 5"
        " --no-enable-chunked-prefill --watermark 0.5 --preemption-mode swap --swap-space 1KiB"
        " --enforce-eager"
    )
    assert load_llm(parsed(*flags.split())) == (
        "m",
        {
            "backend": "numpy",
            "dtype": "float64",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "block_size": 8,
            "num_blocks": 32,
            "kv_cache_memory_bytes": 2 << 20,
            "enable_prefix_caching": False,
            "partial_block_sharing": False,
            "max_cached_blocks": 9,
            "scheduling_policy": "sjf",
            "batching": "static",
            "max_prefill_chunk": 5,
            "enable_chunked_prefill": False,
            "watermark": 0.5,
            "preemption_mode": "swap",
            "swap_space": 1024,
            "enforce_eager": True,
        },
    )
    assert load_llm(parsed()) == ("bundled", {})


def test_a_title_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert _title("short") == "=== short"
    assert len(_title("long " * 20)) == 40
    assert _title("long " * 20).endswith("…")


def test_an_error_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "no\nsuch", "Hi"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_table_of_too_little_memory_stays_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--num-blocks", "999999999", "Hi"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("mie: error: not enough memory")
    assert [line.split()[0] for line in lines[1:6]] == [
        "weights",
        "step",
        "KV",
        "total",
        "available",
    ]
    assert "num_blocks=" in lines[-1]


def test_the_help_of_chat_begins_with_few_options(capsys: pytest.CaptureFixture[str]) -> None:
    def options(*words: str) -> list[str]:
        assert main(["chat", *words]) == 0
        return re.findall(r"^  (--?[\w-]+)", capsys.readouterr().out, re.MULTILINE)

    first = ["--model", "--system", "--prompt", "--temperature", "--max-tokens"]
    assert options("--help") == [*first, "-h", "--help-all"]
    everything = options("--help-all")
    assert {*first, "--top-p", "--num-blocks", "--trace"} <= {*everything}
    assert main(["chat", "--top-q", "1"]) == 2
    shown = capsys.readouterr().err
    assert "usage: mie chat [options] [MODEL]" in shown
    assert "did you mean --top-p?" in shown


class FailingLLM:
    """Runs two requests. The first fails in its step, and the second is answered."""

    def __init__(self) -> None:
        self.has_work = True
        self.generation_config = SimpleNamespace(sampling={})

    def add_request(self, prompt: object, params: object, priority: int) -> str:
        return prompt["prompt"]

    def step(self) -> list[SimpleNamespace]:
        self.has_work = False
        output = SimpleNamespace(
            prompt=None, prompt_token_ids=[1], num_cached_tokens=0, metrics=None, finished=True
        )
        answer = CompletionOutput(index=0, text="well")
        return [
            SimpleNamespace(**vars(output), request_id="b", outputs=[answer], error=None),
            SimpleNamespace(**vars(output), request_id="a", outputs=[], error="ValueError: no"),
        ]


def test_a_request_that_fails_in_its_step_has_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        Line(source=f"line {i}", number=i, ids={"id": i}, request={"prompt": text})
        for i, text in enumerate("ab")
    ]
    args = argparse.Namespace(**{**vars(parsed()), "json": True, "input": "-", "n": None})
    printer = _Printer(FailingLLM(), args, lines)
    printer.print_all()
    shown = capsys.readouterr()
    failed, answered = map(json.loads, shown.out.splitlines())
    assert failed == {"id": 0, "line": 0, "error": "line 0: ValueError: no"}
    assert (answered["id"], answered["text"]) == (1, "well")
    assert shown.err == "mie: error: line 0: ValueError: no\n"
    assert printer.num_failed == 1
