"""Parse arguments, and suggest the nearest name for a misspelt one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """The parser of ``mie`` and of each of its commands.

    argparse makes the parsers of commands with the class of the main parser.
    """

    first: tuple[argparse.Action, ...] = ()
    """The options that ``--help`` shows, or none if it shows all."""

    def format_help(self) -> str:
        """Return the help, short if there are `first` options."""
        if not self.first:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self.first, [])
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments(self.first)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(  # type: ignore[override]  # its overloads differ only in the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse an unknown option in the parser of the command, which knows its options."""
        parsed, rest = super().parse_known_args(args, namespace)
        for word in rest:
            if word.startswith("--"):
                name = word.partition("=")[0]
                self.error(f"unknown option {name}{did_you_mean(name, self._option_names())}")
        return parsed, rest

    def _option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        hint = did_you_mean(str(value), choices) or f" (choose from {', '.join(choices)})"
        raise argparse.ArgumentError(action, f"invalid choice {str(value)!r}{hint}")


class _HelpAll(argparse.Action):
    """Prints the help with all options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        parser.first = ()
        parser.print_help()
        parser.exit()


def show_first(parser: argparse.ArgumentParser, options: Sequence[str]) -> None:
    """Let ``--help`` show the positional arguments and these options, and ``--help-all`` all."""
    assert isinstance(parser, Parser)
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options, and exit")
    positional = [action for action in parser._actions if not action.option_strings]
    known = parser._option_string_actions
    named = [known[name] for name in (*options, "--help", "--help-all")]
    parser.first = (*positional, *named)
    words = [f"{x.metavar}" if x.nargs is None else f"[{x.metavar}]" for x in positional]
    parser.usage = " ".join(["%(prog)s [options]", *words])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for an error message, or "" if no name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
