"""Keep a folder of a learner: the files of the exercises, and the solved files."""

import ast
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from mie.base.reprs import count
from mie.errors import ConfigError
from mie.learn.exercises import Exercise, commands, exercises, functions, open_holes, program

RECORD = ".mie-learn.json"
"""File with the digest of each solved file, by name."""


@dataclass(frozen=True)
class State:
    """An exercise in a folder."""

    exercise: Exercise
    words: str
    """The state in words."""
    is_solved: bool


def start(folder: Path) -> tuple[list[str], list[str]]:
    """Write the files of all exercises. Return the names that were written, and that were there.

    A file that is there is never written.

    Raises:
        ConfigError: the folder is a file.
        OSError: the folder or a file cannot be written.
    """
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    written, kept = [], []
    for each in exercises():
        try:
            with (folder / each.name).open("x", encoding="utf-8") as file:
                check, run = commands(folder / each.name)
                text = each.text().replace(f"mie learn check {each.name}", check)
                file.write(text.replace(f"python {each.name}", run))
        except FileExistsError:
            kept.append(each.name)
        else:
            written.append(each.name)
    return written, kept


def note_solved(path: Path, part: str = "") -> None:
    """Note that a file was solved in its present form, or the functions of ``part``.

    Raises:
        OSError: the file cannot be read, or the note cannot be written.
    """
    record = _record(path.parent)
    record[f"{path.name} {part}".strip()] = _digest(path)
    text = json.dumps(record, indent=2) + "\n"
    (path.parent / RECORD).write_text(text, encoding="utf-8")


def folder_of(folder: Path) -> Path:
    """Return the folder with the exercises: this folder, or the folder ``lessons`` in it.

    Raises:
        ConfigError: neither has an exercise.
    """
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; its folder is {folder.parent}")
    for place in (folder, other := folder / "lessons"):
        if any((place / each.name).exists() for each in exercises()):
            return place
    seen = f"{folder} has no exercises; "
    raise ConfigError(f"{seen}{program()} learn start {other} writes them into a folder")


def states(folder: Path) -> list[State]:
    """Return the state of each exercise in a folder."""
    record = _record(folder)
    return [_state(each, folder / each.name, record) for each in exercises()]


def _state(exercise: Exercise, path: Path, record: dict[str, str]) -> State:
    if not path.is_file():
        return State(exercise, "missing", False)
    if record.get(exercise.name) == _digest(path):
        return State(exercise, "solved", True)
    if exercise.name in record:
        return State(exercise, "changed since it was solved", False)
    try:
        source = path.read_text(encoding="utf-8")
        num_open, found = len(open_holes(exercise, source)), dict(functions(ast.parse(source)))
    except UnicodeDecodeError:
        return State(exercise, "not UTF-8", False)
    except (SyntaxError, ValueError):
        return State(exercise, "not Python", False)
    num_missing = len({*exercise.holes} - {*found})
    if num_missing:
        missing = count(num_missing, "function")
        return State(exercise, f"{missing} {'is' if num_missing == 1 else 'are'} missing", False)
    words = f"{num_open} of {len(exercise.holes)} to write" if num_open else "written, not solved"
    right = [k for k, v in record.items() if k.startswith(f"{path.name} ") and v == _digest(path)]
    words += f"; right: {right[0].partition(' ')[2]}" if right and num_open else ""
    return State(exercise, words, False)


def _record(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
