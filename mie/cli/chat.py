"""Implement ``mie chat``, a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mie.cli.chat_input import (
    Message,
    line_editor,
    read_from_pipe,
    read_message,
    read_plainly,
)
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
from mie.cli.parser import did_you_mean
from mie.cli.terminal import AnswerWriter, typing_hidden
from mie.errors import RequestError

if TYPE_CHECKING:
    from mie.config.params.sampling import SamplingParams
    from mie.frontend.outputs import CompletionOutput
    from mie.llm import LLM

_COMMANDS = ("/help", "/exit", "/reset")
_HINT = "/help shows the commands, /exit ends, /reset starts over, Ctrl-C stops an answer"

_HELP = '''\
  /help     show this
  /exit     end the conversation (so does Ctrl-D)
  /reset    forget everything but the system message
  """       begin a message of several lines; another """ ends it
  Ctrl-C    stop the answer; its text stays in the conversation'''

_EDITOR_HELP = """\
  Alt-Enter begin a new line in the message
  a pasted block is one message; the arrow keys recall earlier messages"""

_EPILOG = f"""\
in the conversation:
{_HELP}

with the extra "chat" (pip install "mie[chat]"):
{_EDITOR_HELP}

Nothing is dropped silently: when the context is full, mie says so and waits for /reset.
Messages may also come from standard input, one per line.

examples:
  mie chat
  mie chat ./Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie chat`` to the command line. Its parser sets ``run``."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model, turn by turn.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_trace_option(parser)
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=None, choices=False)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends, and return the exit code.

    It is 1 if a message from a pipe could not be answered, else 0.

    Raises:
        ConfigError: an argument is out of range.
        ModelError: the model cannot be used.
        RequestError: the input is not UTF-8, or ends inside a message.
    """
    if args.positional_model and args.model == DEFAULT_MODEL:
        args.model = args.positional_model
    sampling_params(args)  # refuse bad values before the model is loaded
    with llm_with_trace(args) as llm:
        report_sampling_defaults(args, llm)
        params = sampling_params(args, defaults=llm.generation_config.sampling)
        is_terminal = sys.stdin is not None and sys.stdin.isatty()
        conversation = Conversation(llm, params, args.system, tells_speed=is_terminal)
        if is_terminal:
            _talk_in_terminal(conversation, args.model)
            num_failed = 0  # the user has seen the errors
        else:
            num_failed = _talk(conversation, lambda: read_message(read_from_pipe), _HELP)
        return 1 if trace_failed(args, llm) or num_failed else 0


class Conversation:
    """A model and the messages so far. Answers are printed as they are generated.

    With ``tells_speed`` each answer is followed by a line with its tokens per second.

    Raises:
        ChatTemplateError: the model has no chat template, or one without a system message.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, *, tells_speed: bool = False
    ) -> None:
        self._llm = llm
        self._params = params
        self._tells_speed = tells_speed
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = [*self._opening]
        llm.apply_chat_template([*self._opening, {"role": "user", "content": "Hello"}])

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [*self._opening]

    def answer(self, text: str) -> None:
        """Print the answer to ``text``, and remember both. Ctrl-C ends the answer early.

        Raises:
            RequestError: the conversation does not fit the context, or the template rejects it;
                ``text`` is not remembered.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._llm.chat_prompt(messages)
        self._check_fits(len(prompt["prompt_token_ids"]))
        began = perf_counter()
        choice, is_stopped = self._printed(prompt)
        notes = ["stopped"] if is_stopped else self._why_cut(choice)
        if choice is not None and self._tells_speed:
            count = len(choice.token_ids)
            notes += [f"{count} tokens", f"{count / (perf_counter() - began):.1f} tokens/s"]
        if notes:
            print(f"[{' · '.join(notes)}]", file=sys.stderr)
        if choice is not None and choice.text:
            self.messages = [*messages, {"role": "assistant", "content": choice.text}]

    def _printed(self, prompt: dict[str, Any]) -> tuple[CompletionOutput | None, bool]:
        """Print the answer as it is generated, and return it and whether Ctrl-C stopped it."""
        choice: CompletionOutput | None = None
        is_stopped = False
        writer = AnswerWriter(sys.stdout)
        try:
            with closing(self._llm.stream(prompt, self._params)) as outputs:
                for output in outputs:
                    choice = output.outputs[0]
                    writer.add(choice.new_text)
        except KeyboardInterrupt:
            is_stopped = True
        writer.finish()
        return choice, is_stopped

    def _check_fits(self, num_tokens: int) -> None:
        limit = self._llm.engine.max_model_len
        if num_tokens >= limit:
            raise RequestError(
                f"the conversation has {num_tokens} tokens with this message; the context holds"
                f" {limit}, including the answer. The message was not sent: use /reset, or send a"
                " shorter one"
            )

    def _why_cut(self, choice: CompletionOutput | None) -> list[str]:
        if choice is None or choice.finish_reason != "length":
            return []
        if len(choice.token_ids) == self._params.max_tokens:
            return [f"cut at --max-tokens {self._params.max_tokens}"]
        limit = self._llm.engine.max_model_len
        return [f"the context of {limit} tokens is full: the answer was cut. /reset starts over"]


def _talk_in_terminal(conversation: Conversation, model: str) -> None:
    editor = line_editor() if sys.stdout.isatty() else None
    print(f"{model} · {_HINT}", file=sys.stderr)
    if editor is None:
        print('(pip install "mie[chat]" adds history and pasted blocks)', file=sys.stderr)

    def read_next() -> Message | None:
        while True:
            try:
                return read_message(editor or read_plainly)
            except KeyboardInterrupt:  # start the message again
                print(f"\n({_HINT})")

    _talk(conversation, read_next, _HELP if editor is None else f"{_HELP}\n{_EDITOR_HELP}")


def _talk(conversation: Conversation, read_next: Callable[[], Message | None], help_: str) -> int:
    """Answer messages until the input ends, and return how many could not be answered."""
    num_failed = 0
    while (message := read_next()) is not None and message.command != "/exit":
        if message.command == "/reset":
            conversation.reset()
            print("[a new conversation]", file=sys.stderr)
        elif message.command == "/help":
            print(help_, file=sys.stderr)
        elif message.command is not None:
            near = did_you_mean(message.command, _COMMANDS)
            print(f"[unknown command {message.command}{near or f': {_HINT}'}]", file=sys.stderr)
            num_failed += 1
        elif message.text.strip():
            num_failed += not _answered(conversation, message.text)
    return num_failed


def _answered(conversation: Conversation, text: str) -> bool:
    try:
        with typing_hidden(sys.stdin):
            conversation.answer(text)
    except RequestError as error:
        print(f"mie: error: {error}", file=sys.stderr)
        return False
    return True
