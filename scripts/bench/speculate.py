"""Measure generation with drafts and without, in turns, by groups of questions.

    python scripts/benchmark.py speculate MODEL --questions FILE [--groups qa,rag] [--temperature T]
    python scripts/benchmark.py speculate MODEL --code [--groups edit,extraction,code]
    python scripts/benchmark.py speculate MODEL --row-costs

FILE has the questions of Spec-Bench (https://github.com/hemingkx/Spec-Bench), as JSON lines, plain
or compressed (.xz). A model answers each question in turn without drafts and with each setting, and
the answers must be equal. A method llama.cpp, or llama.cpp:7 for its lookup of seven tokens, takes
the same GGUF file, and its answers are its own. The seconds are those after the first token of each
request. --code asks about functions of Python's own library: 30 edits, 30 extractions and 30
programs. With --row-costs, it measures the time of steps of 1, 2, … rows (mie/speculate/costs.py).
"""

from __future__ import annotations

import argparse
import base64
import calendar
import colorsys
import difflib
import fnmatch
import gettext
import heapq
import inspect
import json
import locale
import lzma
import shlex
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Spread, in_turn, machine, parser_of, table, write_report
from mie import LLM, SamplingParams

OF_SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""The categories of Spec-Bench that are groups. The others are of MT-bench."""
LONGEST_ROWS = 17


def settings_of(name: str) -> Mapping[str, Any] | None:
    """Return the ``speculative_config`` of a name: off, ngram, suffix, or ngram:3 (always 3)."""
    method, _, count = name.partition(":")
    if method == "off":
        return None
    fixed = {"num_speculative_tokens": int(count), "adaptive": False} if count else {}
    return {"method": method, **fixed}


def questions_of(path: Path) -> Iterator[Any]:
    """Yield the questions of a file."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def read_questions(path: Path, groups: Sequence[str], most: int) -> dict[str, list[str]]:
    """Return the first turns of at most ``most`` questions of each group, spread evenly."""
    found: dict[str, list[str]] = {}
    for question in questions_of(path):
        category = question["category"]
        group = category if category in OF_SPEC_BENCH else "mt_bench"
        if not groups or group in groups:
            found.setdefault(group, []).append(question["turns"][0])
    return {group: each[:: max(1, len(each) // most)][:most] for group, each in found.items()}


MODULES = (
    base64,
    calendar,
    colorsys,
    difflib,
    fnmatch,
    gettext,
    heapq,
    locale,
    shlex,
    statistics,
    textwrap,
)
LINES_OF_FUNCTION = range(12, 45)
CODE_QUESTIONS = {
    "edit": "Rewrite this Python function. Rename the parameter {name} to {name}_value, change "
    "nothing else, and give the whole function.\n\n```python\n{source}```",
    "extraction": "Copy each line of this Python function that contains `return` or `raise`, with "
    "its line number.\n\n```python\n{source}```",
    "code": "Write a Python function `{signature}` with this docstring, and then five tests of "
    "it.\n\n{doc}",
}


def code_questions(groups: Sequence[str], most: int) -> dict[str, list[str]]:
    """Return questions about documented functions of the standard library, by group."""
    found: dict[str, list[str]] = {}
    for module in MODULES:
        for function_name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ != module.__name__ or not function.__doc__:
                continue
            source, signature = inspect.getsource(function), inspect.signature(function)
            if source.count("\n") not in LINES_OF_FUNCTION or not signature.parameters:
                continue
            for group, question in CODE_QUESTIONS.items():
                if not groups or group in groups:
                    text = question.format(
                        name=next(iter(signature.parameters)),
                        source=source,
                        signature=f"{function_name}{signature}",
                        doc=inspect.getdoc(function),
                    )
                    found.setdefault(group, []).append(text)
    return {group: each[:most] for group, each in found.items()}


def batches(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Yield the items in batches."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


class Side:
    """A model with one setting, and the totals of the present group."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.llm = LLM(
            args.model,
            backend=args.backend,
            num_threads=args.threads,
            max_num_seqs=args.concurrency,
            max_model_len=args.max_model_len,
            enable_prefix_caching=False,
            activations=args.activations,
            speculative_config=settings_of(name),
        )
        self.begin()

    def begin(self) -> None:
        """Begin a group."""
        self.seconds, self.num_tokens = 0.0, 0
        self._num_steps = self.llm.engine.stats.num_steps

    @property
    def num_steps(self) -> int:
        """The number of steps of the group."""
        return self.llm.engine.stats.num_steps - self._num_steps

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Answer prompts at once, and count the tokens and seconds after the first tokens."""
        tokens_prompts = [{"prompt_token_ids": list(each)} for each in prompts]
        outputs = self.llm.generate(tokens_prompts, params, use_tqdm=False)
        metrics = [each.metrics for each in outputs if each.metrics is not None]
        first = min(each.first_token_time or 0.0 for each in metrics)
        self.seconds += max(each.last_token_time or 0.0 for each in metrics) - first
        tokens = [list(each.outputs[0].token_ids) for each in outputs]
        self.num_tokens += sum(len(each) - 1 for each in tokens)
        return tokens


class LlamaCpp:
    """llama.cpp on the same GGUF file, plain or with the prompt lookup of its Python package."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        _, _, count = name.partition(":")
        draft = LlamaPromptLookupDecoding(num_pred_tokens=int(count)) if count else None
        self.name, self.seconds, self.num_tokens, self.num_steps = name, 0.0, 0, 1
        self._llama = Llama(
            args.model,
            n_ctx=args.max_model_len,
            n_threads=args.threads,
            n_threads_batch=args.threads,
            draft_model=draft,
            logits_all=draft is not None,  # release 0.3.36 fails without
            verbose=False,
        )

    def begin(self) -> None:
        """Begin a group."""
        self.seconds, self.num_tokens = 0.0, 0

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Answer prompts one after another. The tokens are llama.cpp's own."""
        for prompt in prompts:
            self._llama.reset()
            tokens = self._llama.generate(list(prompt), temp=params.temperature)
            last = next(tokens)
            begun = time.perf_counter()
            for number, token in enumerate(tokens, 2):
                self.num_tokens += 1
                last = token
                if last == self._llama.token_eos() or number == params.max_tokens:
                    break
            self.seconds += time.perf_counter() - begun


def prompt_of(llm: LLM, question: str) -> list[int]:
    """Return the token ids of a question. A base model continues the text."""
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(f"{question}\n\n"))
    chat = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def compare(args: argparse.Namespace) -> int:
    """Answer all questions on all sides, and print the speeds by group."""
    if args.code:
        groups = code_questions(args.groups, min(args.limit, 30))
    else:
        groups = read_questions(Path(args.questions), args.groups, args.limit)
    sides = [
        LlamaCpp(name, args) if name.startswith("llama.cpp") else Side(name, args)
        for name in args.methods
    ]
    assert isinstance(sides[0], Side), "the first method is one of mie"
    values: dict[str, Any] = {"machine": machine(), "arguments": vars(args), "groups": {}}
    rows, num_different = [], 0
    for group, questions in groups.items():
        for side in sides:
            side.begin()
        for number, batch in enumerate(batches(questions, args.concurrency)):
            params = SamplingParams(
                temperature=args.temperature, max_tokens=args.max_tokens, seed=number
            )
            prompts = [prompt_of(sides[0].llm, question) for question in batch]
            answers = {side.name: side.answer(prompts, params) for side in in_turn(sides, number)}
            first = answers[sides[0].name]
            num_different += sum(each not in (first, None) for each in answers.values())
        base = sides[0].num_tokens / sides[0].seconds
        found = {
            side.name: {
                "tokens/s": side.num_tokens / side.seconds,
                "speed": side.num_tokens / side.seconds / base,
                "tokens/step": side.num_tokens / side.num_steps,
            }
            for side in sides
        }
        values["groups"][group] = found
        rows.append(
            [
                group,
                f"{base:.1f}",
                *(f"{each['speed']:.2f}× ({each['tokens/step']:.2f})" for each in found.values()),
            ]
        )
        print(group, rows[-1], file=sys.stderr, flush=True)
    heads = ["group", "tokens/s off", *(f"{side.name} (tokens a step)" for side in sides)]
    lines = table(heads, rows)
    lines += ["", f"{num_different} batches of answers differ."]
    write_report(args.output, values, lines)
    return int(num_different > 0)


class WrongDrafts:
    """Drafts a given number of tokens in each step."""

    def __init__(self) -> None:
        self.count = 0

    def may_draft(self, seq: Any) -> bool:
        return True

    def propose(self, seq: Any, most: int, num_rows: int, num_tokens: int) -> Sequence[int]:
        return [5 + (seq.num_tokens * 7 + i) % 97 for i in range(min(most, self.count))]

    def observe(self, seq: Any, num_drafts: int, num_accepted: int) -> None:
        pass

    def end(self, seq: Any) -> None:
        pass

    def forget(self) -> None:
        pass


def row_costs(args: argparse.Namespace) -> int:
    """Print the time of steps of 1, 2, … rows of one sequence, relative to the first."""
    drafts = WrongDrafts()
    side = Side("ngram:1", args)
    engine = side.llm.engine
    assert engine.scheduler.speculation is not None
    engine.scheduler.speculation.drafter = drafts
    seconds: dict[int, list[float]] = {}
    for number in range(args.rounds):
        engine.add_request(
            [5 + i % 97 for i in range(200)],
            SamplingParams(max_tokens=8 * LONGEST_ROWS, ignore_eos=True, temperature=0.0),
        )
        engine.step()
        for step in range(7 * LONGEST_ROWS):
            if not engine.has_work:
                break
            num_rows = 1 + (step * 5 + number) % LONGEST_ROWS
            drafts.count = num_rows - 1
            begun = time.perf_counter()
            stats = engine.step().stats
            seconds.setdefault(stats.num_decode_tokens, []).append(time.perf_counter() - begun)
        while engine.has_work:
            engine.step()
    found = {rows: Spread.of(each) for rows, each in sorted(seconds.items())}
    first = found[1].median
    cells = [
        [str(rows), f"{1000 * each.median:.2f} ms", f"{each.median / first:.2f}"]
        for rows, each in found.items()
    ]
    values = {"machine": machine(), "costs": {k: v.median / first for k, v in found.items()}}
    write_report(args.output, values, table(["rows", "median step", "relative"], cells))
    return 0


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = parser_of("speculate", __doc__)
    parser.add_argument("model")
    parser.add_argument("--questions", help="JSON lines of Spec-Bench, plain or .xz")
    parser.add_argument("--code", action="store_true", help="ask about Python's own library")
    parser.add_argument("--row-costs", action="store_true")
    parser.add_argument("--groups", type=lambda text: text.split(","), default=[])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["off", "ngram"])
    parser.add_argument("--limit", type=int, default=80, help="questions of each group")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--backend", default="jit")
    parser.add_argument("--activations", default="float32", help="float32 or int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", help="prefix of a JSON and a Markdown file")
    args = parser.parse_args(argv)
    if not (args.row_costs or args.code or args.questions):
        parser.error("give --questions FILE, --code or --row-costs")
    return row_costs(args) if args.row_costs else compare(args)
