"""Test ChatTemplate: where it is found, how it renders, and its limits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mie.errors import ChatTemplateError, ConfigError, RequestError, TokenizerError
from mie.text.chat import ChatTemplate, ChatTemplates, TemplateFiles
from mie.text.messages import conversation
from mie.text.renderer import TemplateRenderer

HELLO = [{"role": "user", "content": "hello"}]
CHATML = """{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""


RENDERER = TemplateRenderer()


def render(template: str, messages: Any = HELLO, **variables: Any) -> str:
    return ChatTemplate(template, renderer=RENDERER).render(messages, **variables)


def load(directory: Path, name: str | None = None) -> ChatTemplate:
    return ChatTemplates(TemplateFiles(directory)).choose(name)


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    RENDERER.close()


# Files.


def test_the_jinja_file_is_used_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "config", "bos_token": "<s>"})
    )
    assert load(tmp_path).render(HELLO) == "file <s>"


def test_the_tokenizer_config_is_used_second(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert load(tmp_path).render(HELLO) == "config"


def test_a_list_of_templates_has_a_default_and_names(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert load(tmp_path).render(HELLO) == "D"
    assert load(tmp_path, "tool_use").render(HELLO) == "T"
    templates = ChatTemplates(TemplateFiles(tmp_path))
    assert templates.render(HELLO, tools=[{"type": "function"}]) == "T"
    assert templates.render(HELLO, tools=[]) == "D"
    assert templates.render(HELLO, chat_template="own {{ tools }}", tools=[1]) == "own [1]"
    with pytest.raises(ChatTemplateError, match=r"'rag'.*there are others: default, tool_use"):
        TemplateFiles(tmp_path).read("rag")


def test_the_folder_of_templates_is_used_third(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("more")
    assert load(tmp_path).render(HELLO) == "more"


def test_a_missing_template_lists_the_places_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        load(tmp_path)
    for part in ("chat_template.jinja", "tokenizer_config.json", "additional_chat_templates"):
        assert part in str(caught.value)
    assert "Put a jinja2 template into" in str(caught.value)


@pytest.mark.parametrize("templates", [5, [{"name": "default"}], [{"name": "a", "template": 1}]])
def test_a_malformed_entry_in_the_config_is_named(tmp_path: Path, templates: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template must be"):
        load(tmp_path)


def test_a_template_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja is not UTF-8"):
        load(tmp_path)


# Rendering.


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
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
    ],
)
def test_features_that_templates_use_work(template: str, expected: str) -> None:
    assert render(template) == expected


def test_every_rendering_has_its_own_time_limit() -> None:
    busy = "{% for i in range(33333) %}{% for j in range(9) %}{% endfor %}{% endfor %}"
    assert [render(busy + "{{ messages[0].content }}") for _ in range(24)] == ["hello"] * 24


def test_an_unpaired_surrogate_passes_through() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "\ud83d"}]) == "\ud83d"


# Errors.


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
        ("{{ '(' * 5000 }}" + "{{ " + "(" * 5000, "not a jinja2 template|cannot be compiled"),
        ("x" * 131_073, "has 131,073 characters; the limit is 131,072"),
        ("{{ raise_exception('a\x1b[2J\nb\u202e') }}", r"messages: a\\x1b\[2J\\nb\\u202e$"),
    ],
)
def test_a_failing_template_is_reported(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(template)


def test_values_that_are_not_json_are_refused() -> None:
    for value in ({1, 2}, b"bytes", object()):
        with pytest.raises(RequestError, match="must be JSON values: got a value of type"):
            render("", variable=value)
    with pytest.raises(RequestError, match="must be JSON values"):
        render("", variable=10**5000)
    with pytest.raises(RequestError, match=r"bytes of JSON; the limit is 8,388,608"):
        render("", [{"role": "user", "content": "x" * (9 << 20)}])


# The parameters of LLM.chat.

PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}<{{ part.text }}>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PARTS, "openai"),
        ("{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}",
         "openai"),
        ("{% set c = messages[1:] %}{% for m in c %}{% for p in m.content | reverse %}"
         "{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% set c = m.content %}{% if c is string %}{{ c }}{% else %}"
         "{% for p in c %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}", "openai"),
        (CHATML, "string"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}",
         "string"),
        ("{{ messages[0].content }}", "string"),
        ("{% set messages = messages[1:] %}{% for m in messages %}{{ m.content }}{% endfor %}",
         "string"),
    ],
)  # fmt: skip
def test_the_content_format_is_found_in_the_template(template: str, expected: str) -> None:
    assert ChatTemplate(template, renderer=RENDERER).content_format == expected


