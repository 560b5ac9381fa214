"""Run an engine of token ids."""

from collections.abc import Callable

from mie.engine.engine import Engine

Tokens = dict[tuple[str, int], list[int]]
"""The output of each choice: (request id, index) -> token ids."""


def run_to_end(engine: Engine, after_step: Callable[[], object] = lambda: None) -> Tokens:
    """Step until the engine has no work, and return the outputs of the requests that it had."""
    requests = engine.requests
    while engine.has_work:
        engine.step()
        after_step()
    return {
        (each.request_id, seq.index): seq.output_ids for each in requests for seq in each.sequences
    }
