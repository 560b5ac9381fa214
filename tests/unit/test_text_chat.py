"""ChatTemplate: where it is found, how it renders, and that nothing in it can run away."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mie.errors import ChatTemplateError, RequestError, TokenizerError
from mie.text.chat import ChatTemplate, checked_messages

HELLO = [{"role": "user", "content": "hello"}]
CHATML = """{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""


def render(template: str, messages: Any = HELLO, **variables: Any) -> str:
    return ChatTemplate(template).render(messages, **variables)


# Where it is found


def test_the_jinja_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "config", "bos_token": "<s>"})
    )
    assert ChatTemplate.load(tmp_path).render(HELLO) == "file <s>"


def test_then_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert ChatTemplate.load(tmp_path).render(HELLO) == "config"


def test_of_a_list_the_default_or_the_one_asked_for(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert ChatTemplate.load(tmp_path).render(HELLO) == "D"
    assert ChatTemplate.load(tmp_path, "tool_use").render(HELLO) == "T"
    with pytest.raises(ChatTemplateError, match=r"'rag'.*there are others: default, tool_use"):
        ChatTemplate.load(tmp_path, "rag")


def test_then_the_folder_of_more_templates(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("more")
    assert ChatTemplate.load(tmp_path).render(HELLO) == "more"


def test_without_any_the_error_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate.load(tmp_path)
    for part in ("chat_template.jinja", "tokenizer_config.json", "additional_chat_templates"):
        assert part in str(caught.value)
    assert "Put a jinja2 template into" in str(caught.value)


@pytest.mark.parametrize("templates", [5, [{"name": "default"}], [{"name": "a", "template": 1}]])
def test_a_malformed_entry_in_the_config_is_named(tmp_path: Path, templates: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template must be"):
        ChatTemplate.load(tmp_path)


def test_a_template_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja is not UTF-8"):
        ChatTemplate.load(tmp_path)


# How it renders


def test_blocks_leave_no_blank_lines() -> None:
    assert render(CHATML, [{"role": "user", "content": " hi "}]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, add_generation_prompt=False).endswith("hello<|im_end|>\n")


def test_special_tokens_and_variables_are_known_by_name() -> None:
    template = ChatTemplate("{{ bos_token }}{{ thinking }}", special_tokens={"bos_token": "<s>"})
    assert template.render(HELLO, thinking="on") == "<s>on"
    assert template.render(HELLO, bos_token="<b>") == "<b>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{% endfor %}", "1True"),
        ("{% set n = namespace(s='a') %}{% set n.s = n.s ~ 'b' + 'c' %}{{ n.s }}", "abc"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') ~ f(messages[0].role) }}", "[a][user]"),
        ("{{ messages[0]['content'].split('l')[0].strip() | upper }}", "HE"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ '%s-%03d' | format('a', 7) }}{{ '%5.1f' % 2 }}", "a-007  2.0"),
        ("{{ '{:>4}'.format('x') }}{{ '{a}'.format_map({'a': 1}) }}", "   x1"),
        ("{{ messages[0].content[1:3] }}{{ messages[::-1] | length }}", "el1"),
        ("{{ 'a' * 3 }}{{ 2 ** 10 }}{{ 7 // 2 }}", "aaa10243"),
        ("{{ 'a,b'.replace(',', ';') }}{{ '-'.join(['x', 'y']) }}", "a;bx-y"),
        ("{{ 'x\ny' | indent(2) }}", "x\n  y"),
        ("{{ tools is none }}{{ documents is none }}{{ nothing is defined }}", "TrueTrueFalse"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for c in [1, [2]] recursive %}{{ c if c is number else loop(c) }}{% endfor %}", "12"),
        (
            "{% set n = namespace(s=1) %}{% for i in range(99) %}"
            "{% set n.s = namespace(a=n.s, b=n.s) %}{% endfor %}{{ n.s }}",
            "<namespace>",
        ),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
    ],
)
def test_what_templates_use_works(template: str, expected: str) -> None:
    assert render(template) == expected


def test_a_long_conversation_is_well_within_the_allowance() -> None:
    messages = [{"role": "user", "content": "word " * 400}] * 1000
    assert len(render(CHATML, messages)) > 2_000_000


def test_the_allowance_is_new_for_each_rendering() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}")
    assert [template.render(HELLO) for _ in range(8)] == ["hello"] * 8


