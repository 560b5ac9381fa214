"""Keep a folder of a learner: the files of the exercises, and the solved files."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from mie.errors import ConfigError
from mie.learn.exercises import Exercise, exercises, open_holes

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
        OSError: the folder or a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written, kept = [], []
    for each in exercises():
        try:
            with (folder / each.name).open("x", encoding="utf-8") as file:
                file.write(each.text())
        except FileExistsError:
            kept.append(each.name)
        else:
            written.append(each.name)
    return written, kept


def note_solved(path: Path) -> None:
    """Note that a file was solved in its present form.

    Raises:
        OSError: the file cannot be read, or the note cannot be written.
    """
    record = _record(path.parent)
    record[path.name] = _digest(path)
    text = json.dumps(record, indent=2) + "\n"
    (path.parent / RECORD).write_text(text, encoding="utf-8")


def states(folder: Path) -> list[State]:
    """Return the state of each exercise in a folder.

    Raises:
        ConfigError: the folder has no exercise.
    """
    if not any((folder / each.name).exists() for each in exercises()):
        raise ConfigError(f"{folder} has no exercises; mie learn start {folder} writes them")
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
        num_open = len(open_holes(exercise, path.read_text(encoding="utf-8")))
    except (SyntaxError, UnicodeDecodeError):
        return State(exercise, "not Python", False)
    num_all = len(exercise.holes)
    words = f"{num_open} of {num_all} to write" if num_open else "written, not solved"
    return State(exercise, words, False)


def _record(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
