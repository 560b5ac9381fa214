"""Implement ``mie generate``: complete prompts, all together in one engine."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING

from mie.base.reprs import clipped, count
from mie.cli.options import (
    llm_with_trace,
    lora_of,
    print_error,
    report_sampling_defaults,
    sampling_params,
    trace_failed,
)
from mie.errors import ConfigError, RequestError
from mie.frontend.batch.lines import Line, answer_all, decoded, num_failed, raw_lines, read_lines

if TYPE_CHECKING:
    from mie.config.params.sampling import SamplingParams
    from mie.frontend.batch.requests import Request
    from mie.frontend.llm import LLM
    from mie.frontend.outputs import RequestOutput


def run(args: argparse.Namespace) -> int:
    """Print the completions, and return the exit code.

    It is 1 if a line of ``--input`` could not be served, else 0.
    """
    lines = _read(args)
    sampling_params(args)  # refuse bad values before the model is loaded
    lora_of(args)
    with llm_with_trace(args) as llm:
        printer = _Printer(llm, args, lines)
        try:
            if len(lines) == 1 and not args.input and not args.json and (args.n or 1) == 1:
                printer.stream()
            else:
                printer.print_all()
        except KeyboardInterrupt:
            print()
            printer.print_numbers()
            raise
        printer.print_numbers()
        return 1 if trace_failed(args, llm) or num_failed(lines) else 0


def _read(args: argparse.Namespace) -> list[Line]:
    if args.chat_template is not None and not args.chat and args.input is None:
        raise ConfigError("--chat-template needs --chat or --input")
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat, which applies the chat template")
    if args.input is None:
        prompts = enumerate(args.prompts or _prompts_from_stdin(), start=1)
        return [_line_of(prompt, f"prompt {number}", args) for number, prompt in prompts]
    if args.prompts or args.chat:
        raise ConfigError(
            "--input cannot be combined with prompts or --chat (use a line in OpenAI's batch form"
            " for a chat)"
        )
    return [*read_lines(args.input, args.model)]


def _line_of(prompt: str, source: str, args: argparse.Namespace) -> Line:
    """Return a prompt, or with ``--chat`` a user's message, as the line of a file."""
    if not prompt:
        raise RequestError(f"{source} is empty; give it some text")
    if not args.chat:
        return Line(source=source, request={"prompt": prompt})
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = [*opening, {"role": "user", "content": prompt}]
    return Line(source=source, request={"messages": messages})


def _prompts_from_stdin() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            'no prompt: pass one, as in: mie generate "Once upon a time" (see mie generate --help)'
        )
    prompts = [decoded(raw, source) for _, source, raw in raw_lines("-")]
    if not prompts:
        raise RequestError(
            "no prompt: standard input is empty; pass prompts as arguments, one per line on"
            " standard input, or one per line of --input"
        )
    return prompts


class _Printer:
    """Answers the requests of one command, and prints the answers in order."""

    def __init__(self, llm: LLM, args: argparse.Namespace, lines: Sequence[Line]) -> None:
        from mie.text.template_files import template_given

        self._llm = llm
        self._args = args
        self._lines = lines
        self._lora = lora_of(args)
        self._template = template_given(args.chat_template)
        self._began = perf_counter()
        self._first_token: float | None = None
        self._num_done = 0

    def stream(self) -> None:
        """Print the only answer as its tokens are generated."""
        from mie.frontend.batch.requests import prompt_of

        (line,) = self._lines
        params = self._params(line.source, line.request)
        prompt = prompt_of(self._llm, line.request, self._template)
        stream = self._llm.stream(prompt, params, lora_request=self._lora)
        with closing(stream) as outputs:
            for output in outputs:
                self._note_first_token(output)
                print(output.outputs[0].new_text, end="", flush=True)
        self._num_done += 1
        print()

    def print_all(self) -> None:
        """Run all requests together, and print their records in order as soon as possible."""
        from tqdm import tqdm

        from mie.frontend.batch.requests import run

        waiting = deque(self._lines)
        ended: dict[str, RequestOutput | None] = {}
        shown = bool(self._args.input) and sys.stderr.isatty()

        def answers(requests: Mapping[str, Request]) -> Iterator[tuple[str, RequestOutput]]:
            return run(
                self._llm,
                requests.items(),
                self._params,
                is_strict=not self._args.input,
                chat_template=self._template,
                lora_request=self._lora,
            )

        def write(line: Line, output: RequestOutput | None) -> None:
            self._note_first_token(output)
            ended[line.source] = output
            bar.update()
            while waiting and waiting[0].source in ended:
                due = waiting.popleft()
                self._print(due, ended.pop(due.source))

        with tqdm(total=len(waiting), unit="request", desc="generating", disable=not shown) as bar:
            answer_all({line.source: line for line in waiting}, answers, write, print_error)

    def _params(self, source: str, request: Request) -> SamplingParams:
        from mie.frontend.batch.requests import sampling_of

        defaults = self._llm.generation_config.sampling
        return sampling_params(self._args, sampling_of(request), defaults)

    def _note_first_token(self, output: RequestOutput | None) -> None:
        """Record the time of the earliest first token of all requests."""
        moment = output.metrics.first_token_time if output and output.metrics else None
        if moment is not None:
            seconds = moment - self._began
            self._first_token = min(seconds, self._first_token or seconds)

    def _print(self, line: Line, output: RequestOutput | None) -> None:
        if output is None:
            title, texts = line.source, [f"[error: {line.error}]"]
        else:
            self._num_done += 1
            title = line.title
            texts = [choice.text for choice in output.outputs]
            if len(texts) > 1:
                texts = [f"[{index}] {text}" for index, text in enumerate(texts)]
        if self._args.json:
            texts = list(map(json.dumps, line.records(output, self._args.model)))
        elif len(self._lines) > 1:
            width = max(20, shutil.get_terminal_size().columns - 4)
            texts = [f"=== {clipped(title, width)}", *texts, ""]
        print("\n".join(texts), flush=True)

    def print_numbers(self) -> None:
        """Print on standard error the number of tokens, the speed, and the use of the cache."""
        stats, seconds = self._llm.engine.stats, perf_counter() - self._began
        tokens = stats.num_generated_tokens
        numbers = [
            count(self._num_done, "request"),
            f"{count(tokens, 'token')} in {seconds:.2f} s",
            f"{tokens / seconds:.1f} tokens/s",
        ]
        if self._first_token is not None:
            numbers.append(f"first token after {self._first_token:.3f} s")
        numbers.append(f"peak {count(stats.peak_blocks, 'block')}")
        num_hit = stats.memory.num_hit_tokens + stats.memory.num_partial_hit_tokens
        if num_hit:
            numbers.append(
                f"{num_hit:,} of {stats.memory.num_queried_tokens:,} prompt tokens cached"
            )
        if stats.num_preemptions:
            numbers.append(count(stats.num_preemptions, "preemption"))
        if speculation := self._llm.engine.scheduler.speculation:
            kept = speculation.stats.num_accepted_tokens
            numbers.append(f"{kept:,} of {count(speculation.stats.num_draft_tokens, 'draft')} kept")
        if failed := num_failed(self._lines):
            numbers.append(f"{failed} failed")
        report_sampling_defaults(self._args, self._llm)
        print(f"[{' · '.join(numbers)}]", file=sys.stderr)
