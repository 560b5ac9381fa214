"""Errors as clients get them.

Every error is an `ApiError`: a status, and the four keys of OpenAI's error body. Exceptions of mie
become one by `api_error`. Other dialects have their own bodies, made of the same fields.
"""

import errno
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Literal

from starlette.responses import Response

from mie.errors import (
    ChatTemplateError,
    ConfigError,
    EngineDeadError,
    MieError,
    PromptTooLongError,
    RequestError,
    RequestFailedError,
    ThreadLimitError,
    WorkerError,
    shown,
)
from mie.frontend.outputs import CompletionOutput, RequestOutput

INVALID = "invalid_request_error"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "service_unavailable",
}
"""The types of errors by their status. All others are invalid requests."""
MAX_RETRY_AFTER = 60
"""Seconds. OpenAI's clients do not retry at all if the wait is longer than 120."""


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        """Make the error; its ``type`` follows from the status unless it is given.

        ``more`` are further keys of the body.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, INVALID)
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.more = more

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape; all four keys are always there."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.more}}

    def response(self, path: str = "") -> Response:
        """The error as a response, in the dialect of the route ``path``."""
        content = body_of(self, path)
        return Response(content, self.status, self.headers, media_type="application/json")


def body_of(error: ApiError, path: str) -> str:
    """Return the JSON of an error for a client, in the dialect of the route ``path``."""
    of_dialect = {"anthropic": anthropic_body, "ollama": ollama_body}.get(dialect_of(path))
    body = error.body() if of_dialect is None else of_dialect(error)
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace").decode()


def dialect_of(path: str) -> Literal["anthropic", "ollama", "openai"]:
    """Return the dialect of errors of the route ``path``."""
    if path.startswith("/api/"):
        return "ollama"
    return "anthropic" if f"{path}/".startswith("/v1/messages/") else "openai"


def ollama_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Ollama's shape."""
    return {"error": error.message}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    others = {413: "request_too_large", 503: "overloaded_error"}
    default = "api_error" if error.status >= 500 else _TYPES.get(error.status, INVALID)
    kind = others.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The 400 for a value that a parameter cannot have."""
    return ApiError(400, message, code=code, param=param)


def unsupported(name: str, why: str) -> ApiError:
    """The 400 for a known parameter that has no effect here."""
    message = f"{name} is not supported: {why}"
    return ApiError(400, message, code="unsupported_parameter", param=name)


@contextmanager
def naming_structure(name: str) -> Iterator[None]:
    """Name the client's field in refusals of a structured output."""
    try:
        yield
    except (RequestError, ConfigError) as error:
        what = str(error)
        if not what.startswith("structured_outputs"):
            raise
        raise invalid(f"{name}{what.removeprefix('structured_outputs')}", name) from error


def unavailable(message: str, retry_after: int) -> ApiError:
    """The 503 of a server that serves nothing now."""
    return ApiError(
        503,
        message,
        code="service_unavailable",
        headers={"retry-after": str(min(retry_after, MAX_RETRY_AFTER))},
    )


def too_many(message: str, code: str, retry_after: int) -> ApiError:
    """The 429 for a client that must wait for ``retry_after`` seconds."""
    return ApiError(429, message, code=code, headers={"retry-after": str(retry_after)})


def no_model(name: object, known: Iterable[str]) -> ApiError:
    """The 404 for a model that is not among the ``known`` ones."""
    names = ", ".join(known) or "none"
    message = f"the model {shown(name)} does not exist; this server has {names}"
    return ApiError(404, message, code="model_not_found", param="model")


def refuse_unfinished(choice: CompletionOutput) -> None:
    """Raise the 503 for a choice that was aborted, so that no client takes it for an answer."""
    if choice.finish_reason == "abort":
        raise unavailable("the server ended the request before its answer was complete", 1)


def refuse_failed(outputs: Iterable[RequestOutput]) -> None:
    """Raise the error of a request that failed while it ran.

    It is a 400 if the request itself is the reason, and clients must not send it again.
    """
    for output in outputs:
        if output.error is not None:
            message = f"request {output.request_id} failed: {output.error}"
            raise ApiError(400 if output.is_invalid else 500, message, code="request_failed")


def too_long(num_prompt: int | None, max_model_len: int) -> ApiError:
    """The 400 for a prompt that leaves no room for its answer in the context."""
    prompt = "the prompt is longer" if num_prompt is None else f"the prompt has {num_prompt} tokens"
    return ApiError(
        400,
        f"{prompt}; the context holds {max_model_len} tokens, the answer included (shorten the "
        "prompt)",
        code="context_length_exceeded",
        param="prompt",
        n_prompt_tokens=num_prompt,
        n_ctx=max_model_len,
    )


def _is_refused_by_system(error: Exception) -> bool:
    """Return whether the system has no file descriptor, process or memory left for now."""
    cause = error.__cause__ if isinstance(error, WorkerError) else error
    return isinstance(cause, OSError) and cause.errno in _NONE_LEFT


_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
_FIRST_WORD = re.compile(r"(?:each of )?([a-z][a-z_]+)\b")


def api_error(error: Exception, known_params: Set[str] = frozenset()) -> ApiError:
    """The error that a client gets for any exception.

    A message of mie begins with the parameter that it is about; ``known_params`` has their names.
    An exception that is a bug shows its type only.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return unavailable(f"the engine is not serving: {error}", MAX_RETRY_AFTER)
    if isinstance(error, ThreadLimitError) or _is_refused_by_system(error):
        return unavailable(str(error), 1)
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, PromptTooLongError):
        return too_long(error.num_tokens, error.max_model_len)
    if isinstance(error, ChatTemplateError):
        return invalid(str(error), "messages")
    if isinstance(error, (RequestError, ConfigError)):
        message = str(error)
        found = _FIRST_WORD.match(message)
        param = found.group(1) if found else None
        return invalid(message, param if param in known_params else None)
    if isinstance(error, MieError):
        return ApiError(500, str(error), code="internal_error")
    return ApiError(
        500,
        f"internal error: {type(error).__name__} (the server's log has the details)",
        code="internal_error",
    )
