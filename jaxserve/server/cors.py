"""Web pages of other origins: which may read the answers, and what their browsers ask first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

Signal = Callable[[web.Request, web.StreamResponse], Awaitable[None]]

ANY = "*"
METHODS = "GET, POST, DELETE, OPTIONS"
SENT = "Authorization, Content-Type, X-Request-Id"
"""What a page may send where its browser does not say what it wants to."""
SHOWN = "Retry-After, X-Request-Id, " + ", ".join(
    f"x-ratelimit-{what}-{of}"
    for what in ("limit", "remaining", "reset")
    for of in ("requests", "tokens")
)
"""Headers of answers that a page may read besides the usual ones."""
MAX_AGE = "3600"
"""Seconds a browser may remember the answer to its question."""


def allowed(origin: str | None, origins: Collection[str]) -> str | None:
    """What Access-Control-Allow-Origin says to a page of this origin; None: nothing."""
    if origin is None:
        return None
    return ANY if ANY in origins else origin if origin in origins else None


def answer_preflights(origins: Collection[str]) -> Middleware:
    """A middleware that answers the browsers' questions. They bring no key, so it comes first."""

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or allowed(request.headers.get("Origin"), origins) is None:
            return await handler(request)
        wanted = request.headers.get("Access-Control-Request-Headers", SENT)
        if not wanted.isascii():
            wanted = SENT
        headers = {
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Allow-Headers": wanted,
            "Access-Control-Max-Age": MAX_AGE,
        }
        return web.Response(status=204, headers=headers)

    return preflight


def add_origin(origins: Collection[str]) -> Signal:
    """A signal handler that lets pages of these origins read an answer."""

    async def add(http: web.Request, response: web.StreamResponse) -> None:
        origin = allowed(http.headers.get("Origin"), origins)
        if ANY not in origins:
            response.headers.add("Vary", "Origin")  # a cache must not mix origins up
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = SHOWN

    return add
