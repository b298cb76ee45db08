"""The last quarter of an hour, a sample every two seconds: what the page's charts show."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from time import perf_counter

import msgspec
from aiohttp import web

from jaxserve.errors import RequestError
from jaxserve.frames import PromisedTimes, Stats
from jaxserve.server.metrics import REFUSALS, Metrics
from jaxserve.server.replies import never_stored
from jaxserve.server.service import SERVICE

INTERVAL = 2.0
"""Seconds between samples."""
SPAN = 900.0
"""Seconds that are kept."""
USUAL_TAIL = 95.0
"""The percentile to look at where none is promised."""


class Sample(msgspec.Struct, frozen=True):
    """What was so at one moment. None is a number there was nothing to make of.

    Attributes:
        time: Unix time; it never goes back while the server runs.
        ttft_p50, tpot_p50: medians of the last minute without the batch class, in seconds.
        ttft_tail, tpot_tail: what the promised percentile did not exceed, USUAL_TAIL where nothing
            is promised.
        running, waiting: sequences with and without pages. running_limit: 0 is none but memory.
        pages_live, pages_cached, pages_free: together all there are.
        prompt_rate, output_rate: prompt tokens computed, and tokens generated, per second.
        step_seconds: duration of the last step. predicted_seconds: of the one in flight.
        prediction_error: of steps, relative, on average.
        rung: of the degradation ladder.
        refused: sequences since the sample before, by reason.
    """

    time: float
    ttft_p50: float | None
    ttft_tail: float | None
    tpot_p50: float | None
    tpot_tail: float | None
    running: int
    waiting: int
    running_limit: int
    pages_live: int
    pages_cached: int
    pages_free: int
    prompt_rate: float | None
    output_rate: float | None
    step_seconds: float
    predicted_seconds: float
    prediction_error: float
    rung: int
    refused: dict[str, int]


NUMBERS = tuple(name for name in Sample.__struct_fields__ if name != "refused")


class HistoryQuery(msgspec.Struct, frozen=True):
    """Samples after this one: its time, in Unix seconds."""

    since: float | None = None


class HistoryReply(msgspec.Struct, frozen=True):
    """What GET /history says.

    Attributes:
        model: served. engine: the device and its sizes; empty while there is no engine.
        unavailable: why requests are not welcome just now, or None.
        promise: what is kept, in seconds and percent; None if nothing is promised.
        interval, span: seconds between samples, and from the oldest kept to the newest.
        samples: by name, a list of numbers each, oldest first. See Sample.
        refused: likewise by reason.
    """

    model: str
    engine: str
    unavailable: str | None
    promise: PromisedTimes | None
    interval: float
    span: float
    samples: dict[str, list[float | None]]
    refused: dict[str, list[int]]


class History:
    """A bounded row of samples of one server's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: deque[Sample] = deque(maxlen=int(SPAN / INTERVAL))
        self._clock_starts = time.time() - perf_counter()
        self._refusals = metrics.refusals()
        self._worker, self._heard = metrics.worker, metrics.heard

    def sample(self) -> None:
        """Add a sample of now."""
        metrics, now = self._metrics, perf_counter()
        worker, refusals = metrics.worker, metrics.refusals()
        percents = (50.0, USUAL_TAIL if metrics.promise is None else metrics.promise.percentile)
        ttft_p50, ttft_tail = metrics.ttft.percentiles(percents, now)
        tpot_p50, tpot_tail = metrics.tpot.percentiles(percents, now)
        prompt_rate, output_rate = self._rates(worker, metrics.heard)
        refused = {reason: refusals[reason] - self._refusals[reason] for reason in REFUSALS}
        self._samples.append(
            Sample(
                time=round(self._clock_starts + now, 3),
                ttft_p50=rounded(ttft_p50),
                ttft_tail=rounded(ttft_tail),
                tpot_p50=rounded(tpot_p50),
                tpot_tail=rounded(tpot_tail),
                running=worker.running,
                waiting=worker.waiting,
                running_limit=worker.running_limit,
                pages_live=worker.pages_live,
                pages_cached=worker.pages_cached,
                pages_free=worker.pages_total - worker.pages_live - worker.pages_cached,
                prompt_rate=prompt_rate,
                output_rate=output_rate,
                step_seconds=round(worker.step_seconds, 6),
                predicted_seconds=round(worker.predicted_seconds, 6),
                prediction_error=round(worker.prediction_error, 4),
                rung=worker.rung,
                refused=refused,
            )
        )
        self._refusals = refusals
        self._worker, self._heard = worker, metrics.heard

    def since(self, moment: float) -> list[Sample]:
        """The samples after a moment in Unix time."""
        return [sample for sample in self._samples if sample.time > moment]

    def _rates(self, worker: Stats, heard: float) -> tuple[float | None, float | None]:
        """Tokens a second between the last two samples' Stats. Another worker counts from 0."""
        seconds, steps = heard - self._heard, worker.steps - self._worker.steps
        if seconds <= 0 or steps < 0:
            return None, None
        prompt = worker.prompt_tokens - self._worker.prompt_tokens
        output = worker.output_tokens - self._worker.output_tokens
        return round(prompt / seconds, 2), round(output / seconds, 2)


HISTORY = web.AppKey("history", History)


def rounded(seconds: float) -> float | None:
    """To a microsecond; None for NaN, which JSON does not have."""
    return None if math.isnan(seconds) else round(seconds, 6)


async def keep_history(app: web.Application) -> AsyncIterator[None]:
    """A cleanup context: samples are taken as long as the application lives."""
    history = app[HISTORY] = History(app[SERVICE].client.metrics)

    async def take_samples() -> None:
        while True:
            history.sample()
            await asyncio.sleep(INTERVAL)

    task = asyncio.create_task(take_samples())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def show_history(http: web.Request) -> web.Response:
    """GET /history: the samples after `since`, all without it."""
    service = http.app[SERVICE]
    ready = service.client.ready
    samples = http.app[HISTORY].since(moment(http.query.get("since", "0")))
    reply = HistoryReply(
        model=service.model_name,
        engine="" if ready is None else ready.description,
        unavailable=service.why_unavailable(),
        promise=service.client.metrics.promise,
        interval=INTERVAL,
        span=SPAN,
        samples={name: [getattr(s, name) for s in samples] for name in NUMBERS},
        refused={reason: [s.refused[reason] for s in samples] for reason in REFUSALS},
    )
    return never_stored(reply)


def moment(text: str) -> float:
    """A Unix time. RequestError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RequestError(
            f"since is {text[:40]!r}: send the time of the newest sample you have, in Unix seconds",
            param="since",
        )
    return value
