"""Test ChatTemplate: where it is found, how it renders, and its limits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tables import table

from mie.errors import ChatTemplateError, ConfigError, RequestError
from mie.text.chat import ChatTemplate, ChatTemplates
from mie.text.messages import conversation
from mie.text.renderer import TemplateRenderer
from mie.text.template_files import TemplateFiles

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


def test_a_missing_template_lists_the_places_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        load(tmp_path)
    for part in ("chat_template.jinja", "tokenizer_config.json", "additional_chat_templates"):
        assert part in str(caught.value)
    assert "Put a jinja2 template into" in str(caught.value)


# Rendering.


def test_blocks_leave_no_blank_lines() -> None:
    assert render(CHATML, [{"role": "user", "content": " hi "}]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, add_generation_prompt=False).endswith("hello<|im_end|>\n")


@pytest.mark.parametrize(("template", "expected"), table("chat", "features"))
def test_features_that_templates_use_work(template: str, expected: str) -> None:
    assert render(template) == expected


# Errors.


@pytest.mark.parametrize(
    ("template", "message"),
    [
        *table("chat", "failing templates"),
        ("{{ '(' * 5000 }}" + "{{ " + "(" * 5000, "not a jinja2 template|cannot be compiled"),
        ("x" * 131_073, "has 131,073 characters; the limit is 131,072"),
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
    [*table("chat", "content formats"), (PARTS, "openai"), (CHATML, "string"),],
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
        messages, chat_template=template, continue_final_message=True, add_generation_prompt=False
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


# Messages


def test_tool_calls_get_their_arguments_as_objects() -> None:
    def called(arguments: Any) -> Any:
        calls = [{"id": "1", "function": {"name": "f", "arguments": arguments}}]
        (message,) = conversation([{"role": "assistant", "tool_calls": calls, "content": None}])
        assert calls[0]["function"]["arguments"] is arguments, "the caller's is untouched"
        return message["tool_calls"][0]["function"]["arguments"]

    assert called('{"x": [1]}') == called({"x": [1]}) == {"x": [1]}
    assert called(None) == called("") == {}
    for cut in ('{"x": [1', '{"x": "', "{", "[" * 10**5):
        assert called(cut) == cut
    (message,) = conversation([{"role": "assistant", "tool_calls": [], "content": "x"}])
    assert message == {"role": "assistant", "content": "x"}
    with pytest.raises(RequestError, match=r"tool_calls\[0\] must be"):
        conversation([{"role": "assistant", "tool_calls": ["f"], "content": None}])
    with pytest.raises(RequestError, match="tool_calls must be a list, got dict"):
        conversation([{"role": "assistant", "tool_calls": {"f": 1}, "content": None}])


def test_calls_of_custom_tools_are_read_in_messages_of_any_role():
    call = {"type": "custom", "custom": {"name": "run", "input": "1 + 2"}}
    for role in ("assistant", "user"):
        (message,) = conversation([{"role": role, "tool_calls": [call], "content": None}])
        function = {"name": "run", "arguments": {"input": "1 + 2"}}
        assert message["tool_calls"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        *table("chat", "malformed messages"),
        ([*HELLO, {"role": "", "content": "x"}], r"messages\[1\] must have a role"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        conversation(messages)


# Arguments of calls.

ARGUMENTS = {
    "objects as JSON": "{{ call.function.arguments | tojson }}",
    "text that is concatenated": "{{ 'x' + call.function.arguments }}",
    "text that is formatted": "{{ '%s' % call.function.arguments }}",
    "text that is printed": "{{ call.function.arguments }}",
    "objects or text": "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
    "items": "{% for name, value in call.function.arguments.items() %}{{ '{' + (name | tojson) }}"
    ": {{ value | tojson }}{{ '}' }}{% endfor %}",
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_template_writes_the_arguments_of_calls_as_json(kind: str) -> None:
    template = "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    template += ARGUMENTS[kind] + "{% endfor %}{% endfor %}"
    templates = ChatTemplates(TemplateFiles(Path("nowhere")))
    for arguments in ({"a": 1}, {"a": "it's"}, {"é": None}, {"a": [True, '"']}, {"a": "{'b': 1}"}):
        for given in (arguments, json.dumps(arguments)):
            call = {"id": "1", "function": {"name": "add", "arguments": given}}
            messages = [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            written = templates.render(messages, chat_template=template)
            assert json.loads(written.lstrip("x")) == arguments
    templates.close()


NULL = {
    "printed": "[{{ m.content }}]",
    "concatenated": "{{ '[' + m.content + ']' }}",
    "a method": "[{{ m.content.strip() }}]",
    "a test and a length": "{% if m.content is none or m.content | length == 0 %}[]{% endif %}"
    "{{ m.content | length * '' }}",
    "JSON of all but text": "[{{ m.content if m.content is string else m.content | tojson }}]",
    "only null is a call": "{% if m.content is none %}[]{% endif %}",
}
"""How published templates write a null content beside calls."""


@pytest.mark.parametrize("kind", NULL)
def test_every_template_writes_a_null_content_beside_calls_as_nothing(kind: str) -> None:
    template = "{% for m in messages if m.tool_calls %}" + NULL[kind] + "{% endfor %}"
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    templates = ChatTemplates(TemplateFiles(Path("nowhere")))
    for given in (call, {**call, "content": None}):
        assert templates.render([*HELLO, given], chat_template=template) == "[]"
    templates.close()


PARTS_OF_USERS = (
    "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}"
    "{% else %}[{{ m.content | trim }}]{% endif %}{% endfor %}"
)


def test_texts_stay_texts_in_a_template_that_takes_texts_and_parts() -> None:
    """Gemma 4 and GLM iterate over a user's parts, and write other roles' contents as they are."""
    templates = ChatTemplates(TemplateFiles(Path("nowhere")))

    def text(system: Any, user: Any) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return templates.render(messages, chat_template=PARTS_OF_USERS)

    parts = [{"type": "text", "text": "a"}, "b"]
    assert text("s", "u") == "[s][u]"
    assert text("s", parts) == "[s]<a><b>"
    assert text(parts, "u") == "[a\nb][u]"
    assert text(parts, parts) == "[a\nb][a\nb]"
    templates.close()


def test_a_template_that_fails_with_both_kinds_of_arguments_names_the_first_failure() -> None:
    function = {"name": "add", "arguments": "{}"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    templates = ChatTemplates(TemplateFiles(Path("nowhere")))
    with pytest.raises(ChatTemplateError, match="ZeroDivisionError"):
        templates.render([call], chat_template="{{ 1 / 0 }}")
    with pytest.raises(ChatTemplateError, match="failed: UndefinedError: 'x' is undefined"):
        templates.render([call], chat_template="{{ x.y }}")
    with pytest.raises(ChatTemplateError, match="refused the messages: no"):
        templates.render([call], chat_template="{{ raise_exception('no') }}")
    templates.close()
