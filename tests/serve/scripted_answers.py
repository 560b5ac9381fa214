"""Let a model give a certain answer, which the server then reads like any other."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from audit import llm_of

from mie import LLM, AsyncLLM, StructuredOutputsParams
from mie.frontend.prepare import PreparedRequest, Preparer


@dataclass(frozen=True, kw_only=True)
class Scripted(Preparer):
    """Prepares requests whose grammar allows one text only."""

    text: str

    def prepare(self, *args: Any, **options: Any) -> PreparedRequest:
        prepared = super().prepare(*args, **options)
        params = copy.copy(prepared.params)
        params.structured_outputs = StructuredOutputsParams(choice=[self.text])
        params.max_tokens = 400
        return replace(prepared, params=params)


@contextmanager
def answering(engine: AsyncLLM | LLM, text: str) -> Iterator[None]:
    """Make every answer this text."""
    llm = llm_of(engine)
    original = llm.llm_engine.preparer
    llm.llm_engine.preparer = Scripted(**vars(original), text=text)
    try:
        yield
    finally:
        llm.llm_engine.preparer = original
