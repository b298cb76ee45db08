"""From an application to a process that serves it until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.frames import Progress
from jaxserve.server.app import SUPERVISION
from jaxserve.server.listen import RELOADS, listen, url
from jaxserve.server.service import SERVICE, Service

logger = logging.getLogger("jaxserve.server")

LAST_WORDS_TIMEOUT = 2.0
"""Seconds for the error events of a drain that ran out of time to reach their clients."""


@dataclass(frozen=True)
class Stop:
    """How a server is told to stop.

    Attributes:
        asked: finish what runs, then stop.
        hurry: stop now.
    """

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self) -> None:
        """The first time asks, the second time insists."""
        if self.asked.is_set():
            self.hurry.set()
        self.asked.set()


def run(
    app: web.Application,
    config: ServerConfig,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_ready: Callable[[str], None] = print,
) -> int:
    """Serve until SIGTERM or SIGINT. SIGHUP reads keys and certificates again.

    Then the listener closes, what runs may finish within `config.drain_timeout`, the rest ends with
    an error event, and the worker stops. A second signal skips the waiting.

    Args:
        app: from `make_app`.
        config: the same one.
        on_progress: told how the worker's start is getting on.
        on_ready: told once, in a sentence with the address, when requests are welcome.

    Returns:
        The exit code: 0, or 1 if the worker could not be kept alive.

    Raises:
        ConfigError: the address cannot be listened on, or not with that certificate.
    """

    async def main() -> int:
        stop = Stop()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.ask)
        loop.add_signal_handler(signal.SIGHUP, reload, app)
        return await serve(app, config, stop, on_progress=on_progress, on_ready=on_ready)

    return asyncio.run(main())


async def serve(
    app: web.Application,
    config: ServerConfig,
    stop: Stop,
    *,
    on_progress: Callable[[Progress], None],
    on_ready: Callable[[str], None],
) -> int:
    """`run` without the signals, for a loop that has other work too."""
    service = app[SERVICE]
    service.on_progress = on_progress
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS_TIMEOUT
    )
    await runner.setup()
    try:
        site = await listen(runner, config)
        greeting = asyncio.create_task(greet(service, url(runner, config), on_ready))
        asked = asyncio.create_task(stop.asked.wait())
        supervision = app[SUPERVISION]
        first: set[asyncio.Future[Any]] = {supervision, asked}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        greeting.cancel()
        asked.cancel()
        service.draining = stop.asked.is_set()
        await site.stop()
        if not service.draining:
            supervision.result()  # raises what only a bug can have raised
            return 1
        await drain(service, stop, config.drain_timeout)
        return 0
    finally:
        await runner.cleanup()


def reload(app: web.Application) -> None:
    """Read again what may have changed. What cannot be read stays as it was."""
    for read_again in app[RELOADS]:
        try:
            read_again()
        except ConfigError as error:
            logger.error("nothing was changed: %s", error)


async def greet(service: Service, address: str, on_ready: Callable[[str], None]) -> None:
    """Say once that requests are welcome."""
    await service.client.first_ready.wait()
    ready = service.client.ready
    description = f", {ready.description}" if ready is not None else ""
    on_ready(f"jaxserve ready on {address} (model {service.model_name}{description})")


async def drain(service: Service, stop: Stop, timeout: float) -> None:
    """Let running requests finish; give those that do not an error."""
    waits = {
        asyncio.create_task(service.idle.wait()),
        asyncio.create_task(stop.hurry.wait()),
    }
    await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if service.active:
        logger.warning("%d requests did not finish in time and were ended", service.active)
        service.client.fail_all("the server is shutting down")
        try:
            async with asyncio.timeout(LAST_WORDS_TIMEOUT):
                await service.idle.wait()
        except TimeoutError:
            pass  # closing the connections ends them
