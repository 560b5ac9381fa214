"""Implement ``mie generate``: complete prompts, all together in one engine."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mie.cli.options import (
    add_engine_options,
    add_sampling_options,
    add_trace_option,
    llm_with_trace,
    report_sampling_defaults,
    sampling_params,
    trace_failed,
)
from mie.cli.records import record_of_refused, records_of
from mie.cli.requests import (
    CliRequest,
    RefusedRequest,
    from_json_lines,
    from_prompts,
    prompts_from_stdin,
)
from mie.errors import ConfigError, RequestError
from mie.reprs import count

if TYPE_CHECKING:
    from mie.frontend.outputs import RequestOutput
    from mie.llm import LLM
    from mie.params.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 256

_EPILOG = """\
Prompts are arguments, lines of standard input, or JSON lines with --input. A JSON line has one of
"prompt", "messages" or "prompt_token_ids", and optionally sampling parameters by name, "priority"
and "cache_salt":
  {"id": 7, "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
Lines of OpenAI's batch files are also accepted. With --json the answers have the same form:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
The output repeats "id" and "custom_id" and has the order of the input. Blank lines are skipped. A
bad line does not stop the others: its record has an "error", standard error names the line, and
the exit code is 1.

A single prompt is answered token by token. Several run together, and complete answers are printed
in order. The last line on standard error has statistics.

examples:
  mie generate "Once upon a time"
  mie generate --chat "Tell me a story about Mia the fox, the garden and a kite."
  mie generate --temperature 0 --stop . "Once upon a time" "One day"
  printf 'First prompt\\nSecond prompt\\n' | mie generate --json
  mie generate --input requests.jsonl --max-num-seqs 64 > answers.txt
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie generate`` to the command line. Its parser sets ``run``."""
    parser = subparsers.add_parser(
        "generate",
        help="complete prompts",
        description="Complete prompts, all together in one paged cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompt to complete")
    parser.add_argument(
        "--input", metavar="FILE", help="read requests from a file of JSON lines ('-': from stdin)"
    )
    parser.add_argument(
        "--chat",
        "--apply-chat-template",
        dest="chat",
        action="store_true",
        help="treat prompts as user messages and apply the model's chat template",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message (requires --chat)")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each answer")
    add_trace_option(parser)
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=DEFAULT_MAX_TOKENS)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the completions, and return the exit code.

    It is 1 if a line of ``--input`` could not be served, else 0.

    Raises:
        ConfigError: an argument is out of range, or contradicts another.
        RequestError: a prompt cannot be served; nothing was run.
        ModelError: the model cannot be used.
    """
    requests = _read_requests(args)
    sampling_params(args)  # refuse bad values before the model is loaded
    with llm_with_trace(args) as llm:
        batch = _Batch(llm, args, requests)
        try:
            if len(requests) == 1 and not args.input and not args.json and (args.n or 1) == 1:
                batch.stream()
            else:
                batch.print_all()
        except KeyboardInterrupt:
            print()
            batch.print_numbers()
            raise
        batch.print_numbers()
        return 1 if trace_failed(args, llm) or batch.num_failed else 0


def _read_requests(args: argparse.Namespace) -> list[CliRequest | RefusedRequest]:
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat, which applies the chat template")
    if args.input is None:
        prompts = args.prompts or _stdin_or_help()
        return [*from_prompts(prompts, system=args.system, chat=args.chat)]
    if args.prompts or args.chat:
        raise ConfigError(
            "--input cannot be combined with prompts or --chat (use a line with"
            ' "messages" for a chat)'
        )
    return [*from_json_lines(args.input, args.model)]


def _stdin_or_help() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            'no prompt: pass one, as in: mie generate "Once upon a time" (see mie generate --help)'
        )
    return prompts_from_stdin()


@dataclass(frozen=True, kw_only=True)
class _Added:
    """A request that was added to the engine."""

    request: CliRequest
    request_id: str


