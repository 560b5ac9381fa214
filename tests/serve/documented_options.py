"""Compare the options that a page of docs/ names with those that ``--help`` prints."""

import re
from collections.abc import Iterable, Set

from audit import actions_of

import mie.cli


def help_of(*words: str) -> str:
    """The output of ``--help``."""
    parser = mie.cli.new_parser()
    for word in words:
        [action] = [each for each in actions_of(parser) if each.choices and word in each.choices]
        parser = action.choices[word]  # type: ignore[index]
    parser.first = ()  # the options of --help-all
    return parser.format_help()


def unknown_options(
    page: str, commands: Iterable[tuple[str, ...]], of_other_programs: Set[str]
) -> set[str]:
    """The options that a page names and none of the commands has."""
    known = {option for words in commands for option in re.findall(r"--[\w-]+", help_of(*words))}
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page)) - of_other_programs - known
