"""``mie chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from mie.cli.options import (
    DEFAULT_MODEL,
    add_engine_options,
    add_sampling_options,
    add_trace_option,
    llm_with_trace,
    report_sampling_defaults,
    sampling_params,
    trace_failed,
)
from mie.errors import RequestError

if TYPE_CHECKING:
    from mie.llm import LLM
    from mie.outputs import CompletionOutput
    from mie.sched.params import SamplingParams

_COMMANDS = "/exit ends, /reset starts anew, Ctrl-C stops an answer"

_EPILOG = """\
in the conversation:
  /exit     end (so does Ctrl-D)
  /reset    forget everything but the system message
  Ctrl-C    stop the answer; what was said stays in the conversation

Nothing is dropped silently: when the context is full, mie says so and waits for /reset.
Messages may also come from standard input, one a line.

examples:
  mie chat
  mie chat ./Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Adds ``mie chat`` to the command line; its arguments carry ``run``."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="Talks with a model, turn by turn.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_trace_option(parser)
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=None, choices=False)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Talks until the input ends; 0, or 1 if a message could not be answered.

    Raises:
        ConfigError: an argument is out of range.
        ModelError: the model cannot be used.
    """
    if args.positional_model and args.model == DEFAULT_MODEL:
        args.model = args.positional_model
    sampling_params(args)  # refuses bad values before the model is loaded
    with llm_with_trace(args) as llm:
        report_sampling_defaults(args, llm)
        params = sampling_params(args, defaults=llm.generation_config.sampling)
        conversation = Conversation(llm, params, args.system)
        is_terminal = sys.stdin is not None and sys.stdin.isatty()
        if is_terminal:
            print(f"{args.model} · {_COMMANDS}", file=sys.stderr)
        code = _talk(conversation, is_terminal)
        return 1 if trace_failed(args, llm) else code


class Conversation:
    """A model and what was said; every answer is printed as it comes.

    Raises:
        ChatTemplateError: the model has no chat template, or one without a system message.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = [*self._opening]
        llm.apply_chat_template([*self._opening, {"role": "user", "content": "Hello"}])

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [*self._opening]

    def answer(self, text: str) -> None:
        """Print the answer to ``text``, and remember both. Ctrl-C ends the answer early.

        Raises:
            RequestError: the conversation does not fit the context, or the template refuses it;
                ``text`` is not remembered.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._llm.chat_prompt(messages)
        self._check_fits(len(prompt["prompt_token_ids"]))
        choice: CompletionOutput | None = None
        try:
            with closing(self._llm.stream(prompt, self._params)) as outputs:
                for output in outputs:
                    choice = output.outputs[0]
                    print(choice.new_text, end="", flush=True)
            note = self._why_cut(choice)
        except KeyboardInterrupt:
            note = "stopped"
        print()
        if note:
            print(f"[{note}]", file=sys.stderr)
        if choice is not None and choice.text:
            self.messages = [*messages, {"role": "assistant", "content": choice.text}]

    def _check_fits(self, num_tokens: int) -> None:
        limit = self._llm.engine.max_model_len
        if num_tokens >= limit:
            raise RequestError(
                f"the conversation has {num_tokens} tokens with this message; the context holds"
                f" {limit}, the answer included. The message was not sent: /reset starts anew, or"
                " send a shorter one"
            )

    def _why_cut(self, choice: CompletionOutput | None) -> str | None:
        if choice is None or choice.finish_reason != "length":
            return None
        if len(choice.token_ids) == self._params.max_tokens:
            return f"cut at --max-tokens {self._params.max_tokens}"
        limit = self._llm.engine.max_model_len
        return f"the context of {limit} tokens is full: the answer was cut. /reset starts anew"


def _talk(conversation: Conversation, is_terminal: bool) -> int:
    num_failed = 0
    while True:
        text = _read_from_terminal() if is_terminal else _read_from_pipe()
        if text is None or text.strip() == "/exit":
            return 1 if num_failed and not is_terminal else 0
        if text.strip() == "/reset":
            conversation.reset()
            print("[a new conversation]", file=sys.stderr)
        elif text.strip().startswith("/"):
            print(f"[unknown command {text.strip()}: {_COMMANDS}]", file=sys.stderr)
            num_failed += 1
        elif text.strip():
            num_failed += not _answered(conversation, text)


def _answered(conversation: Conversation, text: str) -> bool:
    try:
        conversation.answer(text)
    except RequestError as error:
        print(f"mie: error: {error}", file=sys.stderr)
        return False
    return True


def _read_from_terminal() -> str | None:
    """A line that was typed; None at its end (Ctrl-D). Ctrl-C begins the line anew."""
    with suppress(ImportError):
        import readline  # noqa: F401  # importing it gives input() its editing keys
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print(f"\n({_COMMANDS})")


def _read_from_pipe() -> str | None:
    raw = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    try:
        return raw.decode("utf-8").rstrip("\r\n") if raw else None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8: byte 0x{raw[error.start]:02x} in {raw[:40]!r}"
        ) from error
