"""Combine the answers of all replicas into one: metrics with labels, health, and the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from mie.front.call import Answer

_FAMILY = re.compile(r"(# HELP .*\n# TYPE .*\n)((?:[^#\n].*\n)*)")

Combine: TypeAlias = Callable[[Sequence[Answer]], Answer]


def _metrics(answers: Sequence[Answer]) -> Answer:
    """Return all samples in Prometheus' text format, with a label for the replica."""
    worst = _worst(answers)
    if worst.status != 200:
        return worst
    families: dict[str, str] = {}
    for each in answers:
        label = f'{{replica="{each.replica}"'
        for head, samples in _FAMILY.findall(each.body.decode()):
            samples = re.sub(r"^([\w:]+)\{", rf"\1{label},", samples, flags=re.MULTILINE)
            samples = re.sub(r"^([\w:]+) ", rf"\1{label}}} ", samples, flags=re.MULTILINE)
            families[head] = families.get(head, "") + samples
    return answers[0]._replace(body="".join(map("".join, families.items())).encode())


def _health(answers: Sequence[Answer]) -> Answer:
    """Return that the whole serves if any replica does, and what each of them says."""
    best = _best(answers)
    if best.status not in (200, 503):  # every replica refuses the request
        return best
    each = {answer.replica: json.loads(answer.body)["status"] for answer in answers}
    body = {"status": each[best.replica], "replicas": each}
    return best._replace(body=json.dumps(body).encode())


def _load(answers: Sequence[Answer]) -> Answer:
    worst = _worst(answers)
    if worst.status != 200:
        return worst
    total = sum(json.loads(answer.body)["server_load"] for answer in answers)
    return answers[0]._replace(body=json.dumps({"server_load": total}).encode())


def _best(answers: Sequence[Answer]) -> Answer:
    return min(answers, key=lambda answer: answer.status)


def _worst(answers: Sequence[Answer]) -> Answer:
    return max(answers, key=lambda answer: answer.status)


_OF_ROUTES: Mapping[str, Combine] = MappingProxyType(
    {
        "/metrics": _metrics,
        "/health": _health,
        "/ready": _health,
        "/ping": _health,
        "/load": _load,
        "/reset_prefix_cache": _worst,
    }
)


def combining(route: str) -> Combine | None:
    """Return how the answers to a route are combined, or None if one replica answers it."""
    if route.startswith("/v1/requests/"):  # a cancelled request runs on one of them
        return _best
    return _OF_ROUTES.get(route)
