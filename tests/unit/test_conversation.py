"""Test conversations and their commands with a model that is played by the test."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mie.cli.chat_commands import Chat, Ended, commands_help
from mie.cli.conversation import Conversation
from mie.config.params.sampling import SamplingParams
from mie.errors import ChatTemplateError, ModelError, RequestError


class FakeLLM:
    """Answers "a1", "a2" …. A message "loop" is interrupted after its first piece."""

    engine = SimpleNamespace(max_model_len=100)
    generation_config = SimpleNamespace(sampling={})

    def __init__(self) -> None:
        self.prompts: list[list[dict[str, str]]] = []
        self.num_closed = 0

    def apply_chat_template(self, messages: Any) -> str:
        if messages[0]["content"] == "refused":
            raise ChatTemplateError("no system message")
        return str(messages)

    def chat_prompt(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"messages": messages, "prompt_token_ids": [0] * (20 * len(messages))}

    def stream(self, prompt: dict[str, Any], params: SamplingParams) -> Iterator[Any]:
        self.prompts.append(prompt["messages"])
        self.params = params
        text = f"a{len(self.prompts)}"
        try:
            for end, reason in ((1, None), (2, "stop")):
                piece = SimpleNamespace(
                    text=text[:end],
                    new_text=text[end - 1 : end],
                    finish_reason=reason,
                    token_ids=[0] * end,
                    reasoning=None,
                )
                yield SimpleNamespace(outputs=[piece], num_cached_tokens=3)
                if prompt["messages"][-1]["content"] == "loop":
                    raise KeyboardInterrupt
        finally:
            self.num_closed += 1


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversation(system: str | None = None) -> tuple[FakeLLM, Conversation]:
    llm = FakeLLM()
    return llm, Conversation(llm, SamplingParams(), system)  # type: ignore[arg-type]


def test_a_conversation_remembers_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    llm, talk = conversation(system="Be brief.")
    talk.answer("one")
    talk.answer("two")
    assert llm.prompts[1] == [
        say("system", "Be brief."),
        say("user", "one"),
        say("assistant", "a1"),
        say("user", "two"),
    ]
    assert capsys.readouterr().out == "a1\na2\n"
    talk.reset()
    assert talk.messages == [say("system", "Be brief.")]


def test_text_before_an_interrupt_is_remembered() -> None:
    llm, talk = conversation()
    talk.answer("loop")
    assert talk.messages == [say("user", "loop"), say("assistant", "a")]
    assert llm.num_closed == 1


def test_a_message_that_does_not_fit_is_not_remembered() -> None:
    llm, talk = conversation()
    talk.answer("one")
    talk.answer("two")
    before = list(talk.messages)
    with pytest.raises(RequestError, match=r"has 100 tokens .* holds 100, .* not sent: use /reset"):
        talk.answer("three")
    assert talk.messages == before
    assert len(llm.prompts) == 2


def params_of(llm: Any, settings: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**settings)


def chat(**changes: Any) -> tuple[FakeLLM, Chat]:
    llm, talk = conversation()
    usual = {"model": "tiny", "load": lambda name: FakeLLM(), "params_of": params_of}
    return llm, Chat(conversation=talk, **{**usual, **changes})


Errors = Callable[[], str]


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]) -> Errors:
    """Return a function that returns what was printed on standard error since the last call."""
    return lambda: capsys.readouterr().err


def users(talk: Chat) -> list[str]:
    return [each["content"] for each in talk.conversation.messages if each["role"] == "user"]


def test_settings_apply_to_the_next_answer(errors: Errors) -> None:
    llm, talk = chat()
    assert talk.execute("/set temperature 0.3")
    assert talk.execute("/set --top-k 5")
    assert talk.execute("/set stop the end")
    assert talk.execute("/set ignore_eos on")
    assert talk.say("one")
    wanted = SamplingParams(temperature=0.3, top_k=5, stop=["the end"], ignore_eos=True)
    assert llm.params == wanted
    errors()
    assert talk.execute("/set")
    assert "temperature=0.3, top_k=5" in errors()
    for command, why in (
        ("/set temprature 1", "did you mean temperature?"),
        ("/set top_k high", "top_k is int; got 'high'"),
        ("/set ignore_eos 1", "ignore_eos is on or off; got '1'"),
        ("/set top_p 3", "top_p"),
        ("/set seed", "/set seed needs a value"),
        ("/set n 2", "unknown setting 'n'"),
        ("/set reasoning loud", "reasoning is one of dim, hide; got 'loud'"),
    ):
        assert not talk.execute(command)
        assert why in errors()
    assert talk.conversation.params == wanted


def test_the_last_message_is_answered_again_changed_or_forgotten(errors: Errors) -> None:
    llm, talk = chat()
    for command in ("/undo", "/regenerate", "/edit two"):
        assert not talk.execute(command)
        assert "there is no message yet" in errors()
    talk.say("one")
    talk.say("two")
    assert talk.execute("/regenerate")
    assert llm.prompts[2] == llm.prompts[1]
    assert talk.conversation.messages[-1] == say("assistant", "a3")
    assert talk.execute("/edit three")
    assert users(talk) == ["one", "three"]
    assert talk.execute("/undo")
    assert users(talk) == ["one"]


def test_edit_shows_the_message_on_a_terminal(errors: Errors) -> None:
    shown = []

    def read_line(prompt: str, text: str) -> str | None:
        shown.append(text)
        return answers.pop(0)

    answers = ["better", None]
    _, talk = chat()
    talk.say("one")
    assert not talk.execute("/edit")
    assert "needs the new message" in errors()
    talk.read_line = read_line
    assert talk.execute("/edit")
    assert talk.execute("/edit")
    assert "nothing was changed" in errors()
    assert (shown, users(talk)) == (["one", "better"], ["better"])


def test_an_answer_that_fails_leaves_the_conversation_as_it_was(errors: Errors) -> None:
    llm, talk = chat()
    talk.say("one")
    before = talk.conversation.messages

    def full(messages: Any) -> dict[str, Any]:
        return {"prompt_token_ids": [0] * 200}

    llm.chat_prompt = full  # type: ignore[method-assign]
    assert not talk.execute("/regenerate")
    assert not talk.execute("/edit two")
    assert talk.conversation.messages == before


def test_a_system_message_is_replaced_if_the_template_has_one(errors: Errors) -> None:
    llm, talk = chat()
    assert talk.execute("/system Be brief.")
    talk.say("one")
    assert llm.prompts[0][0] == say("system", "Be brief.")
    assert not talk.execute("/system refused")
    assert talk.conversation.messages[0] == say("system", "Be brief.")
    errors()
    assert talk.execute("/system")
    assert errors() == "[system: Be brief.]\n"


def test_a_saved_conversation_goes_on(tmp_path: Path, errors: Errors) -> None:
    _, talk = chat()
    talk.execute("/system Be brief.")
    talk.execute("/set seed 7")
    talk.say("one")
    path = tmp_path / "talk.json"
    assert talk.execute(f"/save {path}")
    _, other = chat()
    assert other.execute(f"/load {path}")
    assert other.conversation.messages == talk.conversation.messages
    assert other.conversation.params.seed == 7
    assert json.loads(path.read_text())["model"] == "tiny"


@pytest.mark.parametrize(
    "saved",
    [
        "[]",
        "{}",
        '{"messages": [{"role": "user", "content": "one"}]}',
        '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}',
        '{"messages": ["one", "two"]}',
        '{"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "a"}]}',
        '{"messages": [], "settings": {"temperature": "hot"}}',
        '{"messages": [], "settings": {"no_such": 1}}',
        "not JSON",
    ],
)
def test_another_file_is_refused(tmp_path: Path, errors: Errors, saved: str) -> None:
    _, talk = chat()
    talk.say("one")
    before = talk.conversation.messages
    path = tmp_path / "talk.json"
    path.write_text(saved)
    assert not talk.execute(f"/load {path}")
    assert "mie: error: " in errors()
    assert talk.conversation.messages == before
    assert not talk.execute("/load /no/such/file")
    assert not talk.execute("/save /no/such/file")


def test_another_model_goes_on_with_the_conversation(errors: Errors) -> None:
    def load(name: str) -> FakeLLM:
        if name == "broken":
            raise ModelError("it is broken")
        loaded.append(name)
        return FakeLLM()

    loaded: list[str] = []
    _, talk = chat(load=load)
    talk.say("one")
    assert talk.execute("/model other")
    talk.say("two")
    assert users(talk) == ["one", "two"]
    assert not talk.execute("/model broken")
    assert errors().endswith("mie: error: it is broken\n")
    assert loaded == ["other", "other"]  # the one before is loaded again
    assert talk.execute("/model")
    assert errors() == "[model: other]\n"
    talk.fixed_model = "--trace records one model"
    assert not talk.execute("/model third")
    assert talk.execute("/undo")
    assert talk.say("three")


def test_reasoning_is_not_part_of_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    llm, talk = chat()

    def stream(prompt: object, params: object) -> Iterator[Any]:
        for thought, text in (("Hm", ""), ("Hm, yes", ""), ("Hm, yes", "a1")):
            piece = SimpleNamespace(
                text=text, new_text=text, reasoning=thought, token_ids=[0], finish_reason=None
            )
            yield SimpleNamespace(outputs=[piece], num_cached_tokens=0)

    llm.stream = stream  # type: ignore[method-assign, assignment]
    talk.say("one")
    assert talk.conversation.messages == [say("user", "one"), say("assistant", "a1")]
    assert capsys.readouterr().out == "a1\n"


def test_the_meter_and_the_times(errors: Errors) -> None:
    _, talk = chat()
    assert talk.execute("/stats")
    assert talk.execute("/context")
    assert errors() == f"[no answer yet]\n[{'░' * 30} 0 of 100 tokens (0%) in 0 messages]\n"
    talk.say("one")
    talk.say("two")
    assert talk.execute("/context")
    assert errors() == f"[{'█' * 24}{'░' * 6} 80 of 100 tokens (80%) in 4 messages]\n"
    assert talk.execute("/stats")
    shown = errors()
    assert "first token after 0.00 s" in shown
    assert "2 tokens in" in shown
    assert "3 of 60 prompt tokens cached" in shown


def test_every_command_has_a_line_of_help_and_ends_have_other_names() -> None:
    _, talk = chat()
    text = commands_help(is_terminal=True)
    names = "set system regenerate edit undo reset save load model context stats exit"
    assert all(f"  /{name} " in text for name in names.split())
    for end in ("/exit", "/bye", "/quit"):
        with pytest.raises(Ended):
            talk.execute(end)
