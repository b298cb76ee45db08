"""Around every handler: errors become JSON, each answer gets an id, a count and a log line."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from functools import partial
from time import perf_counter

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve.errors import JaxserveError
from jaxserve.server import access_log
from jaxserve.server.answer import ANSWER
from jaxserve.server.auth import CALLER
from jaxserve.server.failures import INTERNAL_ERROR, failure, failure_of, http_failure
from jaxserve.server.rates import RateLimited
from jaxserve.server.service import SERVICE

logger = logging.getLogger("jaxserve.server")

REQUEST_ID = "X-Request-Id"
NAME = web.RequestKey("name", str)
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
CLIENT_LEFT = 499
"""What the log shows when nobody was left to answer (the number nginx uses)."""
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id(http: web.Request) -> str:
    """The client's own id for this request if it is fit to be repeated, else a fresh one."""
    if NAME not in http:
        given = http.headers.get(REQUEST_ID, "")
        http[NAME] = given if _GOOD_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
    return http[NAME]


async def add_request_id(http: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: runs just before the headers of any response are sent."""
    response.headers.setdefault(REQUEST_ID, request_id(http))


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into an answer, and count and log the outcome."""
    started = perf_counter()
    status = CLIENT_LEFT
    try:
        response = await answer(request, handler)
        status = response.status
        return response
    finally:
        metrics, caller = request.app[SERVICE].client.metrics, request.get(CALLER)
        if request.path in GENERATING:
            metrics.requests.labels(request.path, outcome(status)).inc()
        if caller is not None and caller.has_key:
            metrics.key_requests.labels(caller.name, outcome(status)).inc()
        access_log.log(partial(access_line, request, status, perf_counter() - started))


def access_line(http: web.Request, status: int, seconds: float) -> access_log.Line:
    """What the log says of a request."""
    answer, caller = http.get(ANSWER), http.get(CALLER)
    return access_log.Line(
        request_id=request_id(http),
        method=http.method,
        path=http.raw_path[:200],
        status=status,
        seconds=round(seconds, 6),
        client=http.remote,
        tenant=caller.name if caller is not None and caller.has_key else None,
        generated=None if answer is None else answer.summary(),
    )


async def answer(http: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's response, or the one for the error it raised."""
    try:
        return await handler(http)
    except JaxserveError as error:
        if isinstance(error, RateLimited):
            http.app[SERVICE].client.metrics.refused.labels("rate").inc()
        return failure_of(error)
    except web.HTTPException as error:
        return http_failure(error, http)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        response = failure(500, INTERNAL_ERROR)
        response.headers[REQUEST_ID] = name = request_id(http)
        logger.exception("%s %s failed (request id %s)", http.method, http.raw_path[:200], name)
        return response


def outcome(status: int) -> str:
    """One word for the metrics."""
    words = {
        CLIENT_LEFT: "client_left",
        401: "unauthorized",
        429: "overloaded",
        503: "unavailable",
        504: "late",
    }
    return words.get(status, "ok" if status < 400 else "refused" if status < 500 else "error")
