"""Sessions of the page: a cookie stands for a key, since an EventSource sends no headers."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

from starlette.types import Scope

from mie.serve.asgi import header

COOKIE = "mie_session"
SECONDS = 12 * 3600
"""Time after which one must log in again."""
MAX_SESSIONS = 256
"""Sessions that exist at once. The oldest is dropped for the next."""

SAFE_METHODS = frozenset({"GET", "HEAD"})
PAGE_HEADER = b"x-mie-page"
"""A header that a form or an image of another site cannot send."""


class Sessions:
    """Who has logged in. Only digests of the cookies are kept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def open(self, client: str) -> str:
        """Begin a session of a key's owner, and return its cookie's value."""
        value = secrets.token_urlsafe(32)
        self._sessions[_digest(value)] = (client, self._clock() + SECONDS)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return value

    def close(self, scope: Scope) -> None:
        """End the session of a request, if it has one."""
        value = _cookie(scope)
        if value is not None:
            self._sessions.pop(_digest(value), None)

    def client(self, scope: Scope) -> str | None:
        """Return the name of the key that a request's cookie stands for, or None.

        A request that may change something needs `PAGE_HEADER` too, which only the page itself can
        send. Browsers send the cookie with no request that another site has caused, and the header
        is a second lock.
        """
        value = _cookie(scope)
        if value is None:
            return None
        if scope["method"] not in SAFE_METHODS and header(scope, PAGE_HEADER) is None:
            return None
        client, end = self._sessions.get(_digest(value), (None, 0.0))
        return client if self._clock() < end else None


def cookie_for(value: str, scope: Scope, path: str) -> str:
    """Return the header that sets the cookie, or deletes it if ``value`` is empty."""
    parts = [f"{COOKIE}={value}", f"Path={path or '/'}", "HttpOnly", "SameSite=Strict"]
    parts.append(f"Max-Age={SECONDS if value else 0}")
    if scope["scheme"] == "https":
        parts.append("Secure")
    return "; ".join(parts)


def _cookie(scope: Scope) -> str | None:
    text = header(scope, b"cookie")
    if scope["type"] != "http" or text is None:
        return None
    try:
        morsel = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return None
    return None if morsel is None else morsel.value


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest()
