"""What went wrong, as a status and a body in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping

from aiohttp import web

from jaxserve.errors import DeadlinePassed, JaxserveError, NotFound, Overloaded, RequestError
from jaxserve.server.replies import ErrorDetail, ErrorReply, encode

RETRY_AFTER = "1"
"""Seconds. Long enough for some sequences to finish, or a worker to come back."""

INTERNAL_ERROR = "internal error: the server's log says more"

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
    504: "deadline_exceeded",
}


def failure(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An error response. `code` defaults to the usual one of the status."""
    response = web.Response(
        status=status,
        body=encode(ErrorReply(detail(status, message, param=param, code=code))),
        content_type="application/json",
        headers=headers,
    )
    if status in (429, 503):
        response.headers.setdefault("Retry-After", RETRY_AFTER)
    return response


def detail(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> ErrorDetail:
    """The inner part of the body, also sent when a stream breaks off."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorDetail(as_text(message), kind, param and as_text(param), code or CODES.get(status))


def as_text(said: str) -> str:
    """What a client sent may hold bytes that are no text; an answer spells them out."""
    return said.encode(errors="backslashreplace").decode()


def failure_of(error: JaxserveError) -> web.Response:
    """The answer to a request that could not be served for this reason."""
    match error:
        case NotFound():
            return failure(404, str(error), param=error.param, code=error.code)
        case RequestError():
            return failure(400, str(error), param=error.param)
        case Overloaded() | DeadlinePassed():
            return refusal(error)
        case _:
            return failure(503, str(error))


def refusal(error: Overloaded | DeadlinePassed) -> web.Response:
    """The answer to a request that was not let in, or was given up before its first token."""
    if isinstance(error, DeadlinePassed):
        return failure(504, str(error))
    wait = {"Retry-After": str(math.ceil(error.retry_after))}
    return failure(429, str(error), headers=wait)


def http_failure(error: web.HTTPException, request: web.Request) -> web.Response:
    """aiohttp's own refusals (no such path, wrong method, body too large) in the same shape."""
    messages = {
        404: f"there is nothing at {request.method} {request.path}",
        405: f"{request.path} does not take {request.method}",
        413: "the request body is larger than this server accepts",
    }
    allowed = error.headers.get("Allow")
    return failure(
        error.status,
        messages.get(error.status, error.reason),
        headers={"Allow": allowed} if allowed else None,
    )
