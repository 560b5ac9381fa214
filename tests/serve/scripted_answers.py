"""Let a model give a certain answer, which the server then reads like any other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mie import LLM, AsyncLLM, StructuredOutputsParams


@contextmanager
def answering(engine: AsyncLLM | LLM, text: str) -> Iterator[None]:
    """Make every answer this text: a grammar allows no other one."""
    llm = engine if isinstance(engine, LLM) else engine._llm
    original = llm.prepare

    def prepare(*args: Any, **options: Any) -> Any:
        prepared = original(*args, **options)
        params = copy.copy(prepared.params)
        params.structured_outputs = StructuredOutputsParams(choice=[text])
        params.max_tokens = 400
        return replace(prepared, params=params)

    llm.prepare = prepare  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm.prepare = original  # type: ignore[method-assign]
