"""Chat templates of published models, beside jinja2 with transformers' settings."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mie.checkpoint.locate import BUNDLED_DIRECTORY
from mie.errors import MieError
from mie.text.chat import ChatTemplates
from mie.text.pretrained import PretrainedTokenizer
from mie.text.template_files import TemplateFiles
from mie.text.tokenizer import Tokenizer

from ..case import Case, Row, Run, Suite
from ..inputs import read_table
from . import _reference_templates as reference

TEMPLATES = tuple(name for name in read_table() if name.startswith("templates/"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
SOURCE = "https://github.com/ikawrakow/ik_llama.cpp/tree/main/models/templates"

Render = Callable[..., str]


def _function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    described = {
        "name": name,
        "description": f"Get the {name}, or 'none'.",
        "parameters": parameters,
    }
    return {"type": "function", "function": described}


TOOLS = [
    _function("weather", city={"type": "string", "description": "Ville, e.g. “Orléans”"}),
    _function("time", zone={"type": "string", "enum": ["UTC", "CET"]}, exact={"type": "boolean"}),
]


def _call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    """Return a call with an id of nine characters, as Mistral's templates want it."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def _result(number: int, name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": name, "content": text}


def _system(content: Any = "Answer in one word.") -> dict[str, Any]:
    return {"role": "system", "content": content}


