"""Test ``mie generate`` as a process: its output, and its refusals of bad input."""

import fcntl
import json
import os
import pty
import shlex
import signal
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from command_line import COMMAND, ENVIRONMENT, NUMBERS, PATIENCE, NarrowPipe, error_line, mie, start

from mie import LLM, RequestOutput, SamplingParams

GREEDY = ("--temperature", "0", "--max-tokens", "12")
LONG = ("--ignore-eos", "--max-tokens", "120")


@pytest.fixture(scope="module")
def outputs() -> list[RequestOutput]:
    """The answers of the library to two prompts."""
    prompts = ["Once upon a time", "One day"]
    params = SamplingParams(temperature=0, max_tokens=12)
    return LLM("bundled").generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def answers(outputs: list[RequestOutput]) -> dict[str, str]:
    """The texts, by prompt."""
    return {output.prompt or "": output.outputs[0].text for output in outputs}


def json_lines(text: bytes) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


# Output.


def test_one_prompt_is_answered_and_counted(outputs: list[RequestOutput]) -> None:
    process = mie("generate", *GREEDY, "--block-size", "4", "Once upon a time")
    assert process.returncode == 0
    assert process.stdout.decode() == outputs[0].outputs[0].text + "\n"
    numbers = NUMBERS.fullmatch(process.stderr.decode().strip())
    assert numbers is not None
    assert numbers["requests"] == "1"
    assert numbers["tokens"] == "12"
    num_in_cache = len(outputs[0].prompt_token_ids) + 11  # the last token is never fed back
    assert int(numbers["blocks"]) == -(-num_in_cache // 4)


@pytest.mark.slow
def test_the_first_token_comes_before_the_others() -> None:
    pipe = NarrowPipe()
    with start("generate", *LONG, "Once upon a time", stdout=pipe.writer) as process:
        pipe.close_writer()
        pipe.wait_for_bytes(process)
        assert process.poll() is None
        assert len(pipe.read()) > 100
        assert process.wait(PATIENCE) == 0


def test_several_answers_are_printed_in_order_under_their_titles(answers: dict[str, str]) -> None:
    process = mie("generate", *GREEDY, "Once upon a time", "One day")
    expected = "".join(f"=== {prompt}\n{text}\n\n" for prompt, text in answers.items())
    assert process.stdout.decode() == expected
    assert NUMBERS.search(process.stderr.decode())["requests"] == "2"


def test_json_lines_have_every_field() -> None:
    process = mie(
        *("generate", "--json", "--n", "2", "--seed", "5", "--logprobs", "2", "--max-tokens", "40"),
        *("--temperature", "1.5", "--ignore-eos"),
        "Once upon a time",
    )
    lines = json_lines(process.stdout)
    assert [line["index"] for line in lines] == [0, 1]
    for line in lines:
        assert line["prompt"] == "Once upon a time"
        assert len(line["token_ids"]) == len(line["logprobs"]) == 40
        assert line["finish_reason"] == "length"
        assert line["stop_reason"] is None
        assert line["num_cached_tokens"] == 0
        assert line["metrics"]["time_to_first_token"] > 0
        assert {"request_id", "prompt_token_ids", "cumulative_logprob"} <= line.keys()
    assert lines[0]["token_ids"] != lines[1]["token_ids"]


def test_flags_reach_the_sampler_and_a_seeded_answer_ignores_other_requests() -> None:
    flags = ("generate", "--json", "--seed", "7", "--max-tokens", "20", "--stop", ".")
    (alone,) = json_lines(mie(*flags, "Once upon a time").stdout)
    among = json_lines(mie(*flags, "One day", "Once upon a time", "Then").stdout)
    assert among[1]["token_ids"] == alone["token_ids"]
    for line in [alone, *among]:
        assert "." not in line["text"]
        assert line["finish_reason"] == "length" or line["stop_reason"] == "."


def test_chat_wraps_the_prompt_in_the_template() -> None:
    (line,) = json_lines(mie("generate", "--json", "--chat", *GREEDY, "Who are you?").stdout)
    assert line["prompt"] == "<|bos|><|user|>Who are you?<|assistant|>"
    assert line["prompt_token_ids"].count(line["prompt_token_ids"][0]) == 1  # one BOS


def batch_line(custom_id: str, url: str, **body: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def test_bad_lines_of_a_file_do_not_stop_the_others(tmp_path: Path) -> None:
    own = b'{"id": 7, "prompt": "Once upon a time", "max_tokens": 3}'
    lines = [
        b"Once upon a time",
        own,
        b'{"custom_id": "a", "prompt"',
        b"",
        b"far " * 2000,
        b"x\xff",
        b'["prompt"]\r',
        batch_line("t", "/v1/completions", prompt="x", max_token=5).encode(),
        b' {"messages": []}',
        batch_line("empty", "/v1/completions", prompt="").encode(),
    ]
    (tmp_path / "prompts.txt").write_bytes(b"\n".join(lines))
    process = mie("generate", "--json", *GREEDY, "--input", tmp_path / "prompts.txt")
    assert process.returncode == 1
    records = json_lines(process.stdout)
    served = {record["line"]: record for record in records if "text" in record}
    assert {number: record["prompt"] for number, record in served.items()} == {
        1: "Once upon a time",
        7: '["prompt"]',
    }
    assert {len(record["token_ids"]) for record in served.values()} == {12}
    errors = process.stderr.decode().splitlines()
    assert NUMBERS.fullmatch(errors.pop())["failed"] == "7"
    expected = {
        2: """has no field 'id' (write it in "body", beside "url": "/v1/completions\"""",
        3: "is not JSON",
        5: "the context holds 1024",
        6: "is not UTF-8: byte 0xff",
        8: "did you mean 'max_tokens'?",
        9: "has no field 'messages'",
        10: "prompt is empty",
    }
    said = iter(record["error"] for record in records if record.get("error"))
    for number, message in expected.items():
        (line,) = [line for line in errors if f"prompts.txt, line {number}" in line]
        assert message in line
        error = next(said)
        assert message in (error if isinstance(error, str) else error["message"])
    assert len(errors) == len(expected)
    assert len(records) == len(expected) + len(served)


@pytest.mark.slow
def test_prompts_of_a_file_are_those_of_standard_input() -> None:
    prompts = b"Once upon a time\n\nOne day\n"
    piped = mie("generate", "--json", *GREEDY, "--n", "2", "--seed", "1", stdin=prompts)
    read = mie(
        *("generate", "--json", *GREEDY, "--n", "2", "--seed", "1", "--input", "-"), stdin=prompts
    )
    records = json_lines(read.stdout)
    assert [record.pop("line") for record in records] == [1, 1, 3, 3]
    for record in (*records, *(expected := json_lines(piped.stdout))):
        del record["metrics"]
    assert records == expected


def test_an_openai_batch_file_is_answered_in_its_own_form(tmp_path: Path) -> None:
    chat, completions = "/v1/chat/completions", "/v1/completions"
    question = [{"role": "user", "content": "Who are you?"}]
    lines = [
        batch_line("chat", chat, model="bundled", messages=question, temperature=0, user="u"),
        batch_line("text", completions, prompt="One day", max_tokens=2, n=2, logprobs=1, seed=1),
        batch_line("ids", completions, prompt=[0, 300, 301], max_tokens=2, stream=False),
        batch_line(
            "top", chat, messages=question, max_completion_tokens=1, logprobs=True, top_logprobs=2
        ),
        batch_line("model", chat, model="gpt-x", messages=question),
        batch_line("url", "/v1/embeddings", input="x"),
        batch_line("stream", chat, messages=question, stream=True),
        batch_line("texts", completions, prompt=["One", "Two"]),
        batch_line("empty", chat, prompt="x"),
    ]
    (tmp_path / "batch.jsonl").write_text("\n".join(lines))
    process = mie("generate", "--json", "--input", tmp_path / "batch.jsonl")
    assert process.returncode == 1
    records = json_lines(process.stdout)
    assert [record["custom_id"] for record in records] == [
        json.loads(line)["custom_id"] for line in lines
    ]
    assert all(record["error"] is None for record in records[:4])
    bodies = [record["response"]["body"] for record in records[:4]]
    assert {record["response"]["status_code"] for record in records[:4]} == {200}
    assert [body["object"] for body in bodies[:2]] == ["chat.completion", "text_completion"]
    assert "I am the tiny story model" in bodies[0]["choices"][0]["message"]["content"]
    assert bodies[0]["choices"][0]["finish_reason"] == "stop"
    assert [choice["index"] for choice in bodies[1]["choices"]] == [0, 1]
    assert len(bodies[1]["choices"][0]["logprobs"]["tokens"]) == 2
    assert bodies[1]["usage"]["completion_tokens"] == 4
    assert bodies[2]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (token,) = bodies[3]["choices"][0]["logprobs"]["content"]
    assert len(token["top_logprobs"]) >= 2
    for record, message in zip(
        records[4:],
        (
            "model 'gpt-x' is not loaded; this run uses 'bundled'",
            "url must be '/v1/chat/completions' or '/v1/completions', got '/v1/embeddings'",
            "stream must be false in a batch",
            "give each text its own line",
            "a body for /v1/chat/completions needs messages",
        ),
        strict=True,
    ):
        assert record["response"] is None
        assert message in record["error"]["message"]


@pytest.mark.slow
def test_a_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(b"One day\n")
    terminal, stderr = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 25, 80, 0, 0))  # rows, columns
    one = ("generate", "--max-tokens", "1", "--input", tmp_path / "prompts.txt")
    with start(*one, stderr=stderr) as process:
        os.close(stderr)
        process.stdout.read()
        assert process.wait(PATIENCE) == 0
    assert b"generating: 100%" in os.read(terminal, 100_000)
    os.close(terminal)


