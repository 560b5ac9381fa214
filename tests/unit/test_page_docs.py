"""Check that docs/page.md names existing things."""

from __future__ import annotations

import re
from pathlib import Path

from mie.events.page.records import COLUMNS, SHOWN

TEXT = (Path(__file__).parents[2] / "docs" / "page.md").read_text(encoding="utf-8")


def test_every_kind_of_event_has_an_example() -> None:
    section = TEXT.partition("### events\n")[2].partition("\n### ")[0]
    named = set(re.findall(r'\["(\w+)",', section)) | set(
        re.findall(r"`(\w+)` has no\s+fields", section)
    )
    assert named == SHOWN.keys()


def test_examples_have_the_fields_of_their_kind() -> None:
    section = TEXT.partition("### events\n")[2].partition("\n### ")[0]
    for kind, names in re.findall(r'^ +\["(\w+)",[^\n]*\] {2,}([a-z_ ]+)', section, re.MULTILINE):
        assert tuple(names.split()[: len(SHOWN[kind])]) == SHOWN[kind], kind


def test_the_columns_that_the_page_adds_up_are_there() -> None:
    assert {"step", "num_preempted", "num_admitted_tokens", "num_hit_tokens"} <= set(COLUMNS)
