"""Choose the replica for a request: equal beginnings go to the same replica.

A router keeps no state of replicas, so any number of routers agree without talking to each other.
Rendezvous hashing (Thaler and Ravishankar, 1998) ranks the replicas for each beginning. A replica
that joins or leaves therefore moves only its own share. As in consistent hashing with bounded loads
(Mirrokni and others, 2016), a replica far above the mean is busy, and others take its requests.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from mie.config.engine import check_integer

MAX_PREFIX_BYTES = 16384
"""Maximum bytes of the beginning of a request that a router compares."""


class Key(NamedTuple):
    """The two hashes that choose a replica for a request."""

    home: bytes
    """It ranks the replicas for the request."""
    spill: bytes
    """It ranks them for requests for which the first one is too busy."""


class Router(Protocol):
    """Chooses a replica for each request."""

    def key(self, beginning: bytes, salt: str = "") -> Key:
        """Return the key of a request, given its beginning and its tenant's salt."""

    def choose(self, key: Key, loads: Mapping[str, int]) -> str:
        """Return one of the replicas, given the number of requests that each one serves."""


class PrefixRouter:
    """Sends requests with the same beginning and the same salt to the same replica."""

    def __init__(self, *, prefix_bytes: int = 256, slack: int = 8) -> None:
        """A replica is busy if it serves ``slack`` requests more than the mean.

        Raises:
            ConfigError: one of them is out of range.
        """
        check_integer("prefix_bytes", prefix_bytes, 1, MAX_PREFIX_BYTES)
        check_integer("slack", slack, 1)
        self._prefix_bytes = prefix_bytes
        self._slack = slack

    def key(self, beginning: bytes, salt: str = "") -> Key:
        """Return the hashes of the first ``prefix_bytes`` and of all, with the salt."""
        tenant = _digest(salt.encode("utf-8", "surrogatepass"))
        return Key(_digest(beginning[: self._prefix_bytes], tenant), _digest(beginning, tenant))

    def choose(self, key: Key, loads: Mapping[str, int]) -> str:
        """Return the first replica for the request's home, or another if that one is busy.

        The others are ranked by the whole beginning, so that the conversations with a popular
        system prompt spread, and each one stays where it is. They are compared in pairs, and the
        less loaded replica takes the request.
        """
        limit = sum(loads.values()) / len(loads) + self._slack
        home = best(key.home, loads)
        if loads[home] < limit:
            return home
        others = [replica for replica in ranking(key.spill, loads) if replica != home]
        pairs = (others[place : place + 2] for place in range(0, len(others), 2))
        chosen = (min(pair, key=loads.__getitem__) for pair in pairs)
        return next(replica for replica in chosen if loads[replica] < limit)


class RandomRouter:
    """Spreads requests at random. Others are compared with it."""

    def __init__(self) -> None:
        self._num_requests = 0

    def key(self, beginning: bytes, salt: str = "") -> Key:
        """Return a new key for each request."""
        self._num_requests += 1
        key = _digest(b"%d" % self._num_requests)
        return Key(key, key)

    def choose(self, key: Key, loads: Mapping[str, int]) -> str:
        """Return the first replica for the key."""
        return best(key.home, loads)


def beginning_of(body: Mapping[str, Any]) -> bytes:
    """Return the beginning of a request to any of the server's interfaces, as JSON.

    A router has no tokenizer, so it compares text. A conversation begins with all messages up to
    the user's first one. Every later turn repeats them.
    """
    prompt = next((body[name] for name in ("prompt", "messages", "input") if name in body), None)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        roles = [isinstance(each, dict) and each.get("role") for each in prompt]
        prompt = prompt[: roles.index("user") + 1 if "user" in roles else None]
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # the first of several prompts
    if isinstance(prompt, (str, list)):
        prompt = prompt[:MAX_PREFIX_BYTES]
    system = [body[name] for name in ("system", "instructions") if name in body]
    return json.dumps([*system, prompt])[:MAX_PREFIX_BYTES].encode()


def best(key: bytes, replicas: Iterable[str]) -> str:
    """Return the first of the key's ranking."""
    return max(replicas, key=lambda replica: _digest(replica.encode(), key))


def ranking(key: bytes, replicas: Iterable[str]) -> list[str]:
    """Return all replicas in the key's order. A replica's rank among others depends on no third."""
    return sorted(replicas, key=lambda replica: _digest(replica.encode(), key), reverse=True)


def _digest(data: bytes, key: bytes = b"") -> bytes:
    return blake2b(data, digest_size=16, key=key).digest()
