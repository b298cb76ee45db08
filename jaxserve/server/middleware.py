"""Around every handler: errors become JSON, each answer gets an id, a count and a log line."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from time import perf_counter

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve.errors import DeadlinePassed, EngineStopped, Overloaded, RequestError
from jaxserve.server.failures import INTERNAL_ERROR, failure, http_failure, refusal
from jaxserve.server.service import SERVICE, ModelNotFound

logger = logging.getLogger("jaxserve.server")
access_logger = logging.getLogger("jaxserve.access")

REQUEST_ID = "X-Request-Id"
GENERATING = ("/v1/completions", "/v1/chat/completions")
CLIENT_LEFT = 499
"""What the log shows when nobody was left to answer (the number nginx uses)."""
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id(http: web.Request) -> str:
    """The client's own id for this request if it is fit to be repeated, else a fresh one."""
    given = http.headers.get(REQUEST_ID, "")
    return given if _GOOD_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


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
        if request.path in GENERATING:
            counter = request.app[SERVICE].client.metrics.requests
            counter.labels(request.path, outcome(status)).inc()
        if access_logger.isEnabledFor(logging.INFO):
            elapsed = perf_counter() - started
            path = request.raw_path[:200]  # still percent-encoded: one line it stays
            access_logger.info(
                "%s %s %d %.3f s %s", request.method, path, status, elapsed, request.remote
            )


async def answer(http: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's response, or the one for the error it raised."""
    try:
        return await handler(http)
    except ModelNotFound as error:
        return failure(404, str(error), param=error.param, code="model_not_found")
    except RequestError as error:
        return failure(400, str(error), param=error.param)
    except (Overloaded, DeadlinePassed) as error:
        return refusal(error)
    except EngineStopped as error:
        return failure(503, str(error))
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
    words = {CLIENT_LEFT: "client_left", 429: "overloaded", 503: "unavailable", 504: "late"}
    return words.get(status, "ok" if status < 400 else "refused" if status < 500 else "error")
