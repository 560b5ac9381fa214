"""Name the parts of a constrained output that the engine uses (`mie.structured` has them)."""

from collections.abc import Sequence
from typing import Any, Protocol

from mie.config.params.sampling import SamplingParams
from mie.errors import RequestError


class Constraint(Protocol):
    """The state of one constrained output: the tokens that may come next."""

    def accept(self, token_id: int, /) -> None:
        """Advance by a token."""

    def allows(self, token_id: int, /) -> bool:
        """Return whether a token may come next."""

    def determined(self) -> int | None:
        """Return the only token that may come next, or None if several may."""

    def mask(self) -> bytes:
        """Return a bit for each token that may come next: token i is bit i % 8 of byte i // 8."""

    def validate(self, token_ids: Sequence[int], /) -> int:
        """Return how many of the tokens may come next, one after another."""


class Constraints(Protocol):
    """Makes constraints for a model and its tokenizer."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def start(self, structure: Any, /) -> Constraint:
        """Return the constraint of a structure (`StructuredOutputsParams`) at the beginning."""


def new_constraint(params: SamplingParams, constraints: Constraints | None) -> Constraint | None:
    """Return the constraint at the beginning of the output, or None for a free one.

    Any thread may call.

    Raises:
        RequestError: the engine cannot constrain the output as ``params`` say.
        WorkerError: the compiler failed.
    """
    if params.thinking_token_budget is not None:
        raise RequestError(
            "thinking_token_budget needs the format of a chat's answer (use LLM.chat, or leave it "
            "out)"
        )
    if params.structured_outputs is None:
        return None
    if constraints is None:
        raise RequestError(
            "structured_outputs needs a tokenizer, and the engine has none (load the model with "
            "its tokenizer)"
        )
    traced = params.trace_decode_token_ids or ()
    constraint = constraints.start(params.structured_outputs)
    num_valid = constraint.validate(traced)
    if num_valid < len(traced):
        raise RequestError(
            f"structured_outputs does not allow trace_decode_token_ids[{num_valid}], token "
            f"{traced[num_valid]} (leave one of them out)"
        )
    return constraint
