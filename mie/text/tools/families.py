"""Read the formats in which each family writes calls of tools and reasoning."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class FamilyFormats:
    """The formats of a family by the names of their parsers, where a chat template has no tag."""

    calls: str | None = None
    """A name in `table.CALLS`."""
    reasoning: str | None = None
    """A name in `table.REASONING`."""


FAMILY_FORMATS: Mapping[str, FamilyFormats] = {
    name: FamilyFormats(**row)
    for name, row in json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    ).items()
}
"""The formats by the name in ``architectures``.

Llama is not here: models of many formats have its architecture, so the chat template must show the
format.
"""

NO_FORMATS = FamilyFormats()
