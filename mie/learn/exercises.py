"""Make the files of the exercises from the tutorial's files and the texts of their holes."""

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mie.errors import ConfigError

_HERE = Path(__file__).parent
_PACKAGED = _HERE / "steps"
_STEPS = _PACKAGED if _PACKAGED.is_dir() else _HERE.parents[1] / "docs/tutorial"
"""The tutorial's files: a wheel has a copy, and a clone has the originals."""
_FOLDER = 'FOLDER = Path(__file__).parents[2] / "mie/assets/tiny"'
"""The line of step 1 that finds the model in a clone."""


@dataclass(frozen=True)
class Exercise:
    """An exercise: the file of one step with holes in it."""

    number: int
    title: str
    hints: Mapping[str, list[str]]
    """Hints for each hole, from the first to the most concrete. The easiest hole comes first."""

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"step_{self.number}.py"

    @property
    def page(self) -> str:
        """Path of the page in a clone."""
        return f"docs/tutorial/step_{self.number}.md"

    @property
    def holes(self) -> list[str]:
        """Qualified names of the functions to write, in a good order to write them."""
        return [*self.hints]

    def solution(self) -> str:
        """Return the source of the tutorial's file. It finds the model in the installed package."""
        source = (_STEPS / self.name).read_text(encoding="utf-8")
        if self.number == 1:
            assert _FOLDER in source
            source = source.replace(_FOLDER, 'FOLDER = Path(mie.__file__).parent / "assets/tiny"')
            source = source.replace("import safetensors\n", "import safetensors\n\nimport mie\n")
        return source

    def text(self) -> str:
        """Return the source with holes, as a learner gets it."""
        holes = (_HERE / "holes" / f"step_{self.number}.txt").read_text(encoding="utf-8")
        lines = replaced(self.solution(), holes).splitlines()
        head = ast.parse(holes).body[0].end_lineno
        return "\n".join([*holes.splitlines()[:head], *lines[1:]]) + "\n"


def replaced(source: str, functions_text: str) -> str:
    """Return a source in which functions are replaced by functions of the same qualified names."""
    lines, own = source.splitlines(), functions_text.splitlines()
    new = dict(functions(ast.parse(functions_text)))
    for name, node in [*functions(ast.parse(source))][::-1]:
        if name in new:
            part = own[new[name].lineno - 1 : new[name].end_lineno]
            lines[node.lineno - 1 : node.end_lineno] = part
    return "\n".join(lines) + "\n"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions and methods of a module by their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def exercises() -> list[Exercise]:
    """Return all exercises in their order."""
    rows = json.loads((_HERE / "exercises.json").read_text(encoding="utf-8"))
    return [Exercise(number, row["title"], row["hints"]) for number, row in enumerate(rows, 1)]


def exercise_of(word: str) -> Exercise:
    """Return the exercise of a file's name, a path, or a number.

    Raises:
        ConfigError: no exercise has this name.
    """
    for each in exercises():
        if (
            word in (str(each.number), each.name.removesuffix(".py"))
            or Path(word).name == each.name
        ):
            return each
    raise ConfigError(f"{word!r} is not an exercise; the files are step_1.py to step_9.py")


def program() -> str:
    """Return the words that call ``mie`` as it was called now."""
    called = sys.argv[0]
    if Path(called).parts[-2:] == ("mie", "__main__.py"):
        return f"{sys.executable} -m mie"
    found = shutil.which("mie")
    is_other = Path(called).name == "mie" and (not found or not Path(called).samefile(found))
    return called if is_other else "mie"


def commands(path: Path) -> tuple[str, str]:
    """Return the commands that check a learner's file, and that run it."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    needs = "" if path.name == "step_1.py" else "    (needs the steps that it imports)"
    return f"{program()} learn check {path}", f"{python} {path}{needs}"


def page_without_holes(exercise: Exercise) -> str:
    """Return the page of an exercise, without the code of the functions to write.

    Raises:
        ConfigError: mie runs from a wheel, which has no pages.
    """
    page = (_STEPS / exercise.name).with_suffix(".md")
    if not page.is_file():
        raise ConfigError(f"the page is {exercise.page} in the sources of mie")
    text = page.read_text(encoding="utf-8")
    for hole in exercise.holes:
        name = hole.rpartition(".")[2]
        code = rf"(?ms)^( *)def {name}\(.*?(?=^\1\S|^```)"
        text = re.sub(code, rf"\1def {name}(...):  # you write this function\n", text)
    return text


def open_holes(exercise: Exercise, source: str) -> list[tuple[str, int]]:
    """Return the (name, line) of each hole that still raises NotImplementedError, and no more.

    Raises:
        SyntaxError: the source is not Python.
    """
    found = dict(functions(ast.parse(source)))
    return [
        (name, found[name].lineno)
        for name in exercise.holes
        if name in found and _is_open(found[name])
    ]


def _is_open(node: ast.FunctionDef) -> bool:
    body = [x for x in node.body if not isinstance(x, ast.Expr)]
    return (
        bool(body) and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.dump(body[0])
    )
