"""Keeps a worker process alive: starts it, watches its heartbeat, replaces it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.frames import Progress
from jaxserve.server.client import WorkerClient

WorkerCommand = list[str]
Connected = asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]

logger = logging.getLogger("jaxserve.server")

READ_BUFFER_BYTES = 1 << 20
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""A step's temporaries on large pages too; where the C library is another, nobody reads it."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the supervisor waits, in seconds unless said otherwise.

    Attributes:
        heartbeat_timeout: silence after which a ready worker counts as hanging and is killed.
        start_timeout: the same before it is ready; loading and compiling may take long.
        first_delay: before the first restart. It doubles with each one, up to `longest_delay`.
        stable_after: a worker that served this long restarts without delay's memory.
        max_failures: starts in a row that may fail before the supervisor gives up (a count).
        stop_timeout: from the request to exit to the kill.
    """

    heartbeat_timeout: float
    start_timeout: float = 900.0
    first_delay: float = 0.5
    longest_delay: float = 30.0
    stable_after: float = 60.0
    max_failures: int = 5
    stop_timeout: float = 5.0


class Supervisor:
    """Owns the worker process."""

    def __init__(
        self,
        client: WorkerClient,
        command: WorkerCommand,
        patience: Patience,
        *,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._client = client
        self._command = command
        self._patience = patience
        self._on_progress = on_progress

    async def run(self) -> str:
        """Start workers, one after the other, until cancelled or until it is hopeless.

        Returns:
            Why no further start will be tried.
        """
        loop = asyncio.get_running_loop()
        failures, delay = 0, self._patience.first_delay
        while True:
            started = loop.time()
            was_ready, reason = await self._run_one()
            failures = 0 if was_ready else failures + 1
            if was_ready and loop.time() - started > self._patience.stable_after:
                delay = self._patience.first_delay
            if self._client.hopeless or failures >= self._patience.max_failures:
                times = "" if failures == 1 else f" {failures} times"
                last_words = f"the engine failed to start{times}: {reason}"
                logger.error("%s", last_words)
                return last_words
            logger.warning("worker ended (%s); starting another in %.1f s", reason, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._patience.longest_delay)

    async def _run_one(self) -> tuple[bool, str]:
        """One worker's life: whether it became ready, and why it ended."""
        connected: Connected = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if connected.done():
                writer.close()
            else:
                connected.set_result((reader, writer))

        with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:  # only we may enter it
            path = str(Path(folder) / "worker.sock")
            listener = await asyncio.start_unix_server(accept, path, limit=READ_BUFFER_BYTES)
            try:
                return await self._spawn(path, connected)
            finally:
                listener.close()
                if connected.done() and not connected.cancelled():
                    connected.result()[1].close()

    async def _spawn(self, path: str, connected: Connected) -> tuple[bool, str]:
        try:
            # A session of its own: Ctrl-C is for the server, which lets running requests finish.
            process = await start_process([*self._command, "--socket", path])
        except OSError as error:
            return False, f"{self._command[0]} cannot be started: {error}"
        exited = asyncio.create_task(process.wait())
        try:
            first: set[asyncio.Future[Any]] = {connected, exited}
            timeout = self._patience.start_timeout
            await asyncio.wait(first, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if connected.done():
                was_ready, reason = await self._converse(*connected.result())
                if reason is not None:
                    send_signal(process, signal.SIGKILL)  # it hangs: asking would take for ever
                    return was_ready, reason
            else:
                was_ready = False
            await asyncio.wait({exited}, timeout=self._patience.stop_timeout)
            return was_ready, self._client.failed or describe_exit(process.returncode)
        finally:
            ending = asyncio.ensure_future(self._end(process, exited))
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                await ending  # a stop must not leave half-ended what was ending anyway
                raise

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[bool, str | None]:
        """Whether the worker became ready, and why it must be killed, if it must."""
        loop = asyncio.get_running_loop()
        client, patience = self._client, self._patience
        client.last_heard = loop.time()
        conversation = asyncio.create_task(client.converse(reader, writer, self._on_progress))
        interval = patience.heartbeat_timeout / 8
        late_before = False
        try:
            while True:
                done, _ = await asyncio.wait({conversation}, timeout=interval)
                if done:
                    return conversation.result(), None
                ready = client.ready is not None
                beat = client.longest_silence(patience.heartbeat_timeout)
                limit = beat if ready else patience.start_timeout
                # Twice in a row: if it was this process that stood still, frames are waiting
                # to be read and the second look finds them read.
                late = loop.time() - client.last_heard > limit
                if late and late_before:
                    client.failed = f"the worker gave no sign of life for {limit:g} s"
                    return ready, client.failed
                late_before = late
        finally:
            conversation.cancel()
            await asyncio.wait({conversation})

    async def _end(self, process: Process, exited: asyncio.Task[int]) -> None:
        """Make sure the process is gone: it is asked first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is None:
                send_signal(process, number)
                await asyncio.wait({exited}, timeout=self._patience.stop_timeout)
        await exited


async def start_process(command: list[str]) -> Process:
    """Start a process in a session of its own. Cancelled meanwhile, it leaves none behind."""
    environment = {**MALLOC, **os.environ}
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            process = await starting
            send_signal(process, signal.SIGKILL)
            await process.wait()
        raise


def send_signal(process: Process, number: signal.Signals) -> None:
    """Signal a process that may be ending by itself at this very moment.

    `Process.terminate` would look whether it has, and by looking take the exit status away from
    asyncio, which then reports 255.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def describe_exit(code: int | None) -> str:
    """Why a worker that said nothing ended."""
    if code is None:
        return "the worker closed its socket"
    if code < 0:
        return f"the worker was ended by {signal.Signals(-code).name}"
    return f"the worker exited with code {code}"
