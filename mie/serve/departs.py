"""Write to a header, and to the usage on request, where a prompt departs from the prefix cache."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mie.frontend.outputs import RequestOutput
from mie.text.pretrained import PretrainedTokenizer

HEADER = "x-mie-prefix-departs"
WANTED = b"x-mie-usage-details"
"""The header of a request that puts the place into the usage. The value is 1."""


def departure_of(
    outputs: Iterable[RequestOutput], tokenizer: PretrainedTokenizer | None
) -> dict[str, Any] | None:
    """Return the place of the first prompt that departs, and the reason; None if no prompt does.

    With a tokenizer it has the texts that differ: the next ones of the cached prompt, which may be
    another client's, and of this prompt.
    """
    for output in outputs:
        found = output.metrics.departure if output.metrics else None
        if found is None:
            continue
        place = {"token": found.position, "of": found.num_prompt, "reason": found.reason}
        if not found.cached or tokenizer is None:
            return place
        texts = tokenizer.batch_decode([found.cached, found.got])
        return place | dict(zip(("cached", "got"), texts, strict=True))
    return None


def header_of(departure: dict[str, Any] | None) -> dict[str, str]:
    """Return the header of an answer with this departure."""
    if departure is None:
        return {}
    text = "token {token} of {of}: {reason}".format_map(departure)
    if "cached" in departure:
        cached, got = (json.dumps(departure[name]) for name in ("cached", "got"))
        text += f"; cached {cached}, got {got}"
    return {HEADER: text}
