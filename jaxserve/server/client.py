"""The server's end of the socket to the worker: requests out, events in, and who waits for them.

One task reads. It only sorts events into inboxes; turning tokens into text happens in the tasks
that wait for them. Events that come while a task is busy writing pile up in its inbox and are
handled in one go, so a slow reader costs memory in proportion to its own answer and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import msgspec

from jaxserve.errors import EngineStopped
from jaxserve.frames import (
    LENGTH,
    MAX_FRAME_BYTES,
    Abort,
    Events,
    Failed,
    FromWorker,
    Inspect,
    Inspection,
    Progress,
    Ready,
    SequenceState,
    Stats,
    Submit,
    decode_from_worker,
    encode_frame,
)
from jaxserve.request import Request, TokenEvent
from jaxserve.server.metrics import Metrics, Timeline

INSPECTION_TIMEOUT = 1.0
"""Seconds to wait for the worker to say what its sequences are doing: it may be in a long step."""


class Inbox:
    """The events of one HTTP request, all of its sequences together.

    Attributes:
        open_ids: sequences whose last event has not come.
        timelines: of the sequences, in the order they were asked for.
    """

    def __init__(self, timelines: Mapping[str, Timeline]) -> None:
        self.open_ids = set(timelines)
        self.timelines = tuple(timelines.values())
        self._events: list[TokenEvent] = []
        self._failure: str | None = None
        self._wake = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._wake.set()

    def fail(self, message: str) -> None:
        """No more events will come. What has come already can still be read."""
        self._failure = message
        self._wake.set()

    async def take(self) -> list[TokenEvent]:
        """Everything that has come since the last call, at least one event.

        Raises:
            EngineStopped: nothing has come and nothing will.
        """
        await self._wake.wait()
        self._wake.clear()
        events, self._events = self._events, []
        if self._failure is not None:
            self._wake.set()
            if not events:
                raise EngineStopped(self._failure)
        return events


class Waiter(NamedTuple):
    """Where a sequence's events go, and when they came."""

    inbox: Inbox
    timeline: Timeline


