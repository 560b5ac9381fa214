"""Batches on Ray Data: rows in, rows out, on any number of engines."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.batch import PROMPTS, answers
from mie.config.engine import check_integer
from mie.config.engine_args import EngineArgs
from mie.frontend.outputs import RequestOutput
from mie.llm import LLM

if TYPE_CHECKING:
    from pyarrow import Table
    from ray.data import Dataset

RESULTS = ("generated_text", "finish_reason", "error", "output")


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

    A row has an ``id``, which is unique text, one of ``prompt``, ``messages`` and
    ``prompt_token_ids``, and optionally ``sampling_params``: a struct, or JSON text. Its answer
    adds ``generated_text`` and ``finish_reason`` of the first choice, and ``error``: None, or why
    there is no answer. ``output`` is the `RequestOutput` as JSON, without its metrics.
    Answers depend on neither the number of actors nor the order, because an id stands in for a
    missing seed.

    Answered batches are kept in the directory ``checkpoint``, which all machines must share. A
    later call takes the rows that it finds there, and computes the others.

    Raises:
        ConfigError: a setting is unknown, or out of range.
    """
    from ray.data import ActorPoolStrategy

    check_integer("num_actors", num_actors, 1)
    check_integer("batch_size", batch_size, 1)
    settings = {"model": "bundled", "generation_config": "vllm", **(engine or {})}
    if settings.get("backend", "numpy") == "numpy":
        settings = {"num_threads": max(1, int(num_cpus)), "batch_invariant": True, **settings}
    EngineArgs(**settings)
    return dataset.map_batches(
        _EngineActor,
        fn_constructor_args=(settings, None if checkpoint is None else os.fspath(checkpoint)),
        compute=ActorPoolStrategy(size=num_actors),
        batch_size=batch_size,
        batch_format="pyarrow",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )


def generate_all(
    requests: Mapping[str, Mapping[str, Any]], engine: Mapping[str, Any], **options: Any
) -> Iterator[tuple[str, str]]:
    """Yield (id, output as JSON) of plain requests, batch by batch as they are answered."""
    import ray.data

    rows = [
        {"id": key, "sampling_params": json.dumps(request)} for key, request in requests.items()
    ]
    for row in generate(ray.data.from_items(rows), engine, **options).iter_rows():
        yield row["id"], row["output"]


class _EngineActor:
    """An engine that answers batches of rows."""

    def __init__(self, settings: Mapping[str, Any], checkpoint: str | None) -> None:
        self._llm = LLM(**settings)
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._done = {} if self._checkpoint is None else _kept(self._checkpoint)

    def __call__(self, batch: Table) -> Table:
        """Return the rows with their answers."""
        import pyarrow

        rows = batch.to_pylist()
        found = self._answers(rows)
        for name in RESULTS:
            values = pyarrow.array([each[name] for each in found], pyarrow.string())
            batch = batch.append_column(name, values)
        return batch

    def _answers(self, rows: list[dict[str, Any]]) -> list[Mapping[str, str | None]]:
        """Return the answer of each row: kept, new, or why there is none."""
        ids: list[Any] = [row.get("id") for row in rows]
        requests: dict[str, dict[str, Any]] = {}
        refused: dict[int, Mapping[str, str | None]] = {}
        for place, (row, key) in enumerate(zip(rows, ids, strict=True)):
            try:
                if not isinstance(key, str) or key in ids[:place]:
                    raise ValueError(f"a row needs an id of its own, which is text; got {key!r}")
                if key not in self._done:
                    requests[key] = _request(row)
            except ValueError as error:  # JSON that cannot be read is one, too
                refused[place] = dict.fromkeys(RESULTS) | {"error": str(error)}
        new = {key: _result(output) for key, output in answers(self._llm, requests.items())}
        if self._checkpoint is not None and new:
            _keep(self._checkpoint, new)
        known = {**self._done, **new}
        return [refused.get(place) or known[key] for place, key in enumerate(ids)]


def _request(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as a request. Arrow has filled the fields that other rows have with None."""
    params = row.get("sampling_params") or {}
    request = json.loads(params) if isinstance(params, str) else dict(params)
    request |= {name: row[name] for name in (*PROMPTS, "cache_salt") if row.get(name) is not None}
    if "messages" in request:
        request["messages"] = [
            {name: value for name, value in message.items() if value is not None}
            for message in request["messages"]
        ]
    return request


def _result(output: RequestOutput) -> dict[str, str | None]:
    first = output.outputs[0] if output.outputs else None
    return {
        "generated_text": None if first is None else first.text,
        "finish_reason": None if first is None else first.finish_reason,
        "error": output.error,
        # Times and cache hits depend on what else ran, and an answer does not.
        "output": json.dumps({**output.as_dict(), "metrics": None, "num_cached_tokens": None}),
    }


def _keep(directory: Path, results: Mapping[str, Mapping[str, str | None]]) -> None:
    """Write the answers of a batch to a file that appears at once, complete."""
    directory.mkdir(parents=True, exist_ok=True)
    name = uuid.uuid4().hex
    part = directory / f"{name}.part"
    part.write_text("".join(json.dumps([key, each]) + "\n" for key, each in results.items()))
    part.rename(directory / f"{name}.jsonl")


def _kept(directory: Path) -> dict[str, Mapping[str, str | None]]:
    files = sorted(directory.glob("*.jsonl"))
    return dict(json.loads(line) for file in files for line in file.read_text().splitlines())
