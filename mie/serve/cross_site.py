"""What web pages of other sites may not send, although browsers let them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from mie.errors import shown_text
from mie.serve.asgi import answer, header
from mie.serve.errors import ApiError

FORM_TYPES = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
"""The content types that a page may send to any server. For others, browsers ask the server first.
"""


class CrossSite:
    """Middleware that refuses a POST which a page of any site could send without asking.

    A server on a person's own machine has no other protection from the pages that they visit.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            given = header(scope, b"content-type")
            kind = (given or "").partition(";")[0].strip().lower()
            if kind in FORM_TYPES or (not kind and header(scope, b"origin") is not None):
                return await answer(_refusal(given), scope, receive, send)
        return await self._app(scope, receive, send)


def _refusal(given: str | None) -> ApiError:
    what = "a page's request without a content type" if given is None else shown_text(given)
    return ApiError(
        415,
        f"{what} is not taken, because pages of any site can send it; the body must be JSON (send "
        "the header 'Content-Type: application/json')",
        code="unsupported_media_type",
        headers={"connection": "close"},  # the body is not read
    )