# Errors.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("far " * 2000,), "the context holds 1024"),
        (("--max-tokens", "0", "Hi"), "max_tokens must be an integer at least 1; got 0"),
        (("--model", "./no/such", "Hi"), "model './no/such' does not exist"),
        (("--system", "Be brief.", "Hi"), "--system needs --chat"),
        (("--input", "no-such-file"), "cannot read no-such-file"),
        (("--input", "-", "Hi"), "--input cannot be combined with"),
        (("Hi", ""), "prompt 2 is empty"),
        ((), "standard input is empty"),
    ],
)
def test_a_refusal_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in error_line(mie("generate", *arguments))


def test_prompts_that_are_not_utf8_are_named() -> None:
    line = error_line(mie("generate", stdin=b"Once upon a time\nfaux pas \xe9t\xe9\n"))
    assert "standard input, line 2 is not UTF-8: byte 0xe9 at column 10" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--temprature=0", "Hi"), "unknown option --temprature; did you mean --temp"),
        (("bench", "thruput"), "argument NAME: invalid choice 'thruput'; did you mean throughput?"),
        (("abacus",), "invalid choice 'abacus' (choose from run, pull, "),
        (("--versoin", "doctor"), "unknown option --versoin; did you mean --version?"),
    ],
)
def test_misspelt_commands_and_options_suggest_the_nearest_name(arguments, message) -> None:
    process = mie(*arguments)
    assert process.returncode == 2
    assert message in process.stderr.decode()


