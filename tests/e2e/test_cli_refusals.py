"""Give ``mie`` wrong arguments, and streams and files that cannot be written."""

from pathlib import Path
from typing import Any

import pytest
from command_line import error_line, mie, start
from deadlines import PATIENCE

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "", "--prompt", "Hi"], "model '' does not exist"),
        (["run", "", "Hi"], "model '' does not exist"),
        (["chat", "b", "--model", "a"], "MODEL is b and --model is a; give one of them"),
        (["chat", "--prompt", ""], "the prompt is empty; give it some text"),
        (["chat", "--prompt", "-"], "the prompt is empty; give it some text"),
        (
            ["generate", "--num-threads", "100000", "Hi"],
            "num_threads must be an integer in 1 … 4096",
        ),
    ],
)
def test_an_argument_without_a_meaning_is_refused(arguments: list[str], message: str) -> None:
    assert message in error_line(mie(*arguments))


@needs_full
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--trace", FULL, "Hi"], "cannot write --trace /dev/full: No space left"),
        (["batch", "{requests}", FULL], "cannot write /dev/full: it is not a regular file"),
    ],
)
def test_a_full_disk_is_named(arguments: list[Any], message: str, tmp_path: Path) -> None:
    requests = tmp_path / "requests"
    requests.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Hi"}}\n')
    assert message in error_line(mie(*[requests if x == "{requests}" else x for x in arguments]))


@needs_full
@pytest.mark.parametrize(("arguments", "code"), [(["nosuch"], 2), (["list"], 0)])
def test_errors_on_a_full_disk_do_not_change_the_exit_code(arguments: list[str], code: int) -> None:
    with FULL.open("wb") as full, start(*arguments, stderr=full) as process:
        assert process.wait(PATIENCE) == code