class _Batch:
    """The requests of one command and their state."""

    def __init__(
        self, llm: LLM, args: argparse.Namespace, requests: Sequence[CliRequest | RefusedRequest]
    ) -> None:
        self._llm = llm
        self._args = args
        self._requests = requests
        self._has_titles = len(requests) > 1
        self._began = perf_counter()
        self._first_token: float | None = None
        self._num_done = 0
        self.num_failed = 0

    def stream(self) -> None:
        """Print the only answer as its tokens are generated."""
        (request,) = self._requests
        assert isinstance(request, CliRequest)
        prompt, params = self._prepared(request)
        with closing(self._llm.stream(prompt, params)) as outputs:
            for output in outputs:
                self._note_first_token(output)
                print(output.outputs[0].new_text, end="", flush=True)
        self._num_done += 1
        print()

    def print_all(self) -> None:
        """Run all requests together, and print their records in order as soon as possible."""
        waiting = deque(self._add_all())
        finished: dict[str, RequestOutput] = {}

        def print_those_due() -> None:
            while waiting and (
                isinstance(waiting[0], RefusedRequest) or waiting[0].request_id in finished
            ):
                due = waiting.popleft()
                if isinstance(due, RefusedRequest):
                    self._print_refused(due)
                else:
                    self._print(due.request, finished.pop(due.request_id))

        print_those_due()
        for output in self._finished(sum(isinstance(each, _Added) for each in waiting)):
            finished[output.request_id] = output
            print_those_due()

    def print_numbers(self) -> None:
        """Print on standard error the number of tokens, the speed, and the use of the cache."""
        stats, seconds = self._llm.engine.stats, perf_counter() - self._began
        tokens = stats.num_generated_tokens
        numbers = [
            f"{count(self._num_done, 'request')}",
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
        if self.num_failed:
            numbers.append(f"{self.num_failed} failed")
        report_sampling_defaults(self._args, self._llm)
        print(f"[{' · '.join(numbers)}]", file=sys.stderr)

    def _add_all(self) -> list[_Added | RefusedRequest]:
        return [self._add(request) for request in self._requests]

    def _add(self, request: CliRequest | RefusedRequest) -> _Added | RefusedRequest:
        if isinstance(request, RefusedRequest):
            self._report(request)
            return request
        from mie.params.sampling import RequestOutputKind

        try:
            prompt, params = self._prepared(request)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            priority = request.labels.get("priority", 0)
            request_id = self._llm.add_request(prompt, params, priority=priority)
            return _Added(request=request, request_id=request_id)
        except (ConfigError, RequestError) as error:
            if not self._args.input:
                raise
            message = f"{request.origin.source}: {error}"
            refused = RefusedRequest(origin=request.origin, error=message)
            self._report(refused)
            return refused

    def _report(self, refused: RefusedRequest) -> None:
        """Print a line on standard error for a failed request."""
        print(f"mie: error: {' '.join(refused.error.split())}", file=sys.stderr)
        self.num_failed += 1

    def _prepared(self, request: CliRequest) -> tuple[Any, SamplingParams]:
        defaults = self._llm.generation_config.sampling
        params = sampling_params(self._args, request.overrides, defaults)
        if request.messages is not None:
            prompt = self._llm.chat_prompt(request.messages)
        elif request.prompt_token_ids is not None:
            prompt = {"prompt_token_ids": request.prompt_token_ids}
        else:
            prompt = {"prompt": request.prompt}
        return {**prompt, "cache_salt": request.labels.get("cache_salt")}, params

    def _finished(self, total: int) -> Iterator[RequestOutput]:
        """Yield finished outputs, with a progress bar if standard error is a terminal."""
        from tqdm import tqdm

        shown = bool(self._args.input) and sys.stderr.isatty()
        with tqdm(total=total, unit="request", desc="generating", disable=not shown) as bar:
            while self._llm.has_work:
                for output in self._llm.step():
                    self._note_first_token(output)
                    bar.update()
                    yield output

    def _note_first_token(self, output: RequestOutput) -> None:
        """Record the time of the earliest first token of all requests."""
        moment = output.metrics.first_token_time if output.metrics else None
        if moment is not None:
            seconds = moment - self._began
            self._first_token = min(seconds, self._first_token or seconds)

    def _print(self, request: CliRequest, output: RequestOutput) -> None:
        error = output.error
        if error is not None:  # its step failed; other requests continued
            message = f"{request.origin.source}: {error}"
            refused = RefusedRequest(origin=request.origin, error=message)
            self._report(refused)
            self._print_refused(refused)
            return
        self._num_done += 1
        if self._args.json:
            for record in records_of(request.origin, output, self._args.model):
                print(json.dumps(record))
        else:
            texts = [choice.text for choice in output.outputs]
            if len(texts) > 1:
                texts = [f"[{index}] {text}" for index, text in enumerate(texts)]
            self._print_texts(request.title, texts)
        sys.stdout.flush()

    def _print_refused(self, refused: RefusedRequest) -> None:
        if self._args.json:
            print(json.dumps(record_of_refused(refused)))
        else:
            self._print_texts(refused.origin.source, [f"[error: {refused.error}]"])
        sys.stdout.flush()

    def _print_texts(self, title: str, texts: Sequence[str]) -> None:
        lines = [_title(title), *texts, ""] if self._has_titles else texts
        print("\n".join(lines))


def _title(text: str) -> str:
    """Return a heading that is at most as wide as the terminal."""
    width = max(20, shutil.get_terminal_size().columns - 4)
    return f"=== {text if len(text) <= width else text[: width - 1] + '…'}"