@pytest.mark.parametrize(
    "arguments",
    [("Once upon a time",), pytest.param(("--json", "One", "Two"), marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_a_closed_pipe_ends_it_quietly(arguments: tuple[str, ...]) -> None:
    pipe = NarrowPipe()
    with start("generate", *LONG, *arguments, stdout=pipe.writer) as process:
        pipe.close_writer()
        if len(arguments) == 1:
            pipe.wait_for_bytes(process)
        pipe.close_reader()
        errors = process.stderr.read()
        assert process.wait(PATIENCE) == 141
    assert errors == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.slow
def test_a_full_disk_gives_one_line() -> None:
    with open("/dev/full", "wb") as full, start("generate", *GREEDY, "Hi", stdout=full) as process:
        errors = process.stderr.read().decode()
        assert process.wait(PATIENCE) == 2
    assert errors == "mie: error: standard output cannot be written: No space left on device\n"


@pytest.mark.slow
def test_repeated_prompts_and_preemptions_are_counted() -> None:
    small = ("--num-blocks", "12", "--block-size", "4", "--watermark", "0")
    process = mie("generate", "--ignore-eos", "--max-tokens", "30", *small, "Hello", "Hello there")
    numbers = NUMBERS.search(process.stderr.decode())
    assert int(numbers["preemptions"]) >= 1
    assert process.returncode == 0


@pytest.mark.slow
def test_a_closed_standard_error_is_not_an_error(outputs: list[RequestOutput]) -> None:
    command = shlex.join([*COMMAND, "generate", *GREEDY, "Once upon a time"])
    process = subprocess.run(
        f"{command} 2>&-",
        shell=True,
        capture_output=True,
        env=ENVIRONMENT,
        check=True,
        timeout=PATIENCE,
    )
    assert process.stdout.decode() == outputs[0].outputs[0].text + "\n"


def test_an_interrupt_prints_the_numbers_so_far() -> None:
    pipe = NarrowPipe()
    with start("generate", *LONG, "Once upon a time", stdout=pipe.writer) as process:
        pipe.close_writer()
        pipe.wait_for_bytes(process)
        process.send_signal(signal.SIGINT)
        assert pipe.read()
        errors = process.stderr.read().decode()
        assert process.wait(PATIENCE) == 130
    assert "Traceback" not in errors
    assert NUMBERS.search(errors)["requests"] == "0"
    assert errors.endswith("mie: interrupted\n")
