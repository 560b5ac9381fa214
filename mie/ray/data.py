"""Batches on Ray Data: rows in, rows out, on any number of engines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mie.config.engine import check_integer
from mie.config.engine_args import EngineArgs
from mie.config.settings import ON_CPU_THREADS
from mie.frontend.batch.requests import RESULTS, RowEngine
from mie.frontend.outputs import RequestOutput

if TYPE_CHECKING:
    from pyarrow import Table
    from ray.data import Dataset


def generate(
    dataset: Dataset,
    engine: Mapping[str, Any] | None = None,
    *,
    num_actors: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    batch_size: int = 256,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Return the dataset's rows with the answers of an engine in each of ``num_actors`` actors.

    A row has an ``id`` (unique text), one of ``prompt``, ``messages`` and ``prompt_token_ids``, and
    optionally ``sampling_params``: a struct, or JSON text. The answer's row adds ``generated_text``
    and ``finish_reason`` of the first choice, and ``error``: None, or why there is no answer.
    ``output`` is the `RequestOutput` as JSON, without its metrics. Answers depend on neither the
    number of actors nor the order, because an id replaces a missing seed.

    Answered batches are kept in the directory ``checkpoint``. All machines must share it. A later
    call takes the rows that it finds there, and computes the others.

    The tasks that read and write a dataset need a CPU that no actor holds. Without one they wait
    forever.

    Raises:
        ConfigError: a setting is unknown, or out of range.
    """
    from ray.data import ActorPoolStrategy

    check_integer("num_actors", num_actors, 1)
    check_integer("batch_size", batch_size, 1)
    settings = {"model": "bundled", **(engine or {})}
    if settings.get("backend", "auto") in ON_CPU_THREADS:
        settings = {"num_threads": max(1, int(num_cpus)), "batch_invariant": True, **settings}
    EngineArgs(**settings)
    return dataset.map_batches(
        _Actor,
        fn_constructor_args=(settings, None if checkpoint is None else os.fspath(checkpoint)),
        compute=ActorPoolStrategy(size=num_actors),
        batch_size=batch_size,
        batch_format="pyarrow",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )


def generate_all(
    requests: Mapping[str, Mapping[str, Any]], engine: Mapping[str, Any], **options: Any
) -> Iterator[tuple[str, RequestOutput]]:
    """Yield (id, output) of plain requests, batch by batch as they are answered."""
    import ray.data

    rows = [
        {"id": key, "sampling_params": json.dumps(request)} for key, request in requests.items()
    ]
    for row in generate(ray.data.from_items(rows), engine, **options).iter_rows():
        yield row["id"], RequestOutput.from_dict(json.loads(row["output"]))


class _Actor:
    """An engine in a process of Ray Data."""

    def __init__(self, settings: Mapping[str, Any], checkpoint: str | None) -> None:
        self._engine = RowEngine(settings, checkpoint)

    def __call__(self, batch: Table) -> Table:
        """Return the rows with their answers."""
        import pyarrow

        found = self._engine.answers(batch.to_pylist())
        for name in RESULTS:
            values = pyarrow.array([each[name] for each in found], pyarrow.string())
            batch = batch.append_column(name, values)
        return batch
