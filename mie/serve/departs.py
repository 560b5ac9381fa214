"""Say in a header where a prompt departs from the prefix cache."""

from __future__ import annotations

import json
from collections.abc import Iterable

from mie.frontend.async_llm import AsyncLLM
from mie.frontend.outputs import RequestOutput

HEADER = "x-mie-prefix-departs"


async def departs(
    outputs: Iterable[RequestOutput], llm: AsyncLLM, *, shows_cached: bool
) -> dict[str, str]:
    """Return the header of an answer: the place of the first prompt that departs, and the reason.

    The tokens of the cached prompt are another client's, unless ``shows_cached``.
    """
    for output in outputs:
        found = output.metrics.departure if output.metrics else None
        if found is None:
            continue
        text = f"token {found.position} of {found.num_prompt}: {found.reason}"
        if found.cached and shows_cached:
            tokenizer = await llm.get_tokenizer()
            cached, got = (
                json.dumps(tokenizer.decode([*ids])) for ids in (found.cached, found.got)
            )
            text += f"; cached {cached}, got {got}"
        return {HEADER: text}
    return {}
