"""Check that the mutation ladder fits the current source. `scripts/mutate.py` runs the ladder."""

import re
from collections import Counter
from pathlib import Path
from types import CodeType
from typing import Any

import mutate
import pytest
from mutate import Mutant

ROOT = Path(__file__).parents[3]
MUTANTS = mutate.MUTANTS
EXAMPLE = Mutant(
    name="example",
    page="docs/memory.md",
    section="Forks",
    path="mie/errors.py",
    old="x = 1",
    new="x = 2",
    breaks="nothing",
)


@pytest.mark.parametrize("path", sorted({mutant.path for mutant in MUTANTS}))
def test_a_mutant_changes_one_place_and_is_still_python(path):
    source = (ROOT / path).read_text()
    code = compiled(source)
    for mutant in MUTANTS:
        if mutant.path == path:
            assert compiled(mutant.apply(source)) != code, f"{mutant.name}: the code is the same"


def compiled(source: str) -> Any:
    """Return the instructions and constants of a module and its functions, without line numbers."""

    def parts_of(code: CodeType) -> Any:
        constants = [parts_of(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
        return code.co_code, code.co_names, code.co_varnames, constants

    return parts_of(compile(source, "mutant", "exec"))


@pytest.mark.parametrize("source", ["", "x = 1\nx = 1\n"])
def test_a_missing_or_ambiguous_snippet_is_noticed(source):
    with pytest.raises(ValueError, match=r"example: the snippet occurs [02] times in mie/errors"):
        EXAMPLE.apply(source)


def test_mutants_are_many_and_have_unique_names():
    assert len(MUTANTS) >= 100
    assert Counter(mutant.name for mutant in MUTANTS).most_common(1)[0][1] == 1
    changes = Counter((mutant.path, mutant.old, mutant.new) for mutant in MUTANTS)
    assert changes.most_common(1)[0][1] == 1, "two mutants are the same"


def test_every_mutant_breaks_a_rule_of_a_section_that_exists():
    for page in {mutant.page for mutant in MUTANTS}:
        sections = re.findall(r"^##+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
        assert {mutant.section for mutant in MUTANTS if mutant.page == page} <= set(sections)


def test_every_mutant_climbs_the_ladder_of_its_room():
    for mutant in MUTANTS:
        assert any(rung.fits(mutant) for rung in mutate.RUNGS), mutant.name
    for room in {room for rung in mutate.RUNGS for room in rung.rooms}:
        assert any(mutant.path.startswith(room) for mutant in MUTANTS)


def test_every_test_of_the_ladder_exists():
    files = [ROOT / name for rung in mutate.RUNGS for name in rung.files]
    assert not [path for path in files if not path.is_file()]
