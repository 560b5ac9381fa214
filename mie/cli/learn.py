"""Implement ``mie learn``: exercises that build an engine, and checks that name the mistake."""

import argparse
import textwrap
from pathlib import Path

from mie.base.reprs import count
from mie.cli.parser import Commands, declared
from mie.errors import ConfigError, printable
from mie.learn.check import check
from mie.learn.exercises import commands, exercise_of, page_without_holes, program
from mie.learn.folder import folder_of, note_solved, start, states

WIDTH = 96


def add_parser(commands: Commands) -> None:
    """Add ``mie learn`` to the command line."""
    runs = {
        "start": _start,
        "check": _check,
        "next": _next,
        "read": _read,
        "hint": _hint,
        "solution": _solution,
        "status": _status,
    }
    declared(commands, "learn", runs)


def _start(args: argparse.Namespace) -> int:
    """Write the files, and print the first thing to do."""
    if not args.folder:
        raise ConfigError("the folder has no name; name one, such as lessons")
    folder = Path(args.folder).expanduser()
    written, kept = start(folder)
    print(f"{folder}: {count(len(written), 'exercise')} written", end="")
    were = "it was" if len(kept) == 1 else "they were"
    print(f", {count(len(kept), 'file')} left as {were}" if kept else "")
    print(f"Next: {program()} learn next{_words(folder)}")
    return 0


def _words(folder: Path) -> str:
    return "" if folder == Path() else f" {folder}"


def _check(args: argparse.Namespace) -> int:
    """Check a file. Return 0 if it is right, and 1 if it is not."""
    if args.timeout <= 0:
        raise ConfigError(f"--timeout must be more than 0; got {args.timeout:g}")
    path = Path(args.file).expanduser()
    if args.file == path.name and not path.exists():
        name = exercise_of(args.file).name
        path = next(
            (each for each in (Path(name), Path("lessons", name)) if each.is_file()), Path(name)
        )
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
        next_one = f"Go on with: {program()} learn next{_words(path.parent)}"
        print("All nine exercises are solved." if is_last else next_one)
    elif verdict.get("right"):
        note_solved(path, ", ".join(verdict["right"]))
    return 0 if verdict["is_solved"] else 1


def _next(args: argparse.Namespace) -> int:
    """Print the first exercise that is not solved."""
    folder = folder_of(Path(args.folder).expanduser())
    state = next((each for each in states(folder) if not each.is_solved), None)
    if state is None:
        print("All nine exercises are solved. docs/architecture.md is the map of the real engine.")
        return 0
    exercise = state.exercise
    print(f"Exercise {exercise.number}: {exercise.title} ({state.words})")
    path = folder / exercise.name
    check_command, run = commands(path)
    print(f"  file   {path}    (its docstrings have all that you need)")
    print(f"  write  {', then '.join(exercise.holes)}")
    print(f"  check  {check_command}")
    print(f"  run    {run}")
    read = f"{program()} learn read {exercise.number}"
    print(f"  read   {read}    (optional: the page without the solution)")
    return 0


def _read(args: argparse.Namespace) -> int:
    """Print the page of an exercise without the functions to write."""
    print(page_without_holes(exercise_of(args.exercise)), end="")
    return 0


def _hint(args: argparse.Namespace) -> int:
    """Print the first hint of each function, or all hints of one function."""
    exercise = exercise_of(args.exercise)
    name = args.function
    holes = [hole for hole in exercise.holes if name in (None, hole, hole.rpartition(".")[2])]
    if not holes:
        raise ConfigError(f"{name!r} is not one of {', '.join(exercise.holes)}")
    for hole in holes:
        print(hole)
        hints = exercise.hints[hole]
        for hint in hints if name else hints[:1]:
            print(textwrap.fill(hint, WIDTH, initial_indent="  - ", subsequent_indent="    "))
        if not name and len(hints) > 1:
            print(f"    more: {program()} learn hint {exercise.number} {hole}")
    return 0


def _solution(args: argparse.Namespace) -> int:
    """Print the tutorial's file of an exercise."""
    print(exercise_of(args.exercise).solution(), end="")
    return 0


def _status(args: argparse.Namespace) -> int:
    """Print a line for each exercise."""
    found = states(folder_of(Path(args.folder).expanduser()))
    for state in found:
        print(f"{state.exercise.name}  {state.exercise.title:<48} {state.words}")
    print(f"{sum(state.is_solved for state in found)} of {len(found)} solved")
    return 0