def test_contents_have_the_format_that_the_template_expects() -> None:
    templates = ChatTemplates(TemplateFiles(Path("nowhere")))
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    texts = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": None}]
    plain = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert templates.render(parts, chat_template=PARTS) == "<a><b>"
    assert templates.render(texts, chat_template=PARTS) == "<ab>"
    assert templates.render(parts, chat_template=plain) == "[a\nb]"
    assert templates.render(texts, chat_template=plain) == "[ab][]"
    assert templates.render(
        parts, chat_template=plain, chat_template_content_format="openai"
    ).startswith("[[{'type': 'text', 'text': 'a'}")
    with pytest.raises(ConfigError, match=r"must be one of 'auto', .*got 'json'"):
        templates.render(parts, chat_template=plain, chat_template_content_format="json")


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [  # as transformers 5.23 renders them
        (CHATML, "I think", "<|im_start|>assistant\nI think"),
        (CHATML, "I think ", "<|im_start|>assistant\nI think"),  # this template trims
        ("{% for m in messages %}{{ m.content }};{% endfor %}", " so ", "hello; so "),
        ("{% for m in messages %}{{ m.content }}!{% endfor %}{{ messages[1].content }}.", "x",
         "hello!x!x"),
        (PARTS, [{"type": "text", "text": "x"}], "<hello><x"),
    ],
)  # fmt: skip
def test_a_final_message_can_be_continued(template: str, message: Any, expected: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": message}]
    text = ChatTemplates(TemplateFiles(Path("nowhere"))).render(
        messages,
        chat_template=template,
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert text.endswith(expected)


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        render(CHATML, continue_final_message=True, add_generation_prompt=True)
    for template, message, reason in [
        ("nothing", {"role": "user", "content": "x"}, "does not write the last message's text"),
        (CHATML, {"role": "user", "content": None}, "has no text to continue"),
        (CHATML, {"role": "user", "content": [{"type": "image"}]}, "has no text to continue"),
    ]:
        with pytest.raises(RequestError, match=reason):
            render(template, [message], continue_final_message=True, add_generation_prompt=False)


def test_template_kwargs_reach_the_template_and_hide_no_parameter() -> None:
    templates = ChatTemplates(TemplateFiles(Path("nowhere")))
    kwargs = {"enable_thinking": False}
    text = templates.render(
        HELLO, chat_template="{{ enable_thinking }}", chat_template_kwargs=kwargs
    )
    assert text == "False"
    with pytest.raises(ConfigError, match="tools is a separate parameter"):
        templates.render(HELLO, chat_template="", chat_template_kwargs={"tools": []})
    with pytest.raises(ConfigError, match="must have string keys"):
        templates.render(HELLO, chat_template="", chat_template_kwargs=["x"])


# Messages


def test_tool_calls_get_their_arguments_as_objects() -> None:
    def called(arguments: Any) -> Any:
        calls = [{"id": "1", "function": {"name": "f", "arguments": arguments}}]
        (message,) = conversation([{"role": "assistant", "tool_calls": calls, "content": None}])
        assert calls[0]["function"]["arguments"] is arguments, "the caller's is untouched"
        return message["tool_calls"][0]["function"]["arguments"]

    assert called('{"x": [1]}') == called({"x": [1]}) == {"x": [1]}
    assert called(None) == called("") == {}
    with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls\[0\]: arguments is not"):
        called("{x")
    (message,) = conversation([{"role": "assistant", "tool_calls": [], "content": "x"}])
    assert message == {"role": "assistant", "content": "x"}
    with pytest.raises(RequestError, match=r"tool_calls\[0\] must be"):
        conversation([{"role": "assistant", "tool_calls": ["f"], "content": None}])


@pytest.mark.parametrize("content", [{"t": 3}, [{"t": 3}], 5, True, [1, 2]])
def test_a_tool_may_return_any_value(content: Any) -> None:
    assert conversation([{"role": "tool", "content": content}])[0]["content"] == content


def test_other_keys_are_kept_and_the_callers_messages_untouched() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": "x"}
    (checked,) = conversation([message])
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
        ([{"role": "user"}], r"messages\[0\] has no content; it must be text or"),
        ([{"role": "user", "content": 5}], "got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "got 'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "got 'text'"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        conversation(messages)
