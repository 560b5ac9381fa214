"""Answer rows of a dataset, and keep the answers in a directory for a restart."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mie.batch.requests import PROMPTS, answers
from mie.frontend.outputs import RequestOutput
from mie.llm import LLM

RESULTS = ("generated_text", "finish_reason", "error", "output")
"""The names of the columns that an answer adds to its row."""


class RowEngine:
    """An engine that answers batches of rows, as `mie.ray.generate` describes them."""

    def __init__(
        self, settings: Mapping[str, Any], checkpoint: str | os.PathLike[str] | None = None
    ) -> None:
        """Load an engine, and read which rows are answered in the directory ``checkpoint``."""
        self._llm = LLM(**settings)
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._done = {} if self._checkpoint is None else _kept(self._checkpoint)

    def answers(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, str | None]]:
        """Return the `RESULTS` of each row: kept, new, or why there is no answer."""
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
    params = json.loads(params) if isinstance(params, str) else params
    if not isinstance(params, Mapping):
        raise ValueError(f"sampling_params must be a struct or a JSON object; got {params!r}")
    request = dict(params)
    request |= {name: row[name] for name in (*PROMPTS, "cache_salt") if row.get(name) is not None}
    if isinstance(request.get("messages"), list):
        request["messages"] = [_without_none(message) for message in request["messages"]]
    return request


def _without_none(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message  # the engine refuses it
    return {name: value for name, value in message.items() if value is not None}


def _result(output: RequestOutput) -> dict[str, str | None]:
    first = output.outputs[0] if output.outputs else None
    return {
        "generated_text": None if first is None else first.text,
        "finish_reason": None if first is None else first.finish_reason,
        "error": output.error,
        # Times and cache hits depend on other requests, and an answer does not.
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
