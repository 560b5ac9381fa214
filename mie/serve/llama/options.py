"""Sampling options under llama.cpp's names, which Ollama shares."""

from typing import Annotated, Any

from pydantic import Field

from mie.config.engine import DEFAULT_LIMITS
from mie.serve.body import AtMost, Body, Items, Whole
from mie.serve.fields import with_fields_of
from mie.serve.openai.protocol import (
    REST,
    Integer64,
    NaturalOrAll,
    Penalty,
    Stop,
    Temperature,
    TopP,
)

NumPredict = Annotated[int, Whole(-2, instead_of_zero=REST)]
"""The maximum number of new tokens; -1 and -2 are the rest of the context."""
_SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")


@with_fields_of("llama")
class LlamaOptions(Body):
    """How tokens are chosen, and where an answer ends."""

    temperature: Temperature | None = None
    top_k: NaturalOrAll | None = None
    top_p: TopP | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Integer64 | None = None
    """The seed. -1 draws one."""
    stop: Stop | Annotated[Items[Stop], AtMost(DEFAULT_LIMITS.max_stop_strings)] | None = None


def sampling(options: LlamaOptions | None) -> dict[str, Any]:
    """Return the sampling parameters that options give, under mie's names."""
    if options is None:
        return {}
    same = {name: getattr(options, name) for name in _SAME}
    seed = None if options.seed == -1 else options.seed
    return {**same, "repetition_penalty": options.repeat_penalty, "seed": seed}
