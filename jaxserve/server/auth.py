"""Who may ask: requests without a key of this server's get 401, but for what is open to all."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxserve.server.failures import failure
from jaxserve.server.keys import Caller
from jaxserve.server.service import SERVICE

CALLER = web.RequestKey("caller", Caller)
OPEN = frozenset({"/health", "/version", "/openapi.json", "/docs", "/"})
"""What a load balancer asks, what tells how to ask, and the page, which asks for the key itself."""
PAGE_FILES = "/page/"
"""What the page is made of: open as well."""
METRICS = "/metrics"
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="jaxserve"'}


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Find out who asks; 401 if that has to be known and is not, 429 if it is too often."""
    service = request.app[SERVICE]
    given = request.headers.get("Authorization", "")
    caller = service.keys.find(given)
    if caller is not None:
        request[CALLER] = caller
        if request.method == "POST":
            service.rates.admit(caller.name, "requests", 1)
    elif not is_open(request.path, metrics_need_key=service.config.metrics_need_key):
        return unauthorized(given)
    return await handler(request)


async def add_rates(http: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: tells a caller what its key has left."""
    caller = http.get(CALLER)
    if caller is not None and http.method == "POST":
        response.headers.update(http.app[SERVICE].rates.headers(caller.name))


def is_open(path: str, *, metrics_need_key: bool) -> bool:
    """Whether a path is answered without a key."""
    if path in OPEN or path.startswith(PAGE_FILES):
        return True
    return path == METRICS and not metrics_need_key


def unauthorized(given: str) -> web.Response:
    """401 in OpenAI's shape. Does not repeat what was sent."""
    message = (
        "this API key is not known here"
        if given.lower().startswith("bearer ")
        else "this server needs an API key: send 'Authorization: Bearer KEY'"
    )
    return failure(401, message, code="invalid_api_key", headers=CHALLENGE)