def _user(content: Any = "Is it warm in Orléans?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: Any = "Yes.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


ONE = [_call(1, "weather", city="Brest")]
TWO = [*ONE, _call(2, "time", zone="CET", exact=True)]
THOUGHT = "The user wants the weather.\n\nI can look."
TAGGED = f"<think>\n{THOUGHT}\n</think>\n\nYes."

CONVERSATIONS: Mapping[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": ([_user()], {}),
    "system": ([_system(), _user()], {}),
    "several turns": ([_system(), _user(), _assistant(), _user("Und in Köln?")], {}),
    "no generation prompt": ([_user(), _assistant()], {"add_generation_prompt": False}),
    "spaces, marks and letters": ([_user("  <b>&amp; \"'\t猫 🦙 </s>\n\n{{ x }}{% y %} ")], {}),
    "empty system": ([_system(""), _user()], {}),
    "empty question": ([_user("")], {}),
    "empty answer": ([_user(), _assistant(""), _user("Well?")], {}),
    "tools": ([_user()], {"tools": TOOLS}),
    "tools and system": ([_system(), _user()], {"tools": TOOLS}),
    "one call": (
        [_user(), _assistant(None, tool_calls=ONE), _result(1, "weather", "18 °C")],
        {"tools": TOOLS},
    ),
    "one call with text": (
        [_system(), _user(), _assistant("I look.", tool_calls=ONE), _result(1, "weather", "18")],
        {"tools": TOOLS},
    ),
    "two calls": (
        [
            _user(),
            _assistant(None, tool_calls=TWO),
            _result(1, "weather", "18"),
            _result(2, "time", '{"hour": 9}'),
            _assistant("18 °C at 9."),
            _user("Thanks."),
        ],
        {"tools": TOOLS},
    ),
    "reasoning": (
        [_user(), _assistant(reasoning_content=THOUGHT), _user("Why?")],
        {"enable_thinking": True},
    ),
    "reasoning off": ([_system(), _user()], {"enable_thinking": False}),
    "reasoning before a call": (
        [
            _user(),
            _assistant(None, reasoning_content=THOUGHT, tool_calls=ONE),
            _result(1, "weather", "18"),
        ],
        {"tools": TOOLS, "enable_thinking": True},
    ),
    "reasoning in tags": ([_user(), _assistant(TAGGED), _user()], {}),
    "parts": ([_user(_parts("Is it warm", "in Orléans?"))], {}),
    "parts of all": (
        [_system(_parts("Answer.")), _user(_parts("Warm?")), _assistant(_parts("Yes.")), _user()],
        {},
    ),
    "developer": ([{"role": "developer", "content": "Answer in one word."}, _user()], {}),
    "documents": ([_user()], {"documents": [{"title": "Climate", "text": "It is warm."}]}),
    "continued answer": (
        [_user(), _assistant("Yes, it")],
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
}  # fmt: skip
"""Messages as transformers takes them, and further arguments."""


def expected(
    render: Render, source: str, messages: Any, variables: Mapping[str, Any]
) -> str | None:
    """Return the text of the reference, or None if it raises."""
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
    try:
        return render(source, copy.deepcopy(messages), **SPECIAL, **given)
    except Exception:
        return None


def for_a_server(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's clients send them: arguments of calls are JSON text."""
    found = copy.deepcopy(messages)
    for message in found:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(
                call["function"]["arguments"], ensure_ascii=False
            )
    return found


def served_forms(
    source: str, messages: list[dict[str, Any]], takes_text: bool
) -> Iterator[list[dict[str, Any]]]:
    """Yield the forms of messages that a template may take.

    Contents are parts or text, null or an empty text beside calls. Arguments of calls are objects
    or text. A developer is "system" for a template that does not name developers.
    """
    if "developer" not in source:
        messages = [
            {**each, "role": "system"} if each["role"] == "developer" else each for each in messages
        ]
    joined = [
        {**each, "content": "\n".join(part["text"] for part in each["content"])}
        if isinstance(each["content"], list)
        else each
        for each in messages
    ]
    in_parts = [
        {**each, "content": _parts(each["content"])} if isinstance(each["content"], str) else each
        for each in messages
    ]
    for form in (messages, joined) if takes_text else (in_parts,):
        for content in (None, ""):
            written = [
                {**each, "content": content} if each["content"] is None else each for each in form
            ]
            yield written
            yield for_a_server(written)


def best(texts: Iterable[str | None]) -> list[str | None]:
    """Return the texts with the most calls and the least notation of Python, or None alone."""
    found = [text for text in texts if text is not None]
    if not found:
        return [None]

    def faults(text: str) -> tuple[int, int]:
        return -text.count("Brest"), sum(map(text.count, ("None", "null", "{'", "[{'")))

    fewest = min(map(faults, found))
    return [text for text in found if faults(text) == fewest]


def measure_calls(library: str, run: Run) -> Iterator[Row]:
    """Compare `apply_chat_template` of mie with a library."""
    render = REFERENCES[library]
    tokenizer = Tokenizer.load(BUNDLED_DIRECTORY, None)
    found: dict[str, list[str]] = {"equal": [], "refused": [], "wrong": []}
    for name, source, files in templates(run):
        own = PretrainedTokenizer(tokenizer, files)
        for kind, (messages, variables) in CONVERSATIONS.items():
            without_none = [{k: v for k, v in each.items() if v is not None} for each in messages]
            right = expected(render, source, without_none, variables)
            options = {"add_generation_prompt": True, "tokenize": False, **variables}
            text, _ = answer(partial(own.apply_chat_template, messages, **options))
            verdict = "wrong" if text != right else "refused" if text is None else "equal"
            found[verdict].append(f"{name}, {kind}")
        own.chat_templates.close()
    yield row(f"texts of apply_chat_template, and those of {library}", found)


def measure_chats(library: str, run: Run) -> Iterator[Row]:
    """Compare chats as clients of OpenAI send them with the forms that a template may take."""
    render = REFERENCES[library]
    found: dict[str, list[str]] = {"equal": [], "refused": [], "wrong": []}
    refused: dict[str, list[str]] = {}
    for name, source, files in templates(run):
        own = ChatTemplates(files)
        asked = [expected(render, source, [_user()], {"tools": tools}) for tools in (None, TOOLS)]
        takes_text = any("Is it warm" in (text or "") for text in asked)
        for kind, (messages, variables) in CONVERSATIONS.items():
            named = {key: variables[key] for key in variables if key != "enable_thinking"}
            rest = {key: variables[key] for key in variables.keys() - named.keys()}
            own_render = partial(own.render, for_a_server(messages), **named)
            text, reason = answer(partial(own_render, chat_template_kwargs=rest))
            if text is None:
                refused.setdefault(reason, []).append(name)
            given = served_forms(source, messages, takes_text)
            rights = best(expected(render, source, form, variables) for form in given)
            verdict = "wrong" if text not in rights else "refused" if text is None else "equal"
            found[verdict].append(f"{name}, {kind}")
        own.close()
    yield row(f"texts of chats with OpenAI's messages, and those of {library}", found)
    if library == "jinja2":
        yield from refusals(refused)


def templates(run: Run) -> Iterator[tuple[str, str, TemplateFiles]]:
    """Yield the name, the text and a model's folder of each template."""
    names = TEMPLATES[::5] if run.is_quick else TEMPLATES
    for done, name in enumerate(names):
        run.progress(done, len(names))
        folder = run.folder / Path(name).stem
        folder.mkdir()
        source = run.path(name).read_text(encoding="utf-8")
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL), encoding="utf-8")
        yield Path(name).stem, source, TemplateFiles(folder)


def answer(render: Callable[[], str]) -> tuple[str | None, str]:
    """Return the text of mie, or None and the reason if it refuses the messages."""
    try:
        return render(), ""
    except MieError as error:
        return None, str(error).rpartition("chat_template.jinja ")[2]


def refusals(refused: Mapping[str, list[str]]) -> Iterator[Row]:
    """Yield a row for each reason, with the number of conversations and the templates."""
    for reason, names in sorted(refused.items(), key=lambda each: -len(each[1])):
        which = ", ".join(dict.fromkeys(names))
        yield Row(
            question=f"refused chats of {which}",
            ours=f"{len(names)} chats",
            verdict="refused",
            reason=f"the template {reason}",
        )


def row(question: str, found: Mapping[str, list[str]]) -> Row:
    """Return the row of texts that are equal, refused by both, or wrong."""
    counts = {verdict: len(names) for verdict, names in found.items()}
    ours = f"{counts['equal']} of {sum(counts.values())} equal, {counts['refused']} refused by both"
    reason = f"differ: {'; '.join(found['wrong'])}" if found["wrong"] else ""
    return Row.compared(question, ours, "all equal", not reason, source=SOURCE, reason=reason)


def with_transformers(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """Return the text that transformers renders."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template([messages], chat_template=source, **variables)
    return str(texts[0])


REFERENCES: Mapping[str, Render] = {"jinja2": reference.render, "transformers": with_transformers}

SUITE = Suite(
    title="Chat templates",
    text="The templates of 55 published models, each with 22 conversations: system messages, "
    "tools, calls, results, reasoning, empty texts, texts in parts, a continued answer. "
    "`apply_chat_template` must give the text of transformers, or refuse where transformers "
    "raises: many templates refuse a role, an order of messages or a chat without tools, and three "
    "need variables of their own. A chat has OpenAI's messages, where arguments of calls are JSON "
    "text and a content is null beside calls. The template gets them in a form that it writes. "
    "The text must be the reference's for this form. The reference is jinja2 with the settings of "
    "transformers, and transformers where it is installed.",
    cases=[
        Case(
            f"{name}, as {library} renders them",
            partial(measure, library),
            inputs=TEMPLATES,
            packages=(library,),
        )
        for library in REFERENCES
        for name, measure in (("apply_chat_template", measure_calls), ("chats", measure_chats))
    ],
)
