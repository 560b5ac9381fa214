"""Join the parts of an answer to one grammar: reasoning, and then calls, a text, or both."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from typing import cast

from mie.config.engine import RequestLimits
from mie.config.params.sampling import SamplingParams
from mie.config.params.structured import JSON_OPTIONS, StructuredOutputsParams, structure_from
from mie.errors import RequestError, shown
from mie.structured.descriptions import kind_of
from mie.structured.structural_tags import opening_tag, root_of
from mie.text.tools.definitions import input_grammar_of, parameters_of
from mie.text.tools.formats import AnswerFormat
from mie.text.tools.whole import Format, either, sequence


def answering(
    params: SamplingParams, answer: object, limits: RequestLimits
) -> tuple[SamplingParams, AnswerFormat | None]:
    """Return parameters with the grammar of the whole answer, and how the answer is read.

    ``answer`` is the format that `prompt_of` gave, or None for a text without parts.

    Raises:
        ConfigError: the structure is malformed.
        RequestError: the parameters contradict the format of the answer.
    """
    budget = params.thinking_token_budget
    if answer is None:
        if budget is not None:
            raise _without_tags("a prompt without a chat template has none")
        return params, None
    if not isinstance(answer, AnswerFormat):
        raise RequestError(f"a prompt's answer must come from chat_prompt; got {shown(answer)}")
    if answer.calls is not None and not params.detokenize:
        raise RequestError("tools need text; got detokenize=False")
    if budget is not None and not answer.has_budget:
        raise _without_tags("the tags of this model's reasoning are not known")
    structure = structure_from(params.structured_outputs, limits)
    body = _body(structure, answer, has_budget=budget is not None)
    params = copy.copy(params)
    params.thinking_token_budget = None
    if body is None:
        return params, answer if structure is None else None
    reasoning = list(answer.parts.reasoning)
    if budget is not None and reasoning:
        reasoning = copy.deepcopy(reasoning)
        opening = opening_tag({"format": sequence(*reasoning)})
        assert opening is not None
        cast(Format, opening.tag)["content"]["max_tokens"] = budget
    params.structured_outputs = _grammar(structure, sequence(*reasoning, body))
    if structure is None and not answer.parts.is_forced:
        made = params.structured_outputs if body is answer.parts.calls_in_text else None
        return params, replace(answer, structured_outputs=made)
    return params, replace(
        answer,
        structured_outputs=None if structure is not None else params.structured_outputs,
        structure=structure,
        structure_place=_place_of_structure(answer, len(reasoning)),
        is_written=_is_written(answer, has_more=structure is not None or bool(reasoning)),
        may_lack_open=False,
    )


def _body(
    structure: StructuredOutputsParams | None, answer: AnswerFormat, *, has_budget: bool
) -> Format | None:
    """Return the answer after its reasoning; None if nothing of the answer needs a grammar."""
    parts = answer.parts
    if structure is None:
        if parts.is_forced:
            return None if parts.calls is None else parts.calls()
        return parts.calls_in_text or (parts.free if has_budget and parts.reasoning else None)
    if parts.is_forced:
        raise RequestError(
            "structured_outputs and a call that is forced exclude each other (set tool_choice to "
            "'auto' or 'none')"
        )
    if answer.calls is None and not parts.reasoning:
        return None
    text = sequence(*parts.before_text, _format_of(structure))
    return text if parts.calls is None else either(parts.calls(), text)


def _place_of_structure(answer: AnswerFormat, num_before: int) -> str:
    """Return the place of the structure in the grammar, after so many parts of reasoning."""
    among_calls = ".elements[1]" if answer.parts.calls is not None else ""
    return f"format.elements[{num_before}]{among_calls}.elements[{len(answer.parts.before_text)}]"


_PLACE = re.compile(r"line \d+, column \d+: (failed to compile JSON schema: )?")


def as_asked(refusal: str, answer: AnswerFormat) -> str:
    """Return a refusal of a whole answer's grammar in terms of the tools or of the structure.

    The caller has not seen the grammar. Nothing else is changed.
    """
    own = "structured_outputs has a structural_tag that "
    problem = refusal.removeprefix(own)
    is_of_tools = any(problem.endswith(parameters_of(name)) for name in answer.names)
    is_of_text = any(problem.endswith(input_grammar_of(name)) for name in answer.customs)
    is_of_tools = (is_of_tools or is_of_text) and problem != refusal
    if answer.structured_outputs is not None or is_of_tools:
        what = "grammar" if is_of_text else "schema"
        refusal = refusal.replace(own, f"structured_outputs has a {what} that ", 1)
        return f"tools{refusal.removeprefix('structured_outputs')}"
    structure = answer.structure
    if structure is None or problem == refusal:
        return refusal
    if structure.structural_tag is not None:
        _, root = root_of(json.loads(str(structure.structural_tag)))
        return refusal.replace(answer.structure_place, root, 1)
    problem = problem.replace(f"{answer.structure_place} ", "", 1)
    if structure.grammar is None:
        problem = _PLACE.sub("", problem, count=1)
    return f"structured_outputs has a {kind_of(structure)} that {problem}"


def _is_written(answer: AnswerFormat, *, has_more: bool) -> bool:
    """Return whether the answer is read as a grammar wrote it. ``has_more``: there are other parts.

    Messages of harmony and arguments between tags have parsers of their own.
    """
    if answer.has_channels and has_more:
        return False
    return answer.calls is None or answer.calls.is_streamed


def _format_of(structure: StructuredOutputsParams) -> Format:
    """Return a structure as a format of a structural tag."""
    if structure.structural_tag is not None:
        return dict(root_of(json.loads(str(structure.structural_tag)))[0])
    if structure.regex is not None:
        return {"type": "regex", "pattern": structure.regex}
    if structure.grammar is not None:
        return {"type": "grammar", "grammar": structure.grammar}
    if structure.choice is not None:
        return either(*({"type": "const_string", "value": text} for text in structure.choice))
    schema = '{"type": "object"}' if structure.json_object else str(structure.json)
    return {"type": "json_schema", "json_schema": json.loads(schema)}


def _grammar(structure: StructuredOutputsParams | None, whole: Format) -> StructuredOutputsParams:
    """Return a grammar of a whole answer, with the structure's options."""
    tag = json.dumps({"type": "structural_tag", "format": whole})
    options = {} if structure is None else {name: getattr(structure, name) for name in JSON_OPTIONS}
    return StructuredOutputsParams(structural_tag=tag, **options)


def _without_tags(why: str) -> RequestError:
    return RequestError(
        f"thinking_token_budget needs reasoning between known tags; {why} (set reasoning_parser, "
        "or leave it out)"
    )