# What goes wrong


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(ChatTemplateError, match="refused the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "not a jinja2 template: line 1"),
        ("\n{{ x | nothing }}", "line 2: No filter named 'nothing'"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{% include 'other' %}", "failed: TypeError: no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 'a'.expandtabs(10**10) }}", "unsafe"),
        ("{{ {}.fromkeys('ab') }}", "unsafe"),
        ("{{ (1).to_bytes(10**10, 'big') }}", "unsafe"),
        ("{{ dict.update(messages[0], {'role': 'x'}) }}", "unsafe"),
        ("{{ [1] | tojson(indent=10**9) }}", "indent must be"),
        ("{{ [1] | tojson(separators=['x' * 99, 'y']) }}", "separators"),
        ("{{ strftime_now('%1000000000Y') }}", "widths are not supported"),
        ("{{ '(' * 5000 }}" + "{{ " + "(" * 5000, "not a jinja2 template|cannot be compiled"),
        ("x" * 2_000_000, "has 2,000,000 characters; the limit is"),
    ],
)
def test_a_template_that_fails_says_so(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(template)


MEGABYTE = "{% set s = 'a' * 1000000 %}"
RUNAWAYS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "loops over one list": "{% set l = [1] * 999 %}{% for i in l %}{% for j in l %}{% for k in l %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a long text, often": "{% for i in range(99999) %}" + "long text " * 9999 + "{% endfor %}",
    "a long text, often, in a set": "{% set x %}{% for i in range(99999) %}"
    + "long text " * 9999
    + "{% endfor %}{% endset %}",
    "a long list, often": "{% set l = [1] * 99999 %}{% for i in range(9999) %}{{ l }}{% endfor %}",
    "one long text, many ~": MEGABYTE + "{{ " + "s ~ " * 9999 + "s }}",
    "a long format": MEGABYTE + "{{ ('%' ~ '9' * 9 ~ 'd') % 1 }}",
    "in a set": "{% set x %}{% for i in range(99999) %}{% for i in range(999) %}aaaa{% endfor %}"
    "{% endfor %}{% endset %}",
    "recursive loop": "{% set l = [1] * 9999 %}{% for x in l recursive %}"
    "{{ loop(l) if loop.depth < 9 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "filters": "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "lazy filters": "{{ range(99999) | map('string') | map('length') | list | length }}" * 99,
    "comparisons": MEGABYTE + "{% for i in range(99999) %}{{ 'b' in s }}{% endfor %}",
    "tests": MEGABYTE + "{% for i in range(99999) %}{{ s is eq s }}{% endfor %}",
    "slices": MEGABYTE + "{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    "repetition": "{{ 'a' * 10**10 }}",
    "repetition of a list": "{{ 10**10 * [1] }}",
    "doubling by ~": "{% set n = namespace(s='a') %}{% for i in range(99) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by +": "{% set n = namespace(s='a') %}{% for i in range(99) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "lists of lists": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}"
    "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "tuples": "{% set n = namespace(s=(1,)) %}{% for i in range(99) %}"
    "{% set n.s = (n.s, n.s) %}{% endfor %}",
    "dicts": "{% set n = namespace(s={}) %}{% for i in range(99) %}"
    "{% set n.s = {1: n.s, 2: n.s} %}{% endfor %}",
    "powers": "{{ 10 ** 100000 % 7 }}",
    "squares": "{% set n = namespace(s=7) %}{% for i in range(99) %}"
    "{% set n.s = n.s * n.s %}{% endfor %}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent precision": "{{ '%.999999999f' % 1 }}",
    "percent, width as argument": "{{ '%*d' % (10**10, 1) }}",
    "percent, one long value often": MEGABYTE + "{{ ('%(s)s' * 9999) % {'s': s} }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format, width as argument": "{{ '{:>{}}'.format(1, 10**10) }}",
    "format, one long value often": MEGABYTE + "{{ ('{0}' * 9999).format(s) }}",
    "format_map": MEGABYTE + "{{ ('{s}' * 9999).format_map({'s': s}) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "replace": MEGABYTE + "{{ s.replace('a', s) }}",
    "replace filter": MEGABYTE + "{{ s | replace(new=s, old='a') }}",
    "join": MEGABYTE + "{{ s.join(s) }}",
    "join filter": MEGABYTE + "{{ range(99999) | join(s) }}",
    "join filter, lazy": MEGABYTE + "{{ range(99999) | map('string') | join(d=s) }}",
    "indent": "{{ ('\n' * 1000000) | indent(1000000) }}",
}

RENDER_ALL = """
import json, resource, sys, time
from mie.text.chat import ChatTemplate

resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
outcomes = {}
for name, template in json.load(sys.stdin).items():
    began = time.process_time()
    try:
        outcome = ChatTemplate(template).render([{"role": "user", "content": "hello"}])[:80]
    except Exception as error:
        outcome = str(error)
    outcomes[name] = outcome, time.process_time() - began
json.dump(outcomes, sys.stdout)
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[str, float]]:
    """What each runaway came to in a process of 1 GiB, and the seconds of processor it took."""
    process = subprocess.run(
        [sys.executable, "-c", RENDER_ALL],
        input=json.dumps(RUNAWAYS),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return {name: tuple(outcome) for name, outcome in json.loads(process.stdout).items()}


@pytest.mark.parametrize("name", RUNAWAYS)
def test_a_template_that_runs_away_is_stopped_soon_and_in_little_memory(
    name: str, outcomes: dict[str, tuple[str, float]]
) -> None:
    outcome, seconds = outcomes[name]
    assert "did not end: it was stopped at 20," in outcome
    assert seconds < 10  # at most about 2 on a laptop


def test_it_is_stopped_off_the_main_thread_too() -> None:
    template = ChatTemplate(f"{{% if endless %}}{RUNAWAYS['nested loops']}{{% endif %}}")
    errors: list[str] = []

    def run() -> None:
        try:
            template.render(HELLO, endless=True)
        except ChatTemplateError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert template.render(HELLO) == ""  # this thread's allowance is its own
    thread.join()
    assert len(errors) == 1


# Messages


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert checked_messages([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "one\ntwo"}
    ]


def test_other_keys_are_kept_and_the_callers_messages_untouched() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    (checked,) = checked_messages([message])
    assert checked == message
    assert checked is not message


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        (None, "must be a list"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] must be an object, got str"),
        ([{"content": "x"}], r"messages\[0\] must have a role"),
        ([*HELLO, {"role": "", "content": "x"}], r"messages\[1\] must have a role"),
        ([{"role": "user"}], "content must be text or a list of text parts, got NoneType"),
        ([{"role": "user", "content": 5}], "got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "got 'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "got 'text'"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checked_messages(messages)
