"""Public names of mie have docstrings of whole sentences.

A public name is a module, and every function, class, method and property in it whose name does not
begin with an underscore. A method may omit its docstring if a Protocol of mie, or a base class,
documents it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mie

PACKAGE = Path(mie.__file__).parent
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def undocumented(root: Path) -> Iterator[str]:
    """Yield a sentence about each public name without a docstring of whole sentences."""
    trees = {
        path.relative_to(root).as_posix(): ast.parse(path.read_text())
        for path in sorted(root.rglob("*.py"))
    }
    contracts = {name for tree in trees.values() for name in contract_methods(tree)}
    classes = {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    for module, tree in trees.items():
        for line, name, docstring in public_names(tree):
            where = f"{module}:{line} {name}".rstrip()
            if not docstring:
                owner, _, method = name.rpartition(".")
                if method not in contracts and not is_inherited(classes, owner, method):
                    yield f"{where} has no docstring"
            elif not is_whole(docstring):
                yield f"{where} has no whole sentences: {docstring.splitlines()[0]!r}"


def is_inherited(classes: dict[str, ast.ClassDef], owner: str, method: str) -> bool:
    """Return whether a base class in the tree documents a method."""
    bases = classes[owner].bases if owner in classes else []
    names = [
        getattr(base.value if isinstance(base, ast.Subscript) else base, "id", "") for base in bases
    ]
    return any(
        method in documented_methods(classes[name]) or is_inherited(classes, name, method)
        for name in names
        if name in classes
    )


def documented_methods(node: ast.ClassDef) -> list[str]:
    """Return the names of a class's methods that have docstrings."""
    return [
        each.name for each in node.body if isinstance(each, Function) and ast.get_docstring(each)
    ]


def contract_methods(tree: ast.Module) -> Iterator[str]:
    """Yield the documented methods of the Protocol classes in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.dump(b) for b in node.bases):
            yield from documented_methods(node)


def public_names(tree: ast.Module) -> Iterator[tuple[int, str, str | None]]:
    """Yield (line, name, docstring) of a module, its public names, and documented variables."""
    yield 1, "", ast.get_docstring(tree)
    yield from _members(tree.body, "")


def _members(body: list[ast.stmt], prefix: str) -> Iterator[tuple[int, str, str | None]]:
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, (*Function, ast.ClassDef)):
            is_overload = any("overload" in ast.dump(each) for each in node.decorator_list)
            if not node.name.startswith("_") and not is_overload:
                yield node.lineno, prefix + node.name, ast.get_docstring(node)
                if isinstance(node, ast.ClassDef):
                    yield from _members(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(following, ast.Expr):
            text = getattr(following.value, "value", None)
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if isinstance(text, str) and not target.startswith("_"):
                yield following.lineno, prefix + target, text


def is_whole(docstring: str) -> bool:
    """Return whether a docstring looks like whole sentences, the first of them in its first line.

    It must begin with a capital letter, a number or code, and its first line must end with a full
    stop, or with a colon before an example. The last paragraph must not end in mid-sentence.
    """
    first, *rest = docstring.strip().splitlines()
    is_sentence = re.fullmatch(r"""[A-Z\d`(\["].*[.:]""", first.strip())
    last = rest[-1].strip() if rest else first
    is_apart = not rest or not rest[0].strip()
    return bool(is_sentence) and is_apart and not last.endswith((",", ";", " and", " or"))


def test_public_names_are_documented_in_whole_sentences():
    assert list(undocumented(PACKAGE)) == []


# The check can fail.


FAULTS = (
    "the tokens of a request.",
    "The tokens of a request",
    "The tokens of a request, which\n\n    are integers.",
    "The tokens of a request.\n    They are integers.",
    "The tokens of a request.\n\n    They are integers; and",
    "",
)
PACKAGE_OF_ALL = '''\
class Source(Protocol):
    "A source."
    def read(self):
        "Read a line."
class File:
    "A file."
    def read(self): ...
    def take(self): ...
    def _close(self): ...
class Pipe(File):
    "A pipe."
    def read(self): ...
    def take(self): ...
    def wait(self): "Wait."
class Socket(Pipe):
    "A socket."
    def wait(self): ...
def _helper(): ...
SIZE = 3
"""of a block."""
'''


def test_names_without_whole_sentences_are_reported(tmp_path: Path):
    """Private names, and methods that a protocol or a base class documents, need no docstring."""
    faulty = [f'def tokens():\n    """{text}"""\n' for text in FAULTS]
    (tmp_path / "pool.py").write_text(PACKAGE_OF_ALL + "".join(faulty))
    module, take, inherited, size, *found = undocumented(tmp_path)
    assert module == "pool.py:1 has no docstring"
    assert take == "pool.py:8 File.take has no docstring"
    assert inherited == "pool.py:13 Pipe.take has no docstring"
    assert size == "pool.py:20 SIZE has no whole sentences: 'of a block.'"
    assert len(found) == len(FAULTS)
    assert all("tokens has no" in sentence for sentence in found)
