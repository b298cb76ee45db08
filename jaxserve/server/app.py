"""The HTTP application: its routes, and the worker it keeps alive while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from checkpoints.model_config import ModelConfig
from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.answer import IN_FLIGHT, chat_completions, completions
from jaxserve.server.auth import add_rates, authenticate
from jaxserve.server.batches import BATCH_ROUTES, BATCHING, Batching, keep_batches
from jaxserve.server.client import WorkerClient
from jaxserve.server.cors import add_origin, answer_preflights
from jaxserve.server.embeddings import create_embeddings
from jaxserve.server.files import FILE_ROUTES
from jaxserve.server.history import keep_history, show_history
from jaxserve.server.in_flight import abort_request, list_requests
from jaxserve.server.keys import Keys
from jaxserve.server.listen import RELOADS
from jaxserve.server.middleware import add_request_id, guard
from jaxserve.server.openapi import package_version, show_docs, show_openapi
from jaxserve.server.page import show_file, show_page
from jaxserve.server.rates import Rates
from jaxserve.server.replies import Health, Model, ModelList, Version, json_response
from jaxserve.server.response_store import ResponseStore
from jaxserve.server.responses import RESPONSE_ROUTES, RESPONSES
from jaxserve.server.service import SERVICE, ModelNotFound, Service
from jaxserve.server.supervisor import Patience, Supervisor, WorkerCommand
from jaxserve.server.text import BareIds, Tokenizer
from jaxserve.server.tokenization import detokenize, tokenize

WRITE_TIMEOUT = 60.0
"""Seconds a client may leave a full buffer unread."""
SUPERVISION = web.AppKey("supervision", asyncio.Task[None])


def make_app(
    config: ServerConfig,
    *,
    model_name: str,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    worker_argv: WorkerCommand,
    keys: Keys | None = None,
    patience: Patience | None = None,
    write_timeout: float = WRITE_TIMEOUT,
) -> web.Application:
    """An application that serves one model with one worker process.

    Args:
        config: limits. Host, port and drain timeout are used by `run`.
        model_name: the name clients use.
        model: gives the end tokens and the context.
        tokenizer: None for a model that has none: prompts are ids then, and so is the text.
        worker_argv: command line of the worker; `--socket PATH` is appended.
        keys: whose requests are taken; None takes everybody's.
        patience: how long to wait for the worker; None takes the defaults.
        write_timeout: seconds after which a client that stopped reading is dropped.

    Raises:
        ConfigError: there are limits for each key, and no keys.
    """
    keys = keys or Keys()
    limits = (config.requests_per_minute, config.tokens_per_minute)
    if not keys.needed and limits != (None, None):
        raise ConfigError(
            "--requests-per-minute and --tokens-per-minute are for each API key: add --api-key-file"
        )
    client = WorkerClient()
    service = Service(
        config=config,
        model_name=model_name,
        model=model,
        tokenizer=tokenizer if tokenizer is not None else BareIds(),
        client=client,
        keys=keys,
        rates=Rates(*limits),
        write_timeout=write_timeout,
    )
    supervisor = Supervisor(
        client,
        worker_argv,
        patience or Patience(heartbeat_timeout=config.heartbeat_timeout),
        on_progress=lambda progress: service.on_progress(progress),
    )

    preflight = [answer_preflights(config.allow_origin)] if config.allow_origin else []
    app = web.Application(
        middlewares=[guard, *preflight, authenticate], client_max_size=config.max_body_bytes
    )
    app[SERVICE] = service
    app[IN_FLIGHT] = {}
    app[RELOADS] = [keys.reload]
    app.on_response_prepare.extend([add_request_id, add_rates])
    if config.allow_origin:
        app.on_response_prepare.append(add_origin(config.allow_origin))
    app[RESPONSES] = ResponseStore()
    app[BATCHING] = Batching()
    app.cleanup_ctx.extend([keep_worker(service, supervisor), keep_history, keep_batches])
    app.add_routes(routes())
    return app


def routes() -> list[web.RouteDef]:
    """Every path this server knows."""
    return [
        web.post("/v1/completions", completions),
        web.post("/v1/chat/completions", chat_completions),
        web.post("/v1/embeddings", create_embeddings),
        *RESPONSE_ROUTES,
        *FILE_ROUTES,
        *BATCH_ROUTES,
        web.post("/tokenize", tokenize),
        web.post("/detokenize", detokenize),
        web.get("/v1/models", list_models),
        web.get("/v1/models/{name:.+}", show_model),
        web.get("/health", health),
        web.get("/metrics", metrics),
        web.get("/version", show_version),
        web.get("/openapi.json", show_openapi),
        web.get("/docs", show_docs),
        web.get("/history", show_history),
        web.get("/requests", list_requests),
        web.post("/requests/{id}/abort", abort_request),
        web.get("/", show_page),
        web.get("/page/{name}", show_file),
    ]


def keep_worker(
    service: Service, supervisor: Supervisor
) -> Callable[[web.Application], AsyncIterator[None]]:
    """A cleanup context: the worker lives as long as the application."""

    async def supervise() -> None:
        service.gave_up = await supervisor.run()

    async def context(app: web.Application) -> AsyncIterator[None]:
        app[SUPERVISION] = task = asyncio.create_task(supervise())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        service.pool.shutdown(wait=False, cancel_futures=True)

    return context


async def list_models(http: web.Request) -> web.Response:
    """GET /v1/models."""
    return json_response(ModelList([served_model(http.app[SERVICE])]))


async def show_model(http: web.Request) -> web.Response:
    """GET /v1/models/NAME. Names may contain slashes."""
    service = http.app[SERVICE]
    name = http.match_info["name"]
    if name != service.model_name:
        raise ModelNotFound(f"the model {name[:80]!r} is not served here", param="model")
    return json_response(served_model(service))


def served_model(service: Service) -> Model:
    """The one model there is."""
    return Model(service.model_name, service.created, service.max_context)


async def health(http: web.Request) -> web.Response:
    """GET /health: 200 while requests are welcome, else 503 and why not."""
    reason = http.app[SERVICE].why_unavailable()
    if reason is None:
        return json_response(Health("ok"))
    return json_response(Health("unavailable", reason), status=503)


async def metrics(http: web.Request) -> web.Response:
    """GET /metrics, for Prometheus."""
    body = http.app[SERVICE].client.metrics.text()
    content_type = "text/plain; version=0.0.4; charset=utf-8"
    return web.Response(body=body, headers={"Content-Type": content_type})


async def show_version(http: web.Request) -> web.Response:
    """GET /version."""
    return json_response(Version(package_version()))
