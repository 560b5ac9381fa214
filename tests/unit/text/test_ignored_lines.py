"""Test lines that are left out of system messages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from mie import LLM, SamplingParams
from mie.config.engine_args import EngineArgs
from mie.errors import ConfigError, RequestError
from mie.text.ignored_lines import without_lines
from mie.text.renderer import TemplateRenderer

LINE = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
PATTERN = "^x-anthropic-billing-header: "
USER = {"role": "user", "content": f"{LINE}\nHello"}


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


def system(content: Any, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (f"{LINE}\nYou mend programs.", "You mend programs."),
        (f"You mend programs.\n{LINE}", "You mend programs."),
        (f"You mend\n{LINE}\nprograms.", "You mend\nprograms."),
        (f"\n{LINE}\n\nYou", "\n\nYou"),
        (f"You. {LINE}", f"You. {LINE}"),
        ([part(LINE), part("You."), LINE, "Mend."], [part("You."), "Mend."]),
        ([part(f"{LINE}\nYou.")], [part("You.")]),
        ([{"type": "image"}, 7], [{"type": "image"}, 7]),
        ("", ""),
        ([], []),
        (None, None),
        (7, 7),
        (f"{LINE}{'x' * 1024}", f"{LINE}{'x' * 1024}"),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_line_leaves_a_system_message(
    renderer: TemplateRenderer, content: Any, kept: Any, role: str
):
    given = [system(content, role), USER]
    before = copy.deepcopy(given)
    assert without_lines(given, PATTERN, renderer.ask) == [system(kept, role), USER]
    assert given == before


def test_a_message_without_any_other_line_leaves(renderer: TemplateRenderer):
    given = [system(LINE), system([part(LINE), part(f"{LINE}\n{LINE}")]), USER]
    assert without_lines(given, PATTERN, renderer.ask) == [USER]


@pytest.mark.parametrize("given", [[], [USER], ["Hello"], "Hello", 7, [{"role": ["system"]}]])
def test_what_has_no_system_message_is_as_before(renderer: TemplateRenderer, given: Any):
    assert without_lines(given, PATTERN, renderer.ask) == given


def test_a_regex_that_does_not_end_fails_one_request(renderer: TemplateRenderer):
    with pytest.raises(RequestError, match=r"ignore_prompt_lines '\(a\+\)\+\$' took too much time"):
        without_lines([system("a" * 200 + "b")], "(a+)+$", renderer.ask)
    assert without_lines([system("a\nb")], "(a+)+$", renderer.ask) == [system("b")]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", r"must be a regex in Python's syntax; got '\(': missing \)"),
        (7, "must be a regex in Python's syntax; got 7"),
        ("a*", "'a\\*' is found in an empty line"),
        ("", "'' is found in an empty line"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(pattern: Any, message: str):
    with pytest.raises(ConfigError, match=f"ignore_prompt_lines {message}"):
        EngineArgs("bundled", ignore_prompt_lines=pattern)


def test_a_chat_with_another_line_reads_the_same_prompt():
    llm = LLM("bundled", num_threads=1, num_blocks=64, ignore_prompt_lines=PATTERN)
    rest = "You tell stories of Mia the otter, the mill and a bell, in short sentences."
    params = SamplingParams(max_tokens=1, temperature=0)
    cached = []
    for cch in ("fa690", "71fea"):
        messages = [system(f"{LINE.replace('fa690', cch)}\n{rest}"), {**USER, "content": "Hello"}]
        [output] = llm.chat(messages, params, use_tqdm=False)
        cached.append(output.num_cached_tokens)
    assert llm.chat_prompt(messages) == llm.chat_prompt([system(rest), messages[1]])
    assert cached == [0, 16], "one block is full"
