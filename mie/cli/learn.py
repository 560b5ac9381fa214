"""Implement ``mie learn``: exercises that build an engine, and checks that name the mistake."""

import argparse
import textwrap
from pathlib import Path

from mie.base.reprs import count
from mie.cli.parser import Commands, declared
from mie.errors import ConfigError, printable
from mie.learn.check import check
from mie.learn.exercises import exercise_of, page_of
from mie.learn.folder import note_solved, start, states

WIDTH = 96


def add_parser(commands: Commands) -> None:
    """Add ``mie learn`` to the command line."""
    runs = {
        "start": _start,
        "check": _check,
        "next": _next,
        "hint": _hint,
        "solution": _solution,
        "status": _status,
    }
    declared(commands, "learn", runs)


def _start(args: argparse.Namespace) -> int:
    """Write the files, and print the first thing to do."""
    folder = Path(args.folder).expanduser()
    written, kept = start(folder)
    print(f"{folder}: {count(len(written), 'exercise')} written", end="")
    print(f", {count(len(kept), 'file')} left as they were" if kept else "")
    print(f"Begin with {folder / 'step_1.py'}; its first lines name the page to read.")
    print(f"Then: mie learn check {folder / 'step_1.py'}")
    return 0


def _check(args: argparse.Namespace) -> int:
    """Check a file. Return 0 if it is right, and 1 if it is not."""
    if args.timeout <= 0:
        raise ConfigError(f"--timeout must be more than 0; got {args.timeout:g}")
    path = Path(args.file).expanduser()
    verdict = check(path, args.timeout)
    if verdict["printed"]:
        print("It printed:")
        print(textwrap.indent("\n".join(map(printable, verdict["printed"].splitlines())), "  "))
    for line in verdict["lines"]:
        line = printable(line)
        indented = line.startswith(" ")
        print(line if indented else textwrap.fill(line, WIDTH, break_on_hyphens=False))
    if verdict["is_solved"]:
        note_solved(path)
        is_last = all(state.is_solved for state in states(path.parent))
        folder = "" if path.parent == Path() else f" {path.parent}"
        print(
            "All nine exercises are solved." if is_last else f"Go on with: mie learn next{folder}"
        )
    return 0 if verdict["is_solved"] else 1


def _next(args: argparse.Namespace) -> int:
    """Print the first exercise that is not solved."""
    folder = Path(args.folder).expanduser()
    state = next((each for each in states(folder) if not each.is_solved), None)
    if state is None:
        print("All nine exercises are solved. docs/architecture.md is the map of the real engine.")
        return 0
    exercise = state.exercise
    print(f"Exercise {exercise.number}: {exercise.title} ({state.words})")
    print(f"  read   {page_of(exercise)}")
    print(f"  write  {', '.join(exercise.holes)}")
    print(f"  file   {folder / exercise.name}")
    print(f"  check  mie learn check {folder / exercise.name}")
    return 0


def _hint(args: argparse.Namespace) -> int:
    """Print the hints of an exercise, or of one function."""
    exercise = exercise_of(args.exercise)
    for hole, hints in exercise.hints.items():
        print(hole)
        for hint in hints:
            print(textwrap.fill(hint, WIDTH, initial_indent="  - ", subsequent_indent="    "))
    return 0


def _solution(args: argparse.Namespace) -> int:
    """Print the tutorial's file of an exercise."""
    print(exercise_of(args.exercise).solution(), end="")
    return 0


def _status(args: argparse.Namespace) -> int:
    """Print a line for each exercise."""
    found = states(Path(args.folder).expanduser())
    for state in found:
        print(f"{state.exercise.name}  {state.exercise.title:<48} {state.words}")
    print(f"{sum(state.is_solved for state in found)} of {len(found)} solved")
    return 0
