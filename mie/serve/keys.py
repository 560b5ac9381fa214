"""The keys of a server. Only digests of them are held."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping, Set

from mie.base.files import read_utf8
from mie.config.engine import ClientQuota
from mie.errors import ConfigError, shown

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


class Keys:
    """The keys that a server accepts, by their names. It holds digests only."""

    def __init__(
        self, digests: Mapping[str, bytes], quotas: Mapping[str, ClientQuota] | None = None
    ) -> None:
        """``digests`` are the SHA-256 of the keys, and ``quotas`` the quotas of some keys."""
        if not digests:
            raise ConfigError("keys are empty; give at least one key, or none at all")
        for name in digests:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"a key's name has 1 … 64 letters, digits, '.', '_' or '-'; got {name!r}"
                )
        self._digests = dict(digests)
        self.quotas = dict(quotas or {})
        """The quotas of the keys that have one, for the setting ``client_quotas``."""
        secret = secrets.token_bytes(32)
        self._salts = {
            name: hmac.new(secret, digest, hashlib.sha256).hexdigest()
            for name, digest in digests.items()
        }

    @classmethod
    def of(cls, keys: Iterable[str], file: str | None = None) -> Keys | None:
        """Return the given keys, named key-1, key-2, …, and a file's; None if there are none.

        Each line of the file is ``NAME KEY`` or ``NAME sha256:HEX``, and ``weight=X`` or
        ``max_num_seqs=N`` may follow. Empty lines, and lines that begin with #, are skipped.

        Raises:
            ConfigError: a key is empty or not ASCII, a name occurs twice, a quota is no quota, or
                the file is unusable.
        """
        digests = {f"key-{i}": _digest(key) for i, key in enumerate(keys, start=1)}
        quotas = {}
        for name, digest, quota in () if file is None else _read(file):
            if name in digests:
                raise ConfigError(f"{file} has the name {name!r} twice (key-1, … are taken, too)")
            digests[name] = digest
            if quota is not None:
                quotas[name] = quota
        return cls(digests, quotas) if digests else None

    @classmethod
    def of_one(cls, name: str, key: str) -> Keys:
        """Return one key.

        Raises:
            ConfigError: it is not ASCII, or has surrounding spaces.
        """
        return cls({name: _digest(key)})

    def find(self, key: str) -> str | None:
        """Return the name of a key, or None. The time does not depend on the keys."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found

    def salt(self, name: str) -> str:
        """Return the salt of a key's prefix cache. The salt does not reveal the key."""
        return self._salts[name]

    @property
    def names(self) -> Set[str]:
        """The names of the keys."""
        return self._digests.keys()

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"Keys({', '.join(self._digests)})"


def _digest(key: str) -> bytes:
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError("a key must be printable ASCII, not empty, without surrounding spaces")
    return hashlib.sha256(key.encode()).digest()


def _read(file: str) -> Iterable[tuple[str, bytes, ClientQuota | None]]:
    try:
        lines = read_utf8(file).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys in {file}: {error}") from error
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2:
            # The line may hold a key, so the message does not show it.
            raise ConfigError(f"{file}:{number} must be NAME KEY; it has {len(words)} words")
        hashed = _HASH.fullmatch(words[1])
        digest = bytes.fromhex(hashed.group(1)) if hashed else _digest(words[1])
        try:
            yield words[0], digest, _quota(words[2:]) if words[2:] else None
        except ConfigError as error:
            raise ConfigError(f"{file}:{number}: {error}") from error


def _quota(words: Iterable[str]) -> ClientQuota:
    """Return the quota that ``weight=X`` and ``max_num_seqs=N`` give."""
    values: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition("=")
        kind = {"weight": float, "max_num_seqs": int}.get(name)
        if kind is None or name in values:
            # The word may be a part of a key, so the message does not show it.
            raise ConfigError("after NAME KEY there may be weight=X and max_num_seqs=N, once each")
        try:
            values[name] = kind(text)
        except ValueError:
            raise ConfigError(f"{name} must be a number; got {shown(text)}") from None
    return ClientQuota(**values)  # type: ignore[arg-type]  # max_num_seqs is an integer
