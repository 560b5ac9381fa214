"""The engine is five rooms that one reads in an afternoon, and that lean on little.

A room is counted without the folders inside it, which have the variants of its subject.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import mie

PACKAGE = Path(mie.__file__).parent
ROOMS = ("memory", "sched", "engine", "model", "ops")
MOST_LINES = 6000
MOST_IMPORTED_LINES = 2300
TABLES = {"vllm_names.py"}
"""Files of names alone, which nobody reads to understand the engine."""
OF_CONFIG = {"mie.config.engine", "mie.config.params.checks", "mie.config.params.sampling"}
"""The modules of settings and parameters that the engine reads."""
EXCUSED = {
    ("model", "mie.ops.weights")  # the forms of weights that a backend loads
}


def files_of_rooms(package: Path) -> list[Path]:
    return [path for room in ROOMS for path in sorted((package / room).glob("*.py"))]


def num_lines(paths: Iterable[Path]) -> int:
    read = (path.read_text(encoding="utf-8") for path in paths if path.name not in TABLES)
    return sum(len(text.splitlines()) for text in read)


def names_imported(path: Path, *, is_eager: bool = False) -> Iterator[str]:
    """Yield the names that a file imports from mie, all of them or with the module only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if is_eager else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mie."):
            yield from [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [alias.name for alias in node.names if alias.name.startswith("mie.")]


def file_of(name: str, package: Path) -> Path | None:
    """Return the file of a module, or of the module that has the name."""
    for parts in (name.split(".")[1:], name.split(".")[1:-1]):
        path = package.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if parts and file.is_file():
                return file
    return None


def files_elsewhere(package: Path) -> set[Path]:
    """Return the files of other rooms that importing the five rooms imports."""
    found: set[Path] = set()
    to_read = files_of_rooms(package)
    while to_read:
        for name in names_imported(to_read.pop(), is_eager=True):
            file = file_of(name, package)
            if file is not None and name.split(".")[1] not in ROOMS and file not in found:
                found.add(file)
                to_read.append(file)
    return found


def wrong_imports(package: Path) -> Iterator[str]:
    """Yield the imports of folders inside another room, and of more settings than are allowed."""
    for path in files_of_rooms(package):
        room = path.parent.name
        for name in names_imported(path):
            parts = name.split(".")
            inner = ".".join(parts[:3])
            is_inner = parts[1] in ROOMS and package.joinpath(*parts[1:3]).is_dir()
            is_own = parts[1] == room and inner != "mie.engine.watch"  # which watches the engine
            if is_inner and not is_own and (room, inner) not in EXCUSED:
                yield f"{room}/{path.name} imports {inner}, a folder inside a room"
            is_allowed = any(f"{name}.".startswith(f"{each}.") for each in OF_CONFIG)
            if parts[1] == "config" and not is_allowed:
                yield f"{room}/{path.name} imports {name}"


def test_five_rooms_are_read_in_an_afternoon() -> None:
    assert num_lines(files_of_rooms(PACKAGE)) <= MOST_LINES


def test_five_rooms_lean_on_little() -> None:
    assert num_lines(files_elsewhere(PACKAGE)) <= MOST_IMPORTED_LINES


def test_five_rooms_import_no_folder_inside_another_room() -> None:
    assert list(wrong_imports(PACKAGE)) == []


@pytest.mark.parametrize(
    "line",
    [
        "from mie.engine.watch import queue",
        "def f():\n    from mie.memory.layers import window",
        "import mie.config.engine_args",
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, line: str) -> None:
    for folder in ("engine/watch", "memory/layers", "config", "sched"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sched/plan.py").write_text("from mie.config.engine import EngineConfig\n")
    assert list(wrong_imports(tmp_path)) == []
    (tmp_path / "engine/step.py").write_text(line + "\n")
    assert len(list(wrong_imports(tmp_path))) == 1


def test_files_elsewhere_are_found_through_each_other(tmp_path: Path) -> None:
    files = {
        "sched/plan.py": "from mie.base.small import ceil\nfrom mie.memory import pool\n",
        "memory/pool.py": "import math\n",
        "base/small.py": "from mie.errors import MieError\ndef f():\n    import mie.base.large\n",
        "errors.py": "class MieError(Exception):\n    pass\n",
        "base/large.py": "import mie.serve\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = files_elsewhere(tmp_path)
    assert {path.name for path in found} == {"small.py", "errors.py"}
    assert num_lines(found) == 5
