"""The routes of the page that need no engine: its files, logging in, and opening a trace."""

from functools import cached_property

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mie.errors import shown
from mie.page.assets import Asset, assets
from mie.serve.asgi import route_of
from mie.serve.auth import WrongKeys
from mie.serve.config import ServeConfig
from mie.serve.errors import ApiError, invalid, too_many
from mie.serve.json_text import json_object
from mie.serve.page.access import Sessions, check_may_see, cookie_for, name_of
from mie.serve.page.processes import Worker, converted

PAGES = {"/": "index.html", "/chat": "chat.html", "/story.html": "story.html"}
"""Files with a separate route."""
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
SHELL_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
NDJSON = "application/x-ndjson"
DATA_HEADERS = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class PageShell:
    """The files of the page, and the sessions of logins."""

    def __init__(self, config: ServeConfig) -> None:
        self.sessions = Sessions()
        self.wrong_keys = WrongKeys()
        self._uploader = Worker("mie-page-upload")
        self._config = config

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            *(Route(path, self._file) for path in (*PAGES, "/mie/page/{path:path}")),
            Route("/mie/login", self._login, methods=["POST"]),
            Route("/mie/logout", self._logout, methods=["POST"]),
            Route("/mie/trace", self._trace, methods=["POST"]),
        ]

    def close(self) -> None:
        """End the thread."""
        self._uploader.close()

    @cached_property
    def _assets(self) -> dict[str, Asset]:
        return assets()

    async def _file(self, request: Request) -> Response:
        path = route_of(request.scope)
        asset = self._assets.get(PAGES.get(path) or request.path_params["path"])
        if asset is None:
            raise ApiError(404, f"there is no file {shown(path)}")
        headers = {**SHELL_HEADERS, "etag": asset.etag, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(asset.content, headers=headers, media_type=asset.media_type)
        headers["content-encoding"] = "gzip"
        return Response(asset.compressed, headers=headers, media_type=asset.media_type)

    async def _login(self, request: Request) -> Response:
        if not self._config.has_keys:
            raise invalid("this server has no keys, so the page needs no login", "key")
        key = json_object(await request.body()).get("key")
        name = name_of(self._config, key) if isinstance(key, str) else None
        if name is None:
            unknown = ApiError(401, "the key is not one of this server's", code="invalid_api_key")
            raise await self.wrong_keys.answer_to(request.scope, unknown)
        request.scope["mie.client"] = name
        check_may_see(request)
        return self._with_cookie(request, self.sessions.open(name))

    async def _logout(self, request: Request) -> Response:
        self.sessions.close(request.scope)
        return self._with_cookie(request, "")

    def _with_cookie(self, request: Request, value: str) -> Response:
        cookie = cookie_for(value, request.scope, self._config.root_path)
        return Response(status_code=204, headers={**DATA_HEADERS, "set-cookie": cookie})

    async def _trace(self, request: Request) -> Response:
        check_may_see(request)
        log = await request.body()
        if self._uploader.is_busy:
            raise too_many("another trace is being opened (try again in a moment)", "busy", 2)
        records = await self._uploader.call(lambda: converted(log))
        return Response(records, headers=DATA_HEADERS, media_type=NDJSON)
