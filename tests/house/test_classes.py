"""Check that a class of `mie` stands on few other classes of `mie`."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from test_rooms import PACKAGE, sources

MOST_CLASSES = 2
"""Most classes of a chain: a class and its parent.

Classes without methods do not count: errors that only have names, and records that add fields.
"""

EXCUSED = {"mie.serve.serving.Asked": "a writer of the server is a request, a stream and a form"}
"""Roots that may have longer chains, each with the reason."""


def classes_of(root: Path) -> tuple[dict[str, list[str]], set[str]]:
    """Read the classes under ``root``.

    Return the bases of each class that are classes of `mie`, by full name, and the classes that
    define a method.
    """
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    parents: dict[str, list[str]] = {}
    with_methods = set()
    for module, _, tree in sources(root):
        known = dict(_imported(tree))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        known |= {node.name: f"mie.{module}.{node.name}" for node in classes}
        for node in classes:
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            parents[known[node.name]] = [known.get(ast.unparse(base), "") for base in bases]
            if any(isinstance(own, functions) for own in node.body):
                with_methods.add(known[node.name])
    known_bases = {
        name: [each for each in bases if each in parents] for name, bases in parents.items()
    }
    return known_bases, with_methods


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name that a module imports from `mie`, with the full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mie"):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def chain_of(name: str, parents: Mapping[str, list[str]]) -> list[str]:
    """Return the longest chain of classes from a class to a root."""
    above = [chain_of(parent, parents) for parent in parents[name]]
    return [name, *max(above, key=len, default=[])]


def long_chains(root: Path) -> list[list[str]]:
    """Return the chains with too many classes."""
    parents, counted = classes_of(root)
    chains = [chain_of(name, parents) for name in sorted(parents)]
    return [chain for chain in chains if sum(name in counted for name in chain) > MOST_CLASSES]


def test_no_chain_has_more_than_two_classes_with_methods_and_each_excuse_is_needed() -> None:
    chains = long_chains(PACKAGE)
    assert [" < ".join(chain) for chain in chains if chain[-1] not in EXCUSED] == []
    assert {chain[-1] for chain in chains} >= EXCUSED.keys()


@pytest.mark.parametrize(
    ("last", "is_long"),
    [("class C(B): ...", True), ("class C(A): ...", False), ("class C(R): ...", False)],
)
def test_a_chain_of_three_is_noticed(last: str, is_long: bool, tmp_path: Path) -> None:
    method = "\n    def f(self): ...\n"
    (tmp_path / "a.py").write_text(f"class A:{method}class R(A):\n    x: int = 0\n")
    head = "from mie.a import A as Base, R\n"
    (tmp_path / "b.py").write_text(
        f"{head}A = Base\nclass B(Base):{method}{last.replace('...', '')}{method}"
    )
    assert bool(long_chains(tmp_path)) is is_long
