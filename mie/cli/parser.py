"""Parsers of commands, made of ``commands.json``. They suggest a name for a misspelt one.

A row has ``help``, ``description``, the lines of an ``epilog``, and ``arguments``. An argument is
an object of argparse keywords with its ``names``. A group has a ``group`` as its title, or one of
its arguments may be given (``exclusive``). A name stands for the arguments of another row, or for
a function that adds some. A command of commands has the words above their list (``title``) and in
place of one (``metavar``). The options that ``--help`` shows may be named (``first``).
"""

import argparse
import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from mie.config.arguments import integer_argument, json_object, size_argument

_FEW_OPTIONS = 10
"""Number of options up to which the usage of a command shows all of them."""


class Parser(argparse.ArgumentParser):
    """The parser of ``mie`` and of each of its commands.

    argparse makes the parsers of commands with the class of the main parser.
    """

    first: tuple[argparse.Action, ...] = ()
    """The options that ``--help`` shows, or none if it shows all."""
    _is_intermixed = False  # argparse's own passes call parse_known_args again

    def __init__(self, **options: Any) -> None:
        """Refuse abbreviations: ``--device`` must not become ``--device-ids``."""
        super().__init__(**{**options, "allow_abbrev": False})

    def format_usage(self) -> str:
        """Return the usage, without options that are not required if there are many."""
        with self._brief_usage():
            return super().format_usage()

    def format_help(self) -> str:
        """Return the help, short if there are `first` options."""
        with self._brief_usage():
            return self._format_first() if self.first else super().format_help()

    def _format_first(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self.first, [])
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments(self.first)
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    @contextmanager
    def _brief_usage(self) -> Iterator[None]:
        """Set a usage of one line as long as the block runs, if there are many options."""
        usage = self.usage
        options = [
            each for each in self._actions if each.option_strings and each.help != argparse.SUPPRESS
        ]
        if usage is None and len(options) > _FEW_OPTIONS:
            needed = [each for each in options if each.required]
            required = [f"{each.option_strings[-1]} {each.metavar}" for each in needed]
            positional = [each for each in self._actions if not each.option_strings]
            words = ["%(prog)s [options]", *required, *map(_word_of, positional)]
            self.usage = " ".join(words)
        try:
            yield
        finally:
            self.usage = usage

    def parse_known_args(  # type: ignore[override]  # its overloads differ only in the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse options and other words in any order, and refuse an unknown option."""
        if self._is_intermixed:
            return super().parse_known_args(args, namespace)
        self._is_intermixed = self._subparsers is None
        parse = (
            self.parse_known_intermixed_args if self._is_intermixed else super().parse_known_args
        )
        try:
            parsed, rest = parse(args, namespace)
        finally:
            self._is_intermixed = False
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


def shows_help(parser: argparse.ArgumentParser) -> None:
    """Make a command of commands print its help if no command follows."""

    def run(args: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=run)


class _HelpAll(argparse.Action):
    """Prints the help with all options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        parser.first = ()
        parser.print_help()
        parser.exit()


def show_first(parser: argparse.ArgumentParser, options: Sequence[str]) -> None:
    """Make ``--help`` show the positional arguments and these options, and ``--help-all`` all."""
    assert isinstance(parser, Parser)
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options, and exit")
    positional = [action for action in parser._actions if not action.option_strings]
    known = parser._option_string_actions
    named = [known[name] for name in (*options, "--help", "--help-all")]
    parser.first = (*positional, *named)


def _word_of(action: argparse.Action) -> str:
    """Return a positional argument as a usage shows it."""
    word = str(action.metavar or action.dest)
    forms: Mapping[int | str | None, str]
    forms = {None: word, "?": f"[{word}]", "*": f"[{word} ...]", "+": f"{word} [{word} ...]"}
    return forms[action.nargs]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a suggestion for an error message, or "" if no name is near.

    A name that begins with ``name`` is the nearest.
    """
    begins = sorted((each for each in known if each.startswith(name)), key=len)
    near = begins or difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Adders = Mapping[str, Callable[[argparse.ArgumentParser], object]]
"""Functions that add arguments, by the names for which they stand."""


def setting(text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE``. A value that is not a number, True or False is a string."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value.lower())
    except ValueError:
        return name, value


KINDS: Mapping[str, Any] = {
    "integer": integer_argument,
    "number": float,
    "size": size_argument,
    "json": json_object,
    "switch": argparse.BooleanOptionalAction,
    "setting": setting,
}


ROWS: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("commands.json").read_text(encoding="utf-8")
)


def declared(
    commands: Commands, name: str, run: Any = None, **adders: Any
) -> argparse.ArgumentParser:
    """Add a command as its row declares it. The command's parser sets ``run``.

    ``run`` is a function, or a mapping of the command's own commands to theirs. ``adders`` are
    functions that the row names.
    """
    row = ROWS[name]
    texts = {key: row[key] for key in ("help", "description") if key in row}
    if "epilog" in row:
        texts["epilog"] = "\n".join(row["epilog"])
        texts["formatter_class"] = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name.rpartition(" ")[2], **texts)
    add_declared(parser, name, **adders)
    if isinstance(run, Mapping):
        shows_help(parser)
        inner = parser.add_subparsers(title=row["title"], metavar=row["metavar"])
        for each, own in run.items():
            declared(inner, f"{name} {each}", own, **adders)
    elif run is not None:
        parser.set_defaults(run=run)
    if "first" in row:
        show_first(parser, row["first"].split())
    return parser


def add_declared(parser: argparse.ArgumentParser, name: str, **adders: Any) -> None:
    """Add the arguments of a row to a parser."""
    _add(parser, parser, ROWS[name]["arguments"], adders)


def epilog_of(name: str) -> str:
    """Return the epilog of a row."""
    return "\n".join(ROWS[name]["epilog"])


def _add(parser: argparse.ArgumentParser, group: Any, arguments: Any, adders: Adders) -> None:
    for each in arguments:
        if isinstance(each, str):
            if each in adders:
                adders[each](parser)
            else:
                _add(parser, group, ROWS[each]["arguments"], adders)
        elif "group" in each:
            inner = parser.add_argument_group(each["group"], each.get("description"))
            _add(parser, inner, each["arguments"], adders)
        elif "exclusive" in each:
            _add(parser, group.add_mutually_exclusive_group(), each["exclusive"], adders)
        else:
            add_argument(group, each)


def add_argument(group: Any, argument: Mapping[str, Any]) -> None:
    """Add an argument to a parser or a group."""
    keywords = {key: value for key, value in argument.items() if key != "names"}
    for key in {"type", "action"} & keywords.keys():
        keywords[key] = KINDS.get(keywords[key], keywords[key])
    group.add_argument(*argument["names"].split(), **keywords)


def arguments_of(name: str) -> dict[str, Mapping[str, Any]]:
    """Return the arguments of a row by the names that they have in the namespace."""
    found = {}
    for each in ROWS[name]["arguments"]:
        word = each["names"].split()[0].removeprefix("--").replace("-", "_")
        found[each.get("dest", word)] = each
    return found