class WorkerClient:
    """What the HTTP side sees of the worker. Outlives workers: one may die and another come.

    Attributes:
        ready: what the present worker said when it became ready; None while there is none.
        first_ready: set once the first worker is ready, and for ever.
        metrics: takes the times of tokens and the worker's numbers.
        failed: why the last worker gave up, in its own words; None if it did not say.
        hopeless: it said that another worker would fail the same way.
        last_heard: loop time of its newest frame.
    """

    def __init__(self) -> None:
        self.ready: Ready | None = None
        self.first_ready = asyncio.Event()
        self.metrics = Metrics(open_sequences=lambda: len(self._waiters))
        self.failed: str | None = None
        self.hopeless = False
        self.last_heard = 0.0
        self._waiters: dict[str, Waiter] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._inspection: asyncio.Future[Inspection] | None = None

    @property
    def num_open(self) -> int:
        """Sequences submitted and unfinished."""
        return len(self._waiters)

    def longest_silence(self, heartbeat_timeout: float) -> float:
        """Seconds a ready worker may be silent: no less than a few of its longest steps."""
        longest_step = self.ready.longest_step if self.ready is not None else 0.0
        return max(heartbeat_timeout, 10 * longest_step)

    def submit(self, requests: tuple[Request, ...], *, arrived: float) -> Inbox:
        """Start sequences. Whoever calls this calls `close` in the end, whatever happens.

        Args:
            requests: the sequences of one HTTP request.
            arrived: when that came, in seconds of `perf_counter`.

        Raises:
            EngineStopped: there is no worker that is ready.
        """
        if self.ready is None or self._writer is None:
            raise EngineStopped("no worker is ready")
        now = perf_counter()
        timelines = {
            request.request_id: Timeline(
                arrived, now, promised=request.service_class == "interactive"
            )
            for request in requests
        }
        inbox = Inbox(timelines)
        for name, timeline in timelines.items():
            self._waiters[name] = Waiter(inbox, timeline)
        self.metrics.submitted(arrived, now)
        self._writer.write(encode_frame(Submit(requests)))
        return inbox

    def abort(self, inbox: Inbox, request_ids: Sequence[str]) -> None:
        """Tell the worker that nobody waits for these any more. Finished ones are fine."""
        live = tuple(i for i in request_ids if i in inbox.open_ids)
        if not live:
            return
        self._forget(inbox, live)
        if self._writer is not None:
            self._writer.write(encode_frame(Abort(live)))

    def end(self, inbox: Inbox) -> None:
        """Abort what still runs. Whoever reads the inbox is told; the answer is what there is."""
        live = tuple(inbox.open_ids)
        self.abort(inbox, live)
        for request_id in live:
            inbox.put(TokenEvent(request_id, None, finish_reason="abort"))

    def close(self, inbox: Inbox) -> None:
        """Nobody reads this inbox any more: abort what still runs."""
        self.abort(inbox, tuple(inbox.open_ids))

    def fail_all(self, message: str) -> None:
        """End every open request with an error, and tell the worker to drop them."""
        live = tuple(self._waiters)
        for inbox in {waiter.inbox for waiter in self._waiters.values()}:
            inbox.open_ids.clear()
            inbox.fail(message)
        self._waiters.clear()
        if live and self._writer is not None:
            self._writer.write(encode_frame(Abort(live)))

    async def inspect(self) -> dict[str, SequenceState]:
        """What the worker's sequences are doing, by request id. Empty if it does not say in time.

        Whoever asks while another one waits shares its answer.
        """
        if self.ready is None or self._writer is None:
            return {}
        if self._inspection is None:
            self._inspection = asyncio.get_running_loop().create_future()
            self._writer.write(encode_frame(Inspect()))
        try:
            async with asyncio.timeout(INSPECTION_TIMEOUT):
                inspection = await asyncio.shield(self._inspection)
        except TimeoutError:
            return {}
        return {state.request_id: state for state in inspection.sequences}

    def _inspected(self, inspection: Inspection) -> None:
        if self._inspection is not None:
            self._inspection.set_result(inspection)
            self._inspection = None

    async def converse(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_progress: Callable[[Progress], None],
    ) -> bool:
        """Read one worker's frames until it hangs up. Then every open request has failed.

        Returns:
            Whether it ever was ready.
        """
        loop = asyncio.get_running_loop()
        self._writer, self.failed, self.hopeless = writer, None, False
        self.metrics.heard_from_worker(Stats(), perf_counter())
        try:
            while True:
                frame = await read_frame(reader)
                if frame is None:
                    return self.ready is not None
                self.last_heard = loop.time()
                self._handle(frame, on_progress)
        finally:
            self.ready = self._writer = None
            self._inspected(Inspection(()))
            self.fail_all(self.failed or "the worker process ended")
            writer.close()

    def _handle(self, frame: FromWorker, on_progress: Callable[[Progress], None]) -> None:
        match frame:
            case Events():
                self._dispatch(frame.events)
            case Stats():
                self.metrics.heard_from_worker(frame, perf_counter())
            case Inspection():
                self._inspected(frame)
            case Progress():
                on_progress(frame)
            case Ready():
                self.ready = frame
                self.metrics.promise = frame.promise
                self.first_ready.set()
            case Failed():
                self.failed, self.hopeless = frame.message, frame.final

    def _dispatch(self, events: Sequence[TokenEvent]) -> None:
        now = perf_counter()
        for event in events:
            if event.refusal is not None:
                self.metrics.refused.labels(event.refusal).inc()
            waiter = self._waiters.get(event.request_id)
            if waiter is None:
                continue  # aborted while the event was on its way
            if event.token_id is not None:
                self.metrics.token(waiter.timeline, now, event.queued)
            waiter.inbox.put(event)
            if event.finish_reason is not None:
                self.metrics.finished(waiter.timeline)
                self._forget(waiter.inbox, (event.request_id,))

    def _forget(self, inbox: Inbox, request_ids: Sequence[str]) -> None:
        inbox.open_ids.difference_update(request_ids)
        for request_id in request_ids:
            del self._waiters[request_id]


async def read_frame(reader: asyncio.StreamReader) -> FromWorker | None:
    """The next frame, or None at the end. A worker that sends garbage has ended, too."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_FRAME_BYTES:
            return None
        return decode_from_worker(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
        return None
