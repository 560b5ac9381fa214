"""Test conversations and their commands with a model that is played by the test."""

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mie.cli.chat_commands import Chat, Ended, commands_help
from mie.cli.conversation import Conversation
from mie.config.adapters import LoRARequest
from mie.config.params.sampling import SamplingParams
from mie.errors import ChatTemplateError, ModelError, RequestError


class FakeLLM:
    """Answers "a1", "a2" …. A message "loop" is interrupted after its first piece."""

    engine = SimpleNamespace(max_model_len=100)
    generation_config = SimpleNamespace(sampling={}, conversation={})

    def __init__(self) -> None:
        self.prompts: list[list[dict[str, str]]] = []
        self.num_closed = 0

    def apply_chat_template(self, messages: Any, **options: str) -> str:
        if messages[0]["content"] == "refused":
            raise ChatTemplateError("no system message")
        return str(messages)

    def chat_prompt(self, messages: list[dict[str, str]], **options: str) -> dict[str, Any]:
        self.options = options
        return {"messages": messages, "prompt_token_ids": [0] * (20 * len(messages))}

    def stream(
        self, prompt: dict[str, Any], params: SamplingParams, *, lora_request: object
    ) -> Iterator[Any]:
        self.prompts.append(prompt["messages"])
        self.params, self.lora_request = params, lora_request
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
    with pytest.raises(RequestError, match=r"has 100 tokens .* holds 100, .* not sent: use /drop"):
        talk.answer("three")
    assert talk.messages == before
    assert len(llm.prompts) == 2


def talk_of(num_turns: int, system: str | None = None) -> tuple[FakeLLM, Conversation]:
    """A conversation of so many turns, in a context that has room for all of them."""
    llm, talk = conversation(system)
    llm.engine = SimpleNamespace(max_model_len=10_000)
    for number in range(num_turns):
        talk.answer(f"q{number}")
    return llm, talk


