"""The files around the code agree with each other, and public names are documented."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mie

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github/workflows/test.yml").read_text()


def test_the_workflow_runs_make_test_on_every_supported_python():
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    [matrix] = re.findall(r"python: \[(.*)\]", WORKFLOW)
    assert re.findall(r'"([\d.]+)"', matrix) == classifiers
    assert "run: make test\n" in WORKFLOW
    assert "run: make docs\n" in WORKFLOW
    assert "ubuntu-24.04-arm" in WORKFLOW


def test_pre_commit_runs_the_checks_of_make_check():
    makefile = (ROOT / "Makefile").read_text()
    [recipe] = re.findall(r"^check:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    checks = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"^ *entry: (.*)$", config, re.MULTILINE) == checks


def public_docstrings() -> Iterator[tuple[str, str]]:
    """(name, docstring) of every public name of mie and of its public methods."""
    for name in mie.__all__:
        cls = getattr(mie, name)
        yield name, cls.__doc__ or ""
        for base in cls.__mro__:
            for member, value in vars(base).items() if base.__module__.startswith("mie") else ():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if inspect.isfunction(function) and not member.startswith("_"):
                    yield f"{name}.{member}", function.__doc__ or ""


def is_sentence(text: str) -> bool:
    """Return whether a text looks like whole sentences: a capital at its start, a full stop at its
    end."""
    return bool(re.fullmatch(r"[A-Z`].*[.:]", text, re.DOTALL))


@pytest.mark.parametrize(("name", "docstring"), sorted(set(public_docstrings())))
def test_a_public_name_is_documented_in_whole_sentences(name: str, docstring: str):
    first, *_ = docstring.strip().split("\n\n")
    assert is_sentence(first), f"{name}: {first!r}"


@pytest.mark.parametrize("text", ["", "the tokens of a request.", "The tokens of a request"])
def test_what_is_no_sentence_is_seen(text: str):
    assert not is_sentence(text)
