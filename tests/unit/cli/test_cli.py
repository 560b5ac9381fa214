"""Test the parts of the command line that need no process."""

import argparse
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from audit import actions_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mie.cli import COMMANDS, chat, main, new_parser
from mie.cli.options import add_engine_options, add_sampling_options, sampling_params
from mie.config.engine_args import EngineArgs
from mie.config.params.sampling import SamplingParams
from mie.config.settings import settings_of
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


def test_a_conversation_plans_memory_for_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def refuse(args: argparse.Namespace, **more: Any) -> None:
        given.append(more)
        raise ConfigError("nothing is loaded")

    monkeypatch.setattr(chat, "load_llm", refuse)
    for options in ([], ["--max-num-seqs", "4"], ["--reasoning-parser", "none"]):
        assert main(["chat", "--prompt", "Hi", *options]) == 2
    assert [sorted(each) for each in given] == [
        ["max_num_seqs", "reasoning_parser"],
        ["reasoning_parser"],
        ["max_num_seqs"],
    ]
    assert given[0]["max_num_seqs"] == 1


def test_a_requests_own_parameters_take_precedence() -> None:
    params = sampling_params(parsed("--temperature", "0.5"), {"temperature": 0, "max_tokens": 3})
    assert params == SamplingParams(temperature=0, max_tokens=3)
    with pytest.raises(ConfigError, match="did you mean 'max_tokens'"):
        sampling_params(parsed(), {"max_token": 3})


def test_an_error_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "no\nsuch", "Hi"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def commands_of(parser: argparse.ArgumentParser, *words: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command, without those that have commands of their own."""
    inner = [each for each in actions_of(parser) if isinstance(each.choices, dict)]
    if not inner:
        yield words
    for action in inner:
        for word, each in action.choices.items():
            yield from commands_of(each, *words, word)


LEAVES = list(commands_of(new_parser()))


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_a_usage_is_short_and_the_help_of_many_options_shows_few(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    usage = shown.partition("\n\n")[0]
    assert usage.count("\n") < 4
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, re.MULTILINE)
    if "--help-all" in options:
        assert 5 <= len(options) <= 7
    assert main([*words, "--no-such-option"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") < 6
    assert "unknown option --no-such-option" in error or "required" in error


def test_the_commands_with_most_options_have_a_short_help() -> None:
    many = {words for words in LEAVES if {"generate", "serve", "batch", "chat"} & {*words}}
    assert all(_shows_few(words) for words in many if words[0] != "sim")


def _shows_few(words: tuple[str, ...]) -> bool:
    parser: Any = new_parser()
    for word in words:
        [action] = [each for each in actions_of(parser) if isinstance(each.choices, dict)]
        parser = action.choices[word]
    return bool(parser.first)


@pytest.mark.parametrize("words", [(), ("bench",), ("sim",)])
def test_a_command_of_commands_alone_prints_its_help(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(" ".join(["usage: mie", *words]))
    assert not captured.err
    assert main([*words, "--help"]) == 0
    assert capsys.readouterr().out == captured.out


INTEGERS = [
    name
    for name, _, declared in settings_of(EngineArgs)
    if declared.kind == "integer" and not declared.alias_of and name != "seed"
]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1k", 1000), ("1K", 1024), ("25.6k", 25_600), ("2m", 2_000_000), ("2M", 2 << 20)),
        *(("1g", 10**9), ("1G", 1 << 30), ("3t", 3 * 10**12), ("3T", 3 << 40), (" 7 ", 7)),
        ("-1", -1),
    ],
)
def test_integers_have_vllms_units(name: str, text: str, value: int) -> None:
    args = parsed(f"--{name.replace('_', '-')}={text}")
    assert getattr(args, name) == value


@pytest.mark.parametrize(
    "text", ["1.5K", "1.0001k", "k", "1kk", "1 k", "1kb", "1e3", "٣k", "9" * 5000]
)
def test_other_units_are_refused_with_an_example(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--max-model-len", text, "Hi"]) == 2
    error = capsys.readouterr().err
    assert "argument --max-model-len" in error
    assert "such as 4096, 4k (4,000) or 4K (4,096)" in error or "take no decimals" in error
    assert len(error) < 400


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


def test_a_shortened_option_is_refused_with_its_whole_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "bundled", "--temp", "0", "Hi"]) == 2
    assert "unknown option --temp; did you mean --temperature?" in capsys.readouterr().err


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands, and of the commands of commands."""
    inner = [each for each in actions_of(parser) if isinstance(each.choices, dict)]
    for action in inner:
        for each in action.choices.values():
            yield from leaves(each)
    if not inner:
        yield parser


class Refused(Exception):
    pass


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_of_any_command_may_be_shortened(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(parser: argparse.ArgumentParser, message: str) -> None:
        raise Refused(message)

    monkeypatch.setattr(argparse.ArgumentParser, "error", refuse)
    tested: set[str] = set()
    for parser in leaves(new_parser([command])):
        parser.usage = "it takes long to write"
        for action in actions_of(parser):
            action.required = action.required and not action.option_strings
        words = ["x"] * sum(each.required for each in actions_of(parser))
        known = {name for action in actions_of(parser) for name in action.option_strings}
        names = sorted({each for each in known if each.startswith("--")} - tested)
        for name in names[COMMANDS.index(command) % 3 :: 3]:  # commands share many options
            short = name[: len(name) // 2 + 2]
            if short not in known:
                with pytest.raises(Refused, match=f"unknown option {short}; did you mean "):
                    parser.parse_args([short, *words])
        tested |= known


ORDERS = [
    (["run"], ["bundled", "Hello", "you"], {"positional_model": "bundled"}, "prompt_words"),
    (["generate"], ["One", "two"], {}, "prompts"),
    (["batch"], ["in", "out"], {"input": "in", "output": "out"}, None),
    (["chat"], ["bundled"], {"positional_model": "bundled"}, None),
    (["rm"], ["one", "two"], {}, "models"),
]
OPTIONS = {
    "rm": [],
    "batch": [["--max-num-seqs", "3"], ["--num-threads=2"], ["--no-async-scheduling"]],
}
SAMPLING = [["--temperature", "0"], ["--top-p=0.5"], ["--ignore-eos"], ["--stop", "x"]]


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_options_and_other_words_may_come_in_any_order(data: st.DataObject) -> None:
    """The words keep their order among each other, and an option keeps its value."""
    command, words, wanted, many = data.draw(st.sampled_from(ORDERS))
    options = data.draw(st.permutations(OPTIONS.get(command[0], SAMPLING)))
    places = sorted(data.draw(st.integers(0, len(words))) for _ in options)
    line = list(words)
    for place, option in reversed([*zip(places, options, strict=True)]):
        line[place:place] = option
    found = vars(new_parser(command).parse_args([*command, *line]))
    first = vars(new_parser(command).parse_args([*command, *itertools.chain(*options), *words]))
    assert found == first
    assert found.items() >= wanted.items()
    if many is not None:
        assert found[many] == words[len(wanted) :]