@pytest.mark.parametrize("way", ["setting", "command"])
@pytest.mark.parametrize("system", [None, "Be brief."])
@given(
    num_turns=st.integers(1, 9), limit=st.integers(41, 400), most=st.none() | st.integers(1, 400)
)
@settings(max_examples=40, deadline=None)
def test_the_oldest_turns_give_way_and_the_system_message_stays(
    system: str | None, way: str, num_turns: int, limit: int, most: int | None
) -> None:
    """A message has 20 tokens in this model. As few turns go as leave a quarter for the answer."""
    llm, talk = talk_of(num_turns, system)
    llm.engine = SimpleNamespace(max_model_len=limit)
    talk.params = SamplingParams(max_tokens=most)
    before = talk.messages
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        if way == "setting":
            talk.when_full = "drop"
            talk.answer("new")
        elif 20 * (len(before) + 1) < limit:
            talk.answer("new")
        else:
            with pytest.raises(RequestError, match="use /drop"):
                talk.answer("new")
            assert talk.messages == before
            talk.drop()
    opening = before[: len(before) - 2 * num_turns]
    *kept, answer = talk.messages
    assert answer["role"] == "assistant"
    assert kept == llm.prompts[-1]
    num_dropped = num_turns - (len(kept) - len(opening)) // 2
    assert kept == [*opening, *before[len(opening) + 2 * num_dropped :], say("user", "new")]
    assert 20 * len(kept) < limit
    if num_dropped:
        assert f"forgot the oldest {num_dropped} of {num_turns} turn" in errors.getvalue()
        room = min(limit // 4, most or limit)
        assert 20 * (len(kept) + 2) > limit - room or num_dropped == 1
        assert 20 * len(kept) <= limit - room or num_dropped == num_turns
    else:
        assert errors.getvalue() == ""
        assert 20 * (len(before) + 1) < limit


def test_a_message_that_fits_no_empty_context_is_refused_and_drops_nothing() -> None:
    llm, talk = talk_of(3, "Be brief.")
    llm.engine = SimpleNamespace(max_model_len=40)
    talk.when_full = "drop"
    before = talk.messages
    with pytest.raises(RequestError, match=r"the message has 40 tokens .* raise --max-model-len"):
        talk.answer("new")
    assert talk.messages == before
    with pytest.raises(RequestError, match="no message waits"):
        talk.drop()


def test_a_dropped_turn_comes_back_if_no_answer_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, talk = talk_of(4)
    llm.engine = SimpleNamespace(max_model_len=100)
    before = talk.messages

    def fail(prompt: Any, params: Any, **options: Any) -> Iterator[Any]:
        raise RequestError("it failed")
        yield

    monkeypatch.setattr(llm, "stream", fail)
    with pytest.raises(RequestError, match="use /drop"):
        talk.answer("new")
    for _ in range(2):
        with pytest.raises(RequestError, match="it failed"):
            talk.drop()
        assert talk.messages == before


def test_an_answer_may_be_regenerated_after_the_oldest_turns_were_dropped() -> None:
    llm, talk = talk_of(4)
    llm.engine = SimpleNamespace(max_model_len=101)
    talk.when_full = "drop"
    talk.answer_again("other")
    assert [each["content"] for each in talk.messages[-2:]] == ["other", "a5"]
    assert len(talk.messages) == 4
    talk.when_full = "ask"
    llm.engine = SimpleNamespace(max_model_len=60)
    with pytest.raises(RequestError, match="use /drop"):
        talk.answer_again("third")
    assert talk.messages[-2]["content"] == "other"
    talk.drop()
    assert talk.messages == [say("user", "third"), say("assistant", "a6")]


def test_a_reset_forgets_the_message_that_waits() -> None:
    llm, talk = talk_of(4)
    llm.engine = SimpleNamespace(max_model_len=100)
    with pytest.raises(RequestError, match="use /drop"):
        talk.answer("new")
    talk.reset()
    with pytest.raises(RequestError, match="no message waits"):
        talk.drop()


def test_the_adapter_of_the_command_line_answers() -> None:
    llm, own = FakeLLM(), LoRARequest("poet", 1, "path")
    talk = Conversation(llm, SamplingParams(), None, lora_request=own)  # type: ignore[arg-type]
    talk.answer("one")
    assert llm.lora_request is own


def test_the_template_of_the_command_line_writes_every_prompt() -> None:
    llm = FakeLLM()
    talk = Conversation(llm, SamplingParams(), None, chat_template="{{ x }}")  # type: ignore[arg-type]
    talk.answer("one")
    assert llm.options == {"chat_template": "{{ x }}"}
    llm.options = {}
    assert talk.num_tokens == 40
    assert llm.options == {"chat_template": "{{ x }}"}


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
        ("/set top_k high", "top_k: 'high' is not an integer"),
        ("/set ignore_eos 1", "ignore_eos is on or off; got '1'"),
        ("/set top_p 3", "top_p"),
        ("/set seed", "/set seed needs a value"),
        ("/set n 2", "unknown setting 'n'"),
        ("/set reasoning loud", "reasoning is one of dim, hide; got 'loud'"),
        ("/set when_full wait", "when_full is one of ask, drop; got 'wait'"),
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


def test_the_setting_and_the_command_for_a_full_context(errors: Errors) -> None:
    _, talk = chat()
    for text in ("one", "two"):
        assert talk.say(text)
    errors()
    assert not talk.say("three")
    assert "use /drop to forget the oldest turns and send it (/set when_full drop" in errors()
    assert talk.execute("/drop")
    assert errors() == "[the context of 100 tokens is full: forgot the oldest 1 of 2 turns]\n"
    assert users(talk) == ["two", "three"]
    assert talk.execute("/set when_full drop")
    assert talk.say("four")
    assert "forgot the oldest 1 of 2 turns" in errors()
    assert users(talk) == ["three", "four"]
    assert talk.execute("/set")
    assert "when_full=drop" in errors()
    assert not talk.execute("/drop")
    assert "no message waits" in errors()


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

    def stream(prompt: object, params: object, *, lora_request: object) -> Iterator[Any]:
        for thought, text in (("Hm", ""), ("Hm, yes", ""), ("Hm, yes", "a1")):
            piece = SimpleNamespace(
                text=text, new_text=text, reasoning=thought, token_ids=[0], finish_reason=None
            )
            yield SimpleNamespace(outputs=[piece], num_cached_tokens=0)

    llm.stream = stream  # type: ignore[method-assign, assignment]
    talk.say("one")
    assert talk.conversation.messages == [say("user", "one"), say("assistant", "a1")]
    assert capsys.readouterr().out == "a1\n"


def test_a_conversation_goes_on_with_another_adapter(errors: Errors) -> None:
    poet, clerk = LoRARequest("poet", 1, "path"), LoRARequest("clerk", 2, "path")
    llm, talk = chat(loras={"poet": poet, "clerk": clerk})
    assert talk.execute("/lora")
    assert talk.execute("/lora clerk")
    talk.say("one")
    assert llm.lora_request is clerk
    assert not talk.execute("/lora nobody")
    talk.say("two")
    assert llm.lora_request is clerk
    first, second, refusal = errors().splitlines()
    assert (first, second) == ("[adapter: none]", "[adapter: clerk]")
    assert "/lora is 'nobody'; --lora-modules has poet, clerk (name an adapter" in refusal


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
    names = "set system regenerate edit undo reset save load model lora context stats exit"
    assert all(f"  /{name} " in text for name in names.split())
    for end in ("/exit", "/bye", "/quit"):
        with pytest.raises(Ended):
            talk.execute(end)
