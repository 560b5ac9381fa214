"""Implement ``mie chat``, a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from mie.cli.answer_writer import Look
from mie.cli.chat_commands import Chat, Ended, commands_help
from mie.cli.conversation import Conversation
from mie.cli.options import (
    DEFAULT_MODEL,
    add_engine_options,
    add_sampling_options,
    engine_options,
    llm_with_trace,
    load_llm,
    lora_of,
    report_sampling_defaults,
    sampling_params,
    trace_failed,
)
from mie.cli.parser import Commands, add_declared, declared, epilog_of, show_first
from mie.cli.terminal import (
    Message,
    ReadLine,
    line_editor,
    read_all_from_pipe,
    read_from_pipe,
    read_message,
)
from mie.config.adapters import lora_modules_of
from mie.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from mie.config.params.sampling import SamplingParams
    from mie.frontend.llm import LLM

_HINT = "/help shows the commands, /exit ends, /reset starts over, Ctrl-C stops an answer"


_FIRST = ("--model", "--system", "--prompt", "--temperature", "--max-tokens")
"""The options with which ``--help`` begins. ``--help-all`` shows the others."""


def add_parser(commands: Commands) -> None:
    """Add ``mie chat`` to the command line."""
    declared(commands, "chat", run, conversation=add_options)


def add_options(parser: argparse.ArgumentParser, *, names_model: bool = True) -> None:
    """Add the options of a conversation, and ``--model`` if it ``names_model``."""
    help_text = commands_help(is_terminal=True)
    parser.epilog = f"in the conversation:\n{help_text}\n\n{epilog_of('conversation')}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_declared(
        parser,
        "conversation",
        engine=partial(add_engine_options, names_model=names_model),
        sampling=partial(add_sampling_options, max_tokens=None, choices=False),
    )
    show_first(parser, [option for option in _FIRST if names_model or option != "--model"])


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends, and return the exit code, as `talk` does."""
    return talk(args, editor_of(args))


def editor_of(args: argparse.Namespace) -> ReadLine | None:
    """Return the editor of a conversation in a terminal, or None if messages come from elsewhere.

    Raises:
        MissingExtraError: the editor is not installed.
    """
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    return line_editor() if args.prompt is None and is_terminal else None


def talk(args: argparse.Namespace, editor: ReadLine | None) -> int:
    """Talk until the input ends, and return the exit code.

    It is 1 if a message from a pipe or ``--prompt`` could not be answered, else 0. ``editor`` reads
    the messages in a terminal.

    Raises:
        KeyboardInterrupt: Ctrl-C came while the model loaded, or ended the answer to ``--prompt``.
    """
    if args.positional_model is not None:
        if args.model not in (DEFAULT_MODEL, args.positional_model):
            raise ConfigError(
                f"MODEL is {args.positional_model} and --model is {args.model}; give one of them"
            )
        args.model = args.positional_model
    sampling_params(args)  # refuse bad values before the model is loaded
    lora_of(args)
    look = Look.of(args.markdown, args.reasoning)
    if args.prompt == "-":
        args.prompt = read_all_from_pipe()
    if args.prompt is not None and not args.prompt.strip():
        raise RequestError("the prompt is empty; give it some text")
    with ExitStack() as stack:
        chat = _new_chat(args, stack, look, editor is not None)
        if editor is not None:
            _talk_in_terminal(chat, editor)
            num_failed = 0  # the user has seen the errors
        elif args.prompt is None:
            num_failed = _talk(chat, lambda: read_message(read_from_pipe))
        else:
            num_failed = 0 if chat.say(args.prompt) else 1
            if chat.conversation.is_stopped:  # there is no other message
                raise KeyboardInterrupt
        is_cut = args.trace is not None and trace_failed(args, chat.conversation.llm)
        return 1 if is_cut or num_failed else 0


def _new_chat(args: argparse.Namespace, stack: ExitStack, look: Look, tells_speed: bool) -> Chat:
    """Load the model. The event log of ``--trace`` is closed with ``stack``."""
    from mie.text.template_files import template_given

    template = template_given(args.chat_template)  # refuse a file that cannot be read
    # A conversation has one sequence at a time, so memory is planned for one.
    defaults: dict[str, Any] = {"reasoning_parser": "auto", "max_num_seqs": 1}
    settings = {key: value for key, value in defaults.items() if key not in engine_options(args)}

    def load(name: str) -> LLM:
        llm = load_llm(argparse.Namespace(**{**vars(args), "model": name}), **settings)
        report_sampling_defaults(args, llm, is_conversation=True)
        return llm

    def params_of(llm: LLM, changed: Mapping[str, Any]) -> SamplingParams:
        return sampling_params(args, changed, llm.generation_config.conversation)

    # A model without --trace has no other owner than the conversation, so that /model can free it.
    if args.trace:
        llm = stack.enter_context(llm_with_trace(args, **settings))
        report_sampling_defaults(args, llm, is_conversation=True)
    else:
        llm = load(args.model)
    params = params_of(llm, {})
    return Chat(
        conversation=Conversation(
            llm,
            params,
            args.system,
            look=look,
            tells_speed=tells_speed,
            when_full=args.when_full,
            chat_template=template,
            lora_request=lora_of(args),
        ),
        model=getattr(args, "title", args.model),
        load=load,
        params_of=params_of,
        loras=lora_modules_of(args.lora_modules),
        fixed_model="--trace records one model; start again without it" if args.trace else None,
    )


def _talk_in_terminal(chat: Chat, editor: ReadLine) -> None:
    chat.read_line = editor
    print(f"{chat.model} · {_HINT}", file=sys.stderr)

    def read_next() -> Message | None:
        while True:
            try:
                return read_message(editor)
            except KeyboardInterrupt:  # Ctrl-C drops the line and starts the message again
                print(f"\n({_HINT})")

    _talk(chat, read_next)


def _talk(chat: Chat, read_next: Callable[[], Message | None]) -> int:
    """Answer messages until the input ends, and return how many could not be answered."""
    num_failed = 0
    while (message := read_next()) is not None:
        if message.command is not None:
            try:
                num_failed += not chat.execute(message.command)
            except Ended:
                break
        elif message.text.strip():
            num_failed += not chat.say(message.text)
    return num_failed
