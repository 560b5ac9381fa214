"""Keep the results of the probe of linear plans on disk."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from mie.system.cache_dir import CacheError, read_json, write_json

PLANS_CACHE = "linear_plans"
"""The name of the cache that holds the answers."""
MAX_DAYS = 30
"""Age of an answer, in days, after which it is tried again because the machine may have changed."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The faster plan for matrices of one shape, as several rounds agreed."""

    machine: str
    """The CPU, the BLAS and the other parts of `machine_key`."""
    shape: str
    """The dtype and the shape: "float32 576x1536"."""
    plan: str
    ratio: float
    """The time of the second choice divided by that of the first."""
    day: str
    """The day it was found: "2026-11-22"."""

    def is_old(self, today: date) -> bool:
        """Return whether to try again. An answer from the future is also too old."""
        return not 0 <= (today - date.fromisoformat(self.day)).days <= MAX_DAYS


class PlanAnswers:
    """The answers for one machine, in a folder that many processes may use.

    Each answer has its own file, which is written whole, so no process can undo what another one
    writes. With ``folder`` None there are no answers, and none are kept.
    """

    def __init__(self, folder: Path | None, machine: str) -> None:
        self.folder = folder
        self._machine = machine

    def get(self, shape: str) -> Answer | None:
        """Return the answer for the shape, if there is one."""
        path = self._path(shape)
        answer = None if path is None else _parse(read_json(path))
        is_own = answer is not None and (answer.machine, answer.shape) == (self._machine, shape)
        return answer if is_own else None

    def put(self, shape: str, plan: str, ratio: float, day: date) -> None:
        """Store an answer, if the folder is writable."""
        path = self._path(shape)
        if path is None:
            return
        answer = Answer(
            machine=self._machine, shape=shape, plan=plan, ratio=ratio, day=day.isoformat()
        )
        with suppress(CacheError):  # the next process will find it again
            write_json(path, asdict(answer))

    def odd_ones(self) -> list[Answer]:
        """Return the answers of this machine whose plan differs from that of most shapes."""
        if self.folder is None:
            return []
        found = (_parse(read_json(path)) for path in sorted(self.folder.glob("*.json")))
        own = [each for each in found if each is not None and each.machine == self._machine]
        most_common = Counter(each.plan for each in own).most_common(1)
        return [each for each in own if each.plan != most_common[0][0]]

    def _path(self, shape: str) -> Path | None:
        if self.folder is None:
            return None
        # The file says what it is about, so that a clash costs an answer. hashlib would do better,
        # and take 4 MB for OpenSSL.
        text = f"{self._machine}\n{shape}".encode()
        return self.folder / f"{zlib.crc32(text):08x}{zlib.adler32(text):08x}.json"


def _parse(content: Any) -> Answer | None:
    """Return the answer, or None if the file holds anything else."""
    if not isinstance(content, dict) or content.keys() != Answer.__annotations__.keys():
        return None
    ratio = content["ratio"]
    texts = (each for name, each in content.items() if name != "ratio")
    if not isinstance(ratio, float) or not math.isfinite(ratio):
        return None
    if not all(isinstance(each, str) for each in texts):
        return None
    try:
        date.fromisoformat(content["day"])
    except ValueError:
        return None
    return Answer(**content)
