"""Works batches off: a bounded number of lines at once, in what other requests leave over.

A batch is where its files on disk say it is. Whatever ends this process, the next one goes on
from there: a line that was answered is not asked again, one that was not is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from aiohttp import web

from jaxserve.errors import JaxserveError, RequestError
from jaxserve.server.answer import answer_unstreamed
from jaxserve.server.batch_lines import (
    BadLine,
    Line,
    LineError,
    numbered,
    read_line,
    request_body,
    scan,
)
from jaxserve.server.batch_store import (
    ENDED,
    Answered,
    Batch,
    BatchError,
    BatchErrors,
    BatchStore,
    Record,
    RequestCounts,
    Status,
)
from jaxserve.server.embeddings import embed
from jaxserve.server.failures import INTERNAL_ERROR, failure, failure_of
from jaxserve.server.file_store import FileStore
from jaxserve.server.keys import Caller
from jaxserve.server.responses import response_unstreamed
from jaxserve.server.service import SERVICE

logger = logging.getLogger("jaxserve.server")

ENDPOINTS: Mapping[str, Callable[[web.Application, bytes, Caller], Awaitable[web.Response]]] = (
    MappingProxyType(
        {
            "/v1/chat/completions": partial(answer_unstreamed, chat=True),
            "/v1/completions": partial(answer_unstreamed, chat=False),
            "/v1/responses": response_unstreamed,
            "/v1/embeddings": embed,
        }
    )
)
"""What a batch can be of."""
GIVEN_UP = MappingProxyType(
    {
        "cancelled": LineError("batch_cancelled", "the batch was cancelled before this line"),
        "expired": LineError("batch_expired", "the completion window ended before this line"),
    }
)
TRIES = 3
"""Of a line that an engine ended with: a line that ends every engine must not be for ever."""
LONGEST_WAIT = 60.0
"""Seconds between two tries of a line that was told to come again."""


class Job(NamedTuple):
    """A batch that has not ended, and the task that works on it."""

    task: asyncio.Task[None]
    cancelled: asyncio.Event


class BatchRunner:
    """The batches of one server. `files` has their inputs, and gets what comes out."""

    def __init__(self, app: web.Application, folder: Path, *, concurrency: int) -> None:
        """`concurrency`: most lines at work at once, of all batches together."""
        self.files = FileStore(folder / "files")
        self.batches = BatchStore(folder / "batches")
        self._app = app
        self._work = folder / "work"
        self._work.mkdir(exist_ok=True)
        self._slots = asyncio.Semaphore(concurrency)
        self._suspect = asyncio.Lock()
        self._jobs: dict[str, Job] = {}
        self._answered: dict[str, Answered] = {}

    def resume(self) -> None:
        """Go on with every batch that has not ended."""
        for record in self.batches.records.values():
            if record.batch.status not in ENDED:
                self.start(record)

    async def stop(self) -> None:
        """Leave every batch where it is."""
        tasks = [job.task for job in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start(self, record: Record) -> None:
        """Begin a batch, or go on with it."""
        batch_id, cancelled = record.batch.id, asyncio.Event()
        if record.batch.status == "cancelling":
            cancelled.set()
        task = asyncio.create_task(self._run(record, cancelled))
        self._jobs[batch_id] = Job(task, cancelled)
        task.add_done_callback(lambda _: self._jobs.pop(batch_id, None))

    def cancel(self, record: Record) -> None:
        """What runs is given up, what was answered is kept. RequestError for one that has ended."""
        if record.batch.status in (*ENDED, "finalizing"):
            raise RequestError(f"the batch is {record.batch.status} and cannot be cancelled")
        job = self._jobs.get(record.batch.id)
        if job is not None:  # else the server is stopping; the next one reads what is saved here
            job.cancelled.set()
        if record.batch.status != "cancelling":
            self._update(record, "cancelling")

    def seen(self, record: Record) -> Batch:
        """The batch with the counts of this moment."""
        answered = self._answered.get(record.batch.id)
        if answered is None:
            return record.batch
        total = record.batch.request_counts.total
        counts = RequestCounts(total, answered.num_completed, answered.num_failed)
        return msgspec.structs.replace(record.batch, request_counts=counts)

    async def _run(self, record: Record, cancelled: asyncio.Event) -> None:
        try:
            if not await self._validate(record):
                return
            answered = Answered(self._work, record.batch.id)
            self._answered[record.batch.id] = answered
            try:
                outcome = await self._work_off(record, answered, cancelled)
                if outcome != "completed":
                    await self._give_up_rest(record, answered, GIVEN_UP[outcome])
            finally:
                answered.close()
                del self._answered[record.batch.id]
            self._finish(record, answered, outcome)
        except Exception:
            logger.exception("%s broke off", record.batch.id)
            self._fail(record, INTERNAL_ERROR)

    async def _validate(self, record: Record) -> bool:
        found = await asyncio.to_thread(scan, self.files.path(record.batch.input_file_id))
        if found.fault is not None:
            self._fail(record, found.fault)
            return False
        counts = msgspec.structs.replace(record.batch.request_counts, total=found.num_lines)
        record.batch = msgspec.structs.replace(record.batch, request_counts=counts)
        if record.batch.status == "validating":
            self._update(record, "in_progress")
        return True

    async def _work_off(
        self, record: Record, answered: Answered, cancelled: asyncio.Event
    ) -> Status:
        """Every line, until they are done, time is up, or nobody wants them any more."""
        lines = asyncio.create_task(self._ask_all(record, answered))
        told = asyncio.create_task(cancelled.wait())
        try:
            await asyncio.wait(
                (lines, told),
                timeout=max(0.0, record.batch.expires_at - time.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if cancelled.is_set():
                return "cancelled"
            if lines.done():
                lines.result()  # raises what only a bug can have raised
                return "completed"
            return "expired"
        finally:
            for task in (lines, told):
                task.cancel()
            await asyncio.gather(lines, told, return_exceptions=True)

    async def _ask_all(self, record: Record, answered: Answered) -> None:
        batch, taken = record.batch, set[str]()
        max_bytes = self._app[SERVICE].config.max_body_bytes
        async with asyncio.TaskGroup() as group:
            for number, raw in numbered(self.files.path(batch.input_file_id)):
                try:
                    line = read_line(raw, batch.endpoint, taken, max_bytes)
                except BadLine as error:
                    if number not in answered.numbers:
                        fault = LineError("invalid_request", f"line {number}: {error}")
                        answered.add(number, error.custom_id, error=fault)
                    await asyncio.sleep(0)
                    continue
                if number in answered.numbers:
                    await asyncio.sleep(0)
                    continue
                await self._slots.acquire()
                body = request_body(line)
                task = group.create_task(self._ask(record, answered, number, line, body))
                task.add_done_callback(lambda _: self._slots.release())

    async def _ask(
        self, record: Record, answered: Answered, number: int, line: Line, body: bytes
    ) -> None:
        """One line, until it has an answer that trying again would not change."""
        caller = Caller(record.owner, has_key=bool(record.owner))
        num_failed = 0
        while True:
            # Of those that an engine ended with, one at a time: the others had no part in it.
            async with self._suspect if num_failed else nullcontext():
                reply = await self._try(record.batch.endpoint, body, caller)
            num_failed += reply.status == 500
            if reply.status not in (429, 503) and (reply.status != 500 or num_failed == TRIES):
                break
            await asyncio.sleep(min(float(reply.headers.get("Retry-After", 1)), LONGEST_WAIT))
        assert isinstance(reply.body, bytes)
        answered.add(number, line.custom_id, status=reply.status, body=reply.body)

    async def _try(self, endpoint: str, body: bytes, caller: Caller) -> web.Response:
        try:
            return await ENDPOINTS[endpoint](self._app, body, caller)
        except JaxserveError as error:
            return failure_of(error)
        except Exception:
            logger.exception("a line of a batch failed")
            return failure(500, INTERNAL_ERROR)

    async def _give_up_rest(self, record: Record, answered: Answered, why: LineError) -> None:
        """An error for every line that was not answered."""
        taken: set[str] = set()
        for number, raw in numbered(self.files.path(record.batch.input_file_id)):
            if number not in answered.numbers:
                try:
                    line = read_line(raw, record.batch.endpoint, taken, len(raw))
                    custom_id: str | None = line.custom_id
                except BadLine as error:
                    custom_id = error.custom_id
                answered.add(number, custom_id, error=why)
                await asyncio.sleep(0)

    def _finish(self, record: Record, answered: Answered, outcome: Status) -> None:
        """Hand over the two files, as far as there is anything in them. If this is cut short it is
        done again."""
        total = record.batch.request_counts.total
        counts = RequestCounts(total, answered.num_completed, answered.num_failed)
        record.batch = msgspec.structs.replace(record.batch, request_counts=counts)
        if outcome == "completed":
            self._update(record, "finalizing")
        kept = {}
        for field, path, file_id, count in (
            ("output_file_id", answered.outputs, record.outputs, counts.completed),
            ("error_file_id", answered.errors, record.errors, counts.failed),
        ):
            if count:
                name = f"{record.batch.id}_{field.split('_')[0]}.jsonl"
                self.files.keep(
                    path, file_id, filename=name, purpose="batch_output", owner=record.owner
                )
                kept[field] = file_id
        record.batch = msgspec.structs.replace(record.batch, **kept)
        self._update(record, outcome)
        answered.remove()

    def _fail(self, record: Record, message: str) -> None:
        errors = BatchErrors((BatchError("invalid_file", message, param="input_file_id"),))
        record.batch = msgspec.structs.replace(record.batch, errors=errors)
        self._update(record, "failed")

    def _update(self, record: Record, status: Status) -> None:
        now = {f"{status}_at": int(time.time())}
        record.batch = msgspec.structs.replace(record.batch, status=status, **now)
        self.batches.save(record)
