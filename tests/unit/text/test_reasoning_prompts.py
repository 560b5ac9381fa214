"""Reasoning in answers to prompts that begin it, end it, or leave it to the model."""

from functools import cache
from typing import Any

import pytest

from mie import LLM, RequestOutputKind, SamplingParams

# What a template writes before an answer, the prefill of a client, and whether reasoning is open.
OPENINGS = {
    "nothing": ("", None),
    "a tag": ("<think>\n", True),
    "a tag and words": ("<think>\nOkay, ", True),
    "no reasoning": ("<think>\n\n</think>\n\n", False),
    "no reasoning, and words": ("<think>\n\n</think>\n\nSo: ", False),
}
PREFILLS = {
    "a tag": ("<think>", True),
    "reasoning": ("<think>\nOkay, ", True),
    "a second reasoning": ("<think>a</think><think>b", True),
    "an answer": ("So: ", False),
    "reasoning and an answer": ("<think>Hm.</think>So: ", False),
}
USERS = ["Hello", "What does <think> do?", "And </think>?", "<think>\nOkay, "]
ANSWERS = {
    "with the tag": "<think>Hm.</think>So.",
    "without the tag": "Hm.</think>So.",
    "with the tag twice": "<think>\n<think>\nHm.</think>So.",
}


@cache
def bundled(parser: str = "auto") -> LLM:
    return LLM("bundled", num_threads=1, reasoning_parser=parser)


def parts(llm: LLM, messages: list[Any], answer: str, **options: Any) -> tuple[Any, str]:
    """Return the reasoning and the text. Streams must have the same."""
    ids = llm.tokenizer.encode(answer, add_special_tokens=False)
    prompt = llm.chat_prompt(messages, **options)
    whole, delta = (
        SamplingParams(trace_decode_token_ids=ids, max_tokens=len(ids), output_kind=kind)
        for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA)
    )
    [output] = llm.generate([prompt], whole, use_tqdm=False)
    [found] = output.outputs
    pieces = [each.outputs[0] for each in llm.stream(prompt, delta)]
    sent = "".join(each.reasoning or "" for each in pieces), "".join(each.text for each in pieces)
    if sent != (found.reasoning, found.text):
        # Words were sent as text before the closing tag came.
        assert "<think>" not in answer
        assert "".join(sent) == f"{found.reasoning}{found.text}"
        assert sent[1].endswith(found.text)
    return found.reasoning, found.text


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("kind", OPENINGS)
def test_reasoning_is_found_behind_every_generation_prompt(
    kind: str, user: str, answer: str
) -> None:
    opening, is_open = OPENINGS[kind]
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{{ OPENING }}{% endif %}{# </think> #}"
    )
    found = parts(
        bundled(),
        [{"role": "user", "content": user}],
        ANSWERS[answer],
        chat_template=template,
        chat_template_kwargs={"OPENING": opening},
    )
    if is_open is False and answer == "without the tag":
        assert found == ("", "Hm.</think>So.")  # the prompt has ended it
    else:
        assert found == ("Hm.", "So.")


@pytest.mark.parametrize("answer", ["without the tag", "with the tag"])
@pytest.mark.parametrize("user", USERS[:2])
@pytest.mark.parametrize("kind", PREFILLS)
def test_reasoning_is_found_behind_every_prefill(kind: str, user: str, answer: str) -> None:
    prefill, is_open = PREFILLS[kind]
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": prefill}]
    found = parts(
        bundled(),
        messages,
        ANSWERS[answer],
        chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{# </think> #}",
        continue_final_message=True,
        add_generation_prompt=False,
    )
    if not is_open and answer == "without the tag":
        assert found == ("", "Hm.</think>So.")
    else:
        assert found == ("Hm.", "So.")


def test_the_parser_of_models_that_always_reason_needs_no_tag() -> None:
    template = "{{ messages[0].content }}{{ OPENING }}{# </think> #}"
    messages = [{"role": "user", "content": "Hello"}]
    for opening, answer, expected in (
        ("", "Hm.</think>So.", ("Hm.", "So.")),
        ("", "Hm.", ("Hm.", "")),  # cut before the reasoning ended
        ("<think></think>", "So.", ("", "So.")),
    ):
        options = {"chat_template": template, "chat_template_kwargs": {"OPENING": opening}}
        assert parts(bundled("deepseek_r1"), messages, answer, **options) == expected
