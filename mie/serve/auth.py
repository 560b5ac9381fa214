"""Keys: every route but a few needs one, and each key has a prefix cache of its own.

The server keeps SHA-256 digests of the keys, and compares digests in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from mie.errors import ConfigError
from mie.serve.asgi import OPEN_ROUTES, answer, header, route_of
from mie.serve.errors import ApiError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


class Keys:
    """The keys that a server accepts, by their names. It holds digests only."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        """``digests`` are the SHA-256 of the keys."""
        if not digests:
            raise ConfigError("keys are empty; give at least one key, or none at all")
        for name in digests:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"a key's name has 1 … 64 letters, digits, '.', '_' or '-'; got {name!r}"
                )
        self._digests = dict(digests)
        secret = secrets.token_bytes(32)
        self._salts = {
            name: hmac.new(secret, digest, hashlib.sha256).hexdigest()
            for name, digest in digests.items()
        }

    @classmethod
    def of(cls, keys: Iterable[str], file: str | None = None) -> Keys | None:
        """Return the keys given as text, named key-1, key-2, …, and those of a file; None if
        there are none.

        Each line of the file is ``NAME KEY`` or ``NAME sha256:HEX``. Empty lines, and lines that
        begin with #, are skipped.

        Raises:
            ConfigError: a key is empty or not ASCII, a name occurs twice, or the file is unusable.
        """
        digests = {f"key-{i}": _digest(key) for i, key in enumerate(keys, start=1)}
        for name, digest in () if file is None else _read(file):
            if name in digests:
                raise ConfigError(f"{file} has the name {name!r} twice (key-1, … are taken, too)")
            digests[name] = digest
        return cls(digests) if digests else None

    def find(self, key: str) -> str | None:
        """Return the name of a key, or None. The time does not depend on the keys."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found

    def salt(self, name: str) -> str:
        """Return the salt of a key's prefix cache, which does not reveal the key."""
        return self._salts[name]

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"Keys({', '.join(self._digests)})"


def _digest(key: str) -> bytes:
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError("a key must be printable ASCII, not empty, without surrounding spaces")
    return hashlib.sha256(key.encode()).digest()


def _read(file: str) -> Iterable[tuple[str, bytes]]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys in {file}: {error}") from error
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            # The line may hold a key, so the message does not show it.
            raise ConfigError(f"{file}:{number} must be NAME KEY; it has {len(words)} words")
        hashed = _HASH.fullmatch(words[1])
        yield words[0], bytes.fromhex(hashed.group(1)) if hashed else _digest(words[1])


class Authentication:
    """Middleware that lets only known keys in, and notes whose request it is."""

    def __init__(
        self, app: ASGIApp, keys: Keys, *, share_prefix_cache: bool, is_fair: bool
    ) -> None:
        """With ``is_fair``, the engine shares its tokens between the keys."""
        self._app = app
        self._keys = keys
        self._share_prefix_cache = share_prefix_cache
        self._is_fair = is_fair

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        key = _key_of(scope)
        name = None if key is None else self._keys.find(key)
        if name is not None:
            scope["mie.key"] = name
            if self._is_fair:
                scope["mie.client"] = name
            if not self._share_prefix_cache:
                scope["mie.cache_salt"] = self._keys.salt(name)
        elif route_of(scope) not in OPEN_ROUTES:
            return await answer(_refusal(key), scope, receive, send)
        return await self._app(scope, receive, send)


def _key_of(scope: Scope) -> str | None:
    """The key that a client sends, as OpenAI's clients do or as Anthropic's."""
    authorization = header(scope, b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
    return header(scope, b"x-api-key")


def _refusal(key: str | None) -> ApiError:
    message = (
        "this server needs a key (send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY')"
        if key is None
        else "the key is not one of this server's"
    )
    return ApiError(
        401,
        message,
        type="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
