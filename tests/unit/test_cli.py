"""Test the parts of the command line that need no process."""

import argparse
import re

import pytest

from mie.cli import main
from mie.cli.options import add_engine_options, add_sampling_options, sampling_params
from mie.config.params.sampling import SamplingParams
from mie.errors import ConfigError


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


def test_an_error_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "no\nsuch", "Hi"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


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
