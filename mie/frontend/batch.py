"""Run the requests of one call together, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mie.errors import ConfigError
from mie.frontend.driver import Driver
from mie.frontend.outputs import RequestOutput, raise_failed
from mie.frontend.progress import ProgressBar
from mie.frontend.request_state import Collector, PreparedRequest

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Requests that were added together, and where their outputs are filed."""

    collector: Collector
    request_ids: list[str]


def add(driver: Driver, prepared: Sequence[PreparedRequest]) -> Batch:
    """Queue requests, all or none."""
    collector = driver.new_collector()
    return Batch(collector, driver.add([*prepared], collector))


def finish(
    driver: Driver, batches: Sequence[Batch], use_tqdm: bool | Callable[..., Any]
) -> list[RequestOutput]:
    """Return the outputs of all requests in order. Ctrl-C ends all of them.

    Raises:
        RequestFailedError: a request failed.
    """
    finished: dict[str, RequestOutput] = {}
    try:
        with ProgressBar(sum(len(batch.request_ids) for batch in batches), use_tqdm) as bar:
            for batch in batches:
                while not finished.keys() >= {*batch.request_ids}:
                    for output in driver.wait(batch.collector):
                        finished[output.request_id] = output
                        bar.update(output)
    finally:
        for batch in batches:
            driver.release(batch.collector)
        driver.settle()
    outputs = [finished[each] for batch in batches for each in batch.request_ids]
    raise_failed(outputs)
    return outputs


def one_for_each(name: str, given: Any, count: int, default: T) -> list[T]:
    """Return one value for each prompt, from a list or by repeating one value."""
    if given is None:
        return [default] * count
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ConfigError(f"{count} prompts need {count} {name}; got {len(given)}")
    return list(given)
