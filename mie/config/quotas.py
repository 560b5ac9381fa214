"""Declare the share of each client under the fair policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from mie.errors import ConfigError, shown


@dataclass(frozen=True, kw_only=True)
class ClientQuota:
    """The weight of a client's share, and the maximum number of its sequences that run at once.

    A client of weight 2 gets twice the share of a client of weight 1. Without ``max_num_seqs``, a
    client may take every seat that no other client wants.
    """

    weight: float = 1
    max_num_seqs: int | None = None

    def __post_init__(self) -> None:
        weight, most = self.weight, self.max_num_seqs
        if not _is(Real, weight) or not 0 < weight < math.inf:
            raise ConfigError(f"weight must be a number above 0; got {shown(weight)}")
        if most is not None and (not _is(Integral, most) or most < 1):
            raise ConfigError(f"max_num_seqs must be an integer at least 1; got {shown(most)}")


def quotas_of(value: object) -> dict[str, ClientQuota]:
    """Return the quotas that the setting ``client_quotas`` declares, by client.

    Raises:
        ConfigError: the value does not map clients to quotas.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"client_quotas must map clients to quotas; got {shown(value)}")
    return {_client(name): _quota(name, quota) for name, quota in value.items()}


def _client(name: object) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"client_quotas has the client {shown(name)}; a client is a string")
    return name


def _quota(name: object, value: Any) -> ClientQuota:
    if isinstance(value, ClientQuota):
        return value
    what, known = f"client_quotas of {shown(name)}", [each.name for each in fields(ClientQuota)]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be an object of {' and '.join(known)}; got {shown(value)}")
    for each in value:
        if each not in known:
            raise ConfigError(f"{what} has no {shown(each)}; it may have {' and '.join(known)}")
    try:
        return ClientQuota(**value)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
