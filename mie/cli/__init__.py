"""Define the command line, one file per command.

``commands.json`` declares the texts and the options of the commands. In each file ``run`` executes
a command and returns the exit code. It may raise any `MieError`, and `main` prints the error. A
function ``add_parser`` adds options that are not declared. This room handles text and terminals, no
arrays. A command line imports only the file of its command, and a command imports the engine when
it runs, so that help and mistakes in the arguments cost little.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mie.base.files import is_unwritable
from mie.base.logs import logging_to_stderr
from mie.base.version import __version__
from mie.cli.parser import ROWS, Parser, declared, epilog_of, shows_help
from mie.errors import MieError, TooLittleMemoryError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE.

COMMANDS = tuple(name for name, row in ROWS.items() if "help" in row and " " not in name)
"""The commands in the order of ``mie --help``. Each is a file of this room."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own, and return the exit code.

    A user's mistake never shows a traceback: the error is one line on standard error.
    """
    try:
        code = _run(argv)
        sys.stdout.flush()  # while errors can still be caught
    except BrokenPipeError:
        code = EXIT_CLOSED_PIPE
    except KeyboardInterrupt:
        _say("mie: interrupted")
        code = EXIT_INTERRUPTED
    except (MieError, OSError) as error:  # a full disk, a file that cannot be read
        code = _failed(error)
    _discard_unwritable()
    return code


def _run(argv: Sequence[str] | None) -> int:
    _make_streams_safe()
    try:
        words = sys.argv[1:] if argv is None else argv
        args = new_parser(words).parse_args(words)
    except SystemExit as end:  # After --help, or an error that argparse has printed.
        return int(end.code or 0)
    with logging_to_stderr():
        return int(args.run(args))


def new_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of the command that ``words`` begin with, or of all commands."""
    texts = {"description": ROWS["mie"]["description"], "epilog": epilog_of("mie")}
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="mie", **texts, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"mie {__version__}")
    shows_help(parser)
    commands: Any = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in set(COMMANDS).intersection(words[:1]) or COMMANDS:
        module = importlib.import_module(f"mie.cli.{command}")
        if hasattr(module, "add_parser"):
            module.add_parser(commands)
        else:
            declared(commands, command, module.run, engine=_add_engine, sampling=_add_sampling)
    return parser


def _add_engine(parser: argparse.ArgumentParser) -> None:
    from mie.cli.options import add_engine_options  # few commands have an engine

    add_engine_options(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    from mie.cli.options import DEFAULT_MAX_TOKENS, add_sampling_options

    add_sampling_options(parser, max_tokens=DEFAULT_MAX_TOKENS)


def _failed(error: Exception) -> int:
    message = str(error)
    if isinstance(error, OSError):
        message = message.removeprefix(f"[Errno {error.errno}] ")
        if is_unwritable(sys.stdout):
            message = f"standard output cannot be written: {message}"
    if not isinstance(error, TooLittleMemoryError):  # its message is a table
        # A message may quote a file, and control characters must not reach the terminal.
        message = "".join(x if x.isprintable() else " " if x == "\n" else "?" for x in message)
    _say(f"mie: error: {message}")
    return EXIT_ERROR


def _say(line: str) -> None:
    with suppress(OSError):  # a full disk
        print(line, file=sys.stderr)


def _make_streams_safe() -> None:
    """Discard output to closed streams, and print "?" for characters that a terminal lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until exit
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _discard_unwritable() -> None:
    """Redirect streams with output that cannot be written, so that Python's end cannot fail."""
    for stream in (sys.stdout, sys.stderr):
        if is_unwritable(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
