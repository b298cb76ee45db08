"""/v1/batches: many requests in a file, answered when there is time."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from jaxserve.errors import ConfigError, EngineStopped, NotFound, RequestError
from jaxserve.server.answer import read_json
from jaxserve.server.auth import CALLER
from jaxserve.server.batch_runner import ENDPOINTS, BatchRunner
from jaxserve.server.disk import lock
from jaxserve.server.limits import checked_metadata
from jaxserve.server.listing import BatchQuery, batch_list
from jaxserve.server.openai import decode_body, decode_query
from jaxserve.server.replies import json_response
from jaxserve.server.service import SERVICE

logger = logging.getLogger("jaxserve.server")

WINDOW = "24h"


class BatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/batches.

    Attributes:
        input_file_id: of an uploaded file, each line a request: custom_id, method, url, body.
        endpoint: of all of them.
        completion_window: "24h"; what is not done by then is given up.
        metadata: up to 16 strings, kept with the batch.
    """

    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: dict[str, str] | None = None


@dataclass
class Batching:
    """The runner, or why there is none although there should be."""

    runner: BatchRunner | None = None
    why_not: str | None = None


BATCHING = web.AppKey("batching", Batching)


async def keep_batches(app: web.Application) -> AsyncIterator[None]:
    """A cleanup context: batches run as long as the application does.

    Where another process has the folder, or it cannot be written, everything else is served.
    """
    config, batching = app[SERVICE].config, app[BATCHING]
    if config.batch_dir is None:
        yield
        return
    try:
        held = lock(Path(config.batch_dir))
    except ConfigError as error:
        batching.why_not = f"no files and batches: {error}"
        logger.warning("%s", batching.why_not)
        yield
        return
    with held:
        concurrency = config.batch_concurrency
        runner = BatchRunner(app, Path(config.batch_dir), concurrency=concurrency)
        batching.runner = runner
        runner.resume()
        yield
        await runner.stop()


def runner_of(http: web.Request) -> BatchRunner:
    """Raises NotFound where nobody asked for one, EngineStopped where it could not be had."""
    batching = http.app[BATCHING]
    if batching.runner is not None:
        return batching.runner
    if batching.why_not is not None:
        raise EngineStopped(batching.why_not)
    raise NotFound("this server keeps no files: start it with --batch-dir DIR")


async def create_batch(http: web.Request) -> web.Response:
    """POST /v1/batches."""
    runner = runner_of(http)
    body = decode_body(await read_json(http), BatchBody)
    if body.endpoint is None or body.endpoint not in ENDPOINTS:
        raise RequestError(
            f"endpoint is {body.endpoint!r}: it must be one of {', '.join(ENDPOINTS)}",
            param="endpoint",
        )
    if body.completion_window != WINDOW:
        raise RequestError(
            f"completion_window is {body.completion_window!r}: it must be {WINDOW!r}",
            param="completion_window",
        )
    if body.input_file_id is None:
        raise RequestError("input_file_id is missing", param="input_file_id")
    runner.files.get(body.input_file_id, http[CALLER].owner)
    record = runner.batches.create(
        body.endpoint, body.input_file_id, checked_metadata(body.metadata), http[CALLER].owner
    )
    runner.start(record)
    return json_response(record.batch)


async def list_batches(http: web.Request) -> web.Response:
    """GET /v1/batches."""
    query, runner, owner = decode_query(http.query, BatchQuery), runner_of(http), http[CALLER].owner
    return json_response(batch_list([runner.seen(r) for r in runner.batches.all_of(owner)], query))


async def show_batch(http: web.Request) -> web.Response:
    """GET /v1/batches/ID."""
    runner = runner_of(http)
    return json_response(
        runner.seen(runner.batches.get(http.match_info["batch_id"], http[CALLER].owner))
    )


async def cancel_batch(http: web.Request) -> web.Response:
    """POST /v1/batches/ID/cancel."""
    runner = runner_of(http)
    record = runner.batches.get(http.match_info["batch_id"], http[CALLER].owner)
    runner.cancel(record)
    return json_response(runner.seen(record))


BATCH_ROUTES = (
    web.post("/v1/batches", create_batch),
    web.get("/v1/batches", list_batches),
    web.get("/v1/batches/{batch_id}", show_batch),
    web.post("/v1/batches/{batch_id}/cancel", cancel_batch),
)
